"""Checkpoints in: a Hugging Face folder with safetensors to a model on the device where it runs.

Nothing that a checkpoint brings is executed: safetensors hold numbers only, and pickles (.bin, .pt) are not read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from minikv.config import Config
from minikv.default_model import DEFAULT_MODEL, default_model_folder
from minikv.errors import InputError
from minikv.files import read_json
from minikv.model import Llama
from minikv.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

STORED = ("F64", "F32", "F16", "BF16")  # as safetensors call them; quantized weights would need their scales


def load(
    name_or_path: str | Path = DEFAULT_MODEL, device: str = "auto", dtype: str = "auto"
) -> tuple[Llama, Tokenizer]:
    """Load a model and its tokenizer from a checkpoint folder, or the default model by its name.

    device: auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1, mps. dtype: auto (bfloat16 on CUDA, float32
    elsewhere), float32, bfloat16, float16. Raises InputError for anything that is not there or not supported.
    """
    chosen = choose_device(device)
    weights_dtype = choose_dtype(dtype, chosen)
    folder = default_model_folder() if str(name_or_path) == DEFAULT_MODEL else Path(name_or_path)
    if not folder.is_dir():
        raise InputError(f"no model {str(name_or_path)!r}; accepted: a checkpoint folder or {DEFAULT_MODEL}")
    return load_model(folder, chosen, weights_dtype), Tokenizer.from_folder(folder)


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
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = Llama(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    weights: dict[str, torch.Tensor] = {}
    with tqdm(total=len(shapes), desc="loading weights", delay=2, disable=not sys.stderr.isatty()) as progress:
        for file in weight_files(folder):
            _read_weights(file, shapes, config.tied_head, weights, device, dtype, progress)
    missing = [name for name in shapes if name not in weights]
    if missing:
        hint = "; tie_word_embeddings is false" if missing == ["lm_head.weight"] else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"the weights in {folder} lack {missing[0]}{more}{hint}")
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


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


def _read_weights(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    tied_head: bool,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    progress: tqdm,
) -> None:
    """Add the tensors of one safetensors file to `weights`, each moved to where it is going to be used."""
    try:
        with safe_open(file, framework="pt") as tensors:  # maps the file into memory
            for name in tensors.keys():
                if name.endswith("rotary_emb.inv_freq") or (tied_head and name == "lm_head.weight"):
                    continue  # computed from the config; the same as the embeddings
                if name not in shapes:
                    raise InputError(f"{file}: {name} is not part of the model that config.json describes")
                if name in weights:
                    raise InputError(f"{file}: {name} is in another shard, too")
                stored, shape = tensors.get_slice(name), list(shapes[name])
                if stored.get_shape() != shape:
                    raise InputError(f"{file}: {name} has shape {stored.get_shape()}; config.json says {shape}")
                if stored.get_dtype() not in STORED:
                    raise InputError(f"{file}: {name} is stored as {stored.get_dtype()}; accepted: {', '.join(STORED)}")
                weights[name] = tensors.get_tensor(name).to(device, dtype)
                progress.update()
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged or not a safetensors file: {error}") from error
