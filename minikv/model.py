"""A grouped-query-attention Llama in plain PyTorch: RMSNorm, RoPE, attention, SwiGLU.

Parameter names are those of Hugging Face checkpoints, so a state dict loads as it is. Attention is three
steps that can each be called alone: `project` (hidden states to rotated queries, keys and values),
`attend` (to one output per query head) and `output` (the projection back). Everything that looks inside
a layer, such as compression, head scores or layer errors, calls these steps itself; nothing is hooked.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from minikv import kernels
from minikv.cache import KVCache, LayerCache
from minikv.config import Config, FrequencyFactors, LinearScaling, RopeScaling
from minikv.errors import InputError
from minikv.kernels import PLAIN, Kernels

ROWS = 1024  # tokens that a layer projects, and computes the MLP of, at a time


class RMSNorm(nn.Module):
    """Scale vectors [..., size] to a mean square of 1, then each dimension by its weight; in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size]
        x32 = x.float()  # the mean of squares overflows in float16 and loses digits in bfloat16
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        # nn.Embedding draws from a normal distribution, which on the meta device, where models are built that are
        # then loaded, imports torch's compiler: one to five seconds at every start.
        nn.init.uniform_(self.weight, -1, 1)


@lru_cache(maxsize=8)
def _rope_frequencies(config: Config, device: torch.device) -> Tensor:  # [head_dim / 2] float32
    """Angle in radians by which each pair of a head's dimensions turns from one position to the next."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return _scale(frequencies, config.rope_scaling).to(device)


def _scale(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:  # [head_dim / 2]
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        return frequencies / torch.tensor(scaling.factors)
    # Llama 3.1: a pair that turns more than high_freq_factor times within the original context is kept, one
    # that turns less than low_freq_factor times is slowed by `factor`, and between them is a linear blend.
    turns = scaling.original_max_positions / (2 * math.pi / frequencies)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rope_tables(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq, head_dim] of the rotary embedding at integer `positions` [seq].

    Always float32: bfloat16 cannot tell position 8190 from 8191.
    """
    angles = torch.outer(positions.float(), _rope_frequencies(config, positions.device))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys x [batch, heads, seq, head_dim], by tables of their dtype [seq, head_dim] (Llama.rope).

    Dimension i is paired with i + head_dim / 2.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Linear(nn.Linear):
    """A linear by whichever kernel the model was given; its weight may be packed (kernels.pack)."""

    kernels = PLAIN

    def forward(self, x: Tensor) -> Tensor:  # [..., in] to [..., out]
        return self.kernels.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = kernels.dense(destination[prefix + "weight"])  # as checkpoints and hashes have it


class Attention(nn.Module):
    """The projections, and between them `attend`, which takes whatever keys and values a cache has kept."""

    kernels = PLAIN

    def __init__(self, config: Config):
        super().__init__()
        query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, seq, hidden] to queries [batch, heads, seq, dim] and keys, values [batch, kv_heads, seq, dim].

        Queries and keys come rotated to their positions.
        """

        def split(flat: Tensor) -> Tensor:
            return rearrange(flat, "batch seq (heads dim) -> batch heads seq dim", dim=self.head_dim)

        queries, keys, values = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        return rotate(queries, *rope), rotate(keys, *rope), values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One output per query head [batch, heads, new, dim]: see kernels.attend, the definition."""
        return self.kernels.attend(queries, keys, values)

    def output(self, heads: Tensor) -> Tensor:
        """One output per head [batch, heads, seq, dim] to hidden states [batch, seq, hidden]."""
        return self.o_proj(rearrange(heads, "batch heads seq dim -> batch seq (heads dim)"))


