"""The three functions that a Llama spends its time in: a linear, prefill attention and decode attention.

Each has a plain form, which is its definition, and faster ones with the measured reason beside them. Which of them is
faster differs from processor to processor, so `choose` times them once when a model is loaded; forms differ in
rounding only. The figures beside them were timed once, each form alone: SmolLM2-135M's shapes, 30 layers, 8,000 tokens,
two cores of one Xeon with AVX-512 (MKL, oneDNN 3.12). They say why a form is here, not what another machine will show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

MANY_ROWS = 64  # from here on a linear is a matrix product, and its time is arithmetic rather than reading weights
CLEARLY_FASTER = 0.87  # a form is taken for 13 % less time; a smaller gain could be noise, and change from run to run
ATTENTION_ROWS = 128  # query rows of each head at a time: with 8,000 keys and a group of three, 12 MB of float32 scores
MEASURED_TOKENS = 1024  # of the prefill attention that `choose` times
MEASURED_BYTES = 1 << 27  # of weights that `choose` packs to time them: more than a processor's cache, little memory


@dataclass(frozen=True)
class Kernels:
    """Which forms a model uses. Without any, everything is plain."""

    packed: bool = False  # weights lie as oneDNN likes to read them: see `pack`
    widened: bool = False  # linears of many rows are computed in float32: see `widened_linear`
    attend_prompt: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # for prompts that start at position 0
    fast: bool = False  # attention over what was kept, of one token or several

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] times weight [out, in], plus bias [out]: [..., out] in the dtype of x."""
        if torch.compiler.is_compiling() and x.shape[-2] == 1:
            return linear_by_sums(x, weight, bias)
        if self.widened and x.numel() >= MANY_ROWS * x.shape[-1]:
            return widened_linear(x, weight, bias)
        if weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As the function `attend`, by the form for so many queries and keys."""
        new, total = queries.shape[2], keys.shape[2]
        if self.fast and new == 1:
            half_compiled = torch.compiler.is_compiling() and queries.dtype != torch.float32
            return (attend_by_sums if half_compiled else attend_grouped)(queries, keys, values)
        if self.fast and new < total:
            return attend_by_rows(queries, keys, values)
        return (self.attend_prompt or attend)(queries, keys, values)


PLAIN = Kernels()


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Grouped-query attention of new tokens over everything kept before them and, causally, over themselves.

    queries [batch, heads, new, dim]; keys and values [batch, kv_heads, kept + new, dim], the new tokens last.
    Returns one output per query head [batch, heads, new, dim], in the dtype of the queries.
    """
    new, total = queries.shape[2], keys.shape[2]
    # torch's is_causal lines the two up at their first entries, so it is right only when nothing was kept before.
    causal, mask = new > 1 and new == total, None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=queries.device).tril(total - new)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)


