"""Silencing heads: what it does to a model whose retrieving head is known, and the experiment around it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest
import torch

from conftest import make_prompt, make_tiny_model
from copying import COPIER, NEIGHBOUR, copying_model, prompt_with_answer, write_checkpoint, write_essays, write_needles
from minikv import command, profile
from minikv.errors import InputError
from minikv.evals import masking
from minikv.evals.masking import PHASES
from minikv.evals.needle_cases import NeedleCase
from minikv.evals.silencing import (
    PARTS,
    masked_answers,
    masked_logits,
    prefill_before_last,
    rankings,
    sounding_heads,
)
from minikv.haystack import Needle
from minikv.srh import Profile

STOP = frozenset({1})


def silence(model, *heads) -> torch.Tensor:
    """One row that silences these heads."""
    sounding = torch.ones(1, model.config.layers, model.config.heads)
    for layer, head in heads:
        sounding[0, layer, head] = 0
    return sounding


def answer(model, ids, sounding, part, phase, max_tokens=5, stop_ids=STOP) -> list[list[int]]:
    before_last = prefill_before_last(model, ids) if phase == "decode" else None
    return masked_answers(model, ids, sounding, part, before_last, max_tokens, stop_ids)


# --- a model in which it is known which head retrieves (see copying.py) ---


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("phase", PHASES)
def test_silencing_the_head_that_copies_destroys_retrieval_and_no_other_head_does(part, phase):
    ids, positions, distance = prompt_with_answer()
    model, right = copying_model(distance), [ids[position] for position in positions]
    assert answer(model, ids, silence(model), part, phase) == [right]
    assert not set(answer(model, ids, silence(model, COPIER), part, phase)[0]) & set(right)
    others = [(layer, head) for layer in range(3) for head in range(4) if (layer, head) != COPIER]
    assert answer(model, ids, silence(model, *others), part, phase) == [right]


def test_a_head_without_its_query_averages_all_values():
    """What the release's masking leaves: the copier now writes a little of every token it sees."""
    ids, _, distance = prompt_with_answer()
    model = copying_model(distance)
    cache = prefill_before_last(model, ids)
    last = torch.tensor([ids[-1:]])
    logits = masked_logits(model, last, cache, silence(model, COPIER), "query")[0].tolist()
    assert logits[20] == pytest.approx(logits[30], rel=1e-4)  # tokens that occur once
    assert logits[20] > logits[200] + 0.01  # a token that occurs nowhere


# --- the step itself ---


def full_answer(model, ids, max_tokens) -> list[int]:
    """Greedy decoding without a cache."""
    tokens = torch.tensor([ids])
    for _ in range(max_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(ids) :].tolist()


def test_nothing_silenced_is_the_model_itself():
    model, ids = make_tiny_model(), make_prompt(40)[0].tolist()
    for part in PARTS:
        for phase in PHASES:
            assert answer(model, ids, silence(model), part, phase, 6, frozenset()) == [full_answer(model, ids, 6)]


def ablated_model(model, layer, head, part):
    """The same weights with a head's part of a projection set to zero: another way to silence it in the whole run."""
    dim, attention = model.config.head_dim, model.blocks[layer].self_attn
    if part == "query":
        attention.q_proj.weight[head * dim : (head + 1) * dim] = 0
    else:
        attention.o_proj.weight[:, head * dim : (head + 1) * dim] = 0
    return model


@pytest.mark.parametrize("part", PARTS)
def test_a_whole_run_is_that_of_a_model_without_those_weights(part):
    ids, changed = make_prompt(40)[0].tolist(), 0
    for layer, head in [(0, 0), (1, 4), (2, 3), (3, 5)]:
        model = make_tiny_model()
        masked = answer(model, ids, silence(model, (layer, head)), part, "run", 6, frozenset())[0]
        changed += masked != full_answer(model, ids, 6)
        assert masked == full_answer(ablated_model(model, layer, head, part), ids, 6)
    assert changed


@pytest.mark.parametrize("part", PARTS)
def test_decode_silences_from_the_last_prompt_token_on(part):
    """The first token already differs from the unmasked one, and the prompt's keys and values are untouched."""
    model, ids = make_tiny_model(), make_prompt(40)[0].tolist()
    everything = [(layer, head) for layer in range(4) for head in range(6)]
    before_last = prefill_before_last(model, ids)
    assert before_last.length == 39
    masked = masked_logits(model, torch.tensor([ids[-1:]]), before_last, silence(model, *everything), part)
    assert (masked - model(torch.tensor([ids]))[:, -1]).abs().max() > 0.01
    whole = model.new_cache(1, 40)
    model(torch.tensor([ids]), whole)
    for layer in range(4):
        torch.testing.assert_close(before_last[layer].keys[:, :, :39], whole[layer].keys[:, :, :39], atol=1e-5, rtol=1e-4)


