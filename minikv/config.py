"""What a checkpoint's config.json says about the model's shape, and what we refuse to run.

A config that asks for something this code does not compute (another activation, experts, an unknown
RoPE scaling) is refused by field and value: a model that runs wrong is worse than one that does not run.
"""

from __future__ import annotations

import sys
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
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """Frequency i is divided by factors[i], head_dim / 2 of them: what a GGUF's rope_freqs.weight holds."""

    factors: tuple[float, ...]


RopeScaling = Llama3Scaling | LinearScaling | FrequencyFactors


@dataclass(frozen=True)
class Config:
    """The shape of a grouped-query-attention Llama, Mistral or Qwen2: one architecture, with or without biases.

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
    rope_scaling: RopeScaling | None
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    sliding_window: int | None = None  # a query sees that many keys, its own among them

    @property
    def group(self) -> int:
        """Query heads per KV head, G in the paper."""
        return self.heads // self.kv_heads

    @property
    def context(self) -> int:
        """Tokens that can be run exactly: all positions, or as many as a sliding window hides nothing of."""
        return min(self.max_positions, self.sliding_window or self.max_positions)

    @staticmethod
    def from_dict(fields: dict, source: str = "config.json") -> Config:
        """Read the fields of a Hugging Face config.json; `source` names the file in errors.

        Raises InputError for a missing or contradictory field, or one that asks for what we do not compute.
        """
        _refuse_what_we_do_not_compute(fields, source)
        fields = COMMON_DEFAULTS | FAMILY_DEFAULTS[fields["model_type"]] | fields
        heads = _size(fields, "num_attention_heads", source)
        kv_heads = heads if fields["num_key_value_heads"] is None else _size(fields, "num_key_value_heads", source)
        if heads % kv_heads:
            found = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            raise InputError(f"{source}: {found}")
        hidden_size, layers = _size(fields, "hidden_size", source), _size(fields, "num_hidden_layers", source)
        rope_theta, rope_scaling = _rope(fields, source)
        llama_bias = fields["model_type"] == "llama" and bool(fields.get("attention_bias"))
        return Config(
            vocab_size=_size(fields, "vocab_size", source),
            hidden_size=hidden_size,
            intermediate_size=_size(fields, "intermediate_size", source),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(fields, hidden_size, heads, source),
            max_positions=_size(fields, "max_position_embeddings", source),
            norm_eps=_positive(fields, "rms_norm_eps", source),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_head=_flag(fields, "tie_word_embeddings", source),
            qkv_bias=llama_bias or fields["model_type"] == "qwen2",
            output_bias=llama_bias,
            sliding_window=_sliding_window(fields, layers, source),
        )


# What a field means that a config.json leaves out: the defaults of transformers' classes, a trap where they differ.
# The sizes of the weights have no default here: a config without them describes no model.
COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
FAMILY_DEFAULTS = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
}
DEFAULT_ROPE_THETA = 10000.0


def _refuse_what_we_do_not_compute(fields: dict, source: str) -> None:
    _accept(fields, "model_type", list(FAMILY_DEFAULTS), source)
    # Llama puts these biases on all four projections, Qwen2 has its own in any case, Mistral has none.
    biases = {"llama": [False, True, None], "mistral": [False, None], "qwen2": [True, None]}
    _accept(fields, "attention_bias", biases[fields["model_type"]], source)
    _accept(fields, "mlp_bias", [False, None], source)
    _accept(fields, "is_causal", [True, None], source)
    _accept(fields, "hidden_act", ["silu", None], source)
    _accept(fields, "num_local_experts", [0, None], source)
    _accept(fields, "num_experts", [0, None], source)
    _accept(fields, "quantization_config", [None], source)
    _accept(fields, "partial_rotary_factor", [1, None], source)


def _accept(fields: dict, name: str, values: list, source: str) -> None:
    """Refuse any other value of a field; None stands for a field that is null or not there."""
    value = fields.get(name)
    if value not in values:
        known = " or ".join(repr(value) for value in values if value is not None) or "no such field"
        raise InputError(f"{source}: {name} {_brief(value)} is not supported; accepted: {known}")


def _brief(value) -> str:
    """A value as an error shows it: in one line that is not endless."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _size(fields: dict, name: str, source: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise InputError(f"{source}: {name} is {_brief(value)}; a whole number above 0 is needed")
    return value


