"""From a prompt to an answer: a prefill as a value, compression as a function of it, decoding.

`prefill` runs the prompt once and returns everything that any method needs; `compress` applies a policy to it and
leaves it as it was, so one prefill serves every method and budget. `prefill_layer_by_layer` is the form for plain
generation: each layer is cut to its budget as soon as it is done, so that only one full layer ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import scores
from minikv.budget import PromptShape
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.model import Llama
from minikv.policy_base import Policy


@dataclass(frozen=True)
class Prefill:
    """What the prompt left behind. A policy is a pure function of it."""

    logits: Tensor  # [batch, vocab], of the last prompt token: they give the first answer token
    cache: KVCache  # full
    queries: list[Tensor]  # of each layer [batch, heads, window, dim], the last `window` prompt tokens, rotated
    window: int
    column_sums: list[Tensor] | None = None  # of each layer [batch, kv_heads, seq]: see scores.column_sums

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.cache)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.cache.length

    @property
    def entry_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer, for each prompt of the batch."""
        return self.cache[0].entry_bytes

    def last_queries(self, layer: int, window: int) -> Tensor:
        """The rotated queries [batch, heads, window, dim] of the last prompt tokens; InputError if it kept fewer."""
        if window > self.window:
            raise InputError(f"the policy's window of {window} exceeds the {self.window} queries that the prefill kept")
        return _last(self.queries[layer], window)


def check_prompt(model: Llama, tokens: Tensor, new_tokens: int = 0) -> None:
    """InputError, before any long work, for a prompt that is empty or does not fit the model's context with its answer.

    tokens [batch, seq] are its ids, new_tokens how many the answer may have.
    """
    if tokens.ndim != 2:
        raise InputError(f"tokens have the shape {list(tokens.shape)}; [batch, seq] is needed, all of one length")
    length = tokens.shape[1]
    if length == 0:
        raise InputError("the prompt is empty; at least one token is needed")
    limit = model.config.context
    if length + new_tokens > limit:
        name = "context" if limit == model.config.max_positions else "sliding window"
        answer = f" and {new_tokens} new tokens" if new_tokens else ""
        raise InputError(f"the prompt's {length} tokens{answer} exceed the model's {name} of {limit}")


@torch.no_grad()
def prefill(
    model: Llama, tokens: Tensor, window: int = 8, chunk: int | None = None, column_sums: bool = False
) -> Prefill:
    """Run the prompt, token ids [batch, seq], through the model with its full cache.

    Keeps the rotated queries of the last `window` tokens of each layer for the policies, and with `column_sums` what
    all queries attended to (H2O). With `chunk` the prompt is run that many tokens at a time, with the same result.
    Raises InputError when the prompt is empty or too long.
    """
    check_prompt(model, tokens)
    batch, length = tokens.shape
    cache, queries = model.new_cache(batch, length), None
    sums = [torch.zeros(batch, model.config.kv_heads, 0, device=model.device) for _ in cache.layers] if column_sums else None
    for part in tokens.split(chunk or length, dim=1):
        result = extend(model, cache, part, window, queries, sums)
        queries, sums = result.queries, result.column_sums
    return result


