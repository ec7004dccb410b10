"""What needle prompts hide and ask: one needle, several, all of them, distractors, two facts that only together answer."""

from __future__ import annotations

import random
from pathlib import Path

from minikv.errors import InputError
from minikv.haystack import DATA, Needle, Task, check_needle, load_families, load_needles, read_jsonl, texts

MODES = {
    "single": "one needle",
    "several": "different needles, one of them asked",
    "all": "needles of one form, all of them asked",
    "distractors": "needles of one form with other keys, one of them asked",
    "two-hop": "two facts apart, of which the second is asked by way of the first",
}
OWN = {
    "single": "needles.jsonl",
    "several": "needles.jsonl",
    "all": "families.jsonl",
    "distractors": "families.jsonl",
    "two-hop": "hops.jsonl",
}


def load_tasks(needles: str, mode: str, hidden: int, seed: int) -> list[Task]:
    """What to hide and ask, from a file or a number of the project's own needles, evenly over their kinds."""
    path = DATA / "evaluate" / OWN[mode] if needles.isdecimal() else needles
    if mode in ("single", "several"):
        tasks = needle_tasks(path, 1 if mode == "single" else hidden, seed)
    elif mode == "two-hop":
        tasks = two_hop_tasks(path)
    else:
        tasks = family_tasks(path, hidden, mode == "all", seed)
    if not needles.isdecimal():
        return tasks
    count = int(needles)
    if not 1 <= count <= len(tasks):
        raise InputError(f"--needles {count}: there are 1 to {len(tasks)} in mode {mode}, or name a file")
    return [tasks[place * len(tasks) // count] for place in range(count)]


def needle_tasks(path: str | Path, hidden: int, seed: int) -> list[Task]:
    """For each needle of the file a task that asks for it, with hidden - 1 others beside it."""
    needles, tasks = load_needles(path), []
    if hidden > len(needles):
        raise InputError(f"{path} holds {len(needles)} needles; --hidden {hidden} are to be hidden")
    for number, needle in enumerate(needles):
        others = [other for place, other in enumerate(needles) if place != number]
        drawn = random.Random(f"{seed} {number}").sample(others, hidden - 1)
        tasks.append(Task(needle.question, (needle,), tuple(drawn)))
    return tasks


def family_tasks(path: str | Path, hidden: int, ask_all: bool, seed: int) -> list[Task]:
    """For each entry of each family a task with hidden - 1 other entries of the family, asking for one or for all."""
    families, tasks = load_families(path), []
    if hidden < 2 or hidden > min(len(family.entries) for family in families):
        raise InputError(f"--hidden {hidden}: accepted: 2 to the entries of the smallest family of {path}")
    for family in families:
        for asked in range(len(family.entries)):
            others = [entry for entry in range(len(family.entries)) if entry != asked]
            entries = [asked, *random.Random(f"{seed} {family.needle} {asked}").sample(others, hidden - 1)]
            needles = tuple(map(family.fill, entries))
            if ask_all:
                tasks.append(Task(family.ask_all(entries), needles))
            else:
                tasks.append(Task(needles[0].question, needles[:1], needles[1:]))
    return tasks


def two_hop_tasks(path: str | Path) -> list[Task]:
    """For each line of JSONL, first, second, question and answer, a task that hides both sentences.

    The answer is in the second; whom or what the second is about is said by the first.
    """
    tasks = []
    for where, fields in read_jsonl(path):
        first, second, question, answer = texts(where, fields, "first", "second", "question", "answer")
        asked = Needle(second, question, answer)
        check_needle(where, asked)
        tasks.append(Task(question, (asked,), (Needle(first, question, first),)))
    if not tasks:
        raise InputError(f"{path} holds no two-hop facts")
    return tasks
