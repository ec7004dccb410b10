"""A long run's results, one JSON line each as they are finished, so that a stopped run goes on where it was."""

from __future__ import annotations

import glob
import hashlib
import json
from contextlib import suppress
from pathlib import Path

from minikv.errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two processes apart
    fcntl = None

BEGINNING = b'{"settings"'


def digest(value) -> str:
    """A short hash of anything that JSON can hold: two values with one digest are the same."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """The JSONL file of a run: a first line with the run's settings, then one line for each finished example.

    Opening it again with the same settings finds what is done; other settings are refused, so that results of two
    experiments never mix, and so is a second process. A line that was interrupted in the middle is dropped and its
    example done again. A file without results counts as empty: its settings bind nobody.

    Of several processes of one run each writes a file of its own, FILE.rank1 beside FILE and so on, and finds what is
    done in all of them, so the run may go on with another number of processes. Without a path nothing is written.
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
            self._file = open(own, "a", encoding="utf-8")
            _lock(self._file)
            for file in {first, *first.parent.glob(f"{glob.escape(first.name)}.rank*")} - {own}:
                self.done |= _read(file, head)[0]
            mine, size = _read(own, head)
            if size < self._file.tell():
                self._file.truncate(size)
        except InputError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise InputError(f"{own}: {error.strerror}") from error
        self.done |= mine
        self._head = None if mine else head  # still to be written, with the first result

    def add(self, key: str, result: dict) -> None:
        """Write one finished example down, at once."""
        self.done[key] = result
        if self._file:
            self._write(*filter(None, [self._head]), {"key": key, "result": result})
            self._head = None

    def remove(self) -> None:
        """Delete the file, once the run's result is written elsewhere."""
        self.close()
        Path(self._file.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file, so that another run may go on with it."""
        if self._file:
            with suppress(OSError):  # what could not be written was told when it was added
                self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, *records: dict) -> None:
        try:
            self._file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
            self._file.flush()
        except OSError as error:
            self.close()
            raise InputError(f"{self._file.name} cannot be written: {error.strerror}") from error


def _lock(file) -> None:
    """InputError where another process has the file; the lock ends with the process, however that ends."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another process is writing {file.name}; let it end, or name another file") from error
    except OSError:  # a file system without locks
        pass


def _read(path: Path, head: dict) -> tuple[dict[str, dict], int]:
    """The results in a journal's file and its bytes up to the end of the last whole line; none and 0 without results."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]  # without a last line that was interrupted, or is being written
    if not whole and not data.startswith(BEGINNING[: len(data)]):
        raise InputError(f"{path} is not a file of results, so it is left alone; name another")
    results, settings = {}, {}
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            if number == 1:
                settings = dict(record["settings"])
            else:
                results[record["key"]] = record["result"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}, line {number} is not a result of this program: {error!r}") from error
    if not results:
        return {}, 0
    _check_settings(path, settings, head)
    return results, len(whole)


def _check_settings(path: Path, found: dict, head: dict) -> None:
    """InputError where a journal's settings are not those of this run; names the first that differs."""
    for name in [*head["settings"], *found]:
        there, here = found.get(name), head["settings"].get(name)
        if there != here:
            raise InputError(
                f"{path} holds results of other settings: {name} is {there!r} there and {here!r} here;"
                " name another file, or remove it"
            )
