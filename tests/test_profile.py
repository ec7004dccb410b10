"""`python -m minikv.profile` from end to end, and what a profile's file may and may not hold."""

from __future__ import annotations

import json
import math
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import minikv
from conftest import make_profile, make_prompt, make_tiny_model
from copying import COPIER, write_checkpoint, write_essays, write_needles
from minikv import command, generate, offline, profile
from minikv.budget import error_aware
from minikv.errors import InputError
from minikv.evals.error_prompts import ErrorPrompt
from minikv.evals.journal import Journal
from minikv.evals.needle_cases import begin_anywhere
from minikv.inference import compress, prefill
from minikv.policy import CompressKV
from minikv.srh import Profile, strongest
from minikv.tokenizer import Prompt

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).parent.parent.parent / "shared/data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """needles.jsonl, essays.txt, and model, a checkpoint that finds those needles at depth 100 only."""
    folder = tmp_path_factory.mktemp("copying")
    write_essays(folder / "essays.txt")
    write_checkpoint(folder / "model", write_needles(folder / "needles.jsonl"))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """Run a program on the checkpoint with further arguments; SystemExit where it fails."""

    def run(program, *arguments):
        given = ["--model", folder / "model", "--device", "cpu", *arguments]
        monkeypatch.setattr(sys, "argv", ["program", *map(str, given)])
        command.run(program.main)

    return run


@pytest.fixture
def measure(run, folder):
    """Run the profile program over 3 needles and read what it wrote; later arguments win."""

    def measure(output, *arguments, depths=(0, 100)) -> dict:
        texts = ["--needles", folder / "needles.jsonl", "--haystack", folder / "essays.txt"]
        grid = ["--lengths", 256, "--depths", *depths, "--max-answer-tokens", 7]
        run(profile, *texts, *grid, "--output", output, *arguments)
        return json.loads(output.read_text())

    return measure


# --- the program ---


def test_the_profile_names_the_head_that_copies_and_says_what_it_is(measure, tmp_path, folder, capsys):
    fields = measure(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert strongest(torch.tensor(loaded.head_scores))[0] == strongest(torch.tensor(loaded.traditional_scores))[0] == COPIER
    assert loaded.head_ranks[COPIER[0]][0] == COPIER[1]
    model, _ = minikv.load(folder / "model", device="cpu")
    assert loaded.check_model(model, model.config) is None
    # Head identification: the file says model, shape, data and date.
    assert fields["model"] | {"weights": ""} == {"name": "model", "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 258, "weights": ""}
    assert fields["settings"]["needles"].endswith("/needles.jsonl") and fields["settings"]["lengths"] == [256]
    assert len(fields["versions"]["date"]) == len("2025-01-31")
    # 3 needles: found at depth 100, not at depth 0
    assert (fields["settings"]["runs"], fields["settings"]["runs_counted"]) == (6, 3)
    assert fields["stability"]["semantic"]["runs"] == [2, 1]
    assert fields["stability"]["semantic"]["spearman"] > 0.9
    assert sum(fields["layer_scores"]) == pytest.approx(1)
    output = capsys.readouterr()
    assert "found in 3 of 6 runs" in output.out and "layer 1 head 2" in output.out
    assert "warning: 3 of 6 runs" in output.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.json"]


def test_only_runs_that_found_the_answer_count(measure, tmp_path):
    all_runs, good_runs = measure(tmp_path / "a.json"), measure(tmp_path / "b.json", depths=[100])
    assert all_runs["head_scores"] == good_runs["head_scores"]


def test_no_counted_run_is_an_error_and_no_file(measure, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        measure(tmp_path / "p.json", depths=[0])
    assert exit.value.code == 2
    assert "in none of 3 runs did the model find the needle" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program_part", ["score_heads", "layer_errors"])
def test_an_interrupted_measurement_goes_on_to_the_same_profile(measure, tmp_path, monkeypatch, program_part, capsys):
    measure(tmp_path / "whole.json")
    function, calls = getattr(offline, program_part), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return function(*arguments)

    monkeypatch.setattr(offline, program_part, interrupted)
    with pytest.raises(SystemExit) as exit:
        measure(tmp_path / "halves.json")
    assert exit.value.code == 130 and not (tmp_path / "halves.json").exists()
    with open(tmp_path / "halves.runs.jsonl", "a") as journal:
        journal.write('{"key": "heads: a line that was being writ')
    measure(tmp_path / "halves.json")
    assert len(calls) == 3 + 6 - 2  # two were done before the interruption, and are not done again
    assert (tmp_path / "halves.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert "going on from" in capsys.readouterr().out
    assert not (tmp_path / "halves.runs.jsonl").exists()


def test_a_measurement_does_not_go_on_from_another_ones_runs(measure, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(offline, "layer_errors", lambda *_: sys.exit("stopped"))
        with pytest.raises(SystemExit):
            measure(tmp_path / "p.json")
    with pytest.raises(SystemExit) as exit:
        measure(tmp_path / "p.json", "--seed", 1)
    assert exit.value.code == 2
    assert "other settings" in capsys.readouterr().err


def test_errors_of_other_ranks_or_another_prompt_of_the_same_name_are_measured_anew(monkeypatch):
    """Other ranks keep other entries, and a text may change between two runs."""
    model, tokenizer, journal, measured = Namespace(config=Namespace(layers=2)), Namespace(stop_ids={}), Journal(None, {}), []

    def errors(model, ids, ranks, *_):
        measured.append((ids, ranks))
        return torch.ones(2, dtype=torch.float64)

    monkeypatch.setattr(offline, "layer_errors", errors)
    for ids, ranks in [([7, 8], [[0, 1]]), ([7, 8], [[1, 0]]), ([7, 9], [[1, 0]]), ([7, 8], [[0, 1]])]:
        sets = {"text": [ErrorPrompt("tokens from 0", lambda ids=ids: Prompt(ids, "", []))]}
        assert profile.measure_layers(model, tokenizer, sets, ranks, 5, journal)["text"].tolist() == [1, 1]
    assert measured == [([7, 8], [[0, 1]]), ([7, 8], [[1, 0]]), ([7, 9], [[1, 0]])]


def test_the_same_seed_gives_the_same_file_and_another_seed_other_haystacks(measure, tmp_path):
    first, second, other = (measure(tmp_path / f"{n}.json", "--seed", seed) for n, seed in enumerate([5, 5, 6]))
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert first["settings"]["texts"] == second["settings"]["texts"] != other["settings"]["texts"]


def test_a_haystack_begins_with_a_paragraph_that_the_seed_draws():
    text = "\n\n".join("abcdef")
    begins = {begin_anywhere(text, str(seed)) for seed in range(50)}
    assert len(begins) == 6 and begin_anywhere(text, "1") == begin_anywhere(text, "1")
    assert all(sorted(begin.split("\n\n")) == list("abcdef") for begin in begins)
    assert "c\n\nd\n\ne\n\nf\n\na\n\nb" in begins


def test_layer_errors_from_other_prompts_each_data_set_alike(measure, tmp_path, folder, monkeypatch):
    """Plain text, and a LongBench folder, are sets of their own beside the needles."""
    bench = tmp_path / "bench"
    bench.mkdir()
    record = {"input": "Who slept?", "context": "A dog slept. " * 90, "answers": ["a dog"], "dataset": "qasper"}
    (bench / "qasper.jsonl").write_text(json.dumps(record) + "\n")
    asked = []

    def errors(model, ids, *_):  # the more layer 0, the later the prompt
        asked.append(ids)
        return torch.tensor([float(len(asked)), 1, 1], dtype=torch.float64)

    monkeypatch.setattr(offline, "layer_errors", errors)
    fields = measure(tmp_path / "p.json", "--error-prompts", "needles", folder / "essays.txt", bench, depths=[100])
    by_set = fields["layer_scores_by_set"]
    assert list(by_set) == fields["settings"]["error_prompts"] == ["needles", "essays.txt", "qasper"]
    assert [len(ids) for ids in asked[:3]] == [256] * 3  # the needles' prompts
    pieces = len(write_essays(tmp_path / "essays").read_text()) // 256  # a token is a byte
    assert [len(ids) for ids in asked[3:]] == [256] * (pieces + 1)  # whole pieces of the text, and the record, cut
    first, second, third = 1 + 2 + 3, sum(range(4, 4 + pieces)), 4 + pieces
    assert by_set["needles"] == pytest.approx([first / (first + 6), 3 / (first + 6), 3 / (first + 6)])
    shares = [first / (first + 6), second / (second + 2 * pieces), third / (third + 2)]
    assert fields["layer_scores"][0] == pytest.approx(sum(shares) / 3)


def test_data_sets_of_one_name_are_refused(measure, tmp_path, folder, capsys):
    (tmp_path / "essays.txt").write_text("another text")
    with pytest.raises(SystemExit):
        measure(tmp_path / "p.json", "--error-prompts", folder / "essays.txt", tmp_path / "essays.txt")
    assert "two data sets 'essays.txt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--lengths", 4000], "exceed the model's context of 2048"),
        (["--lengths", 64], "no room for what is asked"),
        (["--depths", 101], "not a number from 0 to 100"),
        (["--needles", "nothing.jsonl"], "nothing.jsonl"),
        (["--error-prompts", "nothing.txt"], "nothing.txt"),
    ],
)
def test_what_cannot_be_measured_is_told_before_any_run(measure, tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.setattr(offline, "score_heads", lambda *_: pytest.fail("a run was made"))
    with pytest.raises(SystemExit) as exit:
        measure(tmp_path / "p.json", *arguments)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and problem in error
    assert list(tmp_path.iterdir()) == []


# --- the paper's files ---


def test_the_releases_files_load(tmp_path):
    loaded = Profile.load(FIXTURES / "tiny_head_idx.json")
    assert loaded.head_ranks == [[2, 0, 1, 3], [3, 1, 0, 2]]
    assert loaded.layer_scores == [0.375, 0.625]
    assert loaded.layer_scores_by_set == {"qasper": [0.25, 0.75], "trec": [0.5, 0.5]}
    assert loaded.head_scores is None


def test_a_profile_is_written_as_the_releases_files_and_read_again(tmp_path):
    loaded = Profile.load(FIXTURES / "tiny_head_idx.json")
    loaded.save(tmp_path / "again_head_idx.json")
    assert Profile.load(tmp_path / "again_head_idx.json") == loaded
    for name in ("head_idx.json", "layer_score.jsonl"):
        assert json.loads((tmp_path / f"again_{name}").read_text()) == json.loads((FIXTURES / f"tiny_{name}").read_text())


def test_the_profile_program_writes_the_releases_files(measure, tmp_path):
    ranks = measure(tmp_path / "model_head_idx.json", depths=[100])
    assert ranks["1"][0] == COPIER[1]
    assert Profile.load(tmp_path / "model_head_idx.json").layers == 3


@pytest.mark.parametrize(
    "file, change, problem",
    [
        ("head_idx.json", lambda fields: fields.pop("0"), "layer 0 is missing"),
        ("head_idx.json", lambda fields: fields["1"].pop(), "head_ranks, layer 1"),
        ("layer_score.jsonl", lambda fields: fields.pop("avg_score"), "avg_score"),
        ("layer_score.jsonl", lambda fields: fields["avg_score"].pop(), "layer_scores has 1 numbers, 2 are needed"),
        ("layer_score.jsonl", lambda fields: fields["trec"].append(1), "layer_scores_by_set, trec"),
    ],
)
def test_broken_release_files_are_refused_with_the_field(tmp_path, file, change, problem):
    for name in ("head_idx.json", "layer_score.jsonl"):
        shutil.copy(FIXTURES / f"tiny_{name}", tmp_path)
    fields = json.loads((tmp_path / f"tiny_{file}").read_text())
    change(fields)
    (tmp_path / f"tiny_{file}").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=problem):
        Profile.load(tmp_path / "tiny_head_idx.json")


def test_release_ranks_without_scores_are_refused(tmp_path):
    shutil.copy(FIXTURES / "tiny_head_idx.json", tmp_path)
    with pytest.raises(InputError, match="tiny_layer_score.jsonl is not there"):
        Profile.load(tmp_path / "tiny_head_idx.json")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data, the paper's released files")
@pytest.mark.parametrize("model", ["Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.3"])
def test_the_papers_profiles_load_and_give_the_papers_budgets(model, tmp_path):
    loaded = Profile.load(SHARED / f"reference/{model}_head_idx.json")
    assert (loaded.layers, loaded.heads, len(loaded.layer_scores_by_set)) == (32, 32, 16)
    cases = json.loads((SHARED / "oracle/budget_expected.json").read_text())["error_aware"]
    cases = [case for case in cases if case["layer_scores"] == loaded.layer_scores]
    assert cases
    for case in cases:
        bounds = case["total_budget"], case["min_tokens"], case["max_tokens"]
        assert error_aware(loaded.layer_scores, *bounds) == case["expected"]
    # The mean over the data sets, computed as ours is, is the paper's own.
    sums = [torch.tensor(scores, dtype=torch.float64) for scores in loaded.layer_scores_by_set.values()]
    assert offline.layer_scores(sums) == pytest.approx(loaded.layer_scores)


# --- what is refused ---

GOOD = {
    "format": "minikv profile 1",
    "head_ranks": [[1, 0], [0, 1]],
    "layer_scores": [0.5, 0.5],
    "head_scores": [[0.1, 0.2], [0.4, 0.3]],
    "model": {"layers": 2, "heads": 2},
}
BROKEN = {
    "empty": ({}, "the field format"),
    "of another kind": (GOOD | {"format": "other"}, "the field format"),
    "without ranks": ({name: value for name, value in GOOD.items() if name != "head_ranks"}, "head_ranks"),
    "no layers": (GOOD | {"head_ranks": []}, "head_ranks"),
    "a layer short of a head": (GOOD | {"head_ranks": [[1, 0], [0]]}, "head_ranks, layer 1"),
    "a head twice": (GOOD | {"head_ranks": [[1, 1], [0, 1]]}, "head_ranks, layer 0"),
    "heads as text": (GOOD | {"head_ranks": [["1", "0"], [0, 1]]}, "head_ranks, layer 0"),
    "partial scores": (GOOD | {"layer_scores": [0.5]}, "layer_scores has 1 numbers, 2 are needed"),
    "NaN": (GOOD | {"layer_scores": [0.5, math.nan]}, "layer_scores holds nan"),
    "infinite": (GOOD | {"layer_scores": [0.5, math.inf]}, "layer_scores holds inf"),
    "huge": (GOOD | {"layer_scores": [0.5, 10**400]}, "layer_scores"),
    "negative": (GOOD | {"layer_scores": [1.5, -0.5]}, "layer_scores has a negative number"),
    "null": (GOOD | {"layer_scores": None}, "layer_scores"),
    "NaN in a head": (GOOD | {"head_scores": [[0.1, math.nan], [0.4, 0.3]]}, "head_scores, layer 0"),
    "head scores short of a layer": (GOOD | {"head_scores": [[0.1, 0.2]]}, "head_scores has 1 layers"),
    "an unknown field": (GOOD | {"colour": 1}, "colour"),
    "settings as text": (GOOD | {"settings": "none"}, "settings is 'none'"),
    "another shape than it says": (GOOD | {"model": {"layers": 30, "heads": 2}}, "model says 30 layers, head_ranks has 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_profile_is_refused_with_file_and_field(tmp_path, name):
    fields, problem = BROKEN[name]
    (tmp_path / "broken.json").write_text(json.dumps(fields) if fields else "{}")
    with pytest.raises(InputError, match="broken.json") as error:
        Profile.load(tmp_path / "broken.json")
    assert problem in str(error.value)


@pytest.mark.parametrize("text", ["", '{"format": "minikv profile 1", "head_ra', "[]", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "cut.json").write_text(text)
    with pytest.raises(InputError, match="cut.json"):
        Profile.load(tmp_path / "cut.json")


def test_a_profile_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(InputError, match="there is no such file"):
            Profile.load(path)


@pytest.mark.parametrize("name", ["empty", "partial scores", "NaN"])
def test_generate_does_not_go_on_with_a_broken_profile(run, tmp_path, capsys, name):
    (tmp_path / "broken.json").write_text(json.dumps(BROKEN[name][0]))
    with pytest.raises(SystemExit) as exit:
        run(generate, "--prompt", "hello", "--budget", "12", "--profile", tmp_path / "broken.json")
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1 and BROKEN[name][1] in captured.err


def test_a_profile_of_another_shape_is_refused_and_both_shapes_named():
    of_llama = Profile([list(range(32))] * 32, [1 / 32] * 32)
    with pytest.raises(InputError) as error:
        of_llama.check_shape(30, 9)
    assert "32 layers of 32 query heads" in str(error.value) and "30 of 9" in str(error.value)
    model = make_tiny_model()
    with pytest.raises(InputError, match="32 layers of 32 query heads, the model has 4 of 6"):
        of_llama.check_model(model, model.config)
    with pytest.raises(InputError, match="for 32 layers, the model has 4"):
        compress(prefill(model, make_prompt(40)), CompressKV(20, of_llama))


def test_a_profile_of_other_weights_is_a_warning_and_of_other_kv_heads_an_error():
    model, other = make_tiny_model(), make_tiny_model(seed=1)
    measured = Profile(**vars(make_profile(model)) | {"model": {"weights": minikv.srh.fingerprint(model), "kv_heads": 2}})
    assert measured.check_model(model, model.config) is None
    assert "other weights" in measured.check_model(other, other.config)
    with pytest.raises(InputError, match="2 kv_heads, the model has 3"):
        measured.check_model(other, make_tiny_model(kv_heads=3).config)


@pytest.mark.parametrize("first_heads", [[0, 1, 2], [3, 4, 5]])
def test_heads_of_one_kv_group_alone_may_vote(first_heads):
    """6 heads, 2 KV heads: all that vote share one KV head, none is of the other; both keep what was voted for."""
    rest = [head for head in range(6) if head not in first_heads]
    of_one_group = Profile([first_heads + rest] * 4, [0.25] * 4)
    result = prefill(make_tiny_model(), make_prompt(60))
    cache = compress(result, CompressKV(20, of_one_group, heads=3))
    for layer in cache.layers:
        assert layer.positions[0, 0].tolist() == layer.positions[0, 1].tolist()
    assert sum(cache.kept) == 80


def test_a_profile_without_scores_says_so_where_they_are_needed():
    with pytest.raises(InputError, match="no traditional_scores"):
        make_profile(make_tiny_model()).traditional_ranks
