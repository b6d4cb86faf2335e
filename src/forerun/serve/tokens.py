"""Single tokens as text and as bytes, for log probabilities and traces."""

from __future__ import annotations

from functools import cached_property

from forerun.engine.text import REPLACEMENT
from forerun.models.tokenizer import Tokenizer


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Special tokens by their names; a part of a character as a replacement character."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special=False)
        return self._texts[token]

    def spelled(self, token: int) -> list[int] | None:
        """The bytes, also of a part of a character where the vocabulary tells them; else None."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = self._pieces.get(token, "")
        if len(piece) == 6 and piece.startswith("<0x"):  # as SentencePiece writes a byte
            return [int(piece[3:5], 16)]
        if piece and all(sign in self._bytes for sign in piece):
            return [self._bytes[sign] for sign in piece]
        return None

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {token: piece for piece, token in self._tokenizer.vocab.items()}

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """How byte-level vocabularies write bytes (GPT-2): printable ones as themselves, the others from 256 on."""
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
