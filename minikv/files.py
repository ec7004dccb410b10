"""Small files: reading the JSON that lies beside a checkpoint's weights, writing results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from minikv.errors import InputError


def read_json(path: Path) -> dict:
    """The JSON object in the file at `path`; {} where there is no such file.

    Raises InputError where the file is not UTF-8, not JSON, or holds something other than an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def write_json(path: str | Path, record: dict) -> None:
    """Write a JSON record beside and then into place."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text beside and then into place."""
    write_beside(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_beside(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` and move it into place, so that an interrupted run leaves no half file."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        os.replace(beside, path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink()
