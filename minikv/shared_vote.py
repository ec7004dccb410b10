"""SharedVote, minikv's own method: the model's strongest retrieval heads choose for every layer, and the entries go to
the layers in which such heads sit.

CompressKV asks four heads of every layer, though most layers have no retrieval head, and gives entries to the layers that
eviction hurts most. Here the heads that found the answer in the profile's runs vote once, together. What they choose
serves their own layers most: the others hardly look at it while an answer is decoded, so they keep little more than the end
of the prompt. tutorial.md, section 11, measures each ingredient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import repeat
from torch import Tensor

from minikv import scores
from minikv.budget import Budget, PromptShape, error_aware
from minikv.errors import InputError
from minikv.policy_base import WindowPolicy
from minikv.srh import Profile

if TYPE_CHECKING:
    from minikv.inference import Prefill


@dataclass(frozen=True)
class SharedVote(WindowPolicy):
    """One vote of the model's strongest semantic retrieval heads, and most entries for the layers of such heads.

    profile: must hold head_scores, which compare across layers. window: the last prompt tokens whose attention is
    read; 24 hold a question of some fifteen words and the closing tokens of a chat template. kernel: width of the
    average pooling over positions, odd; 31 keep a sentence together, and some of its surroundings. strength: a head
    votes if its score is at least this share of the strongest head's. sinks: how many of the first tokens are kept
    whatever they score. floor: what every layer keeps at least, the sinks and then the prompt's last tokens.
    concentration: layers share the other entries in proportion to the sum of their heads' scores to this power; 0 gives
    all layers the same. For ablations: layer_errors True shares them by the profile's layer scores, as CompressKV does;
    one_pass False lets every layer follow all voters, for which all layers must be there at once.

    A layer whose budget does not hold the window keeps its end. All KV heads of a layer keep the same positions.
    """

    budget: Budget
    profile: Profile
    window: int = 24
    kernel: int = 31
    strength: float = 0.5
    sinks: int = 1
    floor: int = 9
    concentration: float = 0.7
    layer_errors: bool = False
    one_pass: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.strength <= 1:
            raise InputError(f"strength is {self.strength}; accepted: above 0 and at most 1 (the strongest head alone)")
        if self.sinks < 0:
            raise InputError(f"sinks is {self.sinks}; accepted: 0 or more")
        if self.floor <= self.sinks:
            raise InputError(f"floor is {self.floor}; accepted: more than the {self.sinks} sinks, for the prompt's last token")
        if not 0 <= self.concentration <= 100:
            raise InputError(f"concentration is {self.concentration}; accepted: 0 (all layers the same) to 100")

    @property
    def needs_all_layers(self) -> bool:
        return not self.one_pass

    @property
    def at_least(self) -> int:
        return self.floor

    def head_scores(self) -> Tensor:
        """The profile's semantic retrieval scores [layers, heads], float64; InputError where it has none."""
        if self.profile.head_scores is None:
            raise InputError(
                "the profile has no head_scores, by which this method compares heads of different layers;"
                " make one with `python -m minikv.profile` (the paper's release keeps ranks only)"
            )
        found = torch.tensor(self.profile.head_scores, dtype=torch.float64)
        if found.max() <= 0:
            raise InputError("no head of the profile has a score above 0, so none can vote")
        return found

    def voters(self, layer: int) -> list[int]:
        """The query heads of a layer that vote; none in most layers."""
        found = self.head_scores()
        return (found[layer] >= self.strength * found.max()).nonzero()[:, 0].tolist()

    def budgets(self, prompt: PromptShape | Prefill) -> list[int]:
        """Entries of each layer: the floor, and of the rest a share by the layer's heads."""
        if self.profile.layers != prompt.layers:
            raise InputError(f"the profile is for {self.profile.layers} layers, the model has {prompt.layers}")
        mean = self.mean_entries(prompt)
        shares = self.profile.layer_scores
        if not self.layer_errors:
            found = self.head_scores()
            weights = (found.clamp(min=0) / found.max()).sum(1) ** self.concentration  # tiny and huge scores, too
            shares = (weights / weights.sum()).tolist()
        return error_aware(shares, mean * prompt.layers, min(self.floor, mean), prompt.length)

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """What the voters of a layer that has some give to each position, the same for all KV heads."""
        heads, kv_heads = queries.shape[1], keys.shape[1]
        if heads != self.profile.heads:
            raise InputError(f"the profile is for {self.profile.heads} query heads a layer, the model has {heads}")
        own = torch.tensor(self.voters(layer), device=keys.device)
        votes = scores.window_votes(queries[:, own], keys[:, own // (heads // kv_heads)], self.kernel)
        return repeat(votes.sum(1), "batch prefix -> batch kv_heads prefix", kv_heads=kv_heads)

    def selection(self, prompt: PromptShape | Prefill) -> Callable[[int, Tensor, Tensor], Tensor]:
        """The layers' choices in one pass: each follows the votes of the voters up to it."""
        budgets, votes = self.budgets(prompt), None

        def choose_layer(layer: int, queries: Tensor, keys: Tensor) -> Tensor:
            nonlocal votes
            if self.voters(layer):
                own = self.score(layer, queries, keys)
                votes = own if votes is None else votes + own
            return self._keep(votes, budgets[layer], layer, keys)

        return choose_layer

    def choose(self, prefill: Prefill) -> list[Tensor]:
        """As the layers choose in one pass, or all of them by the votes of all voters."""
        if self.one_pass:
            return super().choose(prefill)
        voting = [layer for layer in range(prefill.layers) if self.voters(layer)]
        keys = [cache.keys for cache in prefill.cache.layers]
        votes = sum(self.score(layer, prefill.last_queries(layer, self.window), keys[layer]) for layer in voting)
        return [self._keep(votes, budget, layer, keys[layer]) for layer, budget in enumerate(self.budgets(prefill))]

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        """What the layer keeps when its own voters are the only ones."""
        votes = self.score(layer, queries, keys) if self.voters(layer) else None
        return self._keep(votes, budget, layer, keys)

    def _keep(self, votes: Tensor | None, budget: int, layer: int, keys: Tensor) -> Tensor:
        """Positions [batch, kv_heads, budget]: the sinks, the best by votes [batch, kv_heads, seq - window], and the end.

        The end is the window, but less where the budget does not hold it, and more where there are no votes.
        """
        everything = scores.all_positions(keys)
        length = everything.shape[-1]
        if budget >= length:
            return everything
        best = 0 if votes is None else max(budget - self.sinks - self.window, 0)
        kept = [everything[..., : self.sinks], everything[..., length - (budget - self.sinks - best) :]]
        if best:
            found = scores.best_positions(scores.refuse_nan(votes[..., self.sinks :], layer), best)
            kept.insert(1, self.sinks + found)
        return torch.cat(kept, dim=-1)
