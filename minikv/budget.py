"""Entries per layer: a budget as people state it, and how it is shared out among the layers.

A budget is a mean number of entries a layer. Every allocation below spends exactly that mean times the number of
layers, or everything when the prompt is shorter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minikv.errors import InputError


@dataclass(frozen=True)
class PromptShape:
    """What budgets follow from: the model's layers, the prompt's tokens, and the bytes of one entry in one layer.

    A Prefill has the same three attributes.
    """

    layers: int
    length: int
    entry_bytes: int


@dataclass(frozen=True)
class Share:
    """A budget as the share of the prompt's entries that is kept: Share(0.03) keeps 3 %, and evicts 97 %."""

    kept: float

    def __post_init__(self):
        if not isinstance(self.kept, (int, float)):
            raise InputError(f"a budget share of {self.kept!r} was given; a number such as 0.03 is needed")
        if not 0 < self.kept <= 1:
            raise InputError(f"a budget share of {self.kept:.6g} was given; accepted: above 0 and at most 1 (all is kept)")


@dataclass(frozen=True)
class Bytes:
    """A budget as the bytes that the keys and values of all layers may take together, for each prompt of a batch."""

    total: int


Budget = int | Share | Bytes


def parse(text: str) -> Budget:
    """A budget as typed: `256` (entries a layer), `3%` (of the prompt's entries, kept) or `2MB`, `1.5GiB`, `900kB`."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*(%|[kMG]i?B)?\s*", text)
    accepted = "accepted: entries a layer such as 256, a share kept such as 3%, or bytes such as 2MB"
    if not match:
        raise InputError(f"budget {text!r} is not understood; {accepted}")
    number, unit = match.groups()
    if unit == "%":
        return Share(float(number) / 100)
    if unit:
        base = 1024 if "i" in unit else 1000
        return Bytes(int(float(number) * base ** ("kMG".index(unit[0]) + 1)))
    if "." in number:
        raise InputError(f"budget {text!r} is not a whole number of entries; {accepted}")
    return int(number)


def mean_entries(budget: Budget, prompt: PromptShape, at_least: int) -> int:
    """The mean number of entries a layer that `budget` comes to for this prompt, at most the prompt's length.

    `at_least` is what a method cannot do without: its window and one entry more. A number of entries or bytes below
    it is an InputError; a share, which people set without a prompt in mind, is raised to it.
    """
    if isinstance(budget, Share):
        return min(max(round(budget.kept * prompt.length), at_least), prompt.length)
    if isinstance(budget, Bytes):
        entries = budget.total // (prompt.layers * prompt.entry_bytes)
        if entries < at_least:
            need = at_least * prompt.layers * prompt.entry_bytes
            raise InputError(f"a budget of {budget.total:,} bytes is {entries} entries a layer; at least {need:,} are needed")
    else:
        if type(budget) is not int:
            raise InputError(f"a budget of {budget!r} is not understood; accepted: entries such as 256, Share(0.03), Bytes(2_000_000)")
        entries = budget
        if entries < at_least:
            raise InputError(
                f"budget {entries} is too small: it must be at least {at_least},"
                f" above the {at_least - 1} entries that are always kept"
            )
    return min(entries, prompt.length)


def uniform(budget: int, layers: int) -> list[int]:
    """The same number of entries in each layer."""
    return [budget] * layers


def pyramid(budget: int, layers: int, seq: int, window: int, beta: int = 20) -> list[int]:
    """PyramidKV's schedule (arXiv 2406.02069): fewer entries the later the layer, in equal steps.

    The last layer keeps about 1 / beta of the mean. As in the paper's release the integer step makes the sum exceed
    budget * layers (16 % for 30 layers at 64); the policy takes that surplus back with `settle`.
    """
    if layers == 1 or budget >= seq:
        return uniform(min(budget, seq), layers)
    choices = budget - window  # entries chosen by score; the window comes on top
    smallest = choices // beta
    largest = 2 * choices - smallest
    if largest > seq - window:
        largest = seq - window
        smallest = 2 * choices - largest
    step = (largest - smallest) // (layers - 1)
    return [largest - layer * step + window for layer in range(layers)]


def error_aware(layer_scores: list[float], total: int, min_tokens: int, max_tokens: int) -> list[int]:
    """CompressKV's layer budgets (section 3.3): more entries where eviction hurts the attention output more.

    layer_scores are the normalised errors of the layers. Each layer gets min_tokens and its share of the rest,
    clipped to max_tokens; what rounding and clipping leave over goes to the highest scores first, what they
    overspend is taken from the lowest.
    """
    spare = total - min_tokens * len(layer_scores)
    budgets = [min_tokens + round(score * spare) for score in layer_scores]  # Python rounds half to even
    budgets = [min(max(entries, min_tokens), max_tokens) for entries in budgets]
    by_score = sorted(range(len(budgets)), key=lambda layer: layer_scores[layer], reverse=True)
    return settle(budgets, total, by_score, min_tokens, max_tokens)


def settle(budgets: list[int], total: int, order: list[int], min_tokens: int, max_tokens: int) -> list[int]:
    """Bring the sum to `total`, one entry a layer at a time, within [min_tokens, max_tokens].

    Layers are visited in `order` when entries are handed out, in the reverse order when they are taken back, round
    after round, until the sum is right or no layer can move.
    """
    budgets = list(budgets)
    missing = total - sum(budgets)
    step = 1 if missing > 0 else -1
    bound = max_tokens if missing > 0 else min_tokens
    visiting = order if missing > 0 else order[::-1]
    while missing:
        movable = [layer for layer in visiting if (bound - budgets[layer]) * step > 0]
        if not movable:
            break
        for layer in movable[: abs(missing)]:
            budgets[layer] += step
            missing -= step
    return budgets


def cake(preferences: list[float], total: int, cap: int) -> list[int]:
    """CAKE's allocation (arXiv 2503.12491): entries in proportion to the layers' preferences, each at most `cap`.

    Shares are truncated. What exceeds the cap is spread evenly over the layers below it, in one pass, the remainder to
    the first ones; what then still differs from the total is spread likewise, in a second pass. As in the release that
    pass can leave a layer a little over the cap: whoever evicts clips.
    """
    weight = sum(preferences)
    shares = [preference / weight if weight > 0 else 1 / len(preferences) for preference in preferences]
    wanted = [int(share * total) for share in shares]
    budgets = [min(entries, cap) for entries in wanted]
    budgets = _spread(budgets, sum(wanted) - sum(budgets), [entries < cap for entries in budgets])
    missing = total - sum(budgets)
    return _spread(budgets, missing, [entries < cap if missing > 0 else entries > 1 for entries in budgets])


def _spread(budgets: list[int], entries: int, takes_part: list[bool]) -> list[int]:
    """Add `entries` (or take them, if negative) evenly over the layers that take part, the remainder to the first."""
    chosen = [layer for layer, takes in enumerate(takes_part) if takes]
    if not chosen:
        return budgets
    each, rest = divmod(abs(entries), len(chosen))
    sign = 1 if entries > 0 else -1
    budgets = list(budgets)
    for place, layer in enumerate(chosen):
        budgets[layer] += sign * (each + (place < rest))
    return budgets