def _positive(fields: dict, name: str, source: str) -> float:
    value = fields.get(name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:  # neither NaN nor a whole number of 400 digits is
        raise InputError(f"{source}: {name} is {_brief(value)}; a number above 0 is needed")
    return float(value)


def _flag(fields: dict, name: str, source: str) -> bool:
    if not isinstance(fields[name], bool):
        raise InputError(f"{source}: {name} is {_brief(fields[name])}; accepted: true or false")
    return fields[name]


def _head_dim(fields: dict, hidden_size: int, heads: int, source: str) -> int:
    if fields.get("head_dim") is None and hidden_size % heads:
        raise InputError(f"{source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
    head_dim = hidden_size // heads if fields.get("head_dim") is None else _size(fields, "head_dim", source)
    if head_dim % 2:
        raise InputError(f"{source}: head_dim {head_dim} is odd; RoPE rotates pairs, so it must be even")
    return head_dim


def _sliding_window(fields: dict, layers: int, source: str) -> int | None:
    """How many keys a query sees where a layer, any layer, has a sliding window; None where none has."""
    kinds = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in known for kind in kinds)):
        raise InputError(f"{source}: layer_types is {_brief(kinds)}; accepted: a list of {' and '.join(known)}")
    if fields["model_type"] == "qwen2":  # the others have it in all layers
        if kinds is not None:
            slides = "sliding_attention" in kinds
        else:
            first = fields["max_window_layers"]
            if type(first) is not int:
                raise InputError(f"{source}: max_window_layers is {_brief(first)}; a whole number is needed")
            slides = _flag(fields, "use_sliding_window", source) and first < layers
        if not slides:
            return None
    return None if fields["sliding_window"] is None else _size(fields, "sliding_window", source)


def _rope(fields: dict, source: str) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling, from the old fields or from `rope_parameters` (transformers 5)."""
    blocks = {name: fields.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, block in blocks.items():
        if not isinstance(block, dict):
            raise InputError(f"{source}: {name} is {_brief(block)}; an object is needed")
        if any(isinstance(value, dict) for value in block.values()):
            raise InputError(f"{source}: {name} {_brief(block)} is not supported; accepted: one object for all layers")
        _accept(block, "partial_rotary_factor", [1, None], f"{source}: {name}")
    places = [place for place in (fields, *blocks.values()) if place.get("rope_theta") is not None]
    thetas = {_positive(place, "rope_theta", source) for place in places}
    if len(thetas) > 1:
        raise InputError(f"{source}: rope_theta is given twice, as {' and as '.join(map(str, sorted(thetas)))}")
    new, old = (_rope_scaling(block, source) for block in blocks.values())
    if all(blocks.values()) and new != old:
        raise InputError(f"{source}: rope_parameters and rope_scaling ask for two different things")
    scaling = new or old
    if isinstance(scaling, Llama3Scaling):  # transformers takes this one where there are two
        _accept(fields, "original_max_position_embeddings", [scaling.original_max_positions, None], source)
    return thetas.pop() if thetas else DEFAULT_ROPE_THETA, scaling


def _rope_scaling(block: dict, source: str) -> RopeScaling | None:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(block, "factor", f"{source}: RoPE scaling 'linear'"))
    if kind != "llama3":
        accepted = "'default', 'linear' or 'llama3'"
        raise InputError(f"{source}: RoPE scaling {_brief(kind)} is not supported; accepted: {accepted}")
    source = f"{source}: RoPE scaling 'llama3'"
    factors = [_positive(block, name, source) for name in ("factor", "low_freq_factor", "high_freq_factor")]
    scaling = Llama3Scaling(*factors, _size(block, "original_max_position_embeddings", source))
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise InputError(f"{source}: low_freq_factor is {low} and high_freq_factor {high}; it has to be the larger")
    return scaling
