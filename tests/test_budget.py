"""Budgets: how many entries each layer keeps. Every allocation spends its total exactly."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv import budget
from minikv.budget import Bytes, PromptShape, Share
from minikv.errors import InputError

ORACLE = json.loads((Path(__file__).parent / "fixtures" / "budget_expected.json").read_text())


@pytest.mark.parametrize("case", ORACLE["error_aware"])
def test_error_aware_budgets_equal_the_release(case):
    arguments = case["layer_scores"], case["total_budget"], case["min_tokens"], case["max_tokens"]
    assert budget.error_aware(*arguments) == case["expected"]


@pytest.mark.parametrize("case", ORACLE["cake_adjust"])
def test_cake_budgets_equal_the_release(case):
    assert budget.cake(case["preference_scores"], case["total_budget"], case["seq_len"]) == case["expected"]


def test_error_aware_by_hand():
    # 40 entries, at least 5 a layer: 20 are left to share, 2 + 6 + 12. The last layer's 17 is over the bound of 15;
    # the 2 it gives up go one each to the highest scores that have room: layer 1, then, as layer 2 is full, layer 0.
    assert budget.error_aware([0.1, 0.3, 0.6], 35, 5, 15) == [8, 12, 15]


def test_settle_hands_out_in_order_and_takes_back_in_reverse():
    assert budget.settle([5, 5, 5], 17, [2, 0, 1], 0, 9) == [6, 5, 6]
    assert budget.settle([5, 5, 5], 13, [2, 0, 1], 0, 9) == [4, 4, 5]
    assert budget.settle([5, 9, 9], 30, [1, 2, 0], 0, 9) == [9, 9, 9]  # no layer can move any further


def test_pyramid_by_hand():
    # 32 chosen entries on average: the last layer 32 // 20 = 1, the first 63, in steps of 12; 8 of the window on top.
    assert budget.pyramid(40, layers=6, seq=200, window=8) == [71, 59, 47, 35, 23, 11]


def test_pyramid_of_one_layer_is_the_budget_itself():
    assert budget.pyramid(40, layers=1, seq=200, window=8) == [40]


@pytest.mark.parametrize("text, expected", [("256", 256), ("3%", Share(0.03)), ("12.5 %", Share(0.125)), ("2MB", Bytes(2_000_000)),
                                            ("1.5MiB", Bytes(1_572_864)), ("1GB", Bytes(10**9)), ("3kiB", Bytes(3072)), ("100%", Share(1.0))])  # fmt: skip
def test_budget_as_typed(text, expected):
    assert budget.parse(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "-5", "2.5", "0%", "101%", "3 percent", "1e3", "nan%", "9" * 400, "9" * 400 + "MB"])
def test_a_budget_that_is_not_understood_is_refused(text):
    with pytest.raises(InputError):
        budget.parse(text)


def test_a_share_is_what_is_kept():
    prompt = PromptShape(layers=4, length=1000, entry_bytes=64)
    assert budget.mean_entries(Share(0.25), prompt, at_least=9) == 250
    assert budget.mean_entries(Share(1.0), prompt, at_least=9) == 1000


def test_bytes_are_those_of_all_layers():
    prompt = PromptShape(layers=4, length=1000, entry_bytes=64)
    assert budget.mean_entries(Bytes(4 * 64 * 100 + 63), prompt, at_least=9) == 100


def test_a_budget_below_the_window_is_refused_but_a_share_is_raised_to_it():
    prompt = PromptShape(layers=4, length=100, entry_bytes=64)
    with pytest.raises(InputError, match="budget 8 is too small: it must be at least 9"):
        budget.mean_entries(8, prompt, at_least=9)
    with pytest.raises(InputError, match="at least 2,304 are needed"):
        budget.mean_entries(Bytes(2000), prompt, at_least=9)
    assert budget.mean_entries(Share(0.01), prompt, at_least=9) == 9


scores_of_layers = st.lists(st.floats(0, 1), min_size=1, max_size=40)


@given(scores_of_layers, st.integers(9, 400), st.integers(10, 3000))
def test_error_aware_spends_the_total_and_grows_with_the_score(scores, mean, length):
    scores = [score / (sum(scores) or 1) for score in scores]
    mean = min(mean, length)
    floor, cap = min(9, mean), min(3 * mean, length)
    budgets = budget.error_aware(scores, mean * len(scores), floor, cap)
    assert sum(budgets) == mean * len(scores)
    assert all(floor <= entries <= cap for entries in budgets)
    ordered = [entries for _, entries in sorted(zip(scores, budgets))]
    assert ordered == sorted(ordered)


@given(scores_of_layers, st.integers(1, 5000), st.integers(1, 500))
def test_cake_budgets_spend_the_total_where_the_cap_lets_them(scores, total, cap):
    budgets = budget.cake(scores, total, cap)
    assert len(budgets) == len(scores) and min(budgets) >= 0
    assert sum(budgets) == total or min(budgets) >= cap  # it stays below the total only where all layers are full
