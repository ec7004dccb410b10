"""What every method offers, and what those share that choose by the attention of the last prompt tokens.

A method of your own is a subclass of WindowPolicy with a `score`, or of Policy with a `select`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from minikv import scores
from minikv.budget import Budget, PromptShape, error_aware, mean_entries, uniform
from minikv.errors import InputError

if TYPE_CHECKING:
    from minikv.inference import Prefill


class Policy(ABC):
    """What every method offers. `window` is the number of last prompt queries it looks at; None: all of them."""

    budget: Budget
    window: int | None = 0
    at_least: int = 2  # entries a layer without which the method makes no sense
    needs_all_layers = False  # it needs a whole Prefill, not just the prompt's shape and one layer after the other

    def mean_entries(self, prompt: PromptShape | Prefill) -> int:
        """The budget in entries, as a mean over the layers; InputError where it is below `at_least`."""
        return mean_entries(self.budget, prompt, self.at_least)

    def budgets(self, prompt: PromptShape | Prefill) -> list[int]:
        """Entries to keep in each layer: the same in all, unless a method has a better idea."""
        return uniform(self.mean_entries(prompt), prompt.layers)

    @abstractmethod
    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        """Positions [batch, kv_heads, budget] to keep in one layer, ascending.

        queries [batch, heads, window, dim] of the last prompt tokens and keys [batch, kv_heads, seq, dim], both
        rotated. Methods that keep the same positions for all KV heads still list them for each.
        """

    def selection(self, prompt: PromptShape | Prefill) -> Callable[[int, Tensor, Tensor], Tensor]:
        """How the layers of one prompt choose: to be called for each in its turn, (layer, queries, keys) to positions.

        Shapes as in `select`. Overridden where layers learn from those before them: what they learn belongs to the prompt,
        so it is held here and not in the policy.
        """
        budgets = self.budgets(prompt)

        def choose_layer(layer: int, queries: Tensor, keys: Tensor) -> Tensor:
            return check_positions(self.select(layer, queries, keys, budgets[layer]), layer, budgets[layer])

        return choose_layer

    def choose(self, prefill: Prefill) -> list[Tensor]:
        """The positions of every layer of a prefill. Overridden where the prefill holds a better summary than queries."""
        choose_layer, layers = self.selection(prefill), enumerate(prefill.cache.layers)
        return [choose_layer(layer, prefill.last_queries(layer, self.window), cache.keys) for layer, cache in layers]


def check_positions(positions: Tensor, layer: int, budget: int) -> Tensor:
    """What a policy chose for a layer, if it keeps to its own budget; else ValueError."""
    if positions.shape[2] != budget:
        raise ValueError(f"layer {layer}: the policy chose {positions.shape[2]} positions for a budget of {budget}")
    return positions


class WindowPolicy(Policy):
    """A method that keeps the last `window` tokens and the earlier ones with the best `score`, pooled over `kernel`."""

    budget: Budget
    window: int
    kernel: int

    def __post_init__(self):
        if self.window < 1:
            raise InputError(f"window is {self.window}; at least 1 prompt token must be looked at")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise InputError(f"kernel is {self.kernel}; accepted: an odd number, so that pooling is centred on a position")

    @abstractmethod
    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Score [batch, kv_heads, seq - window] of each position before the window. Shapes as in `select`."""

    @property
    def at_least(self) -> int:
        return self.window + 1

    def error_aware_budgets(self, prompt: PromptShape | Prefill, layer_scores: list[float]) -> list[int]:
        """CompressKV's budgets, section 3.3 of the paper: at least 32 entries a layer, at most three times the mean.

        A mean below 64 needs a lower floor, a window above 31 a higher one, and no layer can keep more than the prompt:
        so the total is spent exactly.
        """
        if len(layer_scores) != prompt.layers:
            raise InputError(f"the profile is for {len(layer_scores)} layers, the model has {prompt.layers}")
        mean = self.mean_entries(prompt)
        floor = max(self.window + 1, min(32, mean // 2))
        return error_aware(layer_scores, mean * prompt.layers, floor, min(3 * mean, prompt.length))

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        if budget >= keys.shape[2]:
            return scores.all_positions(keys)
        return scores.keep_best_and_window(self.score(layer, queries, keys), budget, self.window, layer)
