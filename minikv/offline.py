"""The two measurements made once a model: which heads retrieve, and how much eviction hurts each layer.

Both decode an answer greedily with the full cache and look at each layer between its steps (CompressKV, section 3.2
and 3.3). Attention rows exist for the one query in hand only, so long prompts fit in memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.inference import compress, prefill
from minikv.model import Llama
from minikv.policy import CompressKV, Full
from minikv.scores import window_attention
from minikv.srh import Profile, rank_heads, semantic_score, traditional_score


@dataclass(frozen=True)
class HeadRun:
    """One needle run: the answer that was decoded and what each head earned in it, [layers, heads]."""

    answer: list[int]
    semantic: Tensor
    traditional: Tensor


@torch.no_grad()
def score_heads(
    model: Llama, ids: list[int], answer_positions: list[int], stop_ids: frozenset[int], max_answer_tokens: int = 50
) -> HeadRun:
    """Decode the answer to a needle prompt and credit each head at each step.

    The row that counts for a token is that of the query which produced it; for the first token that is the last
    prompt token's, so the prefill stops one short of it. Decoding ends at the end of turn, which is not credited:
    what a model goes on to say after it is no answer.
    """
    prompt = torch.tensor(ids, device=model.device)
    positions = torch.tensor(answer_positions, device=model.device)
    cache = compress(prefill(model, prompt[None, :-1], window=1), Full(), reserve=max_answer_tokens + 1)
    token = prompt[None, -1:]
    shape = (model.config.layers, model.config.heads)
    answer, semantic, traditional = [], torch.zeros(shape), torch.zeros(shape)
    for _ in range(max_answer_tokens):
        x = model.embed(token)
        rope = model.rope(cache.length, 1)
        rows = []  # of each layer [heads, kept]
        for layer, block in enumerate(model.blocks):
            queries, keys, values = block.project(x, rope)
            keys, values = cache[layer].append(keys, values)
            rows.append(window_attention(queries, keys)[0, :, 0])
            x = block.output(x, block.attend(queries, keys, values))
        token = model.logits(x)[:, -1].argmax(-1, keepdim=True)
        if token.item() in stop_ids:
            break
        answer.append(token.item())
        for layer, row in enumerate(rows):
            semantic[layer] += semantic_score(row, token.item(), prompt, positions).cpu()
            traditional[layer] += traditional_score(row, token.item(), prompt, positions).cpu()
    return HeadRun(answer, semantic, traditional)


@torch.no_grad()
def layer_errors(
    model: Llama,
    ids: list[int],
    head_ranks: list[list[int]],
    stop_ids: frozenset[int],
    max_answer_tokens: int = 50,
    kept: int = 32,
) -> Tensor:
    """What attention over only `kept` entries gets wrong in each layer, summed over the decode steps: [layers] float64.

    The answer is decoded with the full cache; beside it, from the same hidden states, each layer attends to the
    entries that its retrieval heads choose (window 8) and the tokens decoded since. The error of a step is the
    Frobenius norm of the difference of the two outputs, after the output projection, over that of the full one.
    The first token comes from the prefill and costs no step.
    """
    layers = model.config.layers
    even = Profile(head_ranks, [1 / layers] * layers)  # equal scores: the same `kept` in each layer
    result = prefill(model, torch.tensor([ids], device=model.device), window=8)
    full = compress(result, Full(), reserve=max_answer_tokens)
    cut = compress(result, CompressKV(kept, even, heads=min(4, model.config.heads)), reserve=max_answer_tokens)
    token = result.logits.argmax(-1, keepdim=True)
    errors = torch.zeros(layers, dtype=torch.float64)
    for _ in range(max_answer_tokens - 1):
        if token.item() in stop_ids:
            break
        x = model.embed(token)
        rope = model.rope(full.length, 1)
        for layer, block in enumerate(model.blocks):
            queries, keys, values = block.project(x, rope)
            exact = block.attend(queries, *full[layer].append(keys, values))
            approximate = block.attend(queries, *cut[layer].append(keys, values))
            errors[layer] += relative_error(block.self_attn.output(approximate), block.self_attn.output(exact))
            x = block.output(x, exact)
        token = model.logits(x)[:, -1].argmax(-1, keepdim=True)
    return errors


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """|| approximate - exact || / (|| exact || + 1e-5), Frobenius norms in float32 (CompressKV, section 3.3)."""
    exact = exact.float()
    return ((approximate.float() - exact).norm() / (exact.norm() + 1e-5)).item()


def layer_scores(errors: Iterable[Tensor]) -> list[float]:
    """The layers' shares of the error: the sums of each data set normalised, averaged, and normalised again."""
    shares = torch.stack([sums / sums.sum() for sums in errors]).mean(0)
    return (shares / shares.sum()).tolist()


def halves(groups: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Split runs in two halves, at random; `groups` tells for each run the needle that it asked for.

    The runs of one needle stay together (but for one needle in the middle): they have much in common, and would make
    the halves agree more than the measurement deserves.
    """
    order = list(range(len(groups)))
    names = sorted(set(groups))
    random.Random(seed).shuffle(names)
    order.sort(key=lambda run: names.index(groups[run]))
    middle = (len(order) + 1) // 2
    return order[:middle], order[middle:]


def rank_correlation(first: Tensor, second: Tensor) -> float | None:
    """Spearman's correlation of two tensors of scores: 1 if they order all heads alike. None where one is constant."""
    ranks = torch.stack([_ranks(first.flatten()), _ranks(second.flatten())])
    if (ranks.var(1) == 0).any():
        return None
    return torch.corrcoef(ranks)[0, 1].item()


def _ranks(values: Tensor) -> Tensor:
    """How many of the values are below each one, equal ones counting half."""
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below.double() + equal.double() / 2


def top_overlap(first: Tensor, second: Tensor, count: int = 4) -> float | None:
    """The share of a layer's `count` strongest heads that two score tensors [layers, heads] have in common, on average.

    A layer where fewer heads scored at all has no such ranking, and is left out. None where no layer has one.
    """
    count = min(count, first.shape[1])
    ranked = ((first > 0).sum(1) >= count) & ((second > 0).sum(1) >= count)
    tops = zip(rank_heads(first[ranked]), rank_heads(second[ranked]))
    shared = [len({*a[:count]} & {*b[:count]}) / count for a, b in tops]
    return sum(shared) / len(shared) if shared else None


def stability(scores: Tensor, groups: Sequence[str], seed: int) -> dict:
    """How well the mean scores of two halves of the runs agree, from scores [runs, layers, heads].

    By chance alone the overlap would be 4 / heads, and the correlation 0. Empty with fewer than two runs.
    """
    if len(groups) < 2:
        return {}
    first, second = halves(groups, seed)
    means = scores[first].mean(0), scores[second].mean(0)
    return {
        "runs": [len(first), len(second)],
        "spearman": rank_correlation(*means),
        "top4_overlap": top_overlap(*means),
    }
