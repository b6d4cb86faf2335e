"""Text from tokens as they come: whole characters only, and nothing of a stop string.

A token is no piece of text. It may hold a part of a character, or a space that shows only where something stands before
it. So the text of a few last tokens is decoded again with every new one, and what no later token can change is
*settled*. Settled text is shown, but for an end that may yet become a stop string.

The first stop string is the one that is complete first (of two that end together, the longer): the only reading that
does not depend on how the text was cut into tokens and steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
RARE = "\U000f1234"
"""For private use, so that no vocabulary holds it whole; tokenizers that know bytes spell it with four."""
CONTEXT = 6
"""Tokens that are decoded again before new ones. A character has at most four bytes, so what a cut through one does to
the text after it is over by then; and the space that many tokenizers drop from the first token is not a new one's."""
WINDOW = 24
"""With more tokens than this in the window, all but `CONTEXT` of the settled ones are dropped."""


class Detokenizer(Protocol):
    """The part of a tokenizer that is needed here. Special tokens have no text."""

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Matcher:
    """Looks for several strings at once, character by character (Knuth, Morris and Pratt's automaton for each)."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)

    @property
    def pending(self) -> int:
        """How many of the last characters may be the beginning of one of the strings."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Go on with `text` up to the first string that is complete: where in `text` that ends, and its length."""
        if not self._strings:
            return None
        for place, sign in enumerate(text, start=1):
            found = 0
            for which, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
                length = self._matched[which]
                while length and string[length] != sign:
                    length = borders[length - 1]
                length += string[length] == sign
                if length == len(string):
                    found = max(found, length)
                    length = borders[length - 1]
                self._matched[which] = length
            if found:
                return place, found
        return None

    def would_find(self, text: str) -> bool:
        """What `feed` would say, without going on."""
        before = self._matched.copy()
        found = self.feed(text) is not None
        self._matched = before
        return found


def _borders(string: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = borders[length - 1]
        length += string[place] == string[length]
        borders[place] = length
    return borders


class _Kind(Enum):
    PLAIN = auto()
    SILENT = auto()
    BYTE = auto()


class _Kinds:
    """Of a tokenizer's tokens, as they are met.

    Two kinds of tokenizers know bytes. Byte-level ones join all bytes and then read them, so that only an unfinished
    character at the very end is open. SentencePiece reads each run of byte tokens by itself, and shows a run that is
    not valid as nothing but replacement characters; there a whole run is open until another token ends it.
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._decode = tokenizer.decode
        spelled = tokenizer.encode(RARE)
        self._stray = [token for token in spelled if tokenizer.decode([token]) == REPLACEMENT][-1:]
        self._whole_runs = bool(self._stray) and RARE not in tokenizer.decode([*spelled, *self._stray])
        self._known: dict[int, _Kind] = {}

    def of(self, token: int) -> _Kind:
        kind = self._known.get(token)
        if kind is None:
            kind = self._known[token] = self._find(token)
        return kind

    def _find(self, token: int) -> _Kind:
        text = self._decode([token, token])  # twice, since one space may have no text at the beginning
        if not text:
            return _Kind.SILENT
        # A stray byte after tokens of a run changes their text too.
        if self._whole_runs and (
            REPLACEMENT in text or not self._decode([token, token, *self._stray]).startswith(text)
        ):
            return _Kind.BYTE
        return _Kind.PLAIN


@lru_cache(maxsize=16)
def _kinds_of(tokenizer: Detokenizer) -> _Kinds:
    """All texts of a model have the same."""
    return _Kinds(tokenizer)


class _Window:
    """The last tokens, and how much of their text is settled."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _kinds_of(tokenizer)
        self._tokens: list[int] = []
        self._text: str | None = ""
        """Of these tokens; none after a byte, until someone asks."""
        self._settled = 0
        """How much of the text is settled."""

    def push(self, token: int) -> str:
        """The text that is settled now and was not before."""
        kind = self._kinds.of(token)
        if kind is _Kind.SILENT:
            return ""
        self._tokens.append(token)
        self._text = None
        if kind is _Kind.BYTE:
            return ""
        before, text = self._settled, self._decoded()
        self._settled = max(before, _certain(text))  # some tokenizers take a space back when a full stop follows
        if len(self._tokens) > WINDOW:
            self._tokens = self._tokens[-CONTEXT:]
            self._text = None
            self._settled = _certain(self._decoded())
        return text[before : _certain(text)]

    def open(self) -> str:
        """The text after the settled one, if no token came after these."""
        return self._decoded()[self._settled :]

    def _decoded(self) -> str:
        if self._text is None:
            self._text = self._tokenizer.decode(self._tokens)
        return self._text


def _certain(text: str) -> int:
    """How much of it stays whatever follows: a replacement character at the end may be an unfinished one."""
    return len(text) - text.endswith(REPLACEMENT)


class TextStream:
    """The text of one sequence, given out while it grows.

    All that `push` and `finish` return, joined, is the text of all tokens up to before the first stop string.
    """

    def __init__(self, tokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._window = _Window(tokenizer)
        self._matcher = Matcher(stop)
        self._held = ""
        self._finished = False
        self.stopped = False
        """Whether a stop string was found; what comes after it is dropped."""

    def push(self, tokens: Iterable[int]) -> str:
        """What can be shown after these tokens and not before."""
        shown = []
        for token in tokens:
            if self.stopped:
                break
            shown.append(self._show(self._window.push(token)))
        return "".join(shown)

    def finish(self) -> str:
        """No more tokens come: the rest, with a replacement character where one was left unfinished."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        return self._show(self._window.open()) + self._held

    def _show(self, text: str) -> str:
        found = self._matcher.feed(text)
        if found is not None:
            end, length = found
            self.stopped = True
            shown = (self._held + text[:end])[:-length]
            self._held = ""
            return shown
        text = self._held + text
        keep = len(text) - self._matcher.pending
        self._held = text[keep:]
        return text[:keep]


class StopWatcher:
    """Says of a growing output, after each token, whether its text holds a stop string: `Sequence.ends`."""

    def __init__(self, tokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._window = _Window(tokenizer)
        self._matcher = Matcher(stop)
        self._seen = 0

    def __call__(self, output: list[int]) -> bool:
        for token in output[self._seen :]:
            if self._matcher.feed(self._window.push(token)) is not None:
                return True
        self._seen = len(output)
        return self._matcher.would_find(self._window.open())
