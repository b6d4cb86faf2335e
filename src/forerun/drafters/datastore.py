"""A datastore: the tokens of a folder of texts with a suffix array over them, in one file that is mapped, not read.

Suffixes are sorted by their first `DEPTH` tokens, in the order of the text where these are equal. A match and the
continuation that is drafted after it are shorter than that together, so no lookup can tell this from a full sort, and
the work does not grow with repetitions: files that occur twice are what makes a full sort slow. Sorting takes about 40
bytes of memory a token; the file takes 6, or 8 where the vocabulary does not fit in 16 bits.

The file: `MAGIC`; version, length of the header and its CRC-32, each 32 bits; the header as JSON; then, each at a
multiple of 64 bytes, the tokens and the suffixes as 32-bit positions, little-endian. Tokens are big-endian: so the
order of their bytes is the order of the texts, and a search compares bytes instead of numbers. After each document
comes a separator, which is no token: nothing that was asked for matches across it, and continuations end there.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forerun.models.checkpoint import Progress
from forerun.models.store import naming

MAGIC = b"FORERUN\n"
VERSION = 1
DEPTH = 32
"""So many tokens of each suffix are sorted."""
LARGEST = 2**31 - 1
"""Tokens: positions have to fit in 32 bits."""

_START = struct.Struct("<8sIII")
_LONGEST_HEADER = 1 << 16
_ALIGN = 64
_CHUNK = 1 << 22

Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Header:
    tokens: int
    """A separator after each document included."""
    documents: int
    vocabulary: int
    """All tokens are below it."""
    fingerprint: str
    """Of the tokenizer that made the tokens."""
    model: str
    """The name of the model whose tokenizer it was."""
    depth: int
    checksum: int
    """CRC-32 of tokens and suffixes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            text = field.name in {"fingerprint", "model"}
            if not isinstance(value, str) if text else type(value) is not int or value < 0:
                raise ValueError(f"{field.name} is {value!r}")
        if not self.documents <= self.tokens <= LARGEST or self.vocabulary >= 2**32:
            raise ValueError("the numbers do not fit each other")

    @property
    def token_type(self) -> np.dtype[Any]:
        """A type without room for the separator, its largest number, is too small."""
        return np.dtype(">u2" if self.vocabulary <= 0xFFFF else ">u4")

    @property
    def suffixes(self) -> int:
        """None starts with a separator."""
        return self.tokens - self.documents


@dataclass(frozen=True)
class Match:
    length: int
    first: int  # in the suffix array
    end: int


class Datastore:
    """An open store. Make one with `Datastore.open`."""

    def __init__(self, header: Header, tokens: Numbers, suffixes: Numbers) -> None:
        self.header = header
        self.tokens = np.asarray(tokens)  # still the mapped file, without what a `memmap` does at every access
        self.suffixes = np.asarray(suffixes)
        self._bytes = self.tokens.view(np.uint8).data
        self._positions = self.suffixes.data

    @classmethod
    def open(cls, path: Path) -> Datastore:
        """Reads the header; a file that is none, or not whole, is refused. What a damaged body can do at worst is to
        draft nonsense: `intact` reads all of it."""
        if not path.is_file():
            raise ValueError(f"there is no datastore {path}: make one with `forerun datastore build`")
        with path.open("rb") as file:
            header, start = _read_header(path, file)
            size = os.fstat(file.fileno()).st_size
        places = _places(header, start)
        if size != places[1] + 4 * header.suffixes or not header.suffixes:
            raise _damaged(path)
        return cls(
            header,
            np.memmap(path, header.token_type, "r", places[0], (header.tokens,)),
            np.memmap(path, "<u4", "r", places[1], (header.suffixes,)),
        )

    def intact(self) -> bool:
        """Whether tokens and suffixes are as they were written."""
        return _checksum(self.tokens, self.suffixes) == self.header.checksum

    def longest(self, text: Sequence[int], shortest: int, longest: int) -> Match | None:
        """Where the longest suffix of a text occurs, of at least `shortest` and at most `longest` tokens.

        Whatever occurs does so without its first token, too; so the length is found by bisection as well.
        """
        assert longest <= self.header.depth
        known = list(text[-longest:]) if longest > 0 else []
        for place in reversed(range(len(known))):
            if not 0 <= known[place] < self.header.vocabulary:
                known = known[place + 1 :]
                break
        pattern = np.array(known, dtype=self.header.token_type).tobytes()
        best = None
        low, high = shortest, len(known)
        length = low  # most texts that are not found are not found at all
        while low <= high:
            found = self._range(pattern[len(pattern) - length * self.header.token_type.itemsize :], length)
            if found is None:
                high = length - 1
            else:
                best, low = found, length + 1
            length = (low + high + 1) // 2
        return best

    def continuations(self, match: Match, length: int, most: int) -> Numbers:
        """[C, length] what follows a match, at no more than `most` of its places, evenly spread, in the order of the
        tokens; a separator ends a document, and whatever follows it means nothing."""
        count = match.end - match.first
        rows = np.arange(match.first, match.end) if count <= most else match.first + np.arange(most) * count // most
        # A place beyond the end, which only a damaged file has, leads to the last separator.
        places = self.suffixes[rows].astype(np.int64)[:, None] + np.arange(match.length, match.length + length)
        found: Numbers = self.tokens[np.minimum(places, self.header.tokens - 1)].astype(np.int64)
        return found

    def _range(self, pattern: bytes, length: int) -> Match | None:
        """The suffixes that begin with the pattern."""
        data, wide = self._bytes, self.header.token_type.itemsize

        def beginning(position: int) -> bytes:
            return data[position * wide : position * wide + len(pattern)].tobytes()

        first = bisect_left(self._positions, pattern, key=beginning)
        if first == len(self._positions) or beginning(self._positions[first]) != pattern:
            return None
        return Match(length, first, bisect_right(self._positions, pattern, lo=first + 1, key=beginning))