def test_rows_do_not_influence_each_other_and_end_each_at_its_own_stop():
    ids, positions, distance = prompt_with_answer()
    model, right = copying_model(distance), [ids[position] for position in positions]
    rows = torch.cat([silence(model), silence(model, COPIER), silence(model, NEIGHBOUR)])
    for part in PARTS:
        for phase in PHASES:
            together = answer(model, ids, rows, part, phase)
            assert together == [answer(model, ids, row[None], part, phase)[0] for row in rows]
            assert together[0] == together[2] == right and len(together[1]) == 5


def test_a_prefill_serves_every_mask():
    ids, _, distance = prompt_with_answer()
    model = copying_model(distance)
    before_last = prefill_before_last(model, ids)
    first = masked_answers(model, ids, silence(model), "output", before_last, 5, STOP)
    masked_answers(model, ids, silence(model, COPIER), "query", before_last, 5, STOP)
    assert before_last.length == len(ids) - 1
    assert masked_answers(model, ids, silence(model), "output", before_last, 5, STOP) == first


# --- which heads ---

SCORES = Profile(
    [[0, 1, 2]] * 2,
    [0.5, 0.5],
    head_scores=[[0.1, 0.9, 0.2], [0.8, 0.3, 0.0]],
    traditional_scores=[[0.7, 0.0, 0.1], [0.0, 0.0, 0.6]],
)


def test_heads_are_ranked_across_the_whole_model():
    orders = rankings(SCORES, [0], left_out=0)
    assert orders["semantic"][:3] == [(0, 1), (1, 0), (1, 1)]
    assert orders["traditional"][:3] == [(0, 0), (1, 2), (0, 2)]


def test_random_heads_are_none_of_the_strongest_by_either_score():
    orders = rankings(SCORES, range(20), left_out=2)
    for seed in range(20):
        assert sorted(orders[f"random {seed}"]) == [(0, 2), (1, 1)]
    assert len({tuple(orders[f"random {seed}"]) for seed in range(20)}) == 2
    assert orders == rankings(SCORES, range(20), left_out=2)


def test_more_heads_silence_the_fewer_ones_too():
    order = rankings(SCORES, [0], left_out=0)["semantic"]
    sounding = sounding_heads(order, [1, 3], SCORES)
    assert (1 - sounding[0]).nonzero().tolist() == [[0, 1]]
    assert (1 - sounding[1]).nonzero().tolist() == [[0, 1], [1, 0], [1, 1]]


def test_more_heads_than_there_are_is_an_error():
    with pytest.raises(InputError, match="only 2 heads can be silenced"):
        sounding_heads(rankings(SCORES, [0], left_out=2)["random 0"], [3], SCORES)


def test_a_profile_without_scores_cannot_be_used():
    with pytest.raises(InputError, match="no traditional_scores"):
        rankings(Profile([[0, 1]], [1.0], head_scores=[[0.1, 0.2]]), [0], 0)


# --- the experiment ---


def experiment_with(results: dict[str, list[float]], cases: list[NeedleCase]) -> masking.Experiment:
    """An experiment whose journal holds, for each ranking, these recalls with 1 and with 2 heads silenced."""
    arguments = Namespace(random_seeds=[0, 1], leave_out=1, heads=[1, 2], zero=["query"], during=["run"], seed=0)
    experiment = masking.Experiment(None, None, SCORES, arguments)
    for case in cases:
        for each in experiment.maskings:
            recalls = results[each.ranking]
            experiment.results[each.key(case)] = {"recall": recalls, "contained": [0.0] * len(recalls)}
    return experiment


def test_a_curve_is_the_mean_over_prompts_and_over_the_random_seeds():
    cases = [NeedleCase(Needle("a b", "which?", "b"), 100, depth, "text") for depth in (0, 50)]
    results = {"none": [0.9], "semantic": [0.4, 0.1], "traditional": [0.5, 0.3], "random 0": [0.9, 0.7], "random 1": [0.7, 0.6]}
    points = masking.curves(experiment_with(results, cases), cases)
    recalls = {(point["ranking"], point["heads"]): point["recall"][0] for point in points}
    assert [recalls[ranking, 0] for ranking in masking.RANKINGS] == pytest.approx([0.9, 0.9, 0.9])
    assert [recalls["semantic", 1], recalls["semantic", 2]] == pytest.approx([0.4, 0.1])
    assert [recalls["random", 1], recalls["random", 2]] == pytest.approx([0.8, 0.65])
    more = {(p["ranking"], p["heads"]): p["more_than_semantic"][0] for p in points if "more_than_semantic" in p}
    assert [more["random", 1], more["random", 2], more["traditional", 2]] == pytest.approx([0.4, 0.55, 0.2])


