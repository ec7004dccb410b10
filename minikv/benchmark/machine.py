"""The machine: what it is, how fast it reads memory and multiplies matrices, and what a process holds of its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from minikv.config import Config
from minikv.weights import DTYPES

STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")


def describe(device: torch.device, threads: int) -> dict[str, str | int | None]:
    """Processor, cores, threads, bytes of memory, and the GPU where one is used."""
    facts = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": _kilobytes(MEMINFO, "MemTotal"),
        "device": str(device),
    }
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _kilobytes(file: Path, name: str) -> int | None:
    """A `Name:  123 kB` of a /proc file in bytes; None on systems without it."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process can have on the device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _kilobytes(MEMINFO, "MemAvailable") if device.type == "cpu" else None


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


class PeakMemory:
    """Peak memory of a run, above what the process held after loading and a warm-up with a few tokens.

    On Linux's CPU it is the process's highest resident memory during the run (VmHWM, which clear_refs sets back)
    minus its resident memory (VmRSS) when this object was made. So it leaves out the weights and what the libraries
    hold, and counts cache, hidden states and whatever the run made the allocator ask for. On CUDA it is torch's
    max_memory_allocated minus memory_allocated then. Elsewhere it is None.

    `held` are bytes of a cache that was allocated while loading: they are counted as the run's.
    """

    def __init__(self, device: torch.device, held: int = 0):
        self.device = device
        _give_back_freed_pages()
        self._base = self._now("VmRSS")
        if self._base is not None:
            self._base -= held

    def start(self) -> None:
        _give_back_freed_pages()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif STATUS.exists():
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:  # some containers forbid it; a peak that cannot be set back would be another run's
                self._base = None

    def above(self) -> int | None:
        """Bytes at the highest moment since `start`."""
        peak = self._now("VmHWM")
        return None if peak is None or self._base is None else max(peak - self._base, 0)

    def _now(self, name: str) -> int | None:
        if self.device.type == "cuda":
            highest = name == "VmHWM"
            return (torch.cuda.max_memory_allocated if highest else torch.cuda.memory_allocated)(self.device)
        return _kilobytes(STATUS, name) if self.device.type == "cpu" else None


def _give_back_freed_pages() -> None:
    """Without it pages that an earlier run freed would be resident, and count or not as chance has it."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Rates:
    """The machine's best rates so far. `measure` is called between rounds, so that they see the machine as the rounds do."""

    def __init__(self, config: Config, dtypes: list[str], device: torch.device):
        self.bytes_per_second = 0.0
        self.multiply_adds_per_second = dict.fromkeys(dtypes, 0.0)
        self._config, self._device = config, device

    @torch.no_grad()
    def measure(self) -> None:
        """Read a tensor far larger than any processor cache; multiply matrices of the model's shape and square ones."""
        on_gpu = self._device.type == "cuda"
        large = torch.ones(1 << 18 if on_gpu else 1 << 16, 4096, device=self._device)  # float32: 4 GiB, 1 GiB
        row, flat = torch.ones(4096, device=self._device), large.view(-1)
        for read in (flat.sum, lambda: flat.dot(flat), lambda: large @ row):
            self.bytes_per_second = max(self.bytes_per_second, large.nbytes / self._best(read))
        rows, square = (4096, 8192) if on_gpu else (512, 1024)
        hidden, middle = self._config.hidden_size, self._config.intermediate_size
        for dtype, best in self.multiply_adds_per_second.items():
            for m, k, n in ((rows, hidden, middle), (rows, middle, hidden), (square, square, square)):
                a = torch.ones(m, k, dtype=DTYPES[dtype], device=self._device)
                b = torch.ones(n, k, dtype=DTYPES[dtype], device=self._device)
                best = max(best, m * k * n / self._best(partial(F.linear, a, b)))
            self.multiply_adds_per_second[dtype] = best
        if on_gpu:
            del large, row, flat, a, b
            torch.cuda.empty_cache()  # the participants need the memory

    def _best(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Seconds of the fastest of a few runs, after one that warms up."""
        work()
        seconds = []
        for _ in range(repeats):
            start = now(self._device)
            work()
            seconds.append(now(self._device) - start)
        return min(seconds)
