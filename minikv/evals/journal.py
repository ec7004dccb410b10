"""A long run's results, one JSON line each as they are finished, so that a stopped run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from minikv.errors import InputError


class Journal:
    """The JSONL file of a run: a first line with the run's settings, then one line for each finished example.

    Opening it again with the same settings finds what is done; other settings are refused, so that results of two
    experiments never mix. A line that was interrupted in the middle is dropped and its example done again.
    """

    def __init__(self, path: str | Path, settings: dict):
        self.path = Path(path)
        self.done: dict[str, dict] = {}  # example's key to its result
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        head = {"settings": settings, "hash": digest}
        try:
            if self.path.exists() and self.path.stat().st_size:
                self._read(head)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}") from error
        if self._file.tell() == 0:
            self._write(head)

    def add(self, key: str, result: dict) -> None:
        """Write one finished example down, at once."""
        self.done[key] = result
        self._write({"key": key, "result": result})

    def _write(self, record: dict) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, head: dict) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # without a last line that was interrupted
        lines = whole.decode("utf-8", errors="replace").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number > 1:
                    self.done[record["key"]] = record["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path}, line {number} is not a result of this program: {error}") from error
            if number == 1 and (not isinstance(record, dict) or record.get("hash") != head["hash"]):
                raise InputError(f"{self.path} holds results of other settings; name another file, or remove it")
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
