"""Checks of the tutorial's exercises: `python -m pytest tests/exercises/check.py`.

They look at my_answers.py, a copy of stubs.py that is yours to fill in, or without one at the stubs themselves.
"""

import importlib
import math
from pathlib import Path

import pytest
import torch
from conftest import make_prompt, make_tiny_model

import minikv
from minikv import budget, scores
from minikv.policy import SnapKV


@pytest.fixture
def answers():
    own = Path(__file__).with_name("my_answers.py").is_file()
    return importlib.import_module("exercises.my_answers" if own else "exercises.stubs")


def random(*shape) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_section_1_kv_head_of(answers):
    assert [answers.kv_head_of(head, 9, 3) for head in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [answers.kv_head_of(head, 4, 4) for head in range(4)] == [0, 1, 2, 3]
    assert answers.kv_head_of(31, 32, 8) == 7


def test_section_2_longest_prompt(answers):
    assert answers.longest_prompt(16 * 2**30, 32, 8, 128, 2) == 131_072  # Llama-3.1-8B
    assert answers.longest_prompt(46_080, 30, 3, 64, 4) == 1
    assert answers.longest_prompt(46_079, 30, 3, 64, 4) == 0


def test_section_3_streaming_share(answers):
    rows = torch.tensor([[[0.5, 0.1, 0.1, 0.3], [0.7, 0.0, 0.2, 0.1]], [[0.0, 1.0, 0.0, 0.0], [0.1, 0.8, 0.1, 0.0]]])
    torch.testing.assert_close(answers.streaming_share(rows, 1, 1), torch.tensor([0.8, 0.05]))
    torch.testing.assert_close(answers.streaming_share(rows, 1, 0), torch.tensor([0.6, 0.05]))
    torch.testing.assert_close(answers.streaming_share(rows, 2, 2), torch.ones(2))


def test_section_4_run_score(answers):
    rows = torch.tensor([[[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]], [[0.2, 0.4, 0.4], [0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0]] * 2])
    prompt, answer = torch.tensor([5, 7, 7]), torch.tensor([1, 2])
    # The second token is not part of the answer. The first one occurs twice in it, and is counted once.
    torch.testing.assert_close(answers.run_score(rows, [7, 5, 7], prompt, answer), torch.tensor([0.9 + 1.0, 0.0 + 1.0]))
    torch.testing.assert_close(answers.run_score(rows, [1, 2, 3], prompt, answer), torch.zeros(2))


def test_section_5_max_pool(answers):
    found = answers.max_pool(torch.tensor([[0.0, 3.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 2.0]]), 3)
    assert found.tolist() == [[3.0, 3.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0, 2.0]]
    assert answers.max_pool(random(2, 20), 5).shape == (2, 20)


def test_section_5_group_vote(answers):
    votes = torch.tensor([[0.0, 1.0], [2.0, 3.0], [10.0, 10.0], [20.0, 40.0]])
    assert answers.group_vote(votes, 2).tolist() == [[1.0, 2.0], [15.0, 25.0]]
    torch.testing.assert_close(answers.group_vote(random(9, 30), 3), scores.group_mean(random(1, 9, 30), 3)[0])


def test_section_6_GuardedSnapKV(answers):
    prefill = minikv.prefill(make_tiny_model(), make_prompt(60))
    for layer in minikv.compress(prefill, answers.GuardedSnapKV(20)).layers:
        for kept in layer.positions[0].tolist():
            assert kept[:4] == [0, 1, 2, 3] and kept[-8:] == list(range(52, 60)) and len(kept) == 20
    guarded = minikv.compress(prefill, answers.GuardedSnapKV(20))[0].positions[0]
    for own, snapkv in zip(guarded.tolist(), minikv.compress(prefill, SnapKV(20))[0].positions[0].tolist()):
        assert set(own) - {0, 1, 2, 3} <= set(snapkv)  # the rest is SnapKV's choice
    with pytest.raises(ValueError):  # no room for the window and four tokens
        minikv.compress(prefill, answers.GuardedSnapKV(11))


@pytest.mark.parametrize("mean, layers", [(64, 30), (256, 32)])
def test_section_7_score_that_fills_a_layer(answers, mean, layers):
    score = answers.score_that_fills_a_layer(mean, layers)
    layer_scores = [score, 1 - score] + [0.0] * (layers - 2)  # the second is the highest, and takes what rounding leaves
    assert budget.error_aware(layer_scores, mean * layers, 32, max_tokens=mean * layers)[0] == 3 * mean


def test_section_8_greedy(answers):
    model = make_tiny_model()
    prefill = minikv.prefill(model, make_prompt(60))
    cache = minikv.compress(prefill, SnapKV(20))
    written = answers.greedy(model, cache, prefill.logits, 6)
    right = minikv.decode(model, minikv.compress(prefill, SnapKV(20)), prefill.logits, 6)
    assert written == [token.item() for token in right]
    assert cache.kept == [25] * 4 and cache.length == 65  # five of the six were fed back


def test_section_9_kl(answers):
    exact, cut = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert answers.kl(exact, cut) == pytest.approx((first + 0.0) / 2)
    assert answers.kl(exact + 3.0, cut) == pytest.approx(first / 2)  # logits may be shifted


def test_section_10_mended_group_mean(answers):
    votes = torch.arange(6.0)[None, :, None]
    assert answers.mended_group_mean(votes, 2).flatten().tolist() == [1.0, 4.0]
    assert answers.mended_group_mean(votes, 3).flatten().tolist() == [0.5, 2.5, 4.5]


def test_section_10_mended_best_positions(answers):
    assert answers.mended_best_positions(torch.ones(1000), 300).tolist() == list(range(300))
    votes = torch.linspace(1e-4, 1.001e-4, 1000)  # rising, and all alike in half precision
    assert answers.mended_best_positions(votes, 10).tolist() == list(range(990, 1000))


def test_section_11_voters(answers):
    head_scores = torch.tensor([[0.1, 1.9], [4.0, 2.0], [0.0, 0.0], [3.0, 2.0]])
    assert answers.voters(head_scores, 0.5) == [(1, 0), (3, 0), (1, 1), (3, 1)]
    assert answers.voters(head_scores, 1.0) == [(1, 0)]


def test_section_12_overlap(answers):
    first, second = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), torch.tensor([[2, 3, 4, 5], [4, 5, 6, 9]])
    assert answers.overlap(first, second) == pytest.approx(5 / 8)
    assert answers.overlap(first, first.flip(0)) == 0  # each head has entries of its own
