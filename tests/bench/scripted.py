"""Methods whose times are known, and questions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.cases import Case, Place, Setting
from forerun.bench.contest import Contest
from forerun.bench.contestants import Contestant, Messages
from forerun.bench.measures import Answer, Cell, Work
from forerun.bench.questions import Question
from forerun.bench.rows import make_rows
from forerun.core.params import SamplingParams
from forerun.engine.statistics import Statistics

QUESTIONS = [
    Question("1", "math", ("one",)),
    Question("2", "chat", ("two", "and then?")),
    Question("3", "math", ("three",)),
]


@dataclass
class Scripted:
    """Answers 10 tokens a turn, at a given speed; remembers what it was asked."""

    speed: float = 20.0
    per_pass: int = 1
    token: int = 7
    fails_on: str = ""
    asked: list[list[str]] = field(default_factory=list)
    arrivals: list[Sequence[float] | None] = field(default_factory=list)
    closed: int = 0

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]:
        said = [" ".join(each["content"] for each in talk) for talk in conversations]
        self.asked.append(said)
        self.arrivals.append(arrivals)
        if self.fails_on and any(self.fails_on in text for text in said):
            raise RuntimeError("the device\nis on fire")
        seconds = 10 / self.speed
        answers = [Answer([self.token] * 10, "ok", seconds, 0.1, self._statistics(seconds)) for _ in conversations]
        phases = {"draft": 0.1 * seconds, "target": 0.8 * seconds, "verify": 0.0, "rest": 0.0}
        whole = {name: spent * len(answers) for name, spent in phases.items()}
        return answers, Work(seconds * len(answers), whole, 1000)

    def _statistics(self, seconds: float) -> Statistics:
        """Of an answer of 10 tokens with chains of `per_pass` - 1 drafts that are all accepted."""
        passes, drafts = 10 // self.per_pass, self.per_pass - 1
        known = Statistics(tokens=10, target_passes=passes, drafted=drafts * passes, accepted=drafts * passes)
        known.offered_by_depth = known.accepted_by_depth = [passes] * drafts
        known.seconds |= {"draft": 0.1 * seconds if drafts else 0.0, "target": 0.8 * seconds}
        known.seconds_to_first["target"] = 0.8 * seconds / passes
        known.seconds_to_first["draft"] = known.seconds["draft"] / passes
        return known

    def close(self) -> None:
        self.closed += 1


def contest_of(
    methods: dict[str, Scripted], *settings: Setting, repeat: int = 2, warm_up: int = 0
) -> tuple[Contest, dict[str, int]]:
    """And how often each was started."""
    starts = dict.fromkeys(methods, 0)

    def start(case: Case, setting: Setting) -> Contestant:
        starts[case.drafter] += 1
        return methods[case.drafter]

    cases = [Case(name) for name in methods]
    contest = Contest(QUESTIONS, cases, settings or (Setting(),), start, SamplingParams(), repeat, warm_up=warm_up)
    return contest, starts


def run(contest: Contest, done: Sequence[Place] = ()) -> list[Cell]:
    cells: list[Cell] = []
    contest.run(cells.append, done)
    return cells


def rows_of(contest: Contest) -> Callable[[Sequence[Cell]], list[dict[str, Any]]]:
    return lambda cells: make_rows(cells, contest.cases, contest.settings, contest.categories)


def by_name(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["method"], row["batch"], row["category"]): row for row in rows}
