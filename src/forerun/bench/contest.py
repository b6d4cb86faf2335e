"""Methods side by side on the same prompts, in turns, so that a noisy machine is as noisy for all of them.

Everything runs `repeat` times; in each round every category goes through all methods before the next category, and each
round starts with another method. Figures are medians over rounds. A method starts each round with nothing learnt: a
drafter that remembers texts must not meet its own answers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.bench.questions import Question
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Work:
    """What answering some prompts took."""

    seconds: float
    passes: int
    """Of the target; in a batch one for each text that it decided something for."""
    inside: float
    """Seconds in the target's passes and in the drafter."""


class Contestant(Protocol):
    """A method at work."""

    def answer(self, conversations: Sequence[Messages], params: SamplingParams) -> tuple[list[Answer], Work]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Forerun:
    """Our engine with some drafter."""

    llm: LLM

    def answer(self, conversations: Sequence[Messages], params: SamplingParams) -> tuple[list[Answer], Work]:
        before = self.llm.statistics.as_dict()
        started = time.perf_counter()
        done = self.llm.generate([list(conversation) for conversation in conversations], params)
        seconds = time.perf_counter() - started
        after = self.llm.statistics.as_dict()
        inside = sum(after["seconds_by_phase"][name] - before["seconds_by_phase"][name] for name in ("draft", "target"))
        work = Work(seconds, after["target_passes"] - before["target_passes"], inside)
        return [Answer(each.token_ids, each.text) for each in done], work

    def close(self) -> None:
        self.llm.close()


@dataclass(frozen=True)
class Method:
    name: str
    start: Callable[[int], Contestant]
    """Begins a round at a batch size."""
    batches: bool = True
    """Whether it can answer several prompts at once."""
    rounds: int | None = None
    """It sits out after so many rounds: slow peers need not run as often as what is compared closely."""


@dataclass
class Tally:
    """One method at one batch size, in one category: a figure for each round."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)

    def add(self, tokens: int, work: Work) -> None:
        self.tokens.append(tokens)
        self.seconds.append(work.seconds)
        self.passes.append(work.passes)
        self.inside.append(work.inside)

    def figures(self) -> dict[str, float]:
        speeds = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]
        per_pass = [tokens / passes for tokens, passes in zip(self.tokens, self.passes, strict=True)]
        outside = [1 - inside / seconds for inside, seconds in zip(self.inside, self.seconds, strict=True)]
        return {
            "rounds": len(self.tokens),
            "tokens": self.tokens[-1],
            "seconds": statistics.median(self.seconds),
            "tokens_per_second": statistics.median(speeds),
            "tokens_per_pass": statistics.median(per_pass),
            "outside_share": statistics.median(outside),
        }


def whole(tallies: Sequence[Tally]) -> Tally:
    """All categories together, round by round."""
    total = Tally()
    for round_ in zip(*(zip(t.tokens, t.seconds, t.passes, t.inside, strict=True) for t in tallies), strict=True):
        tokens, seconds, passes, inside = (sum(column) for column in zip(*round_, strict=True))
        total.add(int(tokens), Work(seconds, int(passes), inside))
    return total


@dataclass(frozen=True)
class Contest:
    questions: Sequence[Question]
    methods: Sequence[Method]
    params: SamplingParams
    batches: Sequence[int] = (1,)
    repeat: int = 3
    baseline: str = "none"

    def rounds(self) -> int:
        """How many times `advance` is called."""
        each = sum(
            min(self.repeat, self.repeat if method.rounds is None else method.rounds)
            for batch in self.batches
            for method in self._at(batch)
        )
        return each * len(self._categories())

    def run(self, advance: Callable[[str], None] = lambda done: None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for batch in self.batches:
            rows += self._rows(batch, advance)
        return rows

    def _at(self, batch: int) -> list[Method]:
        return [method for method in self.methods if method.batches or batch == 1]

    def _categories(self) -> dict[str, list[Question]]:
        found: dict[str, list[Question]] = {}
        for question in self.questions:
            found.setdefault(question.category, []).append(question)
        return found

    def _rows(self, batch: int, advance: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        methods, categories = self._at(batch), self._categories()
        tallies = {method.name: {category: Tally() for category in categories} for method in methods}
        texts: dict[str, dict[str, list[Answer]]] = {method.name: {} for method in methods}
        for number in range(self.repeat):
            round_ = [method for method in methods if method.rounds is None or number < method.rounds]
            playing = {method.name: method.start(batch) for method in round_}
            try:
                for category, questions in categories.items():
                    for place in range(len(round_)):
                        name = round_[(place + number) % len(round_)].name
                        answers, work = _converse(playing[name], questions, self.params)
                        tallies[name][category].add(sum(len(answer.token_ids) for answer in answers), work)
                        texts[name].setdefault(category, answers)
                        advance(f"{name}, {category}")
            finally:
                for contestant in playing.values():
                    contestant.close()
        for method in methods:
            own = tallies[method.name]
            for category, tally in {"overall": whole(list(own.values())), **own}.items():
                compared = categories if category == "overall" else (category,)
                yield self._row(method.name, batch, category, tally, compared, tallies, texts)

    def _row(
        self,
        name: str,
        batch: int,
        category: str,
        tally: Tally,
        compared: Sequence[str] | dict[str, list[Question]],
        tallies: dict[str, dict[str, Tally]],
        texts: dict[str, dict[str, list[Answer]]],
    ) -> dict[str, Any]:
        figures = tally.figures()
        row = {"drafter": name, "batch": batch, "temperature": self.params.temperature, "category": category, **figures}
        row["speedup"] = row["identical_to_plain"] = None
        if self.baseline in tallies:
            base = whole([tallies[self.baseline][each] for each in compared])
            ratios = [  # of the rounds that both took part in
                (a / b) / (c / d)
                for a, b, c, d in zip(tally.tokens, tally.seconds, base.tokens, base.seconds, strict=False)
            ]
            row["speedup"] = statistics.median(ratios)
            pairs = [
                (own.token_ids, plain.token_ids)
                for each in compared
                for own, plain in zip(texts[name][each], texts[self.baseline][each], strict=True)
            ]
            same = sum(own == plain for own, plain in pairs)
            row |= {"identical_to_plain": same == len(pairs), "identical": same, "answers": len(pairs)}
        return row


def _converse(
    contestant: Contestant, questions: Sequence[Question], params: SamplingParams
) -> tuple[list[Answer], Work]:
    """All turns; the first turns of all questions are answered together, then the second ones."""
    talks: list[Messages] = [[] for _ in questions]
    answers: list[Answer] = []
    total = Work(0.0, 0, 0.0)
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [index for index, question in enumerate(questions) if turn < len(question.turns)]
        for index in asked:
            talks[index].append({"role": "user", "content": questions[index].turns[turn]})
        found, work = contestant.answer([talks[index] for index in asked], params)
        for index, answer in zip(asked, found, strict=True):
            talks[index].append({"role": "assistant", "content": answer.text})
        answers += found
        total = Work(total.seconds + work.seconds, total.passes + work.passes, total.inside + work.inside)
    return answers, total
