"""A Llama in a GGUF file (llama.cpp's format), written out as an ordinary Hugging Face folder in float16.

What differs in a GGUF: names, blocks of quantized numbers, and the order of query and key rows. Hugging Face
rotates dimension i of a head together with i + dim / 2; llama.cpp rotates neighbours, so its converter
interleaves the two halves of each head, and that is undone here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tqdm import tqdm

from minikv.errors import InputError

ARCHITECTURE = "llama"
VOCABULARY = "gpt2"  # byte-level BPE
PRE_TOKENIZERS = {
    # Every digit is a token of its own, then GPT-2's rule splits words.
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}
CONTROL, USER_DEFINED = 3, 4  # of a GGUF's token types

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


def convert(file: Path, folder: Path) -> None:
    """Write the Llama in the GGUF `file` into the existing `folder`, weights in float16.

    Raises InputError where the architecture, the vocabulary or a tensor is not known.
    """
    reader = open_gguf(file)
    config = read_config(reader, str(file))
    tokenizer, tokenizer_config = read_tokenizer(reader, str(file))
    weights = {name: tensor.half() for name, tensor in read_weights(reader, config, str(file))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors would let only its owner read it
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    _write_json(folder / "generation_config.json", ids)


def open_gguf(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise InputError(f"{file} is damaged or not a GGUF file: {error}") from error


def read_config(reader: GGUFReader, source: str) -> dict:
    """The fields of a Hugging Face config.json; `source` names the file in errors."""
    architecture = _value(reader, "general.architecture")
    if architecture != ARCHITECTURE:
        raise InputError(f"{source}: architecture {architecture!r} is not supported; accepted: {ARCHITECTURE}")
    if any(field.startswith("llama.rope.scaling") for field in reader.fields):
        raise InputError(f"{source}: llama.rope.scaling is not supported")

    def size(name: str, default: int | None = None) -> int:
        value = _value(reader, f"llama.{name}", default)
        if not isinstance(value, int) or value <= 0:
            raise InputError(f"{source}: llama.{name} is {value!r}; a positive number is needed")
        return value

    heads, hidden_size = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // heads)
    if size("rope.dimension_count", head_dim) != head_dim:
        raise InputError(f"{source}: llama.rope.dimension_count is not the size of a head, {head_dim}")
    names = {tensor.name for tensor in reader.tensors}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size("vocab_size", len(_value(reader, "tokenizer.ggml.tokens", []))),
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _decimal(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(_value(reader, "llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float16",
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        id = _value(reader, f"tokenizer.ggml.{field}_token_id")
        if id is not None:
            config[f"{name}_token_id"] = id
    return config


def read_weights(reader: GGUFReader, config: dict, source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and float32 tensor, one after another."""
    for tensor in tqdm(reader.tensors, desc="converting weights", disable=not sys.stderr.isatty()):
        name = _hugging_face_name(tensor.name)
        if name is None:
            raise InputError(f"{source}: tensor {tensor.name} is not part of a Llama that is supported")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            weight = undo_interleaving(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = undo_interleaving(weight, config["num_key_value_heads"])
        yield name, torch.from_numpy(np.ascontiguousarray(weight))


def undo_interleaving(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, hidden] from llama.cpp's order to Hugging Face's.

    `heads` is the number of heads that this matrix makes: query heads for queries, KV heads for keys.
    """
    return rearrange(weight, "(heads pair half) hidden -> (heads half pair) hidden", heads=heads, half=2)


def _hugging_face_name(name: str) -> str | None:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is None:
        return TENSOR_NAMES.get(name)
    part = LAYER_TENSOR_NAMES.get(layer[2])
    return part and f"model.layers.{layer[1]}.{part}.weight"


def read_tokenizer(reader: GGUFReader, source: str) -> tuple[Tokenizer, dict]:
    """The byte-level BPE of the file, and the fields of its tokenizer_config.json."""
    model, pre = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if model != VOCABULARY:
        raise InputError(f"{source}: vocabulary model {model!r} is not supported; accepted: {VOCABULARY}")
    if pre not in PRE_TOKENIZERS:
        raise InputError(f"{source}: pre-tokenizer {pre!r} is not supported; accepted: {', '.join(PRE_TOKENIZERS)}")
    tokens, types = _value(reader, "tokenizer.ggml.tokens"), _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(_value(reader, "tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,  # the clean-up would drop spaces that were in the text
        "model_max_length": _value(reader, "llama.context_length"),
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        id = _value(reader, f"tokenizer.ggml.{field}_token_id")
        if id is not None:
            config[f"{name}_token"] = tokens[id]
    template = _value(reader, "tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return tokenizer, config


def _value(reader: GGUFReader, name: str, default=None):
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _decimal(value: float) -> float:
    """The number that was meant: GGUF keeps float32, where 1e-05 is 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(file: Path, fields: dict) -> None:
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
