"""The methods: for each, how many entries a layer keeps and which positions those are.

A policy is a small frozen dataclass with two pure functions, `budgets` and `select`. It knows nothing of text, files
or devices, and holds nothing of a prompt: two prompts cannot influence each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor

from minikv import scores
from minikv.budget import Budget, PromptShape, error_aware, mean_entries, uniform
from minikv.errors import InputError
from minikv.srh import Profile


class Policy(ABC):
    """What every method offers. `window` is the number of last prompt queries that it looks at."""

    window: int = 0

    @abstractmethod
    def budgets(self, prompt: PromptShape) -> list[int]:
        """Entries to keep in each layer, given a Prefill or just its shape."""

    @abstractmethod
    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        """Positions [batch, kv_heads, budget] to keep in one layer, ascending.

        queries [batch, heads, window, dim] of the last prompt tokens and keys [batch, kv_heads, seq, dim], both
        rotated. Methods that keep the same positions for all KV heads still list them for each.
        """


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything."""

    def budgets(self, prompt: PromptShape) -> list[int]:
        return uniform(prompt.length, prompt.layers)

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        return scores.all_positions(keys)


@dataclass(frozen=True)
class CompressKV(Policy):
    """CompressKV (arXiv 2606.24467): only the semantic retrieval heads of a layer vote, and layers that eviction
    hurts more keep more.

    budget: mean entries a layer, or a Share or Bytes. profile: the model's head ranks and layer scores, measured
    once. window: the last prompt tokens whose attention is read, always kept. kernel: width of the average pooling
    over positions, odd. heads: how many of a layer's strongest retrieval heads vote.
    """

    budget: Budget
    profile: Profile
    window: int = 8
    kernel: int = 5
    heads: int = 4

    def __post_init__(self):
        check_window_and_kernel(self.window, self.kernel)
        if not 1 <= self.heads <= self.profile.heads:
            raise InputError(f"heads is {self.heads}; accepted: 1 to the model's {self.profile.heads} query heads")

    def budgets(self, prompt: PromptShape) -> list[int]:
        self.profile.check_shape(prompt.layers, self.profile.heads)
        mean = mean_entries(self.budget, prompt, at_least=self.window + 1)
        if mean >= prompt.length:
            return uniform(prompt.length, prompt.layers)
        # Section 3.3 of the paper has at least 32 and at most three times the mean. A mean below 64 needs a lower
        # floor, and no layer can keep more than the prompt: so the total is spent exactly.
        floor = min(32, max(self.window + 1, mean // 2))
        return error_aware(self.profile.layer_scores, mean * prompt.layers, floor, min(3 * mean, prompt.length))

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        if budget >= keys.shape[2]:
            return scores.all_positions(keys)
        heads, kv_heads = queries.shape[1], keys.shape[1]
        self.profile.check_shape(self.profile.layers, heads)
        voters = torch.tensor(self.profile.head_ranks[layer][: self.heads], device=keys.device)
        votes = scores.window_votes(queries[:, voters], keys[:, voters // (heads // kv_heads)], self.kernel)
        shared = repeat(votes.mean(1), "batch prefix -> batch kv_heads prefix", kv_heads=kv_heads)
        return scores.keep_best_and_window(shared, budget, self.window, layer)


def check_window_and_kernel(window: int, kernel: int) -> None:
    if window < 1:
        raise InputError(f"window is {window}; at least 1 prompt token must be looked at")
    if kernel < 1 or kernel % 2 == 0:
        raise InputError(f"kernel is {kernel}; accepted: an odd number, so that pooling is centred on each position")
