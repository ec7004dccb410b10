"""SharedVote: which heads vote, who gets the entries, and what a layer keeps."""

import pytest
import torch
from conftest import make_profile, make_prompt, make_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import minikv
from minikv.budget import PromptShape, Share, error_aware
from minikv.errors import InputError
from minikv.policy import SharedVote

EVEN = [0.25] * 4


def profile_of(head_scores, layer_scores=None):
    layers, heads = len(head_scores), len(head_scores[0])
    return minikv.Profile([list(range(heads))] * layers, layer_scores or [1 / layers] * layers, head_scores)


def looking_at(position, length=12, head=1, heads=2):
    """Queries and keys of a layer whose head `head` looks at one position, and the other heads at nothing."""
    keys, queries = torch.zeros(1, 1, length, 4), torch.zeros(1, heads, 1, 4)
    keys[0, 0, position, 0] = queries[0, head, 0, 0] = 10
    return queries, keys


def test_heads_vote_that_come_near_enough_to_the_strongest_of_the_model():
    profile = profile_of([[0.1, 1.9], [4.0, 2.0], [0.0, 0.0], [3.0, 0.5]])
    half = SharedVote(20, profile)
    assert [half.voters(layer) for layer in range(4)] == [[], [0, 1], [], [0]]
    assert [SharedVote(20, profile, strength=1.0).voters(layer) for layer in range(4)] == [[], [0], [], []]
    assert [SharedVote(20, profile, strength=0.01).voters(layer) for layer in range(4)] == [[0, 1], [0, 1], [], [0, 1]]


def test_entries_above_the_floor_follow_the_sums_of_the_head_scores():
    profile = profile_of([[2.0, 2.0], [1.0, 0.0], [0.0, -3.0]])  # sums 4, 1 and, below 0, none
    shape = PromptShape(layers=3, length=100, entry_bytes=1)
    assert SharedVote(13, profile, floor=3, concentration=1).budgets(shape) == [3 + 24, 3 + 6, 3]
    assert SharedVote(13, profile, floor=3, concentration=0.5).budgets(shape) == [3 + 20, 3 + 10, 3]  # as 2 to 1
    assert SharedVote(13, profile, floor=3, concentration=0).budgets(shape) == [13, 13, 13]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e307])
def test_the_size_of_the_head_scores_does_not_matter(scale):
    profile = profile_of([[2.0 * scale, 2.0 * scale], [1.0 * scale, 0.0], [0.0, 0.0]])
    shape = PromptShape(layers=3, length=100, entry_bytes=1)
    assert SharedVote(13, profile, floor=3, concentration=1).budgets(shape) == [27, 9, 3]
    assert SharedVote(13, profile, floor=3, concentration=100).budgets(shape) == [33, 3, 3]


def test_by_layer_errors_it_spends_as_compresskv_does():
    profile = profile_of([[1.0]] * 3, layer_scores=[0.5, 0.3, 0.2])
    shape = PromptShape(layers=3, length=100, entry_bytes=1)
    found = SharedVote(13, profile, floor=3, layer_errors=True).budgets(shape)
    assert found == error_aware([0.5, 0.3, 0.2], 39, 3, 100) == [18, 12, 9]


