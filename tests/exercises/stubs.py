"""The tutorial's exercises, to be filled in. Work in a copy:

    cp tests/exercises/stubs.py tests/exercises/my_answers.py
    python -m pytest tests/exercises/check.py -k section_1_
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache import KVCache
from minikv.model import Llama
from minikv.policy import SnapKV

# Section 1


def kv_head_of(query_head: int, heads: int, kv_heads: int) -> int:
    """The KV head that a query head reads, in a layer of `heads` query heads and `kv_heads` KV heads."""
    raise NotImplementedError


# Section 2


def longest_prompt(memory: int, layers: int, kv_heads: int, head_dim: int, number_bytes: int) -> int:
    """The most tokens whose full KV cache fits into `memory` bytes, with `number_bytes` bytes for each number."""
    raise NotImplementedError


# Section 3


def streaming_share(rows: Tensor, sinks: int, recent: int) -> Tensor:
    """How much of each head's attention goes to the first `sinks` and the last `recent` positions: [heads].

    rows [heads, w, seq] are the attention rows of a window; the share is the mean over its rows. No position counts
    twice: sinks + recent is at most seq.
    """
    raise NotImplementedError


# Section 4


def run_score(rows: Tensor, written: list[int], prompt: Tensor, answer: Tensor) -> Tensor:
    """The semantic score [heads] of a run, straight from the formula.

    rows [steps, heads, seq] are the attention rows of the queries that wrote the tokens `written`; prompt [seq] holds
    the prompt's token ids and answer [span] the positions of the answer in it.
    """
    raise NotImplementedError


# Section 5


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """As `scores.pool`, but each position of scores [heads, seq] gets the largest of its neighbourhood, not the mean."""
    raise NotImplementedError


def group_vote(votes: Tensor, kv_heads: int) -> Tensor:
    """As `scores.group_mean`, votes [heads, seq] to [kv_heads, seq], with loops over heads and no reshape."""
    raise NotImplementedError


# Section 6


@dataclass(frozen=True)
class GuardedSnapKV(SnapKV):
    """SnapKV that always keeps the first four tokens, within the same budget.

    `score` may call SnapKV's own, `super().score(...)`. `at_least` says below which budget a policy is refused.
    """

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        raise NotImplementedError


# Section 7


def score_that_fills_a_layer(mean: int, layers: int) -> float:
    """The layer score that gives a layer 3 * mean entries, with the floor of 32, before rounding and clipping."""
    raise NotImplementedError


# Section 8


@torch.no_grad()
def greedy(model: Llama, cache: KVCache, logits: Tensor, count: int) -> list[int]:
    """The `count` most likely tokens after one prompt, from its cache and the last prompt token's logits [1, vocab].

    `model(tokens, cache)` appends tokens [1, new] to the cache and returns logits [1, new, vocab]. Each token but the
    last is fed back. No `decode`.
    """
    raise NotImplementedError


# Section 9


def kl(exact: Tensor, cut: Tensor) -> float:
    """KL divergence in nats a token of the full cache's distributions from a cut cache's, from logits [tokens, vocab]."""
    raise NotImplementedError


# Section 10


def mended_group_mean(votes: Tensor, kv_heads: int) -> Tensor:
    """votes [batch, heads, seq] to [batch, kv_heads, seq]: the mean of each group. As it stands it mixes the groups."""
    return votes.unflatten(1, (-1, kv_heads)).mean(1)


def mended_best_positions(scores: Tensor, count: int) -> Tensor:
    """The `count` best of scores [seq], ascending; of equal scores the earlier ones. As it stands, ties are lost:
    scores are rounded to half precision, and topk takes any of equal ones."""
    return scores.half().topk(count).indices.sort().values


# Section 11


def voters(head_scores: Tensor, strength: float) -> list[tuple[int, int]]:
    """The heads with at least `strength` of the strongest head's score, from scores [layers, heads], as (layer, head).

    Strongest first, and of equal ones the lower layer, then the lower head.
    """
    raise NotImplementedError


# Section 12


def overlap(first: Tensor, second: Tensor) -> float:
    """The share of `first` that is also in `second`, over all heads: positions [kv_heads, kept], of each head its own."""
    raise NotImplementedError