class SwiGLU(nn.Module):
    """The MLP of a layer: one projection gates another. Hidden states in and out."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, hidden]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer. `project`, then `attend` on whatever keys and values were kept, then `output`."""

    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states x [batch, seq, hidden] to this layer's queries, keys, values (see Attention.project).

        Of a long prompt some rows at a time, as in `output`: norm and rotation make copies of all that they see.
        """
        if x.shape[1] <= ROWS:
            return self.self_attn.project(self.input_layernorm(x), rope)
        parts = zip(x.split(ROWS, 1), *(table.split(ROWS) for table in rope), strict=True)
        projected = [self.self_attn.project(self.input_layernorm(part), (cos, sin)) for part, cos, sin in parts]
        return tuple(torch.cat(rows, 2) for rows in zip(*projected))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One output per query head, from this layer's queries and what was kept (see Attention.attend)."""
        return self.self_attn.attend(queries, keys, values)

    def output(self, x: Tensor, heads: Tensor) -> Tensor:
        """Add the attention's output [batch, heads, seq, dim] and the MLP's to the residual stream x [batch, seq, hidden].

        Of a long prompt some rows at a time, so that the MLP's hidden values, wider than x, never exist whole.
        """
        if x.shape[1] <= ROWS:
            return self._output(x, heads)
        result = torch.empty_like(x)
        for start in range(0, x.shape[1], ROWS):
            rows = slice(start, start + ROWS)
            result[:, rows] = self._output(x[:, rows], heads[:, :, rows])
        return result

    def _output(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.self_attn.output(heads)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        """Hidden states x [batch, new, hidden] of the next tokens, through this layer; `cache` is given their entries."""
        queries, keys, values = self.project(x, rope)
        keys, values = cache.append(keys, values)
        return self.output(x, self.attend(queries, keys, values))


class Decoder(nn.Module):
    """The part of the model that checkpoints call `model`: embeddings, blocks, final norm."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Llama(nn.Module):
    """The whole model: token ids to logits, with or without a cache. Its parts can be called one by one."""

    kernels = PLAIN
    _compiled = None  # what single tokens go through instead of Block.forward and logits: see compile_decoding

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied_head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def use(self, chosen: Kernels) -> None:
        """Compute with these kernels from now on, on packed weights if that is one of them."""
        for module in self.modules():
            if isinstance(module, (Linear, Attention, Llama)):
                module.kernels = chosen
            if isinstance(module, Linear) and chosen.packed:
                module.weight = nn.Parameter(kernels.pack(module.weight), requires_grad=False)

    def use_fastest_kernels(self, compiled: bool = False) -> None:
        """Time the kernels on this model's shapes and use the fastest, for single tokens `compiled` ones."""
        gates = [block.mlp.gate_proj.weight for block in self.blocks]
        shape = self.config.heads, self.config.kv_heads, self.config.head_dim
        self.use(kernels.choose(gates, *shape, pack_weights=not compiled))
        if compiled:
            self.compile_decoding()

    @torch.no_grad()
    def compile_decoding(self) -> None:
        """From now on single tokens go through a layer, and the head, that torch.compile has fused into a few loops.

        One compiled layer serves all layers and lengths (but torch may make a second one where many more entries are
        kept). It is made at once, in some seconds, with a token that is forgotten. Needs weights that are not packed
        and, on the CPU, a C++ compiler; InputError without.
        """
        self._compiled = torch.compile(Block.forward, dynamic=True), torch.compile(Llama.logits, dynamic=True)
        cache, token = self.new_cache(1, 8), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self(token.expand(1, 4), cache)  # lengths of 0 and 1 would get code of their own
            self(token, cache)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"torch.compile failed here; it needs a C++ compiler such as g++: {reason}") from error

    def new_layer_cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty cache of one layer with room for `capacity` entries."""
        return LayerCache(batch, self.config.kv_heads, self.config.head_dim, capacity, self.dtype, self.device)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache with room for `capacity` entries in each layer."""
        return KVCache([self.new_layer_cache(batch, capacity) for _ in range(self.config.layers)])

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, seq] to hidden states [batch, seq, hidden]."""
        return self.model.embed_tokens(tokens)

    def rope(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Rotary tables, cosines and sines [count, head_dim], for the positions start ... start + count - 1."""
        cos, sin = rope_tables(self.config, torch.arange(start, start + count, device=self.device))
        return cos.to(self.dtype), sin.to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Last hidden states [batch, seq, hidden] to logits [batch, seq, vocab]."""
        x = self.model.norm(x)
        return self.kernels.linear(x, self.model.embed_tokens.weight, None) if self.config.tied_head else self.lm_head(x)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of token ids [batch, seq]; with a cache the tokens are appended to it."""
        if cache is None:
            cache = self.new_cache(tokens.shape[0], tokens.shape[1])
        x = self.embed(tokens)
        rope = self.rope(cache.length, tokens.shape[1])
        compiled = self._compiled if tokens.shape[1] == 1 else None
        through_layer, logits = compiled or (Block.forward, Llama.logits)
        for layer, block in enumerate(self.blocks):
            x = through_layer(block, x, rope, cache[layer])
        return logits(self, x)
