"""Reading a GGUF file: its metadata and where its tensors lie.

The `gguf` package brings the constants and the dequantisation. The header is read here: its own reader makes a numpy
view of every token of the vocabulary, which takes seconds, and trusts the lengths that the file states.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""The tensor types that are converted."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FLOAT32 = 6
_MOST_DIMENSIONS = 4
_AT_ONCE = 1 << 19
"""Numbers that are dequantised at once: few enough for the processor's cache, a multiple of every block."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies, and what it is made of."""

    name: str
    shape: tuple[int, ...]  # rows first, as in PyTorch; the file has it reversed
    kind: str
    offset: int  # from the start of the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file, checked against its length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        try:
            with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return cls._parse(path, data)
        except ValueError as error:
            if "empty" not in str(error):
                raise
            raise _broken(path) from None  # an empty file cannot be mapped

    @classmethod
    def _parse(cls, path: Path, data: mmap.mmap) -> GGUFFile:
        if data[:4] != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: name a GGUF file, or the folder of a Hugging Face model")
        cursor = _Cursor(path, data, 4)
        version = cursor.number("I")
        if version not in VERSIONS:
            raise ValueError(
                f"{path} is GGUF version {version}, and Forerun reads {VERSIONS[0]} and {VERSIONS[1]}: {_FIX}"
            )
        count, pairs = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            metadata[key] = cursor.value()
        entries = [cursor.entry() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _broken(path)
        start = -(-cursor.at // alignment) * alignment
        return cls(path, metadata, _tensors(path, entries, start, alignment, len(data)))

    def read(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first number, float32 numbers) of a tensor, flat and some at a time."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType[tensor.kind]
        block, size = GGML_QUANT_SIZES[kind]
        buffer = bytearray(min(tensor.size, _AT_ONCE // block * size))
        first = 0
        # Read, not mapped: mapped pages come one by one, which costs more than copying them.
        with self.path.open("rb") as stream:
            stream.seek(tensor.offset)
            left = tensor.size
            while left:
                part = memoryview(buffer)[: min(left, len(buffer))]
                if stream.readinto(part) != len(part):
                    raise _broken(self.path)
                left -= len(part)
                # One long row: `dequantize` loops over rows in Python.
                numbers = torch.from_numpy(np.array(dequantize(_typed(part, tensor.kind), kind), np.float32)).flatten()
                yield first, numbers
                first += numbers.shape[0]


def _typed(part: memoryview, kind: str) -> np.ndarray[Any, np.dtype[Any]]:
    code = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)
    return np.frombuffer(part, code).reshape(1, -1)


@dataclass
class _Cursor:
    """Walks over the header; whatever reaches past the end of the file is refused."""

    path: Path
    data: mmap.mmap
    at: int

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise _broken(self.path)
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", errors="replace")

    def value(self, depth: int = 0) -> Any:
        return self._of(self.number("I"), depth)

    def _of(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 3:
            return self._array(depth)
        if kind not in _SCALARS:
            raise _broken(self.path)
        number = self.number(_SCALARS[kind])
        return _shortest(number) if kind == _FLOAT32 else number

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))) if count else []
        if count > len(self.data) - self.at:  # each entry takes a byte at least
            raise _broken(self.path)
        return [self._of(kind, depth + 1) for _ in range(count)]

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self.text()
        dimensions = self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise _broken(self.path)
        shape = tuple(int(self.number("Q")) for _ in range(dimensions))
        return name, shape[::-1], self.number("I"), self.number("Q")


def _tensors(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, length: int
) -> dict[str, GGUFTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    tensors: dict[str, GGUFTensor] = {}
    following = 0  # each tensor begins where the one before it ended, filled up to a multiple of `alignment`
    for name, shape, code, offset in entries:
        kind = names.get(code, f"number {code}")
        if kind not in READABLE:
            raise ValueError(
                f"{path}: the tensor {name} is of the type {kind}, and Forerun reads {', '.join(READABLE)}: "
                "take a GGUF file of another quantisation"
            )
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
        if name in tensors or not shape or not all(shape) or shape[-1] % block or offset != following:
            raise _broken(path)
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, math.prod(shape) // block * size)
        following = -(-(offset + tensors[name].size) // alignment) * alignment
        end = tensors[name].offset + tensors[name].size
        if end > length:
            raise ValueError(f"{path} ends before its tensor {name} does ({length:,} of {end:,} bytes): {_FIX}")
    return tensors


_FIX = "fetch the file again"


def _broken(path: Path) -> ValueError:
    return ValueError(f"{path} is not a whole GGUF file: {_FIX}")


def _shortest(number: float) -> float:
    """The decimal number that was meant: a file says 9.999999747378752e-06 where a config said 1e-05."""
    return float(str(np.float32(number))) if math.isfinite(number) else number
