"""A long run's results, one JSON line each as they are finished, so that a stopped run goes on where it was."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from pathlib import Path

from minikv.errors import InputError


def digest(value) -> str:
    """A short hash of anything that JSON can hold: two values with one digest are the same."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """The JSONL file of a run: a first line with the run's settings, then one line for each finished example.

    Opening it again with the same settings finds what is done; other settings are refused, so that results of two
    experiments never mix. A line that was interrupted in the middle is dropped and its example done again.

    Of several processes each writes a file of its own, FILE.rank1 beside FILE and so on, and finds what is done in
    all of them, so the run may go on with another number of processes. Without a path nothing is written.
    """

    def __init__(self, path: str | Path | None, settings: dict, rank: int = 0):
        self.done: dict[str, dict] = {}  # example's key to its result
        self._file = None
        if path is None:
            return
        first = Path(path)
        own = first if rank == 0 else first.with_name(f"{first.name}.rank{rank}")
        head = {"settings": json.loads(json.dumps(settings)), "hash": digest(settings)}
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
            for file in {first, own, *first.parent.glob(f"{glob.escape(first.name)}.rank*")}:
                self._read(file, head, drop_interrupted=file == own)
            self._file = open(own, "a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{own}: {error.strerror}") from error
        if self._file.tell() == 0:
            self._write(head)

    def add(self, key: str, result: dict) -> None:
        """Write one finished example down, at once."""
        self.done[key] = result
        if self._file:
            self._write({"key": key, "result": result})

    def remove(self) -> None:
        """Delete the file, once the run's result is written elsewhere."""
        self._file.close()
        os.unlink(self._file.name)

    def _write(self, record: dict) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, path: Path, head: dict, drop_interrupted: bool) -> None:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # without a last line that was interrupted, or is being written
        for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], 1):
            try:
                record = json.loads(line)
                if number == 1:
                    _check_settings(path, record["settings"], head)
                else:
                    self.done[record["key"]] = record["result"]
            except InputError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}, line {number} is not a result of this program: {error!r}") from error
        if drop_interrupted and len(whole) < len(data):
            os.truncate(path, len(whole))


def _check_settings(path: Path, found: dict, head: dict) -> None:
    """InputError where a journal's settings are not those of this run; names the first that differs."""
    for name in [*head["settings"], *found]:
        there, here = found.get(name), head["settings"].get(name)
        if there != here:
            raise InputError(
                f"{path} holds results of other settings: {name} is {there!r} there and {here!r} here;"
                " name another file, or remove it"
            )