def test_a_layer_hears_the_voters_up_to_it_and_before_the_first_keeps_the_end():
    profile = profile_of([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    policy = SharedVote(4, profile, window=1, kernel=1, sinks=1, floor=4, concentration=0)
    choose_layer = policy.selection(PromptShape(layers=4, length=12, entry_bytes=1))
    kept = [choose_layer(layer, *looking_at(position))[0, 0].tolist() for layer, position in enumerate([5, 3, 6, 9])]
    assert kept[0] == [0, 9, 10, 11]  # no voter yet: the sink and the end
    assert 3 in kept[1] and 6 not in kept[1] and {0, 11} <= set(kept[1])
    assert 3 in kept[2] and 6 not in kept[2]  # its own heads do not vote
    assert kept[3] == [0, 3, 9, 11]  # the sink, what both voters saw, the window


def test_two_prompts_do_not_hear_each_other():
    policy = SharedVote(3, profile_of([[1.0, 1.0]]), window=1, kernel=1, floor=3)
    shape = PromptShape(layers=1, length=12, entry_bytes=1)
    assert policy.selection(shape)(0, *looking_at(4))[0, 0].tolist() == [0, 4, 11]
    assert policy.selection(shape)(0, *looking_at(7))[0, 0].tolist() == [0, 7, 11]


def test_a_small_budget_keeps_the_end_of_the_window_and_the_sinks():
    policy = SharedVote(9, profile_of([[1.0, 1.0]]), window=8, kernel=1, sinks=2, floor=4)
    queries, keys = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 40, 4)
    assert policy.select(0, queries, keys, 4)[0, 0].tolist() == [0, 1, 38, 39]
    assert policy.select(0, queries, keys, 10)[0, 0].tolist() == [0, 1, *range(32, 40)]  # the window, and nothing more
    assert policy.select(0, queries, keys, 50)[0, 0].tolist() == list(range(40))  # more than there is
    assert len(set(policy.select(0, queries, keys, 11)[0, 0].tolist()) - {0, 1, *range(32, 40)}) == 1


def test_not_in_one_pass_all_layers_follow_all_voters():
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(100), window=8)
    policy = SharedVote(30, make_profile(model), window=8, kernel=3, concentration=0, one_pass=False)
    assert policy.needs_all_layers
    positions = [layer.positions for layer in minikv.compress(result, policy).layers]
    assert all(torch.equal(positions[0], other) for other in positions[1:])
    last = minikv.compress(result, SharedVote(30, make_profile(model), window=8, kernel=3, concentration=0)).layers[-1]
    assert torch.equal(last.positions, positions[0])  # the last layer has heard them all


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_spends_the_total_and_keeps_the_sinks_and_the_end(data):
    kv_heads, group, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    sinks, window = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9))
    floor = data.draw(st.integers(sinks + 1, 12))
    budget, length = data.draw(st.integers(floor, 70)), data.draw(st.integers(2, 60))
    model = make_tiny_model(layers, kv_heads * group, kv_heads)
    strength, concentration = data.draw(st.floats(0.05, 1)), data.draw(st.floats(0, 3))
    options = {"window": window, "kernel": 3, "sinks": sinks, "floor": floor, "one_pass": data.draw(st.booleans())}
    policy = SharedVote(budget, make_profile(model), strength=strength, concentration=concentration, **options)
    result = minikv.prefill(model, make_prompt(length, batch=data.draw(st.integers(1, 2))), window=window)
    cache = minikv.compress(result, policy)
    assert cache.kept == policy.budgets(result) and sum(cache.kept) == layers * min(budget, length)
    for layer in cache.layers:
        steps, first = layer.positions.diff(dim=-1), layer.positions[0, 0].tolist()
        assert (steps > 0).all() and first[0] >= 0 and first[-1] == length - 1
        assert first[: min(sinks, length)] == list(range(min(sinks, length)))
        recent = min(window, layer.kept - min(sinks, layer.kept - 1))
        assert first[-recent:] == list(range(length - recent, length))


def test_a_share_below_the_floor_is_raised_to_it_and_a_number_refused():
    profile, shape = make_profile(make_tiny_model()), PromptShape(4, 100, 1)
    assert SharedVote(Share(0.01), profile).budgets(shape) == [9] * 4
    with pytest.raises(InputError, match="at least 9"):
        SharedVote(8, profile).budgets(shape)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strength": 0.0}, "strength is 0.0"),
        ({"strength": 1.5}, "strength is 1.5"),
        ({"strength": float("nan")}, "strength is nan"),
        ({"sinks": -1}, "sinks is -1"),
        ({"sinks": 9}, "floor is 9"),
        ({"concentration": -0.1}, "concentration is -0.1"),
        ({"concentration": float("nan")}, "concentration is nan"),
        ({"window": 0}, "window is 0"),
        ({"kernel": 4}, "kernel is 4"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SharedVote(20, profile_of([[1.0]]), **options)


def test_profiles_that_it_cannot_use_are_refused():
    shape, ranks = PromptShape(2, 50, 1), [[0, 1], [1, 0]]
    with pytest.raises(InputError, match="no head_scores"):
        SharedVote(20, minikv.Profile(ranks, [0.5, 0.5])).budgets(shape)
    with pytest.raises(InputError, match="none can vote"):
        SharedVote(20, minikv.Profile(ranks, [0.5, 0.5], [[0.0, 0.0], [0.0, -1.0]])).budgets(shape)
    with pytest.raises(InputError, match="for 3 layers, the model has 2"):
        SharedVote(20, profile_of([[1.0, 1.0]] * 3)).budgets(shape)
    with pytest.raises(InputError, match="for 2 query heads a layer, the model has 3"):
        SharedVote(20, profile_of([[1.0, 1.0]])).select(0, torch.zeros(1, 3, 8, 4), torch.zeros(1, 1, 50, 4), 20)
