"""One document, many questions: it is prefilled once, and each question runs on top of its full cache.

A question is appended to that very cache, the policy chooses from it as it stands then, the chosen entries are copied into
a cache of their own, and the question is cut off again: no question sees another. What is reused is decided by ids, not by
text, since how the document's last characters are cut into tokens depends on what follows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.files import write_beside
from minikv.inference import check_prompt, compress, extend
from minikv.model import Llama
from minikv.policy_base import Policy
from minikv.srh import fingerprint

QUESTION_ROOM = 512  # tokens of a question, with what the chat template puts after it, before the cache has to grow


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many ids two lists have in common before they differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def reusable(cached: list[int], prompt: list[int], window: int) -> int:
    """How many of the cached ids serve a prompt: those with which it begins, but none of its last `window`.

    Those are run again, for their queries, and the last one at least, for its logits.
    """
    return min(common_prefix(cached, prompt), max(len(prompt) - max(window, 1), 0))


class Document:
    """A model's full cache of the ids with which all prompts about a document begin.

    `ids` are those tokens; `cache` holds their entries and, while a question runs, that question's; `column_sums`, of each
    layer [1, kv_heads, len(ids)] float32, are what their queries attended to (H2O), or None.
    """

    def __init__(self, model: Llama, ids: list[int], cache: KVCache, column_sums: list[Tensor] | None = None):
        self.model, self.ids, self.cache, self.column_sums = model, ids, cache, column_sums

    @staticmethod
    @torch.no_grad()
    def prefill(
        model: Llama, ids: list[int], column_sums: bool = False, progress: Callable[[Iterable], Iterable] = iter
    ) -> Document:
        """Run the ids, at least one, through the model; with `column_sums` for policies whose window is None.

        `progress` wraps the sequence of layers, for a progress bar. InputError where they exceed the model's context.
        """
        check_prompt(model, torch.tensor([ids], dtype=torch.long))
        document = Document(model, [], model.new_cache(1, len(ids) + QUESTION_ROOM), _no_sums(model) if column_sums else None)
        document._run(ids, progress)
        return document

    @torch.no_grad()
    def ask(self, prompt: list[int], policy: Policy, reserve: int = 256) -> tuple[Tensor, KVCache, int]:
        """Logits [1, vocab] of the prompt's last token, its compressed cache, and how many of its tokens were not run.

        The prompt is the whole one, document and question; the result is that of its own prefill. One that begins otherwise
        than the document costs the document's tokens from there on, which later prompts run again. InputError where the
        prompt does not fit the model, or the policy needs column sums that are not there.
        """
        check_prompt(self.model, torch.tensor([prompt], dtype=torch.long))
        if policy.window is None and self.column_sums is None:
            raise InputError("the document's prefill holds no column sums of attention, which this policy needs")
        run_again = self._shorten(reusable(self.ids, prompt, policy.window or 1))
        rest = torch.tensor([prompt[len(self.ids) :]], device=self.model.device)
        sums = self.column_sums if policy.window is None else None
        try:
            prefill = extend(self.model, self.cache, rest, policy.window or 1, column_sums=sums)
            return prefill.logits, compress(prefill, policy, reserve), len(self.ids) - run_again
        finally:
            self._truncate(len(self.ids))

    def _run(self, ids: list[int], progress: Callable[[Iterable], Iterable] = iter) -> None:
        """Run ids behind those that are there, to stay."""
        tokens = torch.tensor([ids], device=self.model.device)
        self.column_sums = extend(self.model, self.cache, tokens, 0, None, self.column_sums, progress).column_sums
        self.ids = self.ids + ids

    def _shorten(self, length: int) -> int:
        """Keep the first `length` tokens; how many of them had to be run again.

        Column sums hold what the tokens cut off attended to as well, so they are made anew.
        """
        if length == len(self.ids):
            return 0
        kept = self.ids[:length]
        if self.column_sums is None:
            self._truncate(length)
            self.ids = kept
            return 0
        self._truncate(0)
        self.ids, self.column_sums = [], _no_sums(self.model)
        if kept:
            self._run(kept)
        return length

    def _truncate(self, length: int) -> None:
        for layer in self.cache.layers:
            layer.truncate(length)


def _no_sums(model: Llama) -> list[Tensor]:
    """The column sums of no tokens."""
    return [torch.zeros(1, model.config.kv_heads, 0, device=model.device) for _ in model.blocks]


FORMAT = "minikv prefill 1"


def save(document: Document, path: str | Path, text: dict[str, str]) -> None:
    """Write the document's prefill as safetensors, with `text` (what its ids were made of) and the model's identity.

    ids int64 [length]; keys.LAYER and values.LAYER [1, kv_heads, length, head_dim] in the model's dtype; column_sums.LAYER
    [1, kv_heads, length] float32, if there are any. The file can be read by its owner only: it holds the text.
    """
    tensors = {"ids": torch.tensor(document.ids)}
    for number, layer in enumerate(document.cache.layers):
        tensors |= {f"keys.{number}": layer.keys.contiguous(), f"values.{number}": layer.values.contiguous()}
        if document.column_sums is not None:
            tensors[f"column_sums.{number}"] = document.column_sums[number]
    metadata = {"format": FORMAT, **_identity(document.model), **text}

    def write(file: Path) -> None:
        try:
            save_file(tensors, file, metadata)
        except SafetensorError as error:  # a full disk, for one
            raise InputError(f"{path}: {error}") from error

    write_beside(path, write)


def read_text_of(path: str | Path) -> dict[str, str]:
    """What `save` was given as `text`, and the model's identity; InputError for anything but a file of this format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no prefill, or damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is no prefill: its format is {metadata.get('format')!r}; accepted: {FORMAT!r}")
    return metadata


