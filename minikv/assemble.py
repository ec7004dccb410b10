"""A config and named tensors, wherever they are stored, to a model: what both checkpoint formats share.

Everything is checked before the first weight is read. Then one tensor after another is read and moved to where it is
used, so that the checkpoint is never in memory twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from minikv.config import Config
from minikv.errors import InputError
from minikv.model import Llama

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet."""

    file: str  # named in errors
    shape: tuple[int, ...]
    read: Callable[[], Tensor]  # the tensor itself, on the CPU in any floating dtype; it may lie in a mapped file


def assemble(
    config: Config, stored: Mapping[str, StoredTensor], device: torch.device, dtype: torch.dtype, source: str
) -> Llama:
    """The model of that config with the stored tensors, by Hugging Face name, as its weights in `dtype` on `device`.

    `source` names the checkpoint in errors. Raises InputError, naming file and tensor, where the two do not fit
    together exactly. The head of a tied model may be stored, too, if it is the same as the embeddings.
    """
    if config.layers > len(stored):  # said before so many layers are made, which a slip in a config can take hours for
        found = f"{len(stored)} tensors; the config's {config.layers} layers have more"
        raise InputError(f"the weights in {source} are {found}")
    try:
        with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
            model = Llama(config)
    except RuntimeError as error:  # a product of sizes that no number of bytes holds
        raise InputError(f"the model that the config of {source} describes is too large: {error}") from error
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tied_head and HEAD in stored:
        _check_same(stored[HEAD], stored.get(EMBEDDINGS))
    stored = {name: tensor for name, tensor in stored.items() if not _is_computed(name, config)}
    _check_fit(shapes, stored, source)
    weights = {}
    # The largest first: while a tensor is moved it is there twice, and that is least when little else is there.
    order = sorted(shapes, key=lambda name: math.prod(shapes[name]), reverse=True)
    for name in tqdm(order, desc="loading weights", delay=2, disable=not sys.stderr.isatty()):
        weights[name] = stored[name].read().to(device, dtype, copy=True)  # a copy, so that no file stays mapped
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def _is_computed(name: str, config: Config) -> bool:
    """Whether a stored tensor is no weight: a rotary table, or the embeddings again."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == HEAD)


def _check_same(head: StoredTensor, embeddings: StoredTensor | None) -> None:
    if embeddings is None or head.shape != embeddings.shape or not torch.equal(head.read(), embeddings.read()):
        raise InputError(f"{head.file}: {HEAD} is not {EMBEDDINGS}, though tie_word_embeddings is true")


def _check_fit(shapes: dict[str, tuple[int, ...]], stored: dict[str, StoredTensor], source: str) -> None:
    for name, tensor in stored.items():
        if name not in shapes:
            raise InputError(f"{tensor.file}: {name} is not part of the model that the config describes")
        if tensor.shape != shapes[name]:
            found, needed = list(tensor.shape), list(shapes[name])
            raise InputError(f"{tensor.file}: {name} has shape {found}; the config says {needed}")
    missing = [name for name in shapes if name not in stored]
    if missing:
        hint = "; tie_word_embeddings is false" if missing == [HEAD] else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"the weights in {source} lack {missing[0]}{more}{hint}")
