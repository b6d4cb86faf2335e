"""Streamed text is the whole text, given out early: for tokenizers of each kind, any tokens, stop strings and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from forerun.engine.text import CONTEXT, WINDOW, Matcher, StopWatcher, TextStream

END = "<|end|>"
SIGNS = "aeb .\n中é😀\u0301�"


@dataclass(frozen=True, eq=False)
class Fast:
    """A tokenizer of the `tokenizers` library; counts what it decodes."""

    backend: Tokenizer
    sizes: list[int]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        self.sizes.append(len(tokens))
        text: str = self.backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def id(self, piece: str) -> int:
        number = self.backend.token_to_id(piece)
        assert number is not None
        return number

    @property
    def size(self) -> int:
        count: int = self.backend.get_vocab_size()
        return count


def _finished(backend: Tokenizer) -> Fast:
    backend.add_special_tokens([AddedToken(END, special=True)])
    return Fast(backend, [])


@cache
def byte_level() -> Fast:
    """Every byte, some pieces of characters, and pieces that reach from one character into the next."""
    letter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {sign: letter.pre_tokenize_str(sign)[0][0] for sign in (*SIGNS, " the")}
    chinese, smile = spelled["中"], spelled["😀"]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [chinese[:2], chinese[2] + smile[:1], smile[2:] + chinese[:1], smile[1:], chinese, smile, spelled[" the"]]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = letter
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


@cache
def sentencepiece() -> Fast:
    """Words that carry their space, and bytes for what has no word; as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "a", "b", "e", ".", "中", "▁▁"]
    backend = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend)


