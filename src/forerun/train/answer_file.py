"""Answers in a file: tens of millions of tokens, compressed, and whole whenever it is read.

    forerun answers 1\\n                     what it is
    {"target": …, "options": …}\\n           whose answers they are, and how they were asked for
    block, block, …                         a length and a checksum (two numbers of 32 bits), then LZMA:
                                            {"keys": […], "turns": [[[prompt, answer], …], …]}\\n and all tokens

Blocks are added as answers come. An interruption can tear the last one only, which is cut off before others are added.
"""

from __future__ import annotations

import io
import json
import lzma
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.train.texts import Text

MAGIC = b"forerun answers 1\n"
FRAME = struct.Struct("<II")
PRESET = 1
"""Of LZMA. Tokens take 0.9 bytes each, at a million a second; zlib takes 1.3, higher presets hardly less."""
NARROW = 1 << 16


@dataclass(frozen=True)
class Conversation:
    """A prompt that was answered: the text of each turn, with all that was said before as its prompt."""

    key: str
    turns: list[Text]


class AnswerFile:
    def __init__(self, path: Path) -> None:
        """One that is there already."""
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is no file of answers: make one with `forerun train answers`")
            try:
                self.about: dict[str, Any] = json.loads(file.readline())
            except ValueError:
                raise self._damaged(len(MAGIC)) from None
            self._start = file.tell()

    @classmethod
    def create(cls, path: Path, about: dict[str, Any]) -> AnswerFile:
        """`about` is what it says of itself, for who reads it."""
        path.write_bytes(MAGIC + json.dumps(about).encode() + b"\n")
        return cls(path)

    def conversations(self) -> Iterator[Conversation]:
        """All of them, but for a block at the end that was torn."""
        with self.path.open("rb") as file:
            for _, payload in self._blocks(file):
                yield from _unpacked(payload)

    def cut_torn(self) -> None:
        """Make the file end with a whole block."""
        with self.path.open("r+b") as file:
            ends = [end for end, _ in self._blocks(file)]
            file.truncate(ends[-1] if ends else self._start)

    def append(self, conversations: Sequence[Conversation]) -> None:
        if not conversations:
            return
        payload = lzma.compress(_packed(conversations), preset=PRESET)
        with self.path.open("ab") as file:
            file.write(FRAME.pack(len(payload), zlib.crc32(payload)) + payload)

    def _blocks(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Where each ends, and its content."""
        size = file.seek(0, io.SEEK_END)
        place = file.seek(self._start)
        while place + FRAME.size <= size:
            length, checksum = FRAME.unpack(file.read(FRAME.size))
            end = place + FRAME.size + length
            if end > size:
                return
            payload = file.read(length)
            if zlib.crc32(payload) != checksum:
                if end == size:
                    return
                raise self._damaged(place)
            yield end, lzma.decompress(payload)
            place = end

    def _damaged(self, place: int) -> ValueError:
        return ValueError(f"{self.path} is damaged at byte {place}: delete it, and the prompts are answered again")


def _packed(conversations: Sequence[Conversation]) -> bytes:
    texts = [text for each in conversations for text in each.turns]
    largest = max((int(text.tokens.max()) for text in texts), default=0)
    kind = "<u2" if largest < NARROW else "<u4"
    head = {
        "keys": [each.key for each in conversations],
        "turns": [[[text.asked, len(text) - text.asked] for text in each.turns] for each in conversations],
        "kind": kind,
    }
    return json.dumps(head).encode() + b"\n" + b"".join(text.tokens.astype(kind).tobytes() for text in texts)


def _unpacked(payload: bytes) -> Iterator[Conversation]:
    line = payload.index(b"\n")
    head = json.loads(payload[:line])
    tokens = np.frombuffer(payload, np.dtype(head["kind"]), offset=line + 1)
    place = 0
    for key, turns in zip(head["keys"], head["turns"], strict=True):
        texts = []
        for asked, answered in turns:
            texts.append(Text(tokens[place : place + asked + answered], asked))
            place += asked + answered
        yield Conversation(key, texts)
