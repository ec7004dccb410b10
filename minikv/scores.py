"""Token scores of one layer: how much the last prompt tokens look at each earlier one (CompressKV, section 3).

All sums are float32, and of equal scores the earlier position wins, so the kept set is the same on every device.
Half-precision sums, as in the paper's release, make thousands of exact ties on a long prompt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor

from minikv.errors import InputError


def window_attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Attention rows of the last w tokens over all keys, causal inside the window.

    queries [batch, heads, w, dim] of the last w positions, keys [batch, kv_heads, seq, dim], heads a multiple of
    kv_heads and query heads of one KV head next to each other. Returns [batch, heads, w, seq] in float32.
    """
    kv_heads, window, length = keys.shape[1], queries.shape[2], keys.shape[2]
    grouped = rearrange(queries.float(), "batch (kv_heads group) w dim -> batch kv_heads group w dim", kv_heads=kv_heads)
    logits = einsum(
        grouped, keys.float(), "batch kv_heads group w dim, batch kv_heads seq dim -> batch kv_heads group w seq"
    )
    logits = logits / queries.shape[-1] ** 0.5
    visible = torch.ones(window, length, dtype=torch.bool, device=keys.device).tril(length - window)
    rows = logits.masked_fill_(~visible, float("-inf")).softmax(-1)
    return rearrange(rows, "batch kv_heads group w seq -> batch (kv_heads group) w seq")


def pool(scores: Tensor, kernel: int) -> Tensor:
    """Average each score [..., seq] with its neighbours: kernel wide (odd), stride 1, zeros beyond the ends counted.

    The result has the shape and dtype of the scores.
    Text is understood in spans: a token next to a much-attended one is worth more than a lone one (SnapKV).
    """
    if not scores.numel():  # a prompt no longer than its window: avg_pool1d refuses what is empty
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).reshape(scores.shape)


def window_votes(queries: Tensor, keys: Tensor, kernel: int) -> Tensor:
    """What each query head gives to each position before the window: [batch, heads, seq - w] float32.

    The window's rows are summed, then pooled. Shapes as in window_attention.
    """
    window = queries.shape[2]
    before_window = window_attention(queries, keys)[..., : keys.shape[2] - window]
    return pool(reduce(before_window, "batch heads w prefix -> batch heads prefix", "sum"), kernel)


def group_mean(votes: Tensor, kv_heads: int) -> Tensor:
    """Average the votes of the query heads that share a KV head: [batch, heads, prefix] to [batch, kv_heads, prefix].

    Query heads lie (kv_heads, group) in memory. The paper's release averages over (group, kv_heads), which mixes
    heads of different KV heads.
    """
    return reduce(votes, "batch (kv_heads group) prefix -> batch kv_heads prefix", "mean", kv_heads=kv_heads)


def column_sums(queries: Tensor, keys: Tensor, rows: int = 128) -> Tensor:
    """What all prompt queries together attend to each position, [batch, kv_heads, seq] float32: the group's mean (H2O).

    queries [batch, heads, new, dim] of the last positions (all of them: new = seq), keys [batch, kv_heads, seq, dim].
    Computed `rows` queries at a time, so the attention matrix never exists whole.
    """
    kv_heads, new, length = keys.shape[1], queries.shape[2], keys.shape[2]
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    for start in range(0, new, rows):
        part = queries[:, :, start : start + rows]
        end = length - new + start + part.shape[2]  # keys that the part's last query sees
        sums[..., :end] += group_mean(window_attention(part, keys[:, :, :end]).sum(2), kv_heads)
    return sums


def best_positions(scores: Tensor, count: int) -> Tensor:
    """The `count` highest of scores [batch, kv_heads, prefix], as ascending positions [batch, kv_heads, count] int64.

    Of equal scores the earlier position wins; torch.topk leaves that order open, a stable sort does not.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def refuse_nan(scores: Tensor, layer: int) -> Tensor:
    """The scores, unless one is NaN: InputError."""
    if scores.isnan().any():
        raise InputError(f"layer {layer}: the token scores contain NaN, so no position can be preferred")
    return scores


def keep_best_and_window(scores: Tensor, budget: int, window: int, layer: int) -> Tensor:
    """The best budget - window positions before the window, and the window itself, ascending.

    scores [batch, kv_heads, prefix] of the positions before the window; returns [batch, kv_heads, budget] int64. The
    window is appended, not protected by a high score, so that no tie can evict it. InputError where scores are
    NaN or the budget is below the window.
    """
    if budget < window:
        raise InputError(f"layer {layer}: a budget of {budget} entries cannot hold the window of {window}")
    batch, kv_heads, prefix = refuse_nan(scores, layer).shape
    recent = torch.arange(prefix, prefix + window, device=scores.device)
    recent = repeat(recent, "w -> batch kv_heads w", batch=batch, kv_heads=kv_heads)
    return torch.cat([best_positions(scores, budget - window), recent], dim=-1)


def all_positions(keys: Tensor) -> Tensor:
    """Every position of keys [batch, kv_heads, seq, dim]: [batch, kv_heads, seq] int64."""
    batch, kv_heads, length, _ = keys.shape
    return repeat(torch.arange(length, device=keys.device), "seq -> batch kv_heads seq", batch=batch, kv_heads=kv_heads)
