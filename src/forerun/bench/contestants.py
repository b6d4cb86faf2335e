"""Who takes part: a method at work, and our own engine as one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.bench.arrivals import at_their_times
from forerun.bench.measures import Answer, Work
from forerun.bench.questions import Question
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM, Writing
from forerun.engine.statistics import PHASES
from forerun.models.tokenizer import Tokenizer

Messages = list[dict[str, str]]
TEMPLATE = 64
"""Tokens that a chat template adds to a turn, at most."""
DRAFTS = 128
"""Tokens of cache beyond the text, for drafts and what is begun of a block."""


class Contestant(Protocol):
    """A method at work. `arrivals` are the seconds at which the conversations come in; without them all are there from
    the beginning."""

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Forerun:
    """Our engine with some drafter."""

    llm: LLM

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]:
        engine = self.llm.statistics
        before = dict(engine.seconds)
        engine.cache_peak = 0.0  # of this work alone
        started = time.perf_counter()
        prompts = [prompt_tokens(self.llm.model.tokenizer, talk) for talk in conversations]
        writings: list[Writing] = []

        def begin(number: int) -> Writing:
            writings.append(self.llm.start(prompts[number], params))
            return writings[-1]

        try:
            begun: list[tuple[Writing, float | None]]
            if arrivals is None:
                begun = [(begin(number), None) for number in range(len(prompts))]
            else:
                begun = list(at_their_times(arrivals, begin))
            answers = [_answer(writing, came) for writing, came in begun]
        finally:
            for writing in writings:  # what is not over, because something else failed
                writing.cancel()
        seconds = time.perf_counter() - started
        phases: dict[str, float] = {name: engine.seconds[name] - before[name] for name in PHASES}
        reserved = self.llm.cache_bytes
        return answers, Work(seconds, phases, round(engine.cache_peak * reserved), reserved)

    def close(self) -> None:
        self.llm.close()


def prompt_tokens(tokenizer: Tokenizer, talk: Messages) -> list[int]:
    """The same for every contestant. A model without a chat template goes on from the plain text."""
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat(talk)
    return tokenizer.encode("\n".join(message["content"] for message in talk))


def room_for(questions: Sequence[Question], tokenizer: Tokenizer, max_tokens: int) -> int:
    """Tokens of cache that the longest conversation takes, with drafts. Contestants of a round are all in memory."""
    longest = max(
        len(tokenizer.encode("\n".join(question.turns))) + len(question.turns) * (max_tokens + TEMPLATE)
        for question in questions
    )
    return longest + DRAFTS


def _answer(writing: Writing, came: float | None) -> Answer:
    for _ in writing.pieces():
        pass
    done = writing.completion()
    own = done.stats
    assert own.began is not None
    assert own.last is not None
    start = own.began if came is None else came
    first = None if own.first is None else own.first - start
    return Answer(done.token_ids, done.text, own.last - start, first, own)