def attend_grouped(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`attend` for one new token: it sees every key, so the heads of a group can be the rows of one head.

    Each key and value is then read once, not once a query head: 27 instead of 40 ms a token in float32, though 18
    instead of 16 ms in bfloat16.
    """
    rows = rearrange(queries, "batch (kv_heads group) 1 dim -> batch kv_heads group dim", kv_heads=keys.shape[1])
    heads = F.scaled_dot_product_attention(rows, keys, values)
    return rearrange(heads, "batch kv_heads group dim -> batch (kv_heads group) 1 dim")


def attend_by_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`attend`, some query rows of one group at a time, so that no row's scores beyond its last key are computed.

    One buffer of scores serves all of them, and no mask is made where tokens were kept before. A whole prompt took 13 s
    in float32 where SDPA took 10, so there it is only taken where `choose` finds it faster.
    """
    (batch, heads, new, dim), (_, kv_heads, total, _) = queries.shape, keys.shape
    group, kept = heads // kv_heads, total - new
    scaled = rearrange(queries * dim**-0.5, "batch (kv_heads group) new dim -> batch kv_heads group new dim", group=group)
    output = torch.empty_like(scaled)
    buffer = queries.new_empty(group * min(ATTENTION_ROWS, new) * total)
    later = torch.ones(ATTENTION_ROWS, ATTENTION_ROWS, dtype=torch.bool, device=queries.device).triu(1)
    for prompt in range(batch):
        for kv_head in range(kv_heads):
            for start in range(0, new, ATTENTION_ROWS):
                rows = min(ATTENTION_ROWS, new - start)
                seen = kept + start + rows  # keys that the last of these rows sees
                part = scaled[prompt, kv_head, :, start : start + rows].reshape(group * rows, dim)
                scores = buffer[: group * rows * seen].view(group * rows, seen)
                torch.mm(part, keys[prompt, kv_head, :seen].T, out=scores)
                scores.view(group, rows, seen)[..., seen - rows :].masked_fill_(later[:rows, :rows], float("-inf"))
                torch.softmax(scores, -1, out=scores)
                mixed = torch.mm(scores, values[prompt, kv_head, :seen])
                output[prompt, kv_head, :, start : start + rows] = mixed.view(group, rows, dim)
    return output.flatten(1, 2)


def linear_by_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear of one row, written so that torch.compile reads each weight once and adds up in float32 as it goes.

    Only for compiled code (Llama.compile_decoding): otherwise all products would lie in memory first. With 256 entries
    kept a compiled step takes 24 instead of 50 ms in float32 on two cores of an EPYC, 16 instead of 33 in bfloat16.
    """
    sums = (x.float().unsqueeze(-2) * weight.float()).sum(-1)
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def attend_by_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`attend` for one new token, as products and float32 sums for torch.compile, which makes loops without copies of them.

    In bfloat16 a step over 8,000 entries takes 48 instead of 74 ms with `attend_grouped` on that EPYC; in float32 that one
    is faster, 69 against 75.
    """
    rows = rearrange(queries, "batch (kv_heads group) 1 dim -> batch kv_heads group 1 dim", kv_heads=keys.shape[1]).float()
    keys, values = (rearrange(held, "batch kv_heads kept dim -> batch kv_heads 1 kept dim").float() for held in (keys, values))
    weights = ((rows * rows.shape[-1] ** -0.5) * keys).sum(-1, keepdim=True).softmax(-2)  # [batch, kv_heads, group, kept, 1]
    return (weights * values).sum(-2, keepdim=True).flatten(1, 2).to(queries.dtype)


def widened(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """That form of attention, computed in float32 for inputs of less: here 10 s instead of 17 in bfloat16."""

    def attend_in_float32(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attention(queries.float(), keys.float(), values.float()).to(queries.dtype)

    return attend_in_float32


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear of bfloat16 weights in float32 products: 330 Gflop/s here, where bfloat16 ones have 170."""
    weight = dense(weight).float()
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's own order, which only `linear` and `dense` understand.

    One row times all weights of the layers takes 14 instead of 19 ms in bfloat16 here; in float32 MKL reads plain
    weights faster (15 against 25 ms). The operators are private to torch, so `choose` tries them first.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)


def dense(weight: Tensor) -> Tensor:
    """The weight [out, in] as a plain tensor, whether it was packed or not."""
    return weight.to_dense() if weight.is_mkldnn else weight


def choose(weights: list[Tensor], heads: int, kv_heads: int, head_dim: int, pack_weights: bool = True) -> Kernels:
    """The fastest forms here, for linears with `weights` [out, in] of one shape: one of every layer, or of a few.

    It takes a third of a second. Only the CPU is known: on other devices all is plain, which is torch's own choice.
    Without `pack_weights` they stay as they are, which torch.compile needs.
    """
    weight = weights[0]
    if weight.device.type != "cpu":
        return PLAIN
    half = weight.dtype != torch.float32
    rows = torch.ones(4 * MANY_ROWS, weight.shape[1], dtype=weight.dtype)
    widen = half and _seconds(lambda: widened_linear(rows, weight, None)) < CLEARLY_FASTER * _seconds(
        lambda: F.linear(rows, weight)
    )
    queries, keys = (torch.randn(1, count, MEASURED_TOKENS, head_dim).to(weight.dtype) for count in (heads, kv_heads))
    forms = [attend, attend_by_rows]
    forms += [widened(form) for form in forms] if half else []
    seconds = [_seconds(lambda form=form: form(queries, keys, keys)) for form in forms]
    seconds[0] *= CLEARLY_FASTER
    return Kernels(pack_weights and _packing_pays(weights), widen, forms[seconds.index(min(seconds))], fast=True)


def _packing_pays(weights: list[Tensor]) -> bool:
    """Whether one row times packed weights is faster. All are read in turn, since a single one would stay in the cache."""
    weights = weights[: max(1, MEASURED_BYTES // weights[0].nbytes)]
    row = torch.ones(1, weights[0].shape[1], dtype=weights[0].dtype)
    try:
        packed = [pack(weight) for weight in weights]
        fast = _seconds(lambda: [PLAIN.linear(row, weight, None) for weight in packed])
    except (AttributeError, RuntimeError):  # NotImplementedError, too: this torch has no such operator for these weights
        return False
    return fast < CLEARLY_FASTER * _seconds(lambda: [F.linear(row, weight) for weight in weights])


@torch.no_grad()
def _seconds(work: Callable[[], object], tries: int = 3) -> float:
    """The shortest of a few runs, after one that does not count."""
    times = []
    for _ in range(1 + tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