@torch.no_grad()
def extend(
    model: Llama,
    cache: KVCache,
    tokens: Tensor,
    window: int,
    queries: list[Tensor] | None = None,
    column_sums: list[Tensor] | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Prefill:
    """The prefill of what the full `cache` holds and of the tokens [batch, new] after it, which are appended in place.

    Keeps the last `window` of the given queries and the new ones. `column_sums`, of each layer [batch, kv_heads, seq],
    are those of exactly the tokens in the cache; the result has them grown, the given ones stay. `progress` wraps the
    sequence of layers, for a progress bar.
    """
    start, recent, grown = cache.length, [], []
    x = model.embed(tokens)
    rope = model.rope(start, tokens.shape[1])
    for layer, block in enumerate(progress(model.blocks)):
        latest, keys, values = block.project(x, rope)
        keys, values = cache[layer].append(keys, values)
        recent.append(_last(latest, window))
        if queries is not None:
            recent[layer] = _last(torch.cat([queries[layer], recent[layer]], 2), window)
        if column_sums is not None:
            grown.append(scores.column_sums(latest, keys))
            grown[layer][..., :start] += column_sums[layer]
        x = block.output(x, block.attend(latest, keys, values))
    return Prefill(model.logits(x[:, -1:])[:, 0], cache, recent, window, grown or None)


def _last(queries: Tensor, window: int) -> Tensor:
    """The last `window` rows of queries [batch, heads, seq, dim], as a copy that does not hold the others."""
    return queries[:, :, max(queries.shape[2] - window, 0) :].clone()


def compress(prefill: Prefill, policy: Policy, reserve: int = 256) -> KVCache:
    """The cache that `policy` keeps of a prefill, with room for `reserve` new tokens (it grows past them).

    The prefill stays as it was. Raises InputError when the policy needs what the prefill did not keep, such as a
    wider window.
    """
    chosen = zip(prefill.cache.layers, policy.choose(prefill), strict=True)
    return KVCache([cache.keep(positions, reserve) for cache, positions in chosen])


@torch.no_grad()
def prefill_for(model: Llama, tokens: Tensor, policies: list[Policy]) -> Prefill:
    """A prefill of tokens [batch, seq] that holds all that the policies look at, such as the widest of their windows.

    The last query, which gives the first answer token, is there whatever they look at.
    """
    window = max(policy.window or 1 for policy in policies)
    return prefill(model, tokens, window, column_sums=any(policy.window is None for policy in policies))


@torch.no_grad()
def prefill_layer_by_layer(
    model: Llama,
    tokens: Tensor,
    policy: Policy,
    reserve: int = 256,
    progress: Callable[[Iterable], Iterable] = iter,
) -> tuple[Tensor, KVCache]:
    """Logits [batch, vocab] of the last prompt token and the compressed cache, with one full layer alive at a time.

    The result is that of `compress(prefill_for(model, tokens, [policy]), policy)`, and it is made that way for a
    policy that needs all layers at once. `progress` wraps the sequence of layers, for a progress bar.
    """
    check_prompt(model, tokens)
    if policy.needs_all_layers:
        result = prefill_for(model, tokens, [policy])
        return result.logits, compress(result, policy, reserve)
    batch, length = tokens.shape
    window = length if policy.window is None else policy.window
    full = model.new_layer_cache(batch, length)  # serves each layer in turn
    choose_layer = policy.selection(PromptShape(model.config.layers, length, full.entry_bytes))
    x = model.embed(tokens)
    rope = model.rope(0, length)
    layers = []
    for layer, block in enumerate(progress(model.blocks)):
        full.clear()
        queries, keys, values = block.project(x, rope)
        keys, values = full.append(keys, values)
        x = block.output(x, block.attend(queries, keys, values))
        layers.append(full.keep(choose_layer(layer, _last(queries, window), keys), reserve))
    return model.logits(x[:, -1:])[:, 0], KVCache(layers)


def pick(logits: Tensor, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """The next token [batch] from logits [batch, vocab]: the most likely one, or a sample when temperature > 0.

    With top_p < 1 only the most likely tokens that together reach that probability are drawn from.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # so that a tiny temperature leaves the best at 0, not at infinity
    probabilities, ids = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # the first token is always among the candidates
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


@torch.no_grad()
def decode(
    model: Llama,
    cache: KVCache,
    logits: Tensor,
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    picker: Callable[[Tensor], Tensor] = pick,
) -> Iterator[Tensor]:
    """Yield the answer's tokens [batch] one by one, appending to `cache` each token that is fed back.

    `logits` [batch, vocab] are those of the last prompt token. Ends after max_new_tokens, or when every row has met a
    stop id; that id is not yielded for a single prompt, and fills up the finished rows of a batch.
    """
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=logits.device)
    token = picker(logits)
    for step in range(max_new_tokens):
        stopped = torch.isin(token, stops)
        if stop_ids and stopped.all():  # reading this waits for the device, so it is not read in vain
            return
        yield token
        if step + 1 < max_new_tokens:
            following = picker(model(token[:, None], cache)[:, -1])
            token = torch.where(stopped, token, following)
