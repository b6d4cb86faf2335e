"""How answers are told: whole, or in chunks whose parts add up to the whole. Both are made from the same pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.engine.completion import Piece
from forerun.engine.request import TokenLogprob
from forerun.serve.orders import Order
from forerun.serve.tokens import TokenTexts
from forerun.serve.tools import Call, may_become_call, read_call

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this."""


class Teller(Protocol):
    """Texts are known by their place among all of a request. Each is fed its pieces in order."""

    prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, place: int, scored: list[TokenLogprob | None] | None) -> list[Json]:
        """Choices of chunks before a text's first piece; `scored` are its prompt's tokens, where they are told."""
        ...

    def piece(self, place: int, piece: Piece) -> list[Json]:
        """Choices of chunks; those of all pieces say what `whole` says."""
        ...

    def whole(self, place: int) -> Json: ...


@dataclass
class _Text:
    parts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    told: int = 0
    """How much of the text is told."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


def shown_logprobs(piece: Piece, endings: frozenset[int]) -> list[TokenLogprob]:
    """Without the token that ended the text and is no part of it."""
    found = piece.logprobs or []
    ended = piece.finish_reason == "stop" and bool(found) and found[-1].token in endings
    return found[:-1] if ended else found


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


class CompletionTeller:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, order: Order, texts: TokenTexts, endings: frozenset[int]) -> None:
        self._order, self._tokens, self._endings = order, texts, endings
        self._texts = [_Text() for _ in range(order.texts)]
        self._offsets = [len(self._echo(place)) for place in range(order.texts)]

    def _echo(self, place: int) -> str:
        return self._order.echoed[place // self._order.params.n] if self._order.echoed else ""

    def opening(self, place: int, scored: list[TokenLogprob | None] | None) -> list[Json]:
        if not self._order.echoed:
            return []
        text = self._texts[place]
        text.parts.append(self._echo(place))
        if scored is not None:
            behind, self._offsets[place] = self._offsets[place], 0
            tokens = self._order.prompts[place // self._order.params.n]
            text.logprobs += [self._entry(place, token, each) for token, each in zip(tokens, scored, strict=True)]
            self._offsets[place] = behind
        if self._order.nothing_more:
            text.finish_reason = "length"
        return [self.whole(place)]

    def piece(self, place: int, piece: Piece) -> list[Json]:
        text = self._texts[place]
        text.parts.append(piece.text)
        entries = [self._entry(place, each.token, each) for each in shown_logprobs(piece, self._endings)]
        text.logprobs += entries
        text.finish_reason = piece.finish_reason
        if not (piece.text or entries or piece.finish_reason):
            return []
        logprobs = _columns(entries) if piece.logprobs is not None else None
        return [{"index": place, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]

    def whole(self, place: int) -> Json:
        text = self._texts[place]
        logprobs = _columns(text.logprobs) if self._order.params.logprobs is not None else None
        return {"index": place, "text": text.text, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def _entry(self, place: int, token: int, found: TokenLogprob | None) -> Json:
        name = self._name(token)
        offset = self._offsets[place]
        self._offsets[place] += len(self._tokens.text(token))
        top = None if found is None else {self._name(other): finite(value) for other, value in found.top}
        value = None if found is None else finite(found.logprob)
        return {"tokens": name, "token_logprobs": value, "top_logprobs": top, "text_offset": offset}

    def _name(self, token: int) -> str:
        """A part of a character as OpenAI writes it."""
        text = self._tokens.text(token)
        spelled = self._tokens.spelled(token)
        if spelled is None or bytes(spelled).decode("utf-8", "replace") == text != "\N{REPLACEMENT CHARACTER}":
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _columns(entries: list[Json]) -> Json:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry[name] for entry in entries] for name in names}


class ChatTeller:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, order: Order, texts: TokenTexts, endings: frozenset[int]) -> None:
        self._order, self._tokens, self._endings = order, texts, endings
        self._texts = [_Text() for _ in range(order.texts)]
        self._calls: dict[int, Json] = {}

    def opening(self, place: int, scored: list[TokenLogprob | None] | None) -> list[Json]:
        return [_delta(place, {"role": "assistant", "content": ""}, None)]

    def piece(self, place: int, piece: Piece) -> list[Json]:
        text = self._texts[place]
        text.parts.append(piece.text)
        entries = [self._entry(each) for each in shown_logprobs(piece, self._endings)]
        text.logprobs += entries
        logprobs = {"content": entries, "refusal": None} if piece.logprobs is not None else None
        choices: list[Json] = []
        new = self._tellable(place, over=piece.finish_reason is not None)
        if new or entries:
            choices.append(_delta(place, {"content": new}, logprobs))
        if piece.finish_reason is not None:
            call = self._call(text.text)
            text.finish_reason = piece.finish_reason
            if call is not None:
                self._calls[place] = call.as_dict()
                choices.append(_delta(place, {"tool_calls": [{"index": 0, **self._calls[place]}]}, None))
                text.finish_reason = "tool_calls" if piece.finish_reason == "stop" else piece.finish_reason
            choices.append(_delta(place, {}, None) | {"finish_reason": text.finish_reason})
        return choices

    def whole(self, place: int) -> Json:
        text = self._texts[place]
        call = self._calls.get(place)
        message: Json = {"role": "assistant", "content": text.text if call is None else None, "refusal": None}
        if call is not None:
            message["tool_calls"] = [call]
        asked = self._order.params.logprobs is not None
        logprobs = {"content": text.logprobs, "refusal": None} if asked else None
        return {"index": place, "message": message, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def _call(self, text: str) -> Call | None:
        return None if self._order.tools is None else read_call(text, self._order.tools)

    def _tellable(self, place: int, *, over: bool) -> str:
        """What can be told now: nothing of what is, or may become, a call."""
        text = self._texts[place]
        tools = self._order.tools
        if tools is not None:
            whole = text.text
            call = self._call(whole) is not None if over else tools.choice == "required" or may_become_call(whole)
            if call:
                return ""
            new, text.told = whole[text.told :], len(whole)
            return new
        return text.parts[-1]

    def _entry(self, found: TokenLogprob) -> Json:
        top = [self._token(token, value) for token, value in found.top]
        return {**self._token(found.token, found.logprob), "top_logprobs": top}

    def _token(self, token: int, value: float) -> Json:
        return {"token": self._tokens.text(token), "logprob": finite(value), "bytes": self._tokens.spelled(token)}


def _delta(place: int, delta: Json, logprobs: Json | None) -> Json:
    return {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": None}
