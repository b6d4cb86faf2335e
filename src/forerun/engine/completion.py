"""What comes back to a user: pieces while a text is written, and the whole of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.core.params import SamplingParams
from forerun.core.sequence import FinishReason
from forerun.engine.request import Kind, TokenLogprob, Update
from forerun.engine.statistics import Statistics
from forerun.engine.text import Detokenizer, TextStream


@dataclass(frozen=True)
class Piece:
    """What one step added to one text."""

    index: int
    """Which of the n texts."""
    spans: list[tuple[str, Kind]]
    """The new text by how its tokens came about. Text that was held back counts to the token that set it free."""
    tokens: list[int]
    kinds: list[Kind]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stats: Statistics
    """Of this text so far; it goes on counting while the engine does, which may be ahead of who reads."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Choice:
    """One finished text."""

    index: int
    text: str
    token_ids: list[int]
    """All that were written, the one that ended the text among them."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    stats: Statistics

    def as_dict(self) -> dict[str, Any]:
        """For JSON; log probabilities only where they were asked for."""
        answer: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        if self.logprobs is not None:
            answer["logprobs"] = [
                {
                    "token": each.token,
                    "logprob": _finite(each.logprob),
                    "top": [[token, _finite(value)] for token, value in each.top],
                }
                for each in self.logprobs
            ]
        return {**answer, "stats": self.stats.as_dict()}


@dataclass(frozen=True)
class Completion:
    """The n texts of one prompt. `text` and what else a text has are those of the first."""

    prompt_tokens: int
    choices: list[Choice]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def stats(self) -> Statistics:
        return self.choices[0].stats

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the first text, and all of them where there are more."""
        answer = {**self.choices[0].as_dict(), "prompt_tokens": self.prompt_tokens}
        if len(self.choices) > 1:
            answer["choices"] = [choice.as_dict() for choice in self.choices]
        return answer


def _finite(value: float) -> float | None:
    """JSON has no infinity; a token that cannot occur has none."""
    return value if math.isfinite(value) else None


@dataclass
class _Draft:
    """One of the n texts while it is written."""

    stream: TextStream
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"  # unless something else ends it
    stats: Statistics = field(default_factory=Statistics)


class Transcript:
    """Turns the updates of one request into pieces, and into a completion at the end."""

    def __init__(
        self, tokenizer: Detokenizer, params: SamplingParams, endings: frozenset[int], prompt_tokens: int
    ) -> None:
        self._params = params
        self._endings = endings
        self._prompt_tokens = prompt_tokens
        self._drafts = [_Draft(TextStream(tokenizer, params.stop)) for _ in range(params.n)]

    def add(self, update: Update) -> Piece:
        draft = self._drafts[update.index]
        spans = list(self._spans(draft.stream, update))
        draft.text += [text for text, _ in spans]
        draft.tokens += update.tokens
        draft.logprobs += update.logprobs or []
        draft.stats = update.statistics
        if update.finish_reason is not None:
            draft.finish_reason = update.finish_reason
        return Piece(
            update.index,
            spans,
            update.tokens,
            update.kinds,
            update.logprobs,
            update.finish_reason,
            update.statistics,
        )

    def _spans(self, stream: TextStream, update: Update) -> Iterator[tuple[str, Kind]]:
        shown: Sequence[int] = update.tokens
        if update.finish_reason == "stop" and shown and shown[-1] in self._endings:
            shown = shown[:-1]  # it ends the text and is no part of it
        for token, kind in zip(shown, update.kinds, strict=False):
            if text := stream.push([token]):
                yield text, kind
        if update.finish_reason is not None and (text := stream.finish()):
            yield text, update.kinds[-1] if update.kinds else "bonus"

    def completion(self) -> Completion:
        choices = [
            Choice(
                index,
                "".join(draft.text) + draft.stream.finish(),
                draft.tokens,
                draft.finish_reason,
                draft.logprobs if self._params.logprobs is not None else None,
                draft.stats,
            )
            for index, draft in enumerate(self._drafts)
        ]
        return Completion(self._prompt_tokens, choices)
