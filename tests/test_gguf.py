"""GGUF files as models: names, the order of rows, quantized numbers, RoPE, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

import minikv
from gguf_files import VOCABULARY, finish, write_gguf
from minikv.config import Config, FrequencyFactors, LinearScaling
from minikv.errors import InputError
from minikv.gguf_checkpoint import convert, load_gguf, read_config
from minikv.gguf_file import GGUFFile
from minikv.model import Llama
from minikv.weights import load_model

CPU = torch.device("cpu")
HEADS = [(8, 2), (6, 2), (4, 4), (9, 3)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROOT = Path(__file__).parent.parent


def load(file, dtype=torch.float32) -> Llama:
    return load_gguf(file, CPU, dtype)[0]


def reference(weights, heads=4, kv_heads=2, head_dim=8, hidden=32, model_type="llama", **fields) -> Llama:
    """A model of those weights and the fields of a config.json, made without the GGUF."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": hidden}
    others = {"vocab_size": len(VOCABULARY), "intermediate_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    tied = {"tie_word_embeddings": "lm_head.weight" not in weights, "max_position_embeddings": 512}
    model = Llama(Config.from_dict({"model_type": model_type, **shape, **others, **tied, **fields}))
    model.load_state_dict(weights)
    return model.requires_grad_(False)


def tokens(length) -> torch.Tensor:
    return torch.randint(len(VOCABULARY), (1, length), generator=torch.Generator().manual_seed(0))


def assert_same_model(found: Llama, expected: Llama, length=201) -> None:
    """The weights exactly, the logits at every position, 200 among them."""
    assert found.config == expected.config
    theirs = expected.state_dict()
    assert set(found.state_dict()) == set(theirs)
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    torch.testing.assert_close(found(tokens(length)), expected(tokens(length)))


# --- weights ---


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_query_and_key_rows_are_put_back_in_order(tmp_path, heads, kv_heads):
    shape = {"heads": heads, "kv_heads": kv_heads, "hidden": heads * 8}
    weights = write_gguf(tmp_path / "a.gguf", **shape)
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights, **shape))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_a_converted_gguf_computes_what_the_original_does(tmp_path, heads, kv_heads):
    shape = {"heads": heads, "kv_heads": kv_heads, "hidden": heads * 8}
    weights = write_gguf(tmp_path / "a.gguf", **shape)
    convert(tmp_path / "a.gguf", tmp_path)
    assert_same_model(load_model(tmp_path, CPU, torch.float32), reference(weights, **shape))


def test_heads_may_have_a_size_of_their_own(tmp_path):
    weights = write_gguf(tmp_path / "a.gguf", head_dim=16)
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights, head_dim=16))


def test_qwen2_rows_are_in_order_and_its_biases_are_read(tmp_path):
    weights = write_gguf(tmp_path / "a.gguf", arch="qwen2", biases="qkv", head=True)
    assert weights["model.layers.0.self_attn.q_proj.bias"].abs().min() > 0
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights, model_type="qwen2"))


def test_a_llamas_biases_are_put_back_in_order(tmp_path):
    weights = write_gguf(tmp_path / "a.gguf", biases="qkvo")
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights, attention_bias=True))


def test_a_bias_on_the_output_is_not_needed(tmp_path):
    weights = write_gguf(tmp_path / "a.gguf", biases="qkv")
    model = load(tmp_path / "a.gguf")
    assert (model.config.qkv_bias, model.config.output_bias) == (True, False)
    name = "model.layers.0.self_attn.k_proj.bias"
    assert torch.equal(model.state_dict()[name], weights[name])


