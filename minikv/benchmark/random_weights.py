"""Models of known shapes with random weights: time and memory do not depend on what the weights are."""

from __future__ import annotations

import torch

from minikv.benchmark import roofline
from minikv.config import Config
from minikv.errors import InputError
from minikv.model import Llama
from minikv.srh import Profile

# The fields of config.json, from the smallest to the largest
SHAPES: dict[str, dict] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}


def fields_of(shape: str, tokens: int) -> dict:
    """The config.json of a shape, with room for `tokens` positions: random weights know no last position."""
    fields = {"model_type": "llama", "rms_norm_eps": 1e-5, **SHAPES[shape]}
    return fields | {"max_position_embeddings": max(tokens, fields["max_position_embeddings"])}


def random_model(config: Config, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model with weights drawn from a normal distribution as narrow as trained ones, made where it runs."""
    with torch.device("meta"):
        model = Llama(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1)
        else:
            weight.normal_(0, 0.02, generator=generator)
    return model


def even_profile(config: Config) -> Profile:
    """A profile that prefers no layer and ranks the heads by number: random weights have no retrieval heads."""
    ranks = [list(range(config.heads)) for _ in range(config.layers)]
    scores = [[float(config.heads - head) for head in row] for row in ranks]
    return Profile(ranks, [1 / config.layers] * config.layers, scores, scores)


def working_bytes(config: Config, length: int, element_bytes: int) -> int:
    """What a prefill of `length` tokens holds at once beside weights and cache, at its widest point.

    That is the MLP of a program that runs the whole prompt through it at once, as the peers do (ours, a part at a time,
    needs less): hidden states of its two sides and three of its middle, and the float32 rotary tables.
    """
    tables = 2 * config.head_dim * 4
    return length * ((3 * config.intermediate_size + 3 * config.hidden_size) * element_bytes + tables)


def needed(config: Config, length: int, dtypes: list[str]) -> dict[str, int]:
    """Bytes of the weights of all participants, one for each of `dtypes`, and of the largest one's cache and work."""
    sizes = [roofline.ELEMENT_BYTES[dtype] for dtype in dtypes]
    return {
        "weights": roofline.all_weights(config) * sum(sizes),
        "full cache": length * config.layers * roofline.entry_bytes(config, max(sizes)),
        "working memory": working_bytes(config, length, max(sizes)),
    }


def check_fit(shape: str, length: int, dtypes: list[str], free: int | None) -> None:
    """InputError with the arithmetic where a shape needs more than `free` bytes; it names the largest that does not."""

    def of(name: str) -> dict[str, int]:
        return needed(Config.from_dict(fields_of(name, length)), length, dtypes)

    parts = of(shape)
    if free is None or sum(parts.values()) <= free:
        return
    sums = " + ".join(f"{name} {value / 1e9:.1f} GB" for name, value in parts.items())
    fitting = [name for name in SHAPES if sum(of(name).values()) <= free]
    hint = f"the largest listed shape that fits is {fitting[-1]}" if fitting else "none of the listed shapes fits"
    at = f"{length} tokens in {', '.join(dtypes)}"
    total = sum(parts.values()) / 1e9
    raise InputError(
        f"--random-weights {shape} at {at} needs {sums} = {total:.1f} GB; {free / 1e9:.1f} GB are free; {hint}"
    )
