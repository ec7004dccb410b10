"""The methods: for each, how many entries a layer keeps and which positions those are.

A policy is a small frozen dataclass of pure functions, `budgets` and `select` above all. It knows nothing of text, files
or devices, and holds nothing of a prompt: two prompts cannot influence each other. `budget` is the mean number of
entries a layer, or a Share of the prompt, or Bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import repeat
from torch import Tensor

from minikv import scores
from minikv.budget import Budget, PromptShape, cake, pyramid, settle, uniform
from minikv.errors import InputError
from minikv.policy_base import Policy, WindowPolicy
from minikv.shared_vote import SharedVote
from minikv.srh import Profile

if TYPE_CHECKING:
    from minikv.inference import Prefill


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything."""

    def mean_entries(self, prompt: PromptShape | Prefill) -> int:
        return prompt.length

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        return scores.all_positions(keys)


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """StreamingLLM (arXiv 2309.17453): the first tokens, on which attention rests as on a sink, and the latest ones.

    sinks: how many of the first tokens. (The paper's release of CompressKV compares with the opposite: the first
    budget - 8 tokens and the last 8.)
    """

    budget: Budget
    sinks: int = 4

    def __post_init__(self):
        if self.sinks < 0:
            raise InputError(f"sinks is {self.sinks}; accepted: 0 or more")

    @property
    def at_least(self) -> int:
        return self.sinks + 1

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        everything = scores.all_positions(keys)
        if budget >= keys.shape[2]:
            return everything
        recent = everything[..., everything.shape[-1] - (budget - self.sinks) :]
        return torch.cat([everything[..., : self.sinks], recent], dim=-1)


@dataclass(frozen=True)
class SnapKV(WindowPolicy):
    """SnapKV (arXiv 2404.14469): all query heads vote, and each KV head keeps what its own group voted for.

    window: the last prompt tokens whose attention is read, always kept. kernel: width of the average pooling over
    positions, odd. layer_scores: CompressKV's layer budgets instead of uniform ones (an ablation, not SnapKV).
    """

    budget: Budget
    window: int = 8
    kernel: int = 5
    layer_scores: list[float] | None = None

    def budgets(self, prompt: PromptShape | Prefill) -> list[int]:
        if self.layer_scores is None:
            return super().budgets(prompt)
        return self.error_aware_budgets(prompt, self.layer_scores)

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        return scores.group_mean(scores.window_votes(queries, keys, self.kernel), kv_heads=keys.shape[1])


@dataclass(frozen=True)
class PyramidKV(WindowPolicy):
    """PyramidKV (arXiv 2406.02069): SnapKV's selection, with fewer entries the later the layer.

    beta: the last layer's share of the entries outside the window is about 1 / beta of the mean. The schedule follows
    from this prompt alone, and its overspending is taken back, so that the total is that of the other methods. Its
    steps are whole entries: below a mean of about 30 for 30 layers they are 0, and so is the difference from SnapKV.
    """

    budget: Budget
    window: int = 8
    kernel: int = 5
    beta: int = 20
    score = SnapKV.score  # the same votes

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 1:
            raise InputError(f"beta is {self.beta}; accepted: 1 (no pyramid) or more")

    def budgets(self, prompt: PromptShape | Prefill) -> list[int]:
        mean = self.mean_entries(prompt)
        schedule = pyramid(mean, prompt.layers, prompt.length, self.window, self.beta)
        smallest_first = list(range(prompt.layers))[::-1]  # taking back starts from the end of this order
        return settle(schedule, mean * prompt.layers, smallest_first, self.window, prompt.length)


