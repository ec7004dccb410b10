"""One prefill, many methods: every pair's answer is the one it gives alone."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch
from conftest import make_policy, make_profile, make_prompt, make_tiny_model

from minikv import policy
from minikv.errors import InputError
from minikv.evals import sweep
from minikv.evals.ranks import ranks
from minikv.generate import generate
from minikv.inference import compress, prefill

NOTHING = frozenset()


@pytest.fixture(scope="module")
def model():
    return make_tiny_model()


def all_methods(model, budgets=(16, 40)) -> list[policy.Policy]:
    policies = []
    for name, method in policy.METHODS.items():
        policies += [make_policy(method, budget, make_profile(model)) for budget in budgets if name != "full"]
    return [*policies, policy.Full()]  # the last: its cache is the only one whose length is what it holds


def alone(model, ids, method, stop_ids, new=12) -> list[int]:
    answer = generate(model, torch.tensor([ids]), method, new, stop_ids)[0].tolist()
    return answer


# --- each pair as if alone ---


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [30, 90, 300])
def test_every_pair_answers_as_it_does_alone(model, seed, length):
    ids, policies = make_prompt(length, seed=seed)[0].tolist(), all_methods(model)
    swept = sweep.sweep(model, ids, policies, 12, NOTHING)
    assert swept.answers == [alone(model, ids, method, NOTHING) for method in policies]
    if length > 40:  # the test would show nothing if all methods answered alike
        assert len(set(map(tuple, swept.answers))) > 1


def test_pairs_that_stop_leave_the_others_as_they_are(model):
    ids, policies = make_prompt(200, seed=4)[0].tolist(), all_methods(model)
    answers = sweep.sweep(model, ids, policies, 12, NOTHING).answers
    stop = frozenset({answers[0][3], answers[-1][6]})
    swept = sweep.sweep(model, ids, policies, 12, stop)
    assert swept.answers == [alone(model, ids, method, stop) for method in policies]
    assert len({len(answer) for answer in swept.answers}) > 1
    assert not any(stop & set(answer) for answer in swept.answers)


def test_the_default_models_pairs_answer_as_they_do_alone(default_model):
    model, tokenizer = default_model
    ids = tokenizer.chat_prompt("The code of the north gate is 4817. " * 8 + "What is the code?").ids
    policies = [policy.StreamingLLM(32), policy.SnapKV(48), policy.PyramidKV(48), policy.Cake(48), policy.Full()]
    swept = sweep.sweep(model, ids, policies, 8, tokenizer.stop_ids)
    assert swept.answers == [alone(model, ids, method, tokenizer.stop_ids, 8) for method in policies]


# --- one prefill ---


def test_the_prompt_is_run_once_whatever_the_number_of_pairs(model, monkeypatch):
    lengths = []
    embed = model.embed
    monkeypatch.setattr(type(model), "embed", lambda self, tokens: lengths.append(tokens.shape[1]) or embed(tokens))
    sweep.sweep(model, make_prompt(120)[0].tolist(), all_methods(model), 6, NOTHING)
    assert lengths == [120, 1, 1, 1, 1, 1]  # and the first token of all comes from the prefill


def test_all_pairs_begin_with_the_token_of_full_attention(model):
    ids = make_prompt(150, seed=2)[0].tolist()
    first = model(torch.tensor([ids]))[0, -1].argmax().item()
    swept = sweep.sweep(model, ids, all_methods(model), 3, NOTHING)
    assert {answer[0] for answer in swept.answers} == {first}


def test_an_answer_of_at_least_one_token_does_not_begin_with_a_stop(model):
    ids, policies = make_prompt(100)[0].tolist(), all_methods(model)
    order = model(torch.tensor([ids]))[0, -1].argsort(descending=True).tolist()
    stop = frozenset(order[:2])
    assert all(answer == [] for answer in sweep.sweep(model, ids, policies, 4, stop).answers)
    swept = sweep.sweep(model, ids, policies, 4, stop, at_least_one=True)
    assert {answer[0] for answer in swept.answers} == {order[2]}


# --- what is kept ---


def test_what_was_kept_is_what_the_budgets_say(model):
    ids, policies = make_prompt(200)[0].tolist(), all_methods(model)
    prefilled = prefill(model, torch.tensor([ids]), 8, column_sums=True)
    swept = sweep.sweep(model, ids, policies, 2, NOTHING)
    assert swept.kept == [sum(method.budgets(prefilled)) / prefilled.layers for method in policies]
    assert swept.kept[0] == 16 and swept.kept[-1] == 200


def test_memory_grows_by_the_kept_entries_only(model):
    """No row is padded to the longest: decoded together, a cache takes what it takes alone."""
    prefilled = prefill(model, make_prompt(200), 8)
    policies = [policy.Full(), policy.StreamingLLM(16), policy.SnapKV(24)]
    caches = [compress(prefilled, method, reserve=10) for method in policies]
    before = [cache.allocated_bytes for cache in caches]
    sweep.decode_together(model, caches, 5, 10, NOTHING)
    assert [cache.kept for cache in caches] == [[kept + 9] * 4 for kept in (200, 16, 24)]
    assert [cache.allocated_bytes for cache in caches] == before


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_run(model):
    with pytest.raises(InputError, match="2040 tokens and 20 new tokens exceed the model's context of 2048"):
        sweep.sweep(model, make_prompt(2040)[0].tolist(), [policy.Full()], 20, NOTHING)


# --- what people ask for ---


def asked(**options) -> Namespace:
    defaults = dict(methods=["full", "snapkv"], budgets=["3%"], window=8, kernel=5, heads=4, profile=None, model="tiny")
    defaults |= dict(results=None, json=None, plot=None)
    return Namespace(**defaults | options)


def test_methods_and_budgets_may_be_listed_with_commas_or_spaces():
    arguments = asked(methods=["full,snapkv", "cake"], budgets=["3%,128", "3%", "2MB"])
    sweep.check_arguments(arguments)
    assert arguments.methods == ["full", "snapkv", "cake"]
    assert arguments.budgets == ["3%", "128", "2MB"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"methods": ["snap"]}, "'snap' is unknown; accepted: full,"),
        ({"methods": [","]}, "--methods lists nothing"),
        ({"budgets": ["3 per"]}, "'3 per'"),
        ({"methods": ["snapkv:heads=2"]}, "snapkv has no option 'heads'; accepted: window=int, kernel=int"),
        ({"methods": ["full:window=2"]}, "full has no option 'window'; accepted: no option"),
        ({"methods": ["snapkv:kernel"]}, "kernel is ''; accepted: a whole number"),
        ({"methods": ["cake:gamma=much"]}, "gamma is 'much'; accepted: a number"),
        ({"methods": ["compresskv:layer_budgets=0"]}, "layer_budgets is '0'; accepted: true or false"),
    ],
)
def test_a_slip_is_told_before_anything_is_loaded(options, message):
    with pytest.raises(InputError, match=message):
        sweep.check_arguments(asked(**options))


def test_every_method_meets_every_budget_and_the_full_cache_none(model):
    pairs = sweep.make_pairs(model, asked(methods=["streamingllm", "full", "snapkv"], budgets=["3%", "64"], window=4))
    names = ["streamingllm 3%", "streamingllm 64", "full", "snapkv 3%", "snapkv 64"]
    assert [pair.name for pair in pairs] == names
    assert pairs[-1].policy == policy.SnapKV(64, window=4)


def test_a_method_may_be_listed_again_with_changes_of_its_own(model):
    methods = ["snapkv", "snapkv:window=16:kernel=21", "cake:gamma=0.5"]
    pairs = sweep.make_pairs(model, asked(methods=methods, budgets=["64"], window=4))
    assert [pair.name for pair in pairs] == ["snapkv 64", "snapkv:window=16:kernel=21 64", "cake:gamma=0.5 64"]
    expected = [policy.SnapKV(64, 4), policy.SnapKV(64, 16, 21), policy.Cake(64, 4, gamma=0.5)]
    assert [pair.policy for pair in pairs] == expected


@pytest.mark.parametrize("budget, message", [("8", "at least 9"), ("2kB", "bytes is"), ("1", "at least")])
def test_a_budget_below_the_window_is_refused_before_any_prefill(model, budget, message):
    with pytest.raises(InputError, match=message):
        sweep.make_pairs(model, asked(methods=["full", "snapkv"], budgets=["3%", budget]))


def test_files_are_written_before_anything_is_printed(monkeypatch, tmp_path):
    """So that a reader who leaves, as `head` does, loses no result."""
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    record, drawn = {"window": "", "seconds": {"prefill": 1.0}}, []
    with pytest.raises(BrokenPipeError):
        sweep.report(record, asked(json=tmp_path / "a.json", plot="b.png"), "table", lambda *given: drawn.append(given) or [])
    assert json.loads((tmp_path / "a.json").read_text()) == record and drawn == [(record, "b.png")]


def test_torchruns_settings_that_are_no_numbers_are_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(InputError, match="WORLD_SIZE is 'abc'"), ranks():
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK"), ranks():
        pass


def test_settings_tell_runs_apart_by_all_that_results_follow_from(model, tmp_path):
    make_profile(model).save(tmp_path / "a.json")
    make_profile(model, [0.4, 0.3, 0.2, 0.1]).save(tmp_path / "b.json")

    def settings(**options):
        arguments = asked(methods=["compresskv"], seed=0, results=None, **options)
        return sweep.settings_of(model, sweep.make_pairs(model, arguments), arguments)

    base = settings(profile=str(tmp_path / "a.json"))
    assert settings(profile=str(tmp_path / "a.json"), json="x", device="auto", debug=True) == base
    assert settings(profile=str(tmp_path / "b.json")) != base
    assert settings(profile=str(tmp_path / "a.json"), window=9) != base
    here, there = (settings(profile=str(tmp_path / "a.json"), haystack=f"/{place}/a/essays") for place in ("here", "there"))
    assert here == there and here["haystack"] == "a/essays"
    other = make_tiny_model(seed=1)
    arguments = asked(methods=["full"])
    first, second = (sweep.settings_of(m, sweep.make_pairs(m, arguments), arguments) for m in (model, other))
    assert first != second


def test_a_limit_draws_by_seed_and_keeps_the_order():
    examples = list(range(100))
    drawn = sweep.draw(examples, 10, seed=1)
    assert len(drawn) == 10 and drawn == sorted(drawn) and drawn != examples[:10]
    assert drawn == sweep.draw(examples, 10, seed=1) != sweep.draw(examples, 10, seed=2)
    assert sweep.draw(examples, None, 1) == sweep.draw(examples, 200, 1) == examples