@cache
def metaspace() -> Fast:
    """Words that carry their space, and no bytes; as in T5."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁", "▁the", "a", "b", "e", ".", "中", "▁a"))]
    backend = Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _finished(backend)


KINDS = [byte_level, sentencepiece, metaspace]
every_kind = pytest.mark.parametrize("kind", KINDS)


def cut(text: str, stop: Sequence[str]) -> str:
    """By trying every end: up to before the first stop string that is complete."""
    for end in range(len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@st.composite
def cases(draw: st.DrawFn, tokenizer: Fast) -> tuple[list[int], list[str], list[int]]:
    """Tokens (at random, and of random text, with specials between), stop strings likely to occur, lengths of steps."""
    any_token = st.integers(0, tokenizer.size - 1)
    words = st.text(SIGNS, max_size=6).map(tokenizer.encode)
    byte_tokens = st.lists(st.integers(0, 256), max_size=4)
    parts = draw(st.lists(st.one_of(st.lists(any_token, max_size=4), words, byte_tokens), max_size=12))
    tokens = [token for part in parts for token in part]
    text = tokenizer.decode(tokens)
    stop = draw(st.lists(st.text(SIGNS, min_size=1, max_size=4), max_size=2))
    if text and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + draw(st.integers(1, 5))])
    steps = draw(st.lists(st.integers(0, 5), max_size=len(tokens)))
    return tokens, stop, steps


def chunks(tokens: list[int], steps: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for length in steps:
        parts.append(tokens[start : start + length])
        start += length
    return [*parts, tokens[start:]]


@every_kind
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_stream_is_the_whole_text(kind: Callable[[], Fast], data: st.DataObject) -> None:
    tokenizer = kind()
    tokens, stop, steps = data.draw(cases(tokenizer))
    whole = cut(tokenizer.decode(tokens), stop)
    stream = TextStream(tokenizer, stop)
    shown = ""
    for part in chunks(tokens, steps):
        shown += stream.push(part)
        assert whole.startswith(shown)
    assert shown + stream.finish() == whole
    assert stream.finish() == ""
    assert stream.stopped == (whole != tokenizer.decode(tokens))


@every_kind
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_watcher_sees_a_stop_string_as_soon_as_it_is_there(kind: Callable[[], Fast], data: st.DataObject) -> None:
    tokenizer = kind()
    tokens, stop, _ = data.draw(cases(tokenizer))
    watcher = StopWatcher(tokenizer, stop)
    output: list[int] = []
    for token in tokens:
        output.append(token)
        text = tokenizer.decode(output)
        there = any(string in text for string in stop)
        assert watcher(output) == there
        if there:  # the text ends here, and what is shown of it ends before the stop string
            stream = TextStream(tokenizer, stop)
            assert stream.push(output) + stream.finish() == cut(text, stop)
            break


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_unicode_byte_by_byte(text: str) -> None:
    """One byte a token: a character comes with its last byte, and never a part of it."""
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stream = TextStream(tokenizer, ())
    shown = ""
    for sign in text:
        pieces = letters.pre_tokenize_str(sign)[0][0]
        pushed = [stream.push([tokenizer.id(piece)]) for piece in pieces]
        assert not any(pushed[:-1]) or shown.endswith("�") or pushed[0] == "�"
        shown += "".join(pushed)
        if "�" not in text:
            assert pushed == [""] * (len(pieces) - 1) + [sign]
    assert shown + stream.finish() == text


def test_an_unfinished_character_is_held_and_shown_at_the_end() -> None:
    tokenizer = byte_level()
    first, *rest = (tokenizer.id(piece) for piece in ("ð", "Ł", "ĺ", "Ģ"))  # bytes of 😀
    stream = TextStream(tokenizer, ())
    assert stream.push([first, rest[0]]) == ""
    assert stream.finish() == "�"
    stream = TextStream(tokenizer, ())
    assert [stream.push([token]) for token in (first, *rest)] == ["", "", "", "😀"]


def test_a_stop_string_is_never_begun() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a ba bab. the rest")
    stream = TextStream(tokenizer, ["bab", " bb"])
    pushed = [stream.push([token]) for token in tokens]
    assert "".join(pushed) == "a ba "
    assert stream.stopped
    assert stream.finish() == ""
    assert pushed[:6] == ["a", "", "", " ", "ba", ""]  # " b" might have gone on as " bb", then "ba" as "bab"


def test_the_first_to_be_complete_ends_the_text() -> None:
    """Whether "abcd" came in one token or in four."""
    assert cut("xabcd", ["bc", "abcd"]) == "xa"
    tokenizer = byte_level()
    tokens = tokenizer.encode("xabcd")
    for parts in ([tokens], [[token] for token in tokens]):
        stream = TextStream(tokenizer, ["bc", "abcd"])
        assert "".join(map(stream.push, parts)) + stream.finish() == "xa"


def test_matcher_falls_back_within_a_string() -> None:
    matcher = Matcher(["aab"])
    assert matcher.feed("aaa") is None
    assert matcher.pending == 2
    assert matcher.would_find("b")
    assert matcher.pending == 2
    assert matcher.feed("bc") == (1, 3)


def test_the_space_after_a_special_token_stays() -> None:
    """Decoded alone the word would lose it."""
    tokenizer = sentencepiece()
    word, end = tokenizer.id("▁the"), tokenizer.id(END)
    stream = TextStream(tokenizer, ())
    assert [stream.push([token]) for token in (word, end, *[end] * WINDOW, word, word)][-2:] == [" the", " the"]


@every_kind
def test_the_cost_of_a_token_does_not_grow(kind: Callable[[], Fast]) -> None:
    tokenizer = kind()
    end = tokenizer.id(END)
    stream, watcher = TextStream(tokenizer, ["zzz"]), StopWatcher(tokenizer, ["zzz"])
    output: list[int] = []
    tokenizer.sizes.clear()
    for number in range(1500):
        token = end if number % 3 == 0 else tokenizer.encode("ab")[number % 2]
        output.append(token)
        stream.push([token])
        watcher(output)
    assert max(tokenizer.sizes) <= WINDOW + 1
    assert CONTEXT < WINDOW
    assert len(tokenizer.sizes) < 3.5 * 1500
