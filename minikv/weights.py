"""Checkpoints in: by folder, file or name to a model and its tokenizer, on the device where the model runs.

No code of a checkpoint is run here: safetensors hold numbers only, and pickles (.bin, .pt) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minikv.assemble import StoredTensor, assemble
from minikv.config import Config
from minikv.default_model import DEFAULT_MODEL, default_model_folder
from minikv.errors import InputError
from minikv.files import read_json
from minikv.model import Llama
from minikv.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

STORED = ("F64", "F32", "F16", "BF16")  # as safetensors call them; quantized weights would need their scales


def load(
    name_or_path: str | Path = DEFAULT_MODEL,
    device: str = "auto",
    dtype: str = "auto",
    plain: bool = False,
    compiled: bool = False,
) -> tuple[Llama, Tokenizer]:
    """Load a model and its tokenizer: a checkpoint folder, a GGUF file, org/name on the hub, or the default model.

    What is there as a folder or file is taken before a name on the hub. device: auto (CUDA, then MPS, then CPU), cpu,
    cuda, cuda:1, mps. dtype: auto (bfloat16 on CUDA, float32 elsewhere), float32, bfloat16, float16. The model computes
    by the kernels that are fastest here, or with `plain` by their definitions (see kernels.py). `compiled`: decode with
    layers that torch.compile has fused, for which loading takes some seconds more. Raises InputError for anything that
    is not there or not supported.
    """
    if plain and compiled:
        raise InputError("plain and compiled kernels were both asked for; accepted: one of them")
    chosen = choose_device(device)
    weights_dtype = choose_dtype(dtype, chosen)
    try:
        model, tokenizer = _load(name_or_path, chosen, weights_dtype)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise InputError(f"no model {str(name_or_path)[:200]!r}: {error.strerror or error}") from error
    if not plain:
        model.use_fastest_kernels(compiled)
    return model, tokenizer


def _load(name_or_path: str | Path, device: torch.device, dtype: torch.dtype) -> tuple[Llama, Tokenizer]:
    path = find_checkpoint(name_or_path)
    if path.is_file():
        from minikv.gguf_checkpoint import load_gguf  # needs gguf, which folders do not

        return load_gguf(path, device, dtype)
    return load_model(path, device, dtype), Tokenizer.from_folder(path)


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The checkpoint folder or GGUF file that `load` takes by that name, fetched where need be. Raises InputError."""
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == DEFAULT_MODEL:
        return default_model_folder()
    if path.is_dir() or path.is_file():
        return path
    if path.suffix.lower() == ".gguf":
        raise InputError(f"no GGUF file {name!r}")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        from minikv.hub import fetch  # needs huggingface_hub, which nothing else does

        return fetch(name)
    raise InputError(
        f"no model {name!r}; accepted: a checkpoint folder, a .gguf file, org/name on the hub, or {DEFAULT_MODEL}"
    )


def choose_device(device: str | torch.device) -> torch.device:
    """The device by that name, checked to be there; "auto" is CUDA, then MPS, then CPU."""
    cuda, mps = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    there = {"cpu": 1, "cuda": cuda, "mps": int(mps)}
    if chosen is None or (chosen.index or 0) >= there.get(chosen.type, 0):
        found = ", ".join(f"{count} {kind}" for kind, count in there.items() if count)
        accepted = "auto, cpu, cuda, cuda:N, mps"
        raise InputError(f"device {str(device)!r} is not available; found: {found}; accepted: {accepted}")
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype by that name; "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Llama:
    """The model of a checkpoint folder: config.json, and model.safetensors or its shards.

    Raises InputError, naming file and tensor, where the two do not fit together exactly.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise InputError(f"{folder} has no config.json; a Hugging Face checkpoint folder is needed")
    config = Config.from_dict(read_json(config_file), source=str(config_file))
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, tensor in _stored_tensors(file).items():
            if name in stored:
                raise InputError(f"{file}: {name} is in another shard, too")
            stored[name] = tensor
    return assemble(config, stored, device, dtype, source=str(folder))


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json lists."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        pickles = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
        if pickles:
            raise InputError(f"{folder} has only {pickles[0]}; pickles are not read, because they can run code: "
                             "save the model as safetensors")
        raise InputError(f"{folder} has no weights; accepted: model.safetensors, or shards with {index.name}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise InputError(f"{index} has no weight_map from tensor names to file names")
    for tensor, shard in shards.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise InputError(f"{index}: {tensor} is in {shard!r}, outside of the checkpoint's folder")
        if not (folder / shard).is_file():
            raise InputError(f"{index}: {tensor} is in {shard}, which is not there")
    return sorted({folder / shard for shard in shards.values()})


def _stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """What a safetensors file's header says that it holds."""
    stored = {}
    with _open(file) as tensors:
        for name in tensors.keys():
            header = tensors.get_slice(name)
            if header.get_dtype() not in STORED:
                raise InputError(f"{file}: {name} is stored as {header.get_dtype()}; accepted: {', '.join(STORED)}")
            stored[name] = StoredTensor(str(file), tuple(header.get_shape()), partial(_read_tensor, file, name))
    return stored


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    """One tensor, in the mapped file. The file is mapped anew for each: what was read of a mapping stays in memory."""
    with _open(file) as tensors:
        return tensors.get_tensor(name)


@contextmanager
def _open(file: Path) -> Iterator:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged or not a safetensors file: {error}") from error
