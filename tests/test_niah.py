"""Needles in haystacks: what is asked, what it scores, and long runs that survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from minikv.errors import InputError
from minikv.evals import niah
from minikv.evals.needle_cases import NeedleCase
from minikv.evals.tasks import MODES, load_tasks
from minikv.haystack import DATA, Family, Needle, Task, contains, hide, hide_all, load_families, load_haystack, load_needles, recall
from minikv.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
HAYSTACK = load_haystack(DATA / "evaluate/essays")
NEEDLE = Needle("The entry code for the north gate is 4817.", "What is the entry code for the north gate?", "4817")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder_with_bos(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny_bos"), add_bos=True)


# --- the prompt ---


@pytest.mark.parametrize("which, bos", [("folder", 0), ("folder_with_bos", 1), ("default_folder", 0)])
@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_a_prompt_is_exact_and_holds_the_needle_once(request, which, bos, depth):
    tokenizer = Tokenizer.from_folder(request.getfixturevalue(which))
    found = hide(tokenizer, HAYSTACK, NEEDLE, 700, depth)
    assert len(found.ids) == len(found.prompt.ids) == 700
    text = tokenizer.decode(found.ids)
    assert text.count(NEEDLE.needle) == 1
    assert "\ufffd" not in text and "<s>" not in text
    if which != "default_folder":
        assert found.ids.count(tokenizer.bos_id) == bos and (found.ids[0] == tokenizer.bos_id) == bool(bos)
    assert tokenizer.decode([found.ids[place] for place in found.answer_positions]).strip(" .") == NEEDLE.answer


def family(count=4) -> Family:
    entries = tuple((f"gate {chr(65 + i)}", f"{4100 + 7 * i}") for i in range(count))
    return Family("The code of {key} is {value}.", "What is the code of {key}?", "What are the codes of {keys}?", entries)


def test_all_needles_of_a_task_are_hidden_the_asked_one_at_its_depth(folder):
    tokenizer, needles = Tokenizer.from_folder(folder), [family().fill(i) for i in range(4)]
    task = Task(needles[0].question, tuple(needles[:1]), tuple(needles[1:]))
    for depth in (0, 0.25, 1):
        found = hide_all(tokenizer, HAYSTACK, task, 1500, depth)
        text = found.prompt.text
        assert len(found.ids) == 1500
        assert all(text.count(needle.needle) == 1 for needle in needles)
        document = text[text.index("<|user|>") + 8 : text.index("Based on the text above")]
        places = [document.index(needle.needle) / len(document) for needle in needles]
        expected = [depth] + [(depth + i / 4) % 1 for i in (1, 2, 3)]
        assert places == pytest.approx(expected, abs=0.06)
        before = text[: text.index(needles[2].needle)].rstrip()
        assert before[-1] in ".!?\"'>"  # a sentence's end, or the turn's beginning
        assert tokenizer.decode([found.ids[i] for i in found.answer_positions]).strip(" .") == "4100"


def test_all_answers_that_are_asked_for_are_marked(folder):
    tokenizer, needles = Tokenizer.from_folder(folder), tuple(family().fill(i) for i in range(3))
    found = hide_all(tokenizer, HAYSTACK, Task(family().ask_all([0, 1, 2]), needles), 900, 0)
    spelled = tokenizer.decode([found.ids[i] for i in found.answer_positions])
    assert all(needle.answer in spelled for needle in needles)
    assert "What are the codes of gate A, gate B and gate C?" in found.prompt.text


# --- the score ---


@pytest.mark.parametrize(
    "said, words, whole",
    [
        ("close both red valves", 1, 1),
        ("In a fire, the first thing to do is to Close Both\nRed Valves, of course.", 1, 1),  # a preface costs nothing
        ("close both", 0.5, 0),
        ("closing both of the red valve", 1, 0),  # word endings aside
        ("valves red both close", 1, 0),  # the order of words does not matter for recall
        ("close both red valvesque", 0.75, 0),
        ("open the green door", 0, 0),
        ("", 0, 0),
    ],
)
def test_scores_of_an_answer(said, words, whole):
    assert recall("close both red valves", said) == pytest.approx(words)
    assert contains("close both red valves", said) == bool(whole)
    assert niah.score(["close both red valves"], said) == {"recall": pytest.approx(words), "contained": whole}


def test_a_number_is_contained_only_as_a_number():
    assert contains("4817", "It is 4817.") and not contains("4817", "It is 48170.")
    assert contains("a+b (c)", "so A+B (c) it is")


def test_of_several_answers_the_share_that_was_given():
    assert niah.score(["4817", "9362", "two red doors", "7139"], "4817, 7139 and red doors") == {
        "recall": pytest.approx(4 / 6),
        "contained": 0.5,
    }


# --- the tasks ---


def test_there_are_enough_needles_of_the_projects_own_of_every_kind():
    path = DATA / "evaluate/needles.jsonl"
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert len(load_needles(path)) >= 24 and set(kinds) == {"sentence", "number", "name", "two-part"}
    questions = {needle.question: kind for needle, kind in zip(load_needles(path), kinds)}
    drawn = [questions[task.question] for task in load_tasks("12", "single", 4, 0)]
    assert all(drawn.count(kind) >= 2 for kind in set(kinds))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_hides_and_asks_what_it_says(mode):
    tasks = load_tasks("24", mode, 3, seed=1)
    assert len(tasks) == 24
    assert len({task.question for task in tasks}) == 24
    for task in tasks:
        needles = {needle.needle for needle in task.asked + task.others}
        expected = {"single": (1, 1), "several": (1, 3), "all": (3, 3), "distractors": (1, 3), "two-hop": (1, 2)}[mode]
        assert (len(task.asked), len(needles)) == expected
        assert task.answers == [needle.answer for needle in task.asked]
        beginnings = {" ".join(needle.split()[:2]) for needle in needles}
        assert (len(beginnings) == 1) == (mode not in ("several", "two-hop"))  # of one form, or not
    assert tasks == load_tasks("24", mode, 3, seed=1)
    if mode not in ("single", "two-hop"):  # nothing is drawn
        assert tasks != load_tasks("24", mode, 3, seed=2)


def test_two_hop_facts_hide_both_sentences_and_are_refused_where_they_cannot_be_used(tmp_path):
    fact = {"first": "Ada keeps the key.", "second": "Ada lives in Rome.", "question": "Where is the key?", "answer": "Rome"}
    path = tmp_path / "hops.jsonl"
    path.write_text(json.dumps(fact))
    (task,) = load_tasks(str(path), "two-hop", 4, 0)
    assert [needle.needle for needle in task.asked + task.others] == ["Ada lives in Rome.", "Ada keeps the key."]
    assert task.answers == ["Rome"] and task.question == "Where is the key?"
    for change, message in (({"answer": "Oslo"}, "'Oslo' does not occur"), ({"first": ""}, "lacks a text for first, second")):
        path.write_text(f"{json.dumps(fact)}\n{json.dumps(fact | change)}\n")
        with pytest.raises(InputError, match=f"hops.jsonl, line 2.*{message}"):
            load_tasks(str(path), "two-hop", 4, 0)
    path.write_text("\n")
    with pytest.raises(InputError, match="holds no two-hop facts"):
        load_tasks(str(path), "two-hop", 4, 0)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"needle": "x"}', "lacks a text for needle, question or question_all"),
        ('{"needle": "{key} {value}", "question": "{key}", "question_all": "{keys}", "entries": [["a", 1]]}', "two or more"),
        ('{"needle": "{key}", "question": "{key}", "question_all": "{keys}", "entries": [["a", 1], ["b", 2]]}', "'{key}' must hold"),
        ('{"needle": "{key} {value}", "question": "{0}", "question_all": "{keys}", "entries": [["a", 1], ["b", 2]]}', "'{0}' must"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_family_that_cannot_be_used_is_named_by_line(tmp_path, line, message):
    good = '{"needle": "{key} {value}", "question": "{key}", "question_all": "{keys}", "entries": [["a", 1], ["b", 2]]}'
    (tmp_path / "f.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(InputError) as error:
        load_families(tmp_path / "f.jsonl")
    assert "f.jsonl, line 3" in str(error.value) and message in str(error.value)


def test_needles_of_ones_own_may_hold_any_character(tmp_path):
    fields = {"needle": "A b\u2028c \x85 d is 5.", "question": "What?", "real_needle": "5"}
    (tmp_path / "n.jsonl").write_text(json.dumps(fields, ensure_ascii=False) + "\n", encoding="utf-8")
    (task,) = load_tasks(str(tmp_path / "n.jsonl"), "single", 4, 0)
    assert task == Task("What?", (Needle(fields["needle"], "What?", "5"),))


def write_lines(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


ONE = {"needle": "The code is 4817.", "question": "What is the code?", "answer": "4817"}


@pytest.mark.parametrize(
    "line, message",
    [
        (ONE, "line 2 repeats .*n.jsonl, line 1"),
        (ONE | {"needle": "The sign shows \u4e00\u4e8c.", "answer": "\u4e00\u4e8c"}, "line 2: the answer .* cannot be scored"),
        (ONE | {"question": "What \ud800?"}, "line 2 holds a lone surrogate"),
    ],
)
def test_a_needle_that_cannot_be_used_is_named_by_line(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        load_needles(write_lines(tmp_path / "n.jsonl", ONE, line))


def test_a_familys_value_that_cannot_be_scored_is_named_by_line(tmp_path):
    forms = {"needle": "{key} {value}", "question": "{key}", "question_all": "{keys}"}
    with pytest.raises(InputError, match="line 1: the answer '!' cannot be scored"):
        load_families(write_lines(tmp_path / "f.jsonl", forms | {"entries": [["a", 1], ["b", "!"]]}))


@pytest.mark.parametrize("depth", [0, 1])
def test_blanks_around_a_needle_are_left_away(folder, tmp_path, depth):
    (needle,) = load_needles(write_lines(tmp_path / "n.jsonl", ONE | {"needle": f" {ONE['needle']}\n"}))
    assert needle == Needle(**ONE)
    assert len(hide(Tokenizer.from_folder(folder), HAYSTACK, needle, 300, depth).ids) == 300


def test_needles_of_one_sentence_with_two_questions_are_two_cases():
    first, second = (NeedleCase(Needle("A is 5.", question, "5"), 100, 0, "text") for question in ("What is A?", "And A?"))
    assert first.key != second.key


def test_a_haystack_that_holds_the_needle_far_beyond_the_prompt_is_refused_at_once(folder):
    with pytest.raises(InputError, match="the haystack already holds"):
        hide(Tokenizer.from_folder(folder), HAYSTACK + NEEDLE.needle, NEEDLE, 300, 0)


def test_a_needle_that_the_question_repeats_is_told_as_that(folder):
    with pytest.raises(InputError, match="2 times"):
        hide(Tokenizer.from_folder(folder), HAYSTACK, Needle("A is 5.", "Right? A is 5.", "5"), 300, 0)


@pytest.mark.parametrize(
    "needles, mode, hidden, message",
    [
        ("0", "single", 4, "--needles 0: there are 1 to 28"),
        ("29", "single", 4, "--needles 29: there are 1 to 28"),
        ("5", "several", 40, "--hidden 40"),
        ("5", "distractors", 1, "--hidden 1"),
        ("5", "all", 9, "--hidden 9"),
        ("nowhere.jsonl", "single", 4, "nowhere.jsonl: No such file"),
    ],
)
def test_tasks_that_cannot_be_had_are_refused(needles, mode, hidden, message):
    with pytest.raises(InputError, match=message):
        load_tasks(needles, mode, hidden, 0)


# --- the program ---


@dataclass
class Program:
    """The program on the tiny checkpoint, with a small grid."""

    folder: Path
    out: Path

    def words(self, *more: str) -> list[str]:
        model = ["--model", str(self.folder), "--profile", str(self.folder / "profile.json"), "--heads", "2", "--device", "cpu"]
        grid = ["--lengths", "256", "300", "--depths", "0", "100", "--needles", "4", "--max-new-tokens", "6"]
        return [*model, *grid, "--budgets", "24", "12%", "--json", str(self.out / "out.json"), *more]

    def run(self, *more: str, launcher=("-m",)) -> tuple[str, dict]:
        """What it prints and its record, run in a process of its own."""
        done = self.start(*more, launcher=launcher)
        out, error = done.communicate(timeout=120)
        assert done.returncode == 0, error
        return out, json.loads((self.out / "out.json").read_text())

    def start(self, *more: str, launcher=("-m",)) -> subprocess.Popen:
        command = [sys.executable, *launcher, "minikv.evals.niah", *self.words(*more)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)

    def run_here(self, monkeypatch, *more: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["niah", *self.words(*more)])
        niah.main()
        return json.loads((self.out / "out.json").read_text())


@pytest.fixture
def program(folder, tmp_path):
    return Program(folder, tmp_path)


def scores_of(printed: str) -> str:
    """The printed table, without the times below it."""
    return printed.split("\n\n")[0]


def test_the_table_shows_window_n_and_the_full_cache_beside_each_score(program, monkeypatch, capsys):
    for window in (4, 8, 16):
        record = program.run_here(monkeypatch, "--window", str(window))
        printed = capsys.readouterr().out
        rows = [line.split() for line in scores_of(printed).splitlines()]
        assert rows[0][:5] == ["method", "budget", "kept", "window", "n"]
        assert [row[:2] for row in rows[2:5]] == [["full", "-"], ["streamingllm", "24"], ["streamingllm", "12%"]]
        assert all(row[4] == "16" for row in rows[2:])
        assert {row[3] for row in rows[2:] if row[0] not in ("full", "streamingllm")} == {str(window)}
        assert "The first token of each answer comes from full attention" in printed
        assert repr(record["window"]) in printed and record["window"].endswith("<|end|><|assistant|>")
        by_name = {(row["method"], row["budget"]): row for row in record["scores"]}
        assert by_name["snapkv", "24"]["n"] == 16 and by_name["snapkv", "24"]["window"] == window
        assert by_name["full", None]["kept"] == 1
        assert by_name["cake", "24"]["kept"] <= by_name["snapkv", "24"]["kept"] == pytest.approx((24 / 256 + 24 / 300) / 2)


def test_means_intervals_and_maps_follow_from_the_examples(program, monkeypatch, capsys):
    """Scores are put in by hand: needle 1 is always found, the others at depth 0 only."""
    true_evaluate = niah.evaluate

    def evaluate(model, tokenizer, example, pairs, new):
        result = true_evaluate(model, tokenizer, example, pairs, new)
        for pair in result["pairs"].values():
            pair["recall"] = float(example.number == 1 or example.depth == 0)
        return result

    monkeypatch.setattr(niah, "evaluate", evaluate)
    record = program.run_here(monkeypatch, "--methods", "full", "snapkv")
    for row in record["scores"]:
        assert row["recall"] == pytest.approx((1 + 3 / 2) / 4)
        assert row["by_length"] == {"256": 0.625, "300": 0.625}
        assert row["by_depth"] == {"0": [1, 1], "100": [0.25, 0.25]}
        low, high = row["recall_interval"]
        assert 0.5 <= low < 0.625 < high <= 1
    assert "0.625" in scores_of(capsys.readouterr().out)


@pytest.mark.parametrize("more", [["--mode", "distractors"], ["--methods", "full"], ["--methods", "h2o", "tova"]])
def test_pictures_are_drawn(program, monkeypatch, capsys, more):
    program.run_here(monkeypatch, "--plot", str(program.out / "maps.png"), "--limit", "7", *more)
    printed = capsys.readouterr().out
    for name in ("maps.png", "maps-budget.png"):
        assert (program.out / name).read_bytes().startswith(b"\x89PNG") and str(program.out / name) in printed


def test_a_run_that_is_killed_goes_on_and_ends_as_one_that_was_not(program):
    more = ["--depths", "0", "25", "50", "75", "100", "--needles", "8"]  # 80 examples
    undisturbed, record = program.run(*more)
    results = program.out / "results.jsonl"
    running = program.start(*more, "--results", str(results))
    deadline = time.time() + 60
    while not (results.exists() and results.read_bytes().count(b"\n") > 10) and time.time() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    done = results.read_bytes().count(b"\n") - 1
    assert 10 <= done < 80
    with open(results, "ab") as file:
        file.write(b'{"key": "needle 1, 25')  # killed in the middle of a line
    again, resumed = program.run(*more, "--results", str(results))
    assert scores_of(again) == scores_of(undisturbed)
    assert resumed["scores"] == record["scores"]
    keys = [json.loads(line)["key"] for line in results.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) == 80


def test_two_ranks_give_the_very_numbers_of_one_process(program):
    alone, record = program.run("--results", str(program.out / "one.jsonl"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    together, merged = program.run("--results", str(program.out / "two.jsonl"), launcher=torchrun)
    assert scores_of(together) == scores_of(alone)
    assert merged["scores"] == record["scores"]

    def texts(*names):
        lines = [json.loads(line) for name in names for line in (program.out / name).read_text().splitlines()[1:]]
        return {line["key"]: line["result"]["pairs"] for line in lines}

    assert texts("two.jsonl", "two.jsonl.rank1") == texts("one.jsonl")
    assert len(texts("two.jsonl")) == len(texts("two.jsonl.rank1")) == 8  # each took its share


def test_another_experiments_results_are_refused_in_one_line(program):
    results = str(program.out / "results.jsonl")
    program.run("--results", results, "--limit", "1", "--window", "8")
    refused = program.start("--results", results, "--limit", "1", "--window", "9")
    out, error = refused.communicate(timeout=60)
    assert refused.returncode == 2 and out == ""
    assert error.count("\n") == 1 and "results.jsonl holds results of other settings: window is 8 there and 9 here" in error


@pytest.mark.parametrize(
    "more, message",
    [
        (["--lengths", "64"], "has no room for what is asked"),
        (["--lengths", "256", "4092"], "4092 tokens and 6 new tokens exceed the model's context of 4096"),
        (["--depths", "101"], "'101' is not a number from 0 to 100"),
        (["--methods", "snapkvv"], "'snapkvv' is unknown"),
        (["--budgets", "8"], "budget 8 is too small: it must be at least 9"),
        (["--haystack", "/nowhere"], "/nowhere: No such file"),
    ],
)
def test_bad_input_is_told_before_the_long_work(program, monkeypatch, more, message):
    with pytest.raises(InputError, match=message):
        program.run_here(monkeypatch, "--methods", "snapkv", *more)
    assert not (program.out / "out.json").exists()
