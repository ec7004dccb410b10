"""What a checkpoint's config.json says about the model's shape, and what we refuse to run.

A config that asks for something this code does not compute (another activation, biases, an unknown
RoPE scaling) is refused by field and value: a model that runs wrong is worse than one that does not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minikv.errors import InputError


@dataclass(frozen=True)
class Llama3Scaling:
    """The RoPE scaling of Llama 3.1: low frequencies are slowed by `factor`, high ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Config:
    """The shape of a grouped-query-attention Llama.

    `heads` are query heads; each of the `kv_heads` KV heads serves `heads // kv_heads` of them, query
    heads h * group ... (h + 1) * group - 1 being those of KV head h.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_head: bool

    @property
    def group(self) -> int:
        """Query heads per KV head, G in the paper."""
        return self.heads // self.kv_heads

    @staticmethod
    def from_dict(fields: dict, source: str = "config.json") -> Config:
        """Read the fields of a Hugging Face config.json; `source` names the file in errors.

        Raises InputError for a missing or contradictory field, or one that asks for what we do not compute.
        """
        _refuse_what_we_do_not_compute(fields, source)

        def size(name: str, default: int | None = None) -> int:
            value = fields.get(name)
            value = default if value is None else value
            if type(value) is not int or not 0 < value < 2**31:
                raise InputError(f"{source}: {name} is {value!r}; a whole number above 0 is needed")
            return value

        heads = size("num_attention_heads")
        kv_heads = size("num_key_value_heads", heads)
        hidden_size = size("hidden_size")
        if heads % kv_heads:
            raise InputError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if fields.get("head_dim") is None and hidden_size % heads:
            raise InputError(f"{source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
        head_dim = size("head_dim", hidden_size // heads)
        if head_dim % 2:
            raise InputError(f"{source}: head_dim {head_dim} is odd; RoPE rotates pairs, so it must be even")
        tied = fields.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise InputError(f"{source}: tie_word_embeddings is {tied!r}; accepted: true or false")
        rope_theta, rope_scaling = _rope(fields, source)
        return Config(
            vocab_size=size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=size("max_position_embeddings", 2048),
            norm_eps=_positive("rms_norm_eps", fields.get("rms_norm_eps", 1e-6), source),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_head=tied,
        )


def _refuse_what_we_do_not_compute(fields: dict, source: str) -> None:
    accepted = {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }
    for name, values in accepted.items():
        if fields.get(name) not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            raise InputError(f"{source}: {name} {fields.get(name)!r} is not supported; accepted: {known}")


def _positive(name: str, value, source: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # NaN is not
        raise InputError(f"{source}: {name} is {value!r}; a number above 0 is needed")
    return float(value)


def _rope(fields: dict, source: str) -> tuple[float, Llama3Scaling | None]:
    """The rotary base and scaling, from the old fields or from `rope_parameters` (transformers 5)."""
    new, old = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict):
            raise InputError(f"{source}: {name} is {value!r}; an object is needed")
    thetas = {_positive("rope_theta", value, source) for value in (new.get("rope_theta"), fields.get("rope_theta")) if value is not None}
    if len(thetas) > 1:
        raise InputError(f"{source}: rope_theta is given twice, as {' and as '.join(map(str, sorted(thetas)))}")
    theta = thetas.pop() if thetas else 10000.0
    scaling = new or old
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise InputError(f"{source}: RoPE scaling {kind!r} is not supported; accepted: 'default' or 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if not isinstance(scaling.get(name), (int, float))]
    if missing:
        raise InputError(f"{source}: RoPE scaling 'llama3' lacks {', '.join(missing)}")
    values = [scaling[name] for name in names]
    if not all(math.isfinite(value) and value > 0 for value in values) or values[1] >= values[2]:
        raise InputError(f"{source}: RoPE scaling 'llama3' has the impossible values {dict(zip(names, values))}")
    return theta, Llama3Scaling(*values)
