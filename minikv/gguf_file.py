"""A GGUF file (llama.cpp's format): its header, which is values by name and a list of tensors, and the tensors.

The header is read here, because the reader of the gguf package takes seconds and 150 MB for a vocabulary, and takes a
broken length for a loop without end. The blocks of quantized numbers, which are the hard part, are left to the package.
The format is described in ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

from minikv.errors import InputError

MAGIC, VERSIONS = b"GGUF", (2, 3)
# The types of a value, by their numbers: whole numbers, float32, bool, then what is made of others, then 64 bits.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "an array"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` as PyTorch counts it, `offset` in bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def nbytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block_size * block_bytes


class GGUFFile:
    """The values and tensors of the GGUF at `file`, which names it in errors as `source`.

    Raises InputError where the file is not there, damaged, big-endian, or one part of several.
    """

    def __init__(self, file: Path):
        self.file, self.source = file, str(file)
        try:
            with open(file, "rb") as stream:
                self._values, self.tensors = _Header(stream).read()
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file} is damaged or not a GGUF file: {error}") from error
        parts = self.value("split.count", int, 1)
        if parts > 1:
            raise InputError(f"{file} is one of {parts} parts; merge them into one file (llama-gguf-split --merge)")

    def value(self, name: str, kind: type, default=None):
        """The value called `name`, which has to be a `kind`; `default` where there is none."""
        found = self._values.get(name)
        if found is None:
            return default
        if type(found) is not kind:
            raise InputError(f"{self.source}: {name} is {found!r:.60}; {KINDS[kind]} is needed")
        return found

    def needed(self, name: str, kind: type):
        """The value called `name`, which has to be there."""
        found = self.value(name, kind)
        if found is None:
            raise InputError(f"{self.source}: {name} is missing; {KINDS[kind]} is needed")
        return found

    def array(self, name: str, kind: type, length: int | None = None) -> list:
        """An array of `kind` that has to be there, with `length` elements if that is given."""
        found = self.needed(name, list)
        if found and type(found[0]) is not kind:  # all elements of a GGUF's array are of one type
            raise InputError(f"{self.source}: {name} holds {found[0]!r:.60}; {KINDS[kind]} is needed")
        if length is not None and len(found) != length:
            raise InputError(f"{self.source}: {name} has {len(found)} elements; {length} are needed")
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor dequantized to float32."""
        tensor = self.tensors[name]
        # Read, not mapped: pages of a mapped file would stay in memory beside the weights.
        data = np.fromfile(self.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        data = data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))
        return torch.from_numpy(dequantize(data, tensor.kind))


class _Header:
    """Reads what stands before the data. Raises ValueError for whatever is not as the format has it."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._end = os.fstat(stream.fileno()).st_size

    def read(self) -> tuple[dict, dict[str, GGUFTensor]]:
        if self._bytes(4) != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        (version,) = self._numbers("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            found = "it is big-endian; little-endian" if swapped else f"it has version {version}; 2 or 3"
            raise ValueError(f"{found} is needed")
        tensor_count, value_count = self._numbers("QQ")
        values = self._named(value_count, lambda: self._value(*self._numbers("I")))
        stored = self._named(tensor_count, self._tensor)
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.60}; a power of two from 8 on is needed")
        start = math.ceil(self._stream.tell() / alignment) * alignment
        tensors = {name: GGUFTensor(shape, kind, start + offset) for name, (shape, kind, offset) in stored.items()}
        free = start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            end = tensor.offset + tensor.nbytes
            if tensor.offset % alignment or tensor.offset < free or end > self._end:
                raise ValueError(f"tensor {name} cannot lie at the bytes {tensor.offset} to {end} of {self._end}")
            free = end
        return values, tensors

    def _named(self, count: int, read) -> dict:
        found = {}
        for _ in range(count):
            name = self._value(STRING)
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = read()
        return found

    def _value(self, kind: int):
        if kind == STRING:
            return self._bytes(*self._numbers("Q")).decode()
        if kind == ARRAY:
            kind, length = self._numbers("IQ")
            if kind in SCALARS:
                return list(self._numbers(SCALARS[kind], length))
            return [self._value(kind) for _ in range(length)]
        if kind not in SCALARS:
            raise ValueError(f"there is no type {kind} of values")
        return self._numbers(SCALARS[kind])[0]

    def _tensor(self) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        sizes = self._numbers("Q", *self._numbers("I"))  # the dimension that lies together in memory first
        kind, offset = self._numbers("IQ")
        kind = GGMLQuantizationType(kind)
        block_size = GGML_QUANT_SIZES[kind][0]
        if not sizes or sizes[0] % block_size:
            raise ValueError(f"a tensor of shape {list(reversed(sizes))} has no whole blocks of {kind.name}")
        return tuple(reversed(sizes)), kind, offset

    def _numbers(self, code: str, count: int = 1) -> tuple:
        """`count` numbers of one type, by its letter in struct; or one of each, where there are several letters."""
        form = "<" + (code if len(code) > 1 else f"{count}{code}")
        return struct.unpack(form, self._bytes(struct.calcsize("<" + code) * count))

    def _bytes(self, count: int) -> bytes:
        if count > self._end - self._stream.tell():  # before memory for a broken length is asked for
            raise ValueError(f"it ends at byte {self._end}, within its header")
        return self._stream.read(count)


@cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package knows how, tried on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
