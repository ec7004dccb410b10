"""The two retrieval scores on attention rows written by hand, ranking, and the fingerprint of a model."""

from __future__ import annotations

import copy

import pytest
import torch

from conftest import make_tiny_model
from minikv.srh import fingerprint, rank_heads, semantic_score, strongest, traditional_score

PROMPT = torch.tensor([7, 8, 9, 8, 5])
ANSWER = torch.tensor([1, 2, 3])  # the tokens 8 9 8
ROWS = torch.tensor(
    [
        [0.1, 0.5, 0.1, 0.2, 0.1],  # looks most at the first 8
        [0.1, 0.1, 0.1, 0.6, 0.1],  # at the second 8
        [0.1, 0.1, 0.6, 0.1, 0.1],  # at the 9
        [0.6, 0.1, 0.1, 0.1, 0.1],  # outside of the answer
        [0.1, 0.1, 0.1, 0.1, 0.6],
    ]
)


def test_the_semantic_score_is_all_attention_to_the_answer():
    assert semantic_score(ROWS, 8, PROMPT, ANSWER).tolist() == pytest.approx([0.8, 0.8, 0.8, 0.3, 0.3])


def test_a_token_that_occurs_twice_in_the_answer_counts_once():
    """As the formula says; the paper's release counts it as often as it occurs."""
    torch.testing.assert_close(semantic_score(ROWS, 8, PROMPT, ANSWER), semantic_score(ROWS, 9, PROMPT, ANSWER))


@pytest.mark.parametrize("token", [7, 5, 99])
def test_a_token_that_is_not_of_the_answer_earns_nothing(token):
    assert semantic_score(ROWS, token, PROMPT, ANSWER).tolist() == [0] * 5
    assert traditional_score(ROWS, token, PROMPT, ANSWER).tolist() == [0] * 5


def test_the_traditional_score_wants_the_very_token_at_the_most_attended_position():
    assert traditional_score(ROWS, 8, PROMPT, ANSWER).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0])
    assert traditional_score(ROWS, 9, PROMPT, ANSWER).tolist() == pytest.approx([0, 0, 1 / 3, 0, 0])


def test_the_same_token_outside_of_the_answer_is_no_copy():
    outside = torch.tensor([8, 8, 9, 8, 5])
    assert traditional_score(ROWS, 8, outside, ANSWER).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0])


def test_attention_to_tokens_after_the_prompt_is_no_copy():
    """While it decodes, a head may look most at what was just generated: position 5 is not in the prompt."""
    rows = torch.tensor([[0.0, 0.1, 0.1, 0.1, 0.0, 0.7]])
    assert traditional_score(rows, 8, PROMPT, ANSWER).tolist() == [0]
    assert semantic_score(rows, 8, PROMPT, ANSWER).tolist() == pytest.approx([0.3])


def test_of_equal_heads_the_lower_number_comes_first():
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.9], [0.0, 0.0, 0.0, 1.0]])
    assert rank_heads(scores) == [[1, 3, 0, 2], [3, 0, 1, 2]]
    assert strongest(scores) == [(1, 3), (0, 1), (0, 3), (0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_the_fingerprint_tells_weights_apart_and_not_dtypes():
    model = make_tiny_model()
    assert fingerprint(model) == fingerprint(make_tiny_model()) != fingerprint(make_tiny_model(seed=1))
    stored = copy.deepcopy(model).bfloat16()
    assert fingerprint(stored) == fingerprint(copy.deepcopy(stored).float())
