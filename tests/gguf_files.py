"""Writes tiny GGUF files as llama.cpp's converter does, from random weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

F32 = GGMLQuantizationType.F32
VOCABULARY = ["<end>", *"abcdefghijklmnopqrstuvwxyz12Ġ", "ab", "12"]
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def byte_level(pre="smollm", tokens=VOCABULARY, merges=("a b", "1 2"), types=None) -> dict:
    """The fields of a byte-level vocabulary; token 0 ends a turn."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": types or [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
    }


def train_merges(texts: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE of 1,500 ids that merges across any border between words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary, merges = tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.get), [" ".join(merge) for merge in merges]


def random_weights(vocab_size, heads, kv_heads, head_dim, hidden, inner, biases="", head=False) -> dict[str, Tensor]:
    """Weights of a one-layer model under GGUF's names, rows in Hugging Face's order; `biases` as in "qkv"."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    shapes = {
        "token_embd.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (queries, hidden),
        "blk.0.attn_k.weight": (keys, hidden),
        "blk.0.attn_v.weight": (keys, hidden),
        "blk.0.attn_output.weight": (hidden, queries),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    if head:
        shapes["output.weight"] = (vocab_size, hidden)
    for part in biases:
        name = "attn_output" if part == "o" else f"attn_{part}"
        shapes[f"blk.0.{name}.bias"] = shapes[f"blk.0.{name}.weight"][:1]
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random).half().float() for name, shape in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query or key rows, as its convert_hf_to_gguf.py writes it for the architecture llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    file: Path,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=32,
    inner=32,
    arch="llama",
    vocabulary: dict | None = None,
    fields: dict | None = None,
    tensors: dict | None = None,
    quantized: GGMLQuantizationType = F32,
    **of_weights,
) -> dict[str, Tensor]:
    """A tiny GGUF; its weights under Hugging Face's names, in Hugging Face's order.

    `fields` are written beside or instead of the others (None: not written), names that begin with a dot after the
    architecture's; so are `tensors`. Matrices are stored as `quantized`.
    """
    vocabulary = vocabulary or byte_level()
    weights = random_weights(
        len(vocabulary["tokenizer.ggml.tokens"]), heads, kv_heads, head_dim, hidden, inner, **of_weights
    )
    stored = {}
    for name, weight in weights.items():
        heads_of_rows = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2]) if arch == "llama" else None
        stored[name] = interleave(weight.numpy(), heads_of_rows) if heads_of_rows else weight.numpy()
    writer = gguf.GGUFWriter(file, arch)
    for name, value in _fields(heads, kv_heads, hidden, inner, head_dim, vocabulary, fields or {}).items():
        _add(writer, arch + name if name.startswith(".") else name, value)
    for name, weight in (stored | (tensors or {})).items():
        if weight is not None:
            kind = quantized if weight.ndim == 2 else F32
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    finish(writer)
    return {hugging_face_name(name): weight for name, weight in weights.items()}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face_name(name: str) -> str:
    *layer, part, kind = name.split(".")
    return ".".join([*(["model.layers", layer[1]] if layer else []), TENSORS[part], kind])


def _fields(heads, kv_heads, hidden, inner, head_dim, vocabulary, more) -> dict:
    return {
        ".block_count": 1,
        ".context_length": 512,
        ".embedding_length": hidden,
        ".feed_forward_length": inner,
        ".attention.head_count": heads,
        ".attention.head_count_kv": kv_heads,
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 10000.0,
        **vocabulary,
        **more,
    }


def _add(writer: gguf.GGUFWriter, name: str, value) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        add[type(value)](name, value)
