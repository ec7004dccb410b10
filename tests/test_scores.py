"""Token scores on tensors small enough to check by hand."""

import pytest
import torch
from torch import tensor

from minikv import scores


def test_window_attention_is_causal_inside_the_window():
    queries, keys = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    rows = scores.window_attention(queries, keys)[0, 0]
    assert torch.allclose(rows[0], tensor([0.25, 0.25, 0.25, 0.25, 0.0]))  # the last but one does not see the last
    assert torch.allclose(rows[1], tensor([0.2] * 5))


def test_each_query_head_reads_the_kv_head_of_its_own_group():
    # Two KV heads: the first has its large key at position 0, the second at position 2. Heads 0 and 1 read the first.
    keys = torch.zeros(1, 2, 4, 1)
    keys[0, 0, 0], keys[0, 1, 2] = 50, 50
    rows = scores.window_attention(torch.ones(1, 4, 1, 1), keys)
    assert rows[0, :, 0].argmax(-1).tolist() == [0, 0, 2, 2]


def test_group_mean_averages_neighbouring_heads():
    # Heads 0 and 1 belong to KV head 0. The released code averages heads 0 and 2, and 1 and 3, instead.
    votes = tensor([[[1.0], [3.0], [10.0], [30.0]]])
    assert scores.group_mean(votes, kv_heads=2).tolist() == [[[2.0], [20.0]]]


def test_pool_counts_the_zeros_beyond_the_ends():
    assert torch.allclose(scores.pool(tensor([[3.0, 0.0, 0.0, 6.0]]), 3), tensor([[1.0, 1.0, 2.0, 2.0]]))


def test_window_votes_sum_the_rows_and_leave_the_window_out():
    queries, keys = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 6, 4)
    assert torch.allclose(scores.window_votes(queries, keys, kernel=1), torch.full((1, 1, 4), 1 / 5 + 1 / 6))


def test_of_equal_scores_the_earlier_position_wins():
    assert scores.best_positions(tensor([[[1.0, 2.0, 1.0, 2.0, 1.0]]]), 3).tolist() == [[[0, 1, 3]]]
    assert scores.best_positions(torch.ones(1, 1, 1000), 3).tolist() == [[[0, 1, 2]]]


def test_the_window_is_kept_whatever_the_scores():
    kept = scores.keep_best_and_window(torch.full((1, 1, 568), float("inf")), budget=64, window=32, layer=0)
    assert kept[0, 0].tolist() == [*range(32), *range(568, 600)]


def test_nan_scores_are_refused_with_the_layer():
    with pytest.raises(ValueError, match="layer 7"):
        scores.keep_best_and_window(tensor([[[1.0, float("nan")]]]), budget=3, window=2, layer=7)


@pytest.mark.parametrize("rows", [1, 7, 128])
def test_column_sums_equal_the_whole_attention_matrix(rows):
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 4, 50, 8), torch.randn(2, 2, 50, 8)
    whole = scores.window_attention(queries, keys).sum(2)
    assert torch.allclose(scores.column_sums(queries, keys, rows), scores.group_mean(whole, 2), atol=1e-4)


def test_scores_are_float32_for_half_precision_keys():
    rows = scores.window_attention(torch.ones(1, 2, 8, 4).bfloat16(), torch.ones(1, 1, 300, 4).bfloat16())
    assert rows.dtype == torch.float32 and rows[0, 0, -1].sum() == pytest.approx(1, abs=1e-5)