def load(path: str | Path, model: Llama, ids: list[int], column_sums: bool = False) -> Document:
    """The document that `save` wrote, if it is this model's prefill of `ids` or of the first of them.

    With `column_sums` those are needed, too. InputError, naming what does not fit, for another model, dtype, text or shape,
    for values that are not finite, and for a damaged file. Nothing in the file is run.
    """
    metadata = read_text_of(path)
    for name, here in _identity(model).items():
        if metadata.get(name) != here:
            found = str(metadata.get(name))[:80]
            raise InputError(f"{path} was made with the model's {name} {found!r}; of this model it is {here!r}")
    try:
        with safe_open(path, framework="pt") as file:
            return _read(file, set(file.keys()), str(path), model, ids, column_sums)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _identity(model: Llama) -> dict[str, str]:
    """What a prefill depends on besides the ids: weights, dtype, and a hash of settings such as the rotary base."""
    settings = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    return {"weights": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch."), "settings": settings}


def _read(file: safe_open, names: set[str], path: str, model: Llama, ids: list[int], column_sums: bool) -> Document:
    def read(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in names:
            raise InputError(f"{path} holds no {name}")
        tensor = file.get_tensor(name)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise InputError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; needed: {dtype} {list(shape)}")
        if not tensor.isfinite().all():
            raise InputError(f"{path}: {name} holds NaN or infinity")
        return tensor.to(model.device)

    length = file.get_slice("ids").get_shape()[0] if "ids" in names and file.get_slice("ids").get_shape() else 0
    found = read("ids", (length,), torch.int64).tolist()
    if not found or found != ids[:length]:
        raise InputError(f"{path}: its ids are not those of its text; another tokenizer, chat template or version made them")
    if column_sums and "column_sums.0" not in names:
        raise InputError(f"{path} holds no column sums of attention, which h2o needs; save it with --policy h2o")

    config, cache, sums = model.config, model.new_cache(1, length + QUESTION_ROOM), []
    shape = (1, config.kv_heads, length, config.head_dim)
    for number, layer in enumerate(cache.layers):
        layer.append(read(f"keys.{number}", shape, model.dtype), read(f"values.{number}", shape, model.dtype))
        if column_sums:
            sums.append(read(f"column_sums.{number}", shape[:3], torch.float32))
    return Document(model, found, cache, sums or None)
