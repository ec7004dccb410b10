"""Checkpoints by name from the Hugging Face hub: fetched once, and read from the cache of its library after that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from minikv.errors import InputError
from minikv.files import read_json

TEXT = ["*.json", "*.jinja", "tokenizer.model"]  # no Python, and no pickles, which can run code


def fetch(name: str) -> Path:
    """The checkpoint folder of the hub's repository `org/name`, fetched where the cache lacks it.

    Place, token and offline mode are those of the huggingface_hub package: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
    HF_ENDPOINT. The cache never holds half a file. Raises InputError whatever goes wrong.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise InputError(f"{name} is on the hub, which needs a package: pip install huggingface_hub") from error
    except ValueError as error:  # it reads its environment variables when it is imported
        raise InputError(f"huggingface_hub cannot be used: {error}") from error
    if not sys.stderr.isatty():
        disable_progress_bars()  # one of them is shown everywhere otherwise
    try:
        folder = Path(snapshot_download(name, allow_patterns=TEXT, ignore_patterns="*/*"))
        if (folder / "config.json").is_file():
            # One by one and not in the package's threads: Ctrl-C would wait for those.
            for file in _weight_files(folder):
                hf_hub_download(name, file, revision=folder.name)
    except Exception as error:  # network, server, token, disk: the package raises many kinds
        message = f"{name} is not a folder here, and cannot be fetched from the hub: {_reason(error)}"
        raise InputError(message) from error
    if not (folder / "config.json").is_file():
        raise InputError(f"{name} has no config.json; a repository with a Hugging Face checkpoint is needed")
    return folder


def _weight_files(folder: Path) -> list[str]:
    """The safetensors files by what the repository's index says; weights.py checks what they hold."""
    shards = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(shards, dict):
        return ["model.safetensors"]
    return sorted({shard for shard in shards.values() if re.fullmatch(r"[^/\\]+\.safetensors", str(shard))})


def _reason(error: Exception) -> str:
    """What went wrong, for somebody who knows neither the package nor the server."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    absent = isinstance(error, LocalEntryNotFoundError)  # no answer from the hub, and no copy from an earlier time
    cause = error.__cause__ if absent and error.__cause__ else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    first_line = (str(cause).strip().splitlines() or [""])[0]
    if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
        return "there is no such repository, or it is private and a token for it is needed in HF_TOKEN"
    if status in (401, 403):
        return f"access is refused ({status}); set HF_TOKEN to the token of an account that has been granted access"
    if isinstance(cause, EntryNotFoundError) and not absent:
        return "it lacks model.safetensors, or a shard that its index names; pickles (.bin) are not read"
    message = f"{type(cause).__name__}: {first_line}"
    return f"the cache does not hold all of it, and the hub cannot be used ({message})" if absent else message
