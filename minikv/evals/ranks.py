"""Many processes, one evaluation: under torchrun each rank takes its share of the examples, rank 0 reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from minikv.errors import InputError
from minikv.weights import choose_device


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run; alone unless torchrun started it."""

    rank: int = 0
    count: int = 1
    on_this_machine: int = 0  # torchrun's local rank

    @property
    def reports(self) -> bool:
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The device that was asked for; of several GPUs each process on a machine takes its own."""
        if self.count > 1 and choose_device(asked) == torch.device("cuda"):
            return f"cuda:{self.on_this_machine % torch.cuda.device_count()}"
        return asked

    def share(self, examples: list) -> list:
        """This rank's examples: from the list alone, never from what is done, which ranks may see at different moments."""
        return examples[self.rank :: self.count]

    def merge(self, results: dict) -> dict:
        """The results of all ranks, on rank 0; on the others nothing. Waits for them all."""
        if self.count == 1:
            return results
        parts = [None] * self.count if self.reports else None
        dist.gather_object(results, parts)
        return {key: result for part in parts for key, result in part.items()} if self.reports else {}


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other processes of torchrun's, if it started this one.

    Over gloo on every device: what is sent are small records of text and numbers, which live on the CPU.
    """
    count, on_this_machine = _from_environment("WORLD_SIZE", default=1), _from_environment("LOCAL_RANK", default=0)
    if count <= 1:
        yield Ranks()
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(days=7))  # a rank may be done long before the last one
    except ValueError as error:
        raise InputError(f"WORLD_SIZE is {count}, but the other settings of torchrun are not right: {error}") from error
    try:
        yield Ranks(dist.get_rank(), count, on_this_machine)
    finally:
        dist.destroy_process_group()


def _from_environment(name: str, default: int) -> int:
    """A number that torchrun sets for its processes."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"the environment variable {name} is {text!r}; a whole number is needed, as torchrun sets it")
    return int(text)