@dataclass(frozen=True)
class Cake(WindowPolicy):
    """CAKE (arXiv 2503.12491): layers whose attention is more dispersed, and shifts more, keep more.

    gamma: weight of an entry's variance over the window beside its mean. tau1, tau2: temperatures of the entropy and
    of the variance in a layer's preference. The paper fits the temperatures for each model; 1 and 1 are neutral.
    Budgets cascade as in the paper's one pass over the layers, where what was evicted cannot come back, so the sum
    may stay below the total. A prompt of at most budget + window tokens is kept whole, as in CAKE's own code.
    """

    budget: Budget
    window: int = 8
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    needs_all_layers = True

    def __post_init__(self):
        super().__post_init__()
        if self.window < 2:
            raise InputError(f"window is {self.window}; CAKE needs at least 2 rows, whose variance it takes")
        if self.tau1 <= 0 or self.tau2 <= 0:
            raise InputError(f"tau1 is {self.tau1} and tau2 {self.tau2}; accepted: numbers above 0")

    def budgets(self, prefill: Prefill) -> list[int]:
        mean = self.mean_entries(prefill)
        if prefill.length <= mean + self.window:
            return uniform(prefill.length, prefill.layers)
        preferences = [self.preference(layer, prefill) for layer in range(prefill.layers)]
        total, cap = (mean - self.window) * prefill.layers, prefill.length - self.window
        least = [cap] * prefill.layers
        for done in range(1, prefill.layers + 1):  # after each layer the total is shared among those done
            stage = cake(preferences[:done], total, cap)
            least[:done] = map(min, least, stage)
        return [entries + self.window for entries in least]

    def preference(self, layer: int, prefill: Prefill) -> float:
        """How much the layer wants to keep: entropy ^ (1 / tau1) * variance ^ (1 / tau2) of its window attention."""
        if prefill.logits.shape[0] > 1:
            raise InputError("CAKE shares its budget by the prompt's own attention: one prompt at a time, not a batch")
        rows = self._rows(prefill.last_queries(layer, self.window), prefill.cache[layer].keys)
        entropy = -(rows * (rows + 1e-10).log()).sum()
        variance = rows.var(dim=2).sum()
        preference = (entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)).item()
        if preference != preference:
            raise InputError(f"layer {layer}: the token scores contain NaN, so no position can be preferred")
        return preference

    def _rows(self, queries: Tensor, keys: Tensor) -> Tensor:  # [batch, heads, window, seq - window]
        return scores.window_attention(queries, keys)[..., : keys.shape[2] - self.window]

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        rows = self._rows(queries, keys)
        votes = scores.pool(rows.mean(dim=2) + self.gamma * rows.var(dim=2), self.kernel)
        return scores.group_mean(votes, kv_heads=keys.shape[1])


@dataclass(frozen=True)
class CompressKV(WindowPolicy):
    """CompressKV (arXiv 2606.24467): only the semantic retrieval heads of a layer vote, and layers that eviction
    hurts more keep more.

    profile: the model's head ranks and layer scores, measured once. window: the last prompt tokens whose attention is
    read, always kept. kernel: width of the average pooling over positions, odd. heads: how many of a layer's strongest
    retrieval heads vote. For ablations: layer_budgets False gives every layer the same, traditional True lets the
    strongest traditional retrieval heads vote.
    """

    budget: Budget
    profile: Profile
    window: int = 8
    kernel: int = 5
    heads: int = 4
    layer_budgets: bool = True
    traditional: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.heads <= self.profile.heads:
            raise InputError(f"heads is {self.heads}; accepted: 1 to the model's {self.profile.heads} query heads a layer")

    def budgets(self, prompt: PromptShape | Prefill) -> list[int]:
        if not self.layer_budgets:
            return super().budgets(prompt)
        return self.error_aware_budgets(prompt, self.profile.layer_scores)

    def voters(self, layer: int) -> list[int]:
        """The query heads that vote in a layer, strongest first."""
        ranks = self.profile.traditional_ranks if self.traditional else self.profile.head_ranks
        return ranks[layer][: self.heads]

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        heads, kv_heads = queries.shape[1], keys.shape[1]
        if heads != self.profile.heads:
            raise InputError(f"the profile is for {self.profile.heads} query heads a layer, the model has {heads}")
        voters = torch.tensor(self.voters(layer), device=keys.device)
        votes = scores.window_votes(queries[:, voters], keys[:, voters // (heads // kv_heads)], self.kernel)
        return repeat(votes.mean(1), "batch prefix -> batch kv_heads prefix", kv_heads=kv_heads)


@dataclass(frozen=True)
class TOVA(WindowPolicy):
    """TOVA (arXiv 2401.06104), applied once after the prompt: what the last token attends to, averaged over all heads.

    All KV heads of a layer keep the same positions.
    """

    budget: Budget
    window = 1
    kernel = 1

    def score(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        row = scores.window_votes(queries, keys, self.kernel).mean(1)
        return repeat(row, "batch prefix -> batch kv_heads prefix", kv_heads=keys.shape[1])


@dataclass(frozen=True)
class H2O(Policy):
    """H2O (arXiv 2306.14048), applied once after the prompt: the entries that all queries together attended to most.

    Half of the budget goes to these heavy hitters, half to the latest entries. Each KV head keeps its own.
    """

    budget: Budget
    window = None

    def select(self, layer: int, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        return self._keep(scores.column_sums(queries, keys), layer, budget)

    def choose(self, prefill: Prefill) -> list[Tensor]:
        if prefill.column_sums is None:
            raise InputError("H2O needs the attention of all prompt tokens: prefill(..., column_sums=True)")
        budgets = self.budgets(prefill)
        return [self._keep(sums, layer, budgets[layer]) for layer, sums in enumerate(prefill.column_sums)]

    def _keep(self, sums: Tensor, layer: int, budget: int) -> Tensor:  # sums [batch, kv_heads, seq]
        recent = budget - budget // 2
        return scores.keep_best_and_window(sums[..., : sums.shape[-1] - recent], budget, recent, layer)


METHODS: dict[str, type[Policy]] = {
    "full": Full,
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "cake": Cake,
    "tova": TOVA,
    "h2o": H2O,
    "compresskv": CompressKV,
    "sharedvote": SharedVote,
}
