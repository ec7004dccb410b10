"""Prompts over the evaluation essays: a question about an essay, a summary, and hidden needles of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from minikv.evals.tasks import OWN, load_tasks
from minikv.haystack import DATA, fit, hide_all, read_text, with_question
from minikv.tokenizer import Tokenizer

EVALUATE = DATA / "evaluate"
SUMMARY = "Summarize the text above in three sentences."
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
KINDS = ("needle", "question", "summary", "several", "all", "distractors", "two-hop")  # the last four: see tasks.MODES
HIDDEN = 4  # needles in a prompt of those kinds


def ask(
    tokenizer: Tokenizer, lengths: list[int], count: int, kinds: Sequence[str] = KINDS[:3]
) -> Iterator[tuple[str, str, list[int]]]:
    """`count` prompts: the kind and the name of each, and its token ids.

    Kinds alternate, lengths follow in turn, essays rotate.
    """
    essays = [(path.name, read_text(path).strip()) for path in sorted((EVALUATE / "essays").glob("*.txt"))]
    questions = [json.loads(line) for line in read_text(EVALUATE / "questions.jsonl").splitlines()]
    names = [name for name, _ in essays]
    modes = {kind: "single" if kind == "needle" else kind for kind in kinds if kind not in ("question", "summary")}
    tasks = {kind: load_tasks(str(EVALUATE / OWN[mode]), mode, HIDDEN, seed=0) for kind, mode in modes.items()}
    for number in range(count):
        turn, kind = number // len(kinds), kinds[number % len(kinds)]
        length = lengths[turn % len(lengths)]
        if kind == "question":
            asked = questions[turn * 3 % len(questions)]
            text = begin_at(essays, names.index(asked["essay"]) - 1)  # the essay asked about comes second
            about, ids = asked["question"], exact(tokenizer, text, partial(with_question, question=asked["question"]), length)
        elif kind == "summary":
            about, ids = SUMMARY, exact(tokenizer, begin_at(essays, turn * 2), lambda text: f"{text}\n\n{SUMMARY}", length)
        else:
            task = tasks[kind][turn * 5 % len(tasks[kind])]
            ids = hide_all(tokenizer, begin_at(essays, turn), task, length, DEPTHS[turn % len(DEPTHS)]).ids
            about = task.question
        yield kind, f"{number} {kind}, {length} tokens: {about}", ids


def begin_at(essays: list[tuple[str, str]], first: int) -> str:
    """All essays in one text, beginning with number `first` and going round."""
    first %= len(essays)
    return "\n\n".join(text for _, text in essays[first:] + essays[:first])


def exact(tokenizer: Tokenizer, document: str, finish: Callable[[str], str], length: int) -> list[int]:
    """A chat prompt of exactly `length` tokens: the document's beginning, with what `finish` puts after it."""
    return fit(tokenizer, document, lambda text: tokenizer.chat_prompt(finish(text)), length).ids
