"""One way to solve each of the tutorial's exercises."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache import KVCache
from minikv.model import Llama
from minikv.policy import SnapKV


def kv_head_of(query_head: int, heads: int, kv_heads: int) -> int:
    return query_head // (heads // kv_heads)


def longest_prompt(memory: int, layers: int, kv_heads: int, head_dim: int, number_bytes: int) -> int:
    return memory // (2 * layers * kv_heads * head_dim * number_bytes)


def streaming_share(rows: Tensor, sinks: int, recent: int) -> Tensor:
    seq = rows.shape[-1]
    return (rows[..., :sinks].sum(-1) + rows[..., seq - recent :].sum(-1)).mean(-1)  # [-0:] would be all of them


def run_score(rows: Tensor, written: list[int], prompt: Tensor, answer: Tensor) -> Tensor:
    tokens = set(prompt[answer].tolist())
    counted = [row[:, answer].sum(-1) for row, token in zip(rows, written) if token in tokens]
    return torch.stack(counted).sum(0) if counted else torch.zeros(rows.shape[1])


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    return F.max_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def group_vote(votes: Tensor, kv_heads: int) -> Tensor:
    group = len(votes) // kv_heads
    found = []
    for kv_head in range(kv_heads):
        members = [votes[kv_head * group + member] for member in range(group)]
        found.append(sum(members) / group)
    return torch.stack(found)


@dataclass(frozen=True)
class GuardedSnapKV(SnapKV):
    @property
    def at_least(self) -> int:
        return self.window + 4

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        votes = super().score(layer, queries, keys)
        votes[..., :4] = float("inf")
        return votes


def score_that_fills_a_layer(mean: int, layers: int) -> float:
    return (3 * mean - 32) / ((mean - 32) * layers)


@torch.no_grad()
def greedy(model: Llama, cache: KVCache, logits: Tensor, count: int) -> list[int]:
    written = []
    for step in range(count):
        if step:
            logits = model(torch.tensor([written[-1:]]), cache)[:, -1]
        written.append(logits.argmax(-1).item())
    return written


def kl(exact: Tensor, cut: Tensor) -> float:
    p, q = exact.log_softmax(-1), cut.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def mended_group_mean(votes: Tensor, kv_heads: int) -> Tensor:
    return votes.unflatten(1, (kv_heads, -1)).mean(2)


def mended_best_positions(scores: Tensor, count: int) -> Tensor:
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def voters(head_scores: Tensor, strength: float) -> list[tuple[int, int]]:
    order = head_scores.flatten().sort(descending=True, stable=True).indices.tolist()
    heads = [divmod(index, head_scores.shape[1]) for index in order]
    return [head for head in heads if head_scores[head] >= strength * head_scores.max()]


def overlap(first: Tensor, second: Tensor) -> float:
    return torch.cat([torch.isin(*heads) for heads in zip(first, second)]).float().mean().item()
