"""A Llama or Qwen 2 in a GGUF file (llama.cpp's format): as a model, or written out as a Hugging Face folder.

What differs in a GGUF: names, blocks of quantized numbers, and for the architecture llama (Mistral's files have it,
too) the order of query and key rows. Hugging Face rotates dimension i of a head together with i + dim / 2; llama.cpp
rotates neighbours, so its converter interleaves the two halves of each head, and that is undone here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor

from minikv.assemble import StoredTensor, assemble
from minikv.config import Config, FrequencyFactors
from minikv.errors import InputError
from minikv.gguf_file import GGUFFile, can_dequantize
from minikv.gguf_vocabulary import model_token_ids, open_tokenizer, read_tokens, write_settings, write_tokenizer
from minikv.model import Llama
from minikv.tokenizer import Tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What changes the computation in a way that we do not compute, unless it has this value.
NEUTRAL = {
    "expert_count": 0,
    "attention.causal": True,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
}


def load_gguf(file: Path, device: torch.device, dtype: torch.dtype) -> tuple[Llama, Tokenizer]:
    """The model in the GGUF `file`, its weights dequantized to `dtype` on `device`, and its tokenizer.

    Raises InputError, naming the file and the field or tensor, where it is damaged or not supported.
    """
    gguf = GGUFFile(file)
    config, tokenizer = model_config(gguf), open_tokenizer(gguf)
    return assemble(config, stored_tensors(gguf, config), device, dtype, gguf.source), tokenizer


def convert(file: Path, folder: Path) -> None:
    """Write the model in the GGUF `file` into the existing `folder`, weights in float16.

    Raises InputError as load_gguf does, and where a folder's config.json cannot say what the file says.
    """
    gguf = GGUFFile(file)
    fields, config = read_config(gguf), model_config(gguf)
    if config != Config.from_dict(fields):
        raise InputError(
            f"{file}: {ROPE_FACTORS}, biases or a sliding window are not written to folders; load the file"
        )
    write_tokenizer(gguf, folder)
    model = assemble(config, stored_tensors(gguf, config), torch.device("cpu"), torch.float16, gguf.source)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors would let only its owner read it
    write_settings(folder / "config.json", fields)


def model_config(gguf: GGUFFile) -> Config:
    """The shape of the model in the file, with what a config.json cannot say."""
    config = Config.from_dict(read_config(gguf), gguf.source)
    config = replace(
        config,
        qkv_bias=config.qkv_bias or "blk.0.attn_q.bias" in gguf.tensors,
        output_bias="blk.0.attn_output.bias" in gguf.tensors,
        sliding_window=gguf.value(f"{_architecture(gguf)}.attention.sliding_window", int) or None,
    )
    if ROPE_FACTORS not in gguf.tensors:
        return config
    if config.rope_scaling is not None:
        raise InputError(f"{gguf.source}: {ROPE_FACTORS} and rope.scaling exclude each other")
    _check_stored(gguf, ROPE_FACTORS)
    factors, pairs = gguf.tensor(ROPE_FACTORS), config.head_dim // 2
    if factors.shape != (pairs,) or not (factors.isfinite() & (factors > 0)).all():
        raise InputError(f"{gguf.source}: {ROPE_FACTORS} must be {pairs} numbers above 0, half the size of a head")
    return replace(config, rope_scaling=FrequencyFactors(tuple(factors.tolist())))


def read_config(gguf: GGUFFile) -> dict:
    """The fields of a Hugging Face config.json."""
    architecture = _architecture(gguf)
    for name, neutral in NEUTRAL.items():
        value = gguf.value(f"{architecture}.{name}", type(neutral), neutral)
        if value != neutral:
            raise InputError(f"{gguf.source}: {architecture}.{name} {value} is not supported; accepted: {neutral}")

    def size(name: str, default: int | None = None) -> int:
        value = gguf.value(f"{architecture}.{name}", int, default)
        if value is None or value <= 0:
            raise InputError(f"{gguf.source}: {architecture}.{name} is {value!r}; a whole number above 0 is needed")
        return value

    heads, hidden_size, vocab_size = size("attention.head_count"), size("embedding_length"), len(read_tokens(gguf))
    head_dim = size("attention.key_length", hidden_size // heads)
    blocks = len({name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")})
    for name, other, what in (
        ("rope.dimension_count", head_dim, "the size of a head"),
        ("attention.value_length", head_dim, "the size of a head"),
        ("vocab_size", vocab_size, "the number of tokens"),
        ("block_count", blocks, "the number of blocks that have tensors"),
    ):
        if size(name, other) != other:
            raise InputError(f"{gguf.source}: {architecture}.{name} is {size(name)}, not {what}, {other}")
    fields = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": architecture == "qwen2",
        "mlp_bias": False,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _decimal(gguf.needed(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(gguf.value(f"{architecture}.rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float16",
    }
    return fields | _rope_scaling(gguf, architecture) | model_token_ids(gguf, vocab_size)


def _architecture(gguf: GGUFFile) -> str:
    architecture = gguf.needed("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{gguf.source}: architecture {architecture!r} is not supported; accepted: {known}")
    return architecture


def _rope_scaling(gguf: GGUFFile, architecture: str) -> dict:
    """`rope_scaling` of a config, if there is any. A factor without a type is a linear one to llama.cpp, too."""
    prefix = f"{architecture}.rope.scaling"
    factor = gguf.value(f"{prefix}.factor", float, 0.0)  # 0 means none
    kind = gguf.value(f"{prefix}.type", str, "linear" if factor else "none")
    if kind not in ("none", "linear"):
        raise InputError(f"{gguf.source}: {prefix}.type {kind!r} is not supported; accepted: none, linear")
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    return {"rope_scaling": {"rope_type": "linear", "factor": _decimal(factor)}}


def stored_tensors(gguf: GGUFFile, config: Config) -> dict[str, StoredTensor]:
    """By Hugging Face name, rows in Hugging Face's order, float32; nothing is read yet."""
    interleaved = {}
    if _architecture(gguf) == "llama":  # the converter leaves the rows of other architectures as they are
        interleaved = {"self_attn.q_proj": config.heads, "self_attn.k_proj": config.kv_heads}
    stored = {}
    for name, tensor in gguf.tensors.items():
        if name == ROPE_FACTORS:
            continue
        theirs = _hugging_face_name(name)
        if theirs is None:
            raise InputError(f"{gguf.source}: tensor {name} is not part of a model that is supported")
        _check_stored(gguf, name)
        part = theirs.split(".", 3)[-1].rpartition(".")[0]
        stored[theirs] = StoredTensor(gguf.source, tensor.shape, partial(_read, gguf, name, interleaved.get(part)))
    return stored


def _check_stored(gguf: GGUFFile, name: str) -> None:
    kind = gguf.tensors[name].kind
    if not can_dequantize(kind):
        raise InputError(
            f"{gguf.source}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantize"
        )


def _read(gguf: GGUFFile, name: str, interleaved_heads: int | None) -> Tensor:
    weight = gguf.tensor(name)
    return weight if interleaved_heads is None else undo_interleaving(weight, interleaved_heads)


def undo_interleaving(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads * dim, hidden], or its bias, from llama.cpp's order to Hugging Face's.

    `heads` is the number of heads that this matrix makes: query heads for queries, KV heads for keys.
    """
    return rearrange(weight, "(heads pair half) ... -> (heads half pair) ...", heads=heads, half=2)


def _hugging_face_name(name: str) -> str | None:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None:
        return TENSOR_NAMES.get(name)
    part = LAYER_TENSOR_NAMES.get(layer[2])
    return part and f"model.layers.{layer[1]}.{part}.{layer[3]}"


def _decimal(value: float) -> float:
    """The number that was meant: GGUF keeps float32, where 1e-05 is 9.999999747378752e-06."""
    return float(str(np.float32(value)))
