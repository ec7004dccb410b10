"""A model with some of its heads silenced, and which heads those are.

Silencing acts between the steps of attention: a head's query is zeroed after `project`, or its output after `attend`.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.inference import prefill
from minikv.model import Llama
from minikv.srh import Profile, strongest

PARTS = ("output", "query")
Head = tuple[int, int]  # layer, head


@torch.no_grad()
def masked_logits(model: Llama, tokens: Tensor, cache: KVCache, sounding: Tensor, part: str) -> Tensor:
    """Logits [rows, vocab] after tokens [rows, new], with heads silenced; keys and values are appended to the cache.

    sounding [rows, layers, heads] is 0 for a head that is silenced in that row, 1 for the others.
    """
    x = model.embed(tokens)
    rope = model.rope(cache.length, tokens.shape[1])
    for layer, block in enumerate(model.blocks):
        factor = sounding[:, layer, :, None, None].to(x)  # [rows, heads, 1, 1]
        queries, keys, values = block.project(x, rope)
        if part == "query":
            queries = queries * factor
        heads = block.attend(queries, *cache[layer].append(keys, values))
        if part == "output":
            heads = heads * factor
        x = block.output(x, heads)
    return model.logits(x[:, -1:])[:, 0]


def prefill_before_last(model: Llama, ids: list[int]) -> KVCache:
    """The full cache of a prompt but for its last token, which belongs to decoding here."""
    return prefill(model, torch.tensor([ids[:-1]], device=model.device), window=1).cache


def masked_answers(
    model: Llama,
    ids: list[int],
    sounding: Tensor,
    part: str,
    before_last: KVCache | None,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    """Greedy answers to one prompt, a row of `sounding` each, without the token that ends a turn.

    before_last is the prompt's cache from a prefill that nothing was silenced in; None: heads are silent there, too.
    """
    rows, sounding = len(sounding), sounding.to(model.device)
    prompt = torch.tensor([ids], device=model.device).expand(rows, -1)
    cache = model.new_cache(rows, len(ids) + max_tokens)
    if before_last is None:
        masked_logits(model, prompt[:, :-1], cache, sounding, part)
    else:
        for layer, shared in zip(cache.layers, before_last.layers):
            layer.append(shared.keys.expand(rows, -1, -1, -1), shared.values.expand(rows, -1, -1, -1))
    token, answers, going = prompt[:, -1:], [[] for _ in range(rows)], set(range(rows))
    for _ in range(max_tokens):
        token = masked_logits(model, token, cache, sounding, part).argmax(-1, keepdim=True)
        going -= {row for row in going if token[row].item() in stop_ids}
        for row in going:
            answers[row].append(token[row].item())
        if not going:
            break
    return answers


def rankings(profile: Profile, seeds: list[int], left_out: int) -> dict[str, list[Head]]:
    """The heads of the whole model in the orders in which they are silenced.

    Random orders leave out the `left_out` strongest heads by either score: they are the control, heads that are not
    known to retrieve. One order serves every n, so the heads of a smaller n are among those of a larger.
    """
    for name in ("head_scores", "traditional_scores"):
        if getattr(profile, name) is None:
            raise InputError(f"the profile has no {name}, so its heads cannot be compared across layers; measure one")
    orders = {
        "semantic": strongest(torch.tensor(profile.head_scores)),
        "traditional": strongest(torch.tensor(profile.traditional_scores)),
    }
    top = {head for order in orders.values() for head in order[:left_out]}
    others = sorted({*orders["semantic"]} - top)
    for seed in seeds:
        orders[f"random {seed}"] = random.Random(seed).sample(others, len(others))
    return orders


def sounding_heads(order: list[Head], counts: list[int], profile: Profile) -> Tensor:
    """For each count a row [layers, heads] of ones, with zeros for the first `count` heads of the order."""
    if max(counts) > len(order):
        raise InputError(f"--heads {max(counts)}: only {len(order)} heads can be silenced; lower it, or --leave-out")
    sounding = torch.ones(len(counts), profile.layers, profile.heads)
    for row, count in enumerate(counts):
        for layer, head in order[:count]:
            sounding[row, layer, head] = 0
    return sounding
