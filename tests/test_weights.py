"""Checkpoint folders: what loads, into which dtype, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minikv.config import Config
from minikv.errors import InputError
from minikv.model import Llama
from minikv.weights import choose_device, choose_dtype, load, load_model

CPU = torch.device("cpu")
FIELDS = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def random_weights(**fields) -> dict[str, torch.Tensor]:
    """Every weight of a tiny Llama, by its Hugging Face name."""
    torch.manual_seed(0)
    model = Llama(Config.from_dict(FIELDS | fields))
    return {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}


def write_config(folder: Path, **fields) -> None:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], **fields) -> Path:
    write_config(folder, **fields)
    save_file(weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weights: dict[str, torch.Tensor], count: int = 2) -> dict[str, str]:
    """Deal the weights out to `count` files; the weight_map of the index."""
    write_config(folder)
    shards = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: shards[i % count] for i, name in enumerate(weights)}
    for shard in shards:
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return load_model(folder, CPU, dtype)


def refusal(folder: Path) -> str:
    """The one line with which the checkpoint in `folder` is refused."""
    with pytest.raises(InputError) as error:
        open_model(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def assert_same_weights(model: Llama, weights: dict[str, torch.Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


# --- what loads ---


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_arrives_unchanged(tmp_path, tied):
    weights = random_weights(tie_word_embeddings=tied)
    model = open_model(write_checkpoint(tmp_path, weights, tie_word_embeddings=tied))
    assert_same_weights(model, weights)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


def test_shards_load_as_one_file_does(tmp_path):
    weights = random_weights()
    write_shards(tmp_path, weights, count=3)
    assert_same_weights(open_model(tmp_path), weights)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_take_the_dtype_that_is_asked_for(tmp_path, stored, wanted):
    weights = {name: weight.to(stored) for name, weight in random_weights().items()}
    model = open_model(write_checkpoint(tmp_path, weights), wanted)
    assert_same_weights(model, {name: weight.to(wanted) for name, weight in weights.items()})
    logits = model(torch.tensor([[1, 2, 3]]))
    assert logits.dtype == wanted and logits.isfinite().all()


def test_a_tied_head_in_the_file_is_left_out(tmp_path):
    weights = random_weights(tie_word_embeddings=True)
    duplicate = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    model = open_model(write_checkpoint(tmp_path, duplicate, tie_word_embeddings=True))
    assert_same_weights(model, weights)


def test_a_tied_head_in_the_file_that_differs_is_refused(tmp_path):
    weights = random_weights(tie_word_embeddings=True)
    duplicate = weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    message = refusal(write_checkpoint(tmp_path, duplicate, tie_word_embeddings=True))
    assert "lm_head.weight is not model.embed_tokens.weight, though tie_word_embeddings is true" in message


def test_shards_that_are_symbolic_links_load(tmp_path):
    """As in the hub's cache, where snapshots link to ../../blobs."""
    weights, blobs, folder = random_weights(), tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    folder.mkdir(parents=True)
    write_shards(folder, weights)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert_same_weights(open_model(folder), weights)


def test_a_model_outlives_its_file(tmp_path):
    weights = random_weights()
    model = open_model(write_checkpoint(tmp_path, weights))
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # weights that lay in the mapped file would be 0 now
    assert_same_weights(model, weights)


def test_rotary_buffers_of_old_checkpoints_are_left_out(tmp_path):
    weights = random_weights()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert_same_weights(open_model(write_checkpoint(tmp_path, weights | buffer)), weights)


def test_the_default_model_loads_by_name(default_folder):
    model, tokenizer = load("smollm2-135m-instruct", device="cpu", dtype="float32")
    assert (model.config.layers, model.config.heads, model.config.kv_heads) == (30, 9, 3)
    prompt = tokenizer.chat_prompt("What is the capital of France?").ids
    answer = [*tokenizer.encode("The capital of France is Paris."), 2]
    logits = model(torch.tensor([prompt + answer]))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


# --- where it is looked for ---


def record_calls(monkeypatch, target: str) -> list:
    """Put a function that does nothing in the place of another; its first arguments."""
    calls = []

    def stop(first, *others):
        calls.append(first)
        raise InputError("stopped")

    monkeypatch.setattr(target, stop)
    return calls


@pytest.mark.parametrize("name", ["model.gguf", "MODEL.GGUF", "no-suffix"])
def test_a_file_is_read_as_a_gguf(tmp_path, monkeypatch, name):
    calls = record_calls(monkeypatch, "minikv.gguf_checkpoint.load_gguf")
    (tmp_path / name).touch()
    with pytest.raises(InputError, match="stopped"):
        load(tmp_path / name, device="cpu")
    assert calls == [tmp_path / name]


def test_a_gguf_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no GGUF file '.*model.GGUF'"):
        load(tmp_path / "model.GGUF", device="cpu")


def test_org_and_name_are_fetched_from_the_hub_unless_such_a_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = record_calls(monkeypatch, "minikv.hub.fetch")
    with pytest.raises(InputError, match="stopped"):
        load("some-org/Some_Model-1.5", device="cpu")
    (tmp_path / "org/name").mkdir(parents=True)
    with pytest.raises(InputError, match="has no config.json"):
        load("org/name", device="cpu")
    assert calls == ["some-org/Some_Model-1.5"]