def test_every_masking_is_run_as_it_is_called(monkeypatch):
    """Which heads, which part, and whether the prefill is shared (decode) or silenced, too (run)."""
    case, prefilled, calls = NeedleCase(Needle("a b", "which?", "b"), 100, 0, "text"), object(), []
    experiment = experiment_with({}, [])
    experiment.model = experiment.arguments.max_answer_tokens = None
    experiment.tokenizer = Namespace(stop_ids=STOP, decode=lambda ids: "b")

    def answers(model, ids, sounding, part, before_last, *_):
        calls.append(((1 - sounding).sum((1, 2)).tolist(), part, before_last))
        return [[0]] * len(sounding)

    monkeypatch.setattr(masking, "masked_answers", answers)
    experiment.answers(case, [], masking.Masking("semantic", "query", "decode"), prefilled)
    experiment.answers(case, [], masking.Masking("random 1", "output", "run"), prefilled)
    experiment.answers(case, [], masking.NOTHING, prefilled)
    assert calls == [([1, 2], "query", prefilled), ([1, 2], "output", None), ([0], "output", prefilled)]


# --- the program ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that finds the needles at depth 100, and its profile."""
    folder = tmp_path_factory.mktemp("masking")
    write_essays(folder / "essays.txt")
    write_checkpoint(folder / "model", write_needles(folder / "needles.jsonl"))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    def run(program, *arguments):
        texts = ["--needles", folder / "needles.jsonl", "--haystack", folder / "essays.txt", "--lengths", 256, "--depths", 100]
        given = ["--model", folder / "model", "--device", "cpu", *texts, "--max-answer-tokens", 7, *arguments]
        monkeypatch.setattr(sys, "argv", ["program", *map(str, given)])
        command.run(program.main)

    if not (folder / "profile.json").exists():
        run(profile, "--output", folder / "profile.json")

    def mask(*arguments):
        run(masking, "--profile", folder / "profile.json", "--heads", 0, 1, 2, "--leave-out", 2, *arguments)

    return mask


def test_the_program_shows_that_the_top_heads_carry_retrieval(run, tmp_path, capsys):
    run("--json", tmp_path / "m.json", "--plot", tmp_path / "m.png", "--random-seeds", 0, 1)
    record = json.loads((tmp_path / "m.json").read_text())
    points = {(p["zeroed"], p["during"], p["ranking"], p["heads"]): p for p in record["curves"]}
    assert len(points) == 2 * 2 * 3 * 3
    for (part, phase, ranking, heads), point in points.items():
        kept = heads == 0 or ranking == "random"
        assert point["recall"] == pytest.approx([float(kept)] * 3), (part, phase, ranking, heads)
        assert point["contained"] == pytest.approx([float(kept)] * 3)
        if heads:
            expected = {"random": [1.0] * 3, "traditional": [0.0] * 3}.get(ranking)
            assert point.get("more_than_semantic") == (expected and pytest.approx(expected))
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "needle recall of 3 prompts, 95 % intervals over 3 needles" in out
    assert "1.00 [1.00, 1.00]" in out and "+1.00 [+1.00, +1.00]" in out
    assert record["settings"]["leave_out"] == 2 and "minikv" in record["versions"]


def test_an_interrupted_experiment_goes_on_to_the_same_result(run, tmp_path, monkeypatch):
    few = ["--zero", "output", "--during", "decode", "--random-seeds", 0]
    run(*few, "--json", tmp_path / "whole.json")
    answers, calls = masking.masked_answers, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return answers(*arguments)

    monkeypatch.setattr(masking, "masked_answers", interrupted)
    with pytest.raises(SystemExit) as exit:
        run(*few, "--results", tmp_path / "r.jsonl", "--json", tmp_path / "halves.json")
    assert exit.value.code == 130
    run(*few, "--results", tmp_path / "r.jsonl", "--json", tmp_path / "halves.json")
    assert len(calls) == 6 + 3 * 4 - 5  # three needles: nothing, semantic, traditional, random; five were done
    assert (tmp_path / "halves.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_what_is_named_twice_is_done_once(run, tmp_path):
    twice = ["--zero", "output", "output", "--during", "decode", "decode", "--random-seeds", 0, 0]
    run(*twice, "--results", tmp_path / "r.jsonl", "--json", tmp_path / "m.json")
    record = json.loads((tmp_path / "m.json").read_text())
    assert record["settings"]["random_seeds"] == [0]
    assert len(record["curves"]) == 3 * 3  # rankings, numbers of heads
    assert len(record["results"]) == 3 * (1 + 3)


def test_results_of_other_heads_are_not_gone_on_with(run, tmp_path, capsys):
    few = ["--zero", "output", "--during", "decode", "--random-seeds", 0, "--results", tmp_path / "r.jsonl"]
    run(*few)
    with pytest.raises(SystemExit) as exit:
        run(*few, "--heads", 1)
    assert exit.value.code == 2 and "heads is [1, 2] there and [1] here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--heads", 0], "--heads names no number above 0"),
        (["--heads", 11], "only 9 heads can be silenced"),  # of 12: 3 are among the 2 strongest by either score
        (["--zero", "keys"], "invalid choice: 'keys'"),
        (["--depths", "deep"], "not a number from 0 to 100"),
        (["--random-seeds", "-1"], "'-1' is not a whole number"),
        (["--json", "/"], "--json / is a folder"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(run, capsys, arguments, problem):
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        run(*arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert exit.value.code == 2 and problem in error