def test_a_head_in_the_file_makes_the_model_untied(tmp_path):
    weights = write_gguf(tmp_path / "a.gguf", head=True)
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights))
    convert(tmp_path / "a.gguf", tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert_same_model(load_model(tmp_path, CPU, torch.float32), reference(weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_come_in_the_dtype_that_is_asked_for(tmp_path, dtype):
    weights = write_gguf(tmp_path / "a.gguf")
    for name, weight in load(tmp_path / "a.gguf", dtype).state_dict().items():
        assert torch.equal(weight, weights[name].to(dtype))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_are_what_the_gguf_package_says(tmp_path, kind):
    kind = GGMLQuantizationType[kind]
    weights = write_gguf(tmp_path / "a.gguf", quantized=kind, arch="qwen2", biases="qkv")
    for name, weight in load(tmp_path / "a.gguf").state_dict().items():
        expected = weights[name].numpy()
        if weight.dim() == 2:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert torch.equal(weight, torch.from_numpy(expected)), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_types_that_the_package_only_reads_are_read(tmp_path, kind):
    kind = GGMLQuantizationType[kind]
    write_gguf(tmp_path / "a.gguf", hidden=256)  # a block holds 256 numbers
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(256, size=(32, 256 // block_size * block_bytes), dtype=np.uint8)
    blocks &= 0x3B  # no scale is infinite
    replace_tensor(tmp_path / "a.gguf", "blk.0.ffn_gate.weight", blocks, kind)
    weight = load(tmp_path / "a.gguf").state_dict()["model.layers.0.mlp.gate_proj.weight"]
    assert weight.shape == (32, 256) and weight.abs().max() > 0
    assert torch.equal(weight, torch.from_numpy(gguf.dequantize(blocks, kind)))


def replace_tensor(file: Path, name: str, data: np.ndarray, kind: GGMLQuantizationType) -> None:
    """Write the GGUF again with other data under one name."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        replaced = tensor.name == name
        writer.add_tensor(
            tensor.name, data if replaced else np.array(tensor.data), raw_dtype=kind if replaced else None
        )
    finish(writer)
    file.with_suffix(".new").replace(file)


# --- RoPE and other fields ---


def llama3_factors(theta=10000.0, head_dim=8) -> np.ndarray:
    """What convert_hf_to_gguf.py writes for Llama 3.1's scaling."""
    low, high, original = (LLAMA3[name] for name in list(LLAMA3)[1:])
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, np.float32)


def test_rope_factors_are_llama3_scaling(tmp_path):
    factors = llama3_factors()
    assert len(set(factors)) == 3  # one kept, one between, two slowed
    weights = write_gguf(tmp_path / "a.gguf", tensors={"rope_freqs.weight": factors})
    model = load(tmp_path / "a.gguf")
    expected = reference(weights, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert model.config.rope_scaling == FrequencyFactors(tuple(factors.tolist()))
    for found, table in zip(model.rope(0, 6001), expected.rope(0, 6001)):
        torch.testing.assert_close(found, table, rtol=0, atol=2e-3)  # float32 angles of up to 6,000 radians
    ids = tokens(6001)
    torch.testing.assert_close(model(ids)[:, 6000], expected(ids)[:, 6000], rtol=0, atol=1e-3)
    assert (reference(weights)(ids)[:, 6000] - expected(ids)[:, 6000]).abs().max() > 0.1


@pytest.mark.parametrize("fields, scaling", [
    ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, LinearScaling(4.0)),
    ({".rope.scaling.factor": 4.0}, LinearScaling(4.0)),  # as llama.cpp reads it
    ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, None),
    ({".rope.scaling.type": "linear"}, None),
])  # fmt: skip
def test_linear_rope_scaling_is_read(tmp_path, fields, scaling):
    write_gguf(tmp_path / "a.gguf", fields=fields)
    assert load(tmp_path / "a.gguf").config.rope_scaling == scaling


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_sliding_window_is_read(tmp_path, arch):
    write_gguf(tmp_path / "a.gguf", arch=arch, biases="qkv", fields={".attention.sliding_window": 64})
    assert load(tmp_path / "a.gguf").config.sliding_window == 64


def test_numbers_kept_as_float32_come_out_as_they_were_meant(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    assert read_config(GGUFFile(tmp_path / "a.gguf"))["rms_norm_eps"] == 1e-5


def test_what_a_file_may_leave_out_has_llama_cpps_defaults(tmp_path):
    left_out = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    weights = write_gguf(tmp_path / "a.gguf", kv_heads=4, fields={f".{name}": None for name in left_out})
    assert_same_model(load(tmp_path / "a.gguf"), reference(weights, kv_heads=4))


# --- the programs ---


def generate(*arguments):
    command = [sys.executable, "-m", "minikv.generate", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_gguf_is_a_model_to_the_programs(tmp_path):
    write_gguf(tmp_path / "a.gguf", fields={"tokenizer.ggml.eos_token_id": None})
    text = ["--prompt", "abc " * 30, "--no-chat", "--max-new-tokens", 8]
    result = generate(
        "--model", tmp_path / "a.gguf", *text, "--policy", "snapkv", "--budget", 32, "--json", tmp_path / "a.json"
    )
    assert result.returncode == 0, result.stderr
    (answer,) = json.loads((tmp_path / "a.json").read_text())["answers"]
    assert answer["entries_kept"] == 32 and answer["new_tokens"] == 8


def test_the_programs_refuse_a_broken_file_in_one_line(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:500])
    result = generate("--model", tmp_path / "a.gguf", "--prompt", "a")
    assert (result.returncode, result.stdout) == (2, "") and "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert "a.gguf is damaged" in line


def test_a_gguf_without_a_chat_template_says_so_by_its_name(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    _, tokenizer = minikv.load(tmp_path / "a.gguf", device="cpu")
    with pytest.raises(InputError, match=r"a.gguf has no chat template.*--no-chat"):
        tokenizer.chat_prompt("a")


def test_a_chat_template_in_the_file_is_used(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}<end>{% if messages[0].content == 'x' %}{{ y.z }}{% endif %}"
    write_gguf(tmp_path / "a.gguf", fields={"tokenizer.chat_template": template})
    tokenizer = load_gguf(tmp_path / "a.gguf", CPU, torch.float32)[1]
    assert tokenizer.chat_prompt("c").ids == [VOCABULARY.index("c"), 0]
    with pytest.raises(InputError, match="the chat template of .*a.gguf failed"):
        tokenizer.chat_prompt("x")


# --- refusals ---


def refusal(file) -> str:
    with pytest.raises(InputError) as error:
        load(file)
    message = str(error.value)
    assert file.name in message and "\n" not in message
    return message


@pytest.mark.parametrize("fields, words", [
    ({".rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported; accepted: none, linear"),
    ({".rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor 0.5 is not supported; accepted: 1.0"),
    ({".expert_count": 8}, "llama.expert_count 8 is not supported; accepted: 0"),
    ({".attention.causal": False}, "llama.attention.causal False is not supported; accepted: True"),
    ({".vocab_size": 99}, "llama.vocab_size is 99, not the number of tokens, 32"),
    ({".rope.dimension_count": 4}, "llama.rope.dimension_count is 4, not the size of a head, 8"),
    ({".attention.value_length": 16}, "llama.attention.value_length is 16, not the size of a head, 8"),
    ({".attention.head_count": None}, "llama.attention.head_count is None; a whole number above 0 is needed"),
    ({".attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv is [2, 2]; a whole number is needed"),
    ({".attention.head_count_kv": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({".attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ({".block_count": 0}, "llama.block_count is 0; a whole number above 0 is needed"),
    ({".block_count": 2**30}, "llama.block_count is 1073741824, not the number of blocks that have tensors, 1"),
    ({".feed_forward_length": 64}, "mlp.gate_proj.weight has shape [32, 32]"),
    ({"split.count": 3}, "is one of 3 parts"),
])  # fmt: skip
def test_a_field_that_we_do_not_compute_or_that_is_wrong_is_named(tmp_path, fields, words):
    write_gguf(tmp_path / "a.gguf", fields=fields)
    assert words in refusal(tmp_path / "a.gguf")


def test_another_architecture_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "a.gguf", arch="gemma2")
    assert "architecture 'gemma2' is not supported; accepted: llama, qwen2" in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize("tensors, words", [
    ({"rope_factors_long.weight": np.ones(4, np.float32)}, "tensor rope_factors_long.weight is not part of a model"),
    ({"blk.0.ffn_gate.bias": np.ones(32, np.float32)}, "mlp.gate_proj.bias is not part of the model"),
    ({"blk.1.attn_q.weight": np.ones((32, 32), np.float32)}, "block_count is 1, not the number of blocks .*, 2"),
    ({"blk.0.attn_v.weight": None}, "lack model.layers.0.self_attn.v_proj.weight"),
    ({"token_embd.weight": np.ones((30, 32), np.float32)}, r"embed_tokens.weight has shape \[30, 32\]"),
    ({"blk.0.attn_k.weight": np.ones((9, 32), np.float32)}, r"k_proj.weight has shape \[9, 32\]"),
    ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight must be 4 numbers above 0"),
    ({"rope_freqs.weight": np.zeros(4, np.float32)}, "rope_freqs.weight must be 4 numbers above 0"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(tmp_path, tensors, words):
    write_gguf(tmp_path / "a.gguf", tensors=tensors)
    with pytest.raises(InputError, match=words):
        load(tmp_path / "a.gguf")


def test_qwen2_without_its_biases_is_refused(tmp_path):
    write_gguf(tmp_path / "a.gguf", arch="qwen2")
    assert "lack model.layers.0.self_attn.q_proj.bias and 2 more" in refusal(tmp_path / "a.gguf")


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    numbers = np.ones((32, 32), np.int8)
    replace_tensor(tmp_path / "a.gguf", "blk.0.ffn_up.weight", numbers, GGMLQuantizationType.I8)
    assert "tensor blk.0.ffn_up.weight is stored as I8" in refusal(tmp_path / "a.gguf")


def test_what_a_folder_cannot_say_is_not_converted(tmp_path):
    write_gguf(tmp_path / "a.gguf", tensors={"rope_freqs.weight": llama3_factors()})
    with pytest.raises(InputError, match="rope_freqs.weight.* not written to folders"):
        convert(tmp_path / "a.gguf", tmp_path)


# --- damaged files ---


@pytest.mark.parametrize("length", [0, 3, 4, 20, 100, 500, 2000, -64])
def test_a_file_that_was_cut_off_is_damaged(tmp_path, length):
    write_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:length])
    assert "a.gguf is damaged" in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize("position, found", [
    (0, b"GGML"),  # another format
    (4, bytes([9, 0, 0, 0])),  # a version that is not there yet
    (8, b"\xff" * 8),  # 2^64 - 1 tensors
    (16, b"\xff" * 8),  # 2^64 - 1 values
    (24, b"\xff" * 8),  # a name of 2^64 - 1 bytes
])  # fmt: skip
def test_garbage_in_the_header_is_damage(tmp_path, position, found):
    write_gguf(tmp_path / "a.gguf")
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[position : position + len(found)] = found
    (tmp_path / "a.gguf").write_bytes(data)
    assert "a.gguf is damaged" in refusal(tmp_path / "a.gguf")


def test_an_array_without_end_is_damage(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    length = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    (tmp_path / "a.gguf").write_bytes(data[:length] + b"\xff" * 7 + data[length + 7 :])
    assert "a.gguf is damaged" in refusal(tmp_path / "a.gguf")


def test_a_tensor_beyond_the_end_is_damage(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    offset = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4  # dimensions, their size, type
    (tmp_path / "a.gguf").write_bytes(data[:offset] + (1 << 40).to_bytes(8, "little") + data[offset + 8 :])
    assert "a.gguf is damaged" in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize("offset", [0, 3])
def test_a_tensor_that_lies_within_another_or_askew_is_damage(tmp_path, offset):
    write_gguf(tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    place = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    (tmp_path / "a.gguf").write_bytes(data[:place] + offset.to_bytes(8, "little") + data[place + 8 :])
    assert "cannot lie at the bytes" in refusal(tmp_path / "a.gguf")


def test_a_changed_byte_of_the_header_is_bad_input_or_harmless(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    original, random = (tmp_path / "a.gguf").read_bytes(), np.random.default_rng(0)
    header = original.index(b"blk.0.ffn_down.weight")
    refused = 0
    for _ in range(100):
        data = bytearray(original)
        data[random.integers(header)] = random.integers(256)
        (tmp_path / "a.gguf").write_bytes(data)
        try:
            load(tmp_path / "a.gguf")
        except InputError as error:
            refused += "\n" not in str(error)
    assert 50 < refused < 100


def test_a_big_endian_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    finish(writer)
    assert "little-endian is needed" in refusal(tmp_path / "a.gguf")
