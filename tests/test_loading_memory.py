"""Loading a checkpoint takes the memory of its weights, not of its files besides."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minikv.config import Config
from minikv.model import Llama

FIELDS = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LOAD = """
import sys
from pathlib import Path
import torch
from minikv.weights import load_model

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

before = kilobytes("VmRSS")
model = load_model(Path(sys.argv[1]), torch.device("cpu"), getattr(torch, sys.argv[2]))
taken = 1024 * (kilobytes("VmHWM") - before)
print(taken, sum(weight.nbytes for weight in model.parameters()))
"""


def write_zeros(file: Path, shapes: dict[str, list[int]], stored: str) -> None:
    """A safetensors file of zeros that takes no room on the disk: the header, then a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * {"F32": 4, "F16": 2}[stored]
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with open(file, "r+b") as hole:
        hole.truncate(8 + len(text) + end)


def write_checkpoint(folder: Path, stored: str, shards: int, tied: bool, layers: int) -> None:
    fields = FIELDS | {"tie_word_embeddings": tied, "num_hidden_layers": layers}
    with torch.device("meta"):
        model = Llama(Config.from_dict(fields))
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]  # a tied head stored, too, takes no room
    (folder / "config.json").write_text(json.dumps(fields))
    if shards == 1:
        write_zeros(folder / "model.safetensors", shapes, stored)
        return
    files = {name: f"model-{i * shards // len(shapes)}.safetensors" for i, name in enumerate(shapes)}
    for file in set(files.values()):
        write_zeros(folder / file, {name: shapes[name] for name in shapes if files[name] == file}, stored)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("stored, wanted, shards, tied, layers", [
    ("F32", "float32", 3, False, 16),  # 1 GB
    ("F16", "float32", 1, True, 16),  # 1 GB
    ("F32", "bfloat16", 1, False, 8),  # 0.3 GB of 0.7 GB
])  # fmt: skip
def test_peak_memory_is_that_of_the_weights(tmp_path, stored, wanted, shards, tied, layers):
    write_checkpoint(tmp_path, stored, shards, tied, layers)
    command = [sys.executable, "-c", LOAD, str(tmp_path), wanted]
    taken, weights = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert weights > 200e6
    assert 0.95 < taken / weights < 1.15