# --- making one -----------------------------------------------------------------------------------------------


def build(
    path: Path,
    documents: Iterable[Sequence[int]],
    *,
    vocabulary: int,
    fingerprint: str,
    model: str = "",
    progress: Progress | None = None,
) -> Header:
    """Write a store of these documents, whole or not at all; empty ones are left out."""
    blank = Header(0, 0, vocabulary, fingerprint, model, DEPTH, 0)
    native = blank.token_type.newbyteorder("=")
    gathered = array("H" if native.itemsize == 2 else "I")
    separator = int(np.iinfo(native).max)
    count = 0
    for tokens in documents:
        if len(tokens):
            assert min(tokens) >= 0
            assert max(tokens) < vocabulary
            gathered.extend(tokens)
            gathered.append(separator)
            count += 1
            if len(gathered) > LARGEST:
                raise ValueError(f"there are more than {LARGEST:,} tokens: build a part with --limit-tokens")
    if not count:
        raise ValueError("there is no text to put in the datastore: name a folder with text files")
    text = np.frombuffer(gathered, dtype=native)
    suffixes = sort_suffixes(text, progress)[: len(text) - count]  # the separator is the largest, so it comes last
    stored = text.astype(blank.token_type)
    header = Header(len(text), count, vocabulary, fingerprint, model, DEPTH, _checksum(stored, suffixes))
    _replace(Path(os.path.realpath(path)), header, stored, suffixes)
    return header


def sort_suffixes(text: Numbers, progress: Progress | None = None) -> NDArray[np.uint32]:
    """The positions of a text in the order of its suffixes' first `DEPTH` tokens, then of the text.

    Prefix doubling (Manber and Myers, 1993): ranks by k tokens, of a position and of the one k further on, give the
    ranks by 2k tokens. The first ranks are by as many tokens as fit in 64 bits.
    """
    size = len(text)
    sorted_by = 8 // text.dtype.itemsize
    key = np.zeros(size, np.uint64)
    for place in range(min(sorted_by, size)):
        shift = np.uint64(8 * text.dtype.itemsize * (sorted_by - 1 - place))
        key[: size - place] |= text[place:].astype(np.uint64) << shift
    rank = _ranks(key)
    while sorted_by < DEPTH:
        if progress is not None:
            progress(f"Sorting {size:,} tokens ({sorted_by} of {DEPTH})", 0, 0)
        key = rank.astype(np.uint64)
        key *= np.uint64(size + 1)
        key[: max(0, size - sorted_by)] += rank[sorted_by:].astype(np.uint64) + np.uint64(1)  # 0: beyond the end
        rank = _ranks(key)
        sorted_by *= 2
    key = rank.astype(np.uint64)
    key *= np.uint64(size)
    key += np.arange(size, dtype=np.uint64)
    key.sort()
    key %= np.uint64(size)
    return key.astype("<u4")


def _ranks(key: NDArray[np.uint64]) -> NDArray[np.int32]:
    """For each key how many different ones are smaller."""
    order = np.argsort(key)
    ascending = key[order]
    steps = np.zeros(len(key), np.int32)
    np.cumsum(ascending[1:] != ascending[:-1], out=steps[1:])
    rank = np.empty(len(key), np.int32)
    rank[order] = steps
    return rank


# --- the file -------------------------------------------------------------------------------------------------


def _replace(path: Path, header: Header, tokens: Numbers, suffixes: Numbers) -> None:
    """Beside the file, then renamed: a reader sees the old store or the new one."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with naming(path), part.open("xb") as file:
            _write(file, header, tokens, suffixes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write(file: BinaryIO, header: Header, tokens: Numbers, suffixes: Numbers) -> None:
    said = json.dumps(asdict(header)).encode()
    file.write(_START.pack(MAGIC, VERSION, len(said), zlib.crc32(said)) + said)
    for place, numbers in zip(_places(header, file.tell()), (tokens, suffixes), strict=True):
        file.write(bytes(place - file.tell()))
        file.write(numbers.view(np.uint8).data)


def _places(header: Header, start: int) -> tuple[int, int]:
    """Where tokens and suffixes begin."""
    tokens = start + -start % _ALIGN
    end = tokens + header.tokens * header.token_type.itemsize
    return tokens, end + -end % _ALIGN


def _read_header(path: Path, file: BinaryIO) -> tuple[Header, int]:
    """The header, and where it ends."""
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(MAGIC):
        raise ValueError(f"{path} is no datastore: make one with `forerun datastore build`")
    _, version, length, checksum = _START.unpack(start)
    if version != VERSION:
        raise ValueError(
            f"the datastore {path} has format {version} and this Forerun reads format {VERSION}: build it again with "
            f"`forerun datastore build`"
        )
    said = file.read(min(length, _LONGEST_HEADER))
    if len(said) != length or zlib.crc32(said) != checksum:
        raise _damaged(path)
    try:
        return Header(**json.loads(said)), _START.size + length
    except (TypeError, ValueError):
        raise _damaged(path) from None


def _checksum(*parts: Numbers) -> int:
    checksum = 0
    for numbers in parts:
        data = numbers.view(np.uint8).data
        for start in range(0, len(data), _CHUNK):
            checksum = zlib.crc32(data[start : start + _CHUNK], checksum)
    return checksum


def _damaged(path: Path) -> ValueError:
    return ValueError(f"the datastore {path} is damaged or cut off: build it again with `forerun datastore build`")
