"""Methods side by side on the same prompts, in turns, so that a noisy machine is as noisy for all of them.

Everything runs `repeat` times, in the order that `cases.plan` gives. A method starts each round with no text learnt: a
drafter that remembers texts must not meet its own answers. What an adaptive engine found out about times it goes on
with. It warms up on texts that are not measured, and that differ: a drafter that looks things up would find equal ones
in each other. A method that fails leaves its error where its figures would be, and the others go on.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from forerun.bench.arrivals import arrival_times
from forerun.bench.cases import ALL, PLAIN, Case, Place, Setting, plan
from forerun.bench.contestants import Contestant, Messages
from forerun.bench.measures import Answer, Cell, Sums, Work, counted
from forerun.bench.memory import Ledger
from forerun.bench.questions import Question
from forerun.core.collector import heap_stays
from forerun.core.params import SamplingParams
from forerun.core.shortage import ran_out_of_memory, shortage

WARM_UPS = ("Tell a story", "Write a poem", "Write a letter", "List three facts", "Tell a joke")
ABOUT = ("a lighthouse", "bread", "old clocks", "bridges", "whales", "chess", "winter")
HOW = ("", " in rhymes", " for my grandmother", " in two sentences", " with a surprise", " without the letter e")
NOTHING = frozenset[int]()


@dataclass(frozen=True)
class Contest:
    questions: Sequence[Question]
    cases: Sequence[Case]
    settings: Sequence[Setting]
    start: Callable[[Case, Setting], Contestant]
    params: SamplingParams
    """But for the temperature, which is the setting's."""
    repeat: int = 3
    rounds: Callable[[Case], int | None] = lambda case: None
    """A method may sit out after so many rounds: slow peers need not run as often as what is compared closely."""
    ends: Collection[int] = NOTHING
    """Tokens that end a text."""
    warm_up: int = 16
    """Tokens that a method writes before it is measured."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    """Of the arrivals."""

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(question.category for question in self.questions))

    def plan(self) -> list[Place]:
        def rounds(case: Case) -> int:
            own = self.rounds(case)
            return self.repeat if own is None else min(own, self.repeat)

        return plan(self.cases, self.settings, self.categories, rounds)

    def run(self, keep: Callable[[Cell], None], done: Collection[Place] = ()) -> None:
        """Measures what is not done yet; `keep` is told of each cell as soon as it is there."""
        left = [place for place in self.plan() if place not in done]
        if left and self.warm_up:
            self._wake(left[0].setting)
        ledger = Ledger(self.device)
        for (setting, _), places in groupby(left, key=lambda place: (place.setting, place.round)):
            with ExitStack() as closing:
                seats: dict[Case, _Seat] = {}
                for place in places:
                    if place.case not in seats:
                        seats[place.case] = closing.enter_context(_Seat(self, place.case, setting, ledger))
                    keep(seats[place.case].measure(place))

    def _wake(self, setting: Setting) -> None:
        """The model's weights come into memory when they are first used: no method shall be charged with that."""
        with suppress(Exception), _Seat(self, Case(PLAIN), setting, Ledger(self.device)) as seat:
            seat.contestant()  # if it fails, its row will say so

    def pool(self, place: Place) -> list[Question]:
        if place.pool != ALL:
            return [question for question in self.questions if question.category == place.pool]
        pool = list(self.questions)  # mixed, so that the texts of a batch are as different as a server's
        random.Random(self.seed).shuffle(pool)
        return pool

    def answers(self, place: Place) -> dict[str, int]:
        """How many there will be, by category."""
        counts: dict[str, int] = {}
        for question in self.pool(place):
            counts[question.category] = counts.get(question.category, 0) + len(question.turns)
        return counts


class _Seat(ExitStack):
    """A method's place in a round: what keeps it from breaking off the contest."""

    def __init__(self, contest: Contest, case: Case, setting: Setting, ledger: Ledger) -> None:
        super().__init__()
        self._contest, self._case, self._setting, self._ledger = contest, case, setting, ledger
        self._params = replace(contest.params, temperature=setting.temperature)
        self._playing: Contestant | None = None
        self._refusal: str | None = None

    def measure(self, place: Place) -> Cell:
        try:
            with self._ledger.at_work(self._case):
                contestant = self.contestant()
                with heap_stays():
                    answers, work = converse(
                        contestant, self._contest.pool(place), self._params, self._setting, self._contest.seed
                    )
        except Exception as error:  # of whatever kind: it belongs to this method and goes into its row
            self._drop()
            return Cell(place, in_words(error))
        sums: dict[str, Sums] = {}
        for category, answer in answers:
            own = replace(answer, token_ids=counted(answer.token_ids, self._contest.ends))
            sums.setdefault(category, Sums()).count(own)
        peak = self._ledger.peak(self._case) if work.phases else None  # a peer shares the process with our model
        return Cell(place, None, work, peak, sums)

    def contestant(self) -> Contestant:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        if self._playing is None:
            try:
                self._playing = self._contest.start(self._case, self._setting)
                self.callback(self._drop)
                if self._contest.warm_up:
                    count = min(self._setting.batch, len(self._contest.questions))  # more are never there at once
                    talks = [[{"role": "user", "content": text}] for text in warm_ups(count)]
                    self._playing.answer(talks, replace(self._params, max_tokens=self._contest.warm_up))
            except Exception as error:
                self._refusal = in_words(error)  # it is not asked again in this round
                raise
        return self._playing

    def _drop(self) -> None:
        """Also after an error, which may have left it in an unknown state."""
        if self._playing is not None:
            with self._ledger.at_work(self._case):
                self._playing.close()
                self._playing = None
                gc.collect()  # so that its memory is not taken for the next one's
            self._ledger.begin(self._case)


def warm_ups(count: int) -> list[str]:
    """Different ones, 210 of them."""
    lists = WARM_UPS, ABOUT, HOW
    return ["{} about {}{}.".format(*(each[i % len(each)] for each in lists)) for i in range(count)]


def converse(
    contestant: Contestant, questions: Sequence[Question], params: SamplingParams, setting: Setting, seed: int
) -> tuple[list[tuple[str, Answer]], Work]:
    """All turns, each answer with its category; the first turns of all questions are answered together, then the second
    ones."""
    talks: list[Messages] = [[] for _ in questions]
    answers: list[tuple[str, Answer]] = []
    total = Work(0.0)
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [index for index, question in enumerate(questions) if turn < len(question.turns)]
        for index in asked:
            talks[index].append({"role": "user", "content": questions[index].turns[turn]})
        times = None if setting.arrivals is None else arrival_times(len(asked), setting.arrivals, seed + turn)
        found, work = contestant.answer([talks[index] for index in asked], params, times)
        for index, answer in zip(asked, found, strict=True):
            talks[index].append({"role": "assistant", "content": answer.text})
            answers.append((questions[index].category, answer))
        total += work
    return answers, total


def in_words(error: Exception) -> str:
    """One line, as a row shows it."""
    if ran_out_of_memory(error):
        return shortage(error)
    reason = " ".join(str(error).split())
    return reason if isinstance(error, ValueError) and reason else f"{type(error).__name__}: {reason}".rstrip(": ")