# --- devices and dtypes ---


def test_auto_is_the_best_device_and_the_dtype_that_suits_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="cuda:2.*found: 1 cpu, 2 cuda"):
        choose_device("cuda:2")
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "gpu", "meta", ""])
def test_a_device_that_is_not_there_is_named(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=f"'{device}' is not available; found: 1 cpu.*accepted: auto"):
        choose_device(device)


def test_an_unknown_dtype_is_named():
    with pytest.raises(InputError, match="'int8' is not supported; accepted: auto, float32"):
        choose_dtype("int8", CPU)
    assert choose_dtype(torch.float16, CPU) == choose_dtype("float16", CPU) == torch.float16


# --- what is refused ---


@pytest.mark.parametrize("name", ["no/such/folder", "../folder", "./folder", "org/", "/org/name", "folder"])
def test_what_is_no_model_is_named_with_what_would_be_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    accepted = "a checkpoint folder, a .gguf file, org/name on the hub, or smollm2-135m-instruct"
    with pytest.raises(InputError, match=f"no model '{name}'; accepted: {accepted}"):
        load(name, device="cpu")


def test_a_folder_without_config(tmp_path):
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "not json", "[1]", "{\"vocab_size\": ", "\x00"])
def test_a_config_that_is_not_json(tmp_path, content):
    write_checkpoint(tmp_path, random_weights())
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in refusal(tmp_path)


def test_a_missing_tensor(tmp_path):
    weights = random_weights()
    del weights[QUERY]
    assert f"lack {QUERY}" in refusal(write_checkpoint(tmp_path, weights))


def test_more_layers_than_tensors_are_refused_before_they_are_made(tmp_path):
    folder = write_checkpoint(tmp_path, random_weights())
    write_config(folder, num_hidden_layers=2_000_000_000)
    assert "are 21 tensors; the config's 2000000000 layers have more" in refusal(folder)


def test_a_model_that_no_memory_holds_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, random_weights())
    write_config(folder, vocab_size=2**31 - 1, hidden_size=2**31 - 2, head_dim=8)
    assert "too large" in refusal(folder)


def test_a_name_that_is_too_long_is_one_line():
    with pytest.raises(InputError, match="no model 'a.*File name too long"):
        load("a" * 300)


def test_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match="has no config.json"):
        load("~/")


def test_an_untied_model_without_a_head(tmp_path):
    weights = random_weights(tie_word_embeddings=True)
    message = refusal(write_checkpoint(tmp_path, weights, tie_word_embeddings=False))
    assert "lm_head.weight" in message and "tie_word_embeddings is false" in message


def test_a_tensor_that_is_left_over(tmp_path):
    weights = random_weights() | {"model.layers.2.input_layernorm.weight": torch.ones(16)}
    message = refusal(write_checkpoint(tmp_path, weights))
    assert "model.safetensors: model.layers.2.input_layernorm.weight is not part" in message


def test_a_tensor_of_the_wrong_shape(tmp_path):
    weights = random_weights() | {QUERY: torch.zeros(16, 8)}
    assert f"{QUERY} has shape [16, 8]; the config says [16, 16]" in refusal(write_checkpoint(tmp_path, weights))


def test_a_quantized_tensor(tmp_path):
    weights = random_weights() | {QUERY: torch.zeros(16, 16, dtype=torch.int8)}
    assert f"{QUERY} is stored as I8" in refusal(write_checkpoint(tmp_path, weights))


def test_a_missing_shard(tmp_path):
    write_shards(tmp_path, random_weights())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors, which is not there" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["absolute", "above"])
def test_a_shard_outside_of_the_folder(tmp_path, place):
    folder = tmp_path / "model"
    folder.mkdir()
    weight_map = write_shards(folder, random_weights())
    shard = "model-00001-of-00002.safetensors"
    shutil.move(folder / shard, tmp_path / shard)
    outside = str(tmp_path / shard) if place == "absolute" else f"../{shard}"
    write_index(folder, {name: outside if file == shard else file for name, file in weight_map.items()})
    assert "outside of the checkpoint's folder" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, ["a"], {"a": 1}])
def test_an_index_without_a_weight_map(tmp_path, weight_map):
    write_config(tmp_path)
    write_index(tmp_path, weight_map)
    assert "weight_map" in refusal(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    weights = random_weights()
    write_shards(tmp_path, weights)
    second = tmp_path / "model-00002-of-00002.safetensors"
    first_name = next(iter(weights))
    save_file(load_file(second) | {first_name: weights[first_name]}, second)
    assert f"{first_name} is in another shard" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [slice(-4), slice(20), slice(0), slice(100, None)])
def test_a_damaged_safetensors_file(tmp_path, kept):
    file = write_checkpoint(tmp_path, random_weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[kept])
    assert "model.safetensors is damaged" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_read(tmp_path, name):
    write_config(tmp_path)
    torch.save(random_weights(), tmp_path / name)
    assert f"only {name}; pickles are not read" in refusal(tmp_path)


def test_a_folder_without_weights(tmp_path):
    write_config(tmp_path)
    assert "has no weights; accepted: model.safetensors" in refusal(tmp_path)
