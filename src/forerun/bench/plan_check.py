"""A plan against the benchmark: what was foreseen for a short run, beside what `bench` then measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.bench.cases import PLAIN, Case, Setting
from forerun.bench.contest import Contest
from forerun.bench.contestants import Contestant, Forerun
from forerun.bench.measures import Cell
from forerun.bench.plan_model import CLEAR, Candidate, closed_seconds, drafting_seconds, step_seconds
from forerun.bench.plan_profile import Profile
from forerun.bench.questions import Question
from forerun.bench.rows import make_rows
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel


@dataclass(frozen=True)
class Checked:
    candidate: Candidate
    batch: int
    texts: int
    predicted: float
    measured: float | None
    low: float | None
    high: float | None
    tokens_per_pass: float | None
    identical: int | None
    error: str | None = None

    @property
    def off(self) -> float | None:
        """How far the prediction is from what was measured, as a share of that."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether what was measured is a clear gain, and one in every round."""
        return self.measured is not None and self.low is not None and self.measured >= CLEAR and self.low > 1

    @property
    def beyond_doubt(self) -> bool:
        """Whether every round was a clear gain, so that it counts against what was foreseen."""
        return self.low is not None and self.low >= CLEAR

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.candidate.label,
            "kind": self.candidate.kind,
            "batch": self.batch,
            "texts": self.texts,
            "predicted_speedup": self.predicted,
            "measured_speedup": self.measured,
            "measured_low": self.low,
            "measured_high": self.high,
            "off": self.off,
            "holds": self.holds,
            "tokens_per_pass": self.tokens_per_pass,
            "identical": self.identical,
            "error": self.error,
        }


@dataclass(frozen=True)
class Check:
    model: LoadedModel
    given: Mapping[str, str]
    """Drafters by the names they have in results, as they were given."""
    questions: Sequence[Question]
    """Each with one turn, in the order in which drafters were watched on them."""
    params: SamplingParams
    profiles: Mapping[int, Profile]

    def run(
        self, candidates: Sequence[Candidate], batch: int, texts: int, repeat: int, tell: Callable[[str], None]
    ) -> list[Checked]:
        """On so many questions from all over, again from the beginning where there are fewer."""
        apart = max(1, len(self.questions) // texts)
        places = [place * apart % len(self.questions) for place in range(texts)]
        cases = {Case(each.drafter, "", _tree(each)): each for each in candidates}
        setting = Setting(batch, self.params.temperature)

        def start(case: Case, setting: Setting) -> Contestant:
            own = cases.get(case)
            options = {} if own is None else dict(own.options)
            name = PLAIN if own is None else self.given[own.drafter]
            return Forerun(LLM(self.model, name, drafter_options=options, max_batch=setting.batch))

        contest = Contest(
            [self.questions[place] for place in places],
            [Case(PLAIN), *cases],
            [setting],
            start,
            self.params,
            repeat,
            ends=self.model.tokenizer.eos | self.model.target.eos,
            device=self.model.target.device,
        )
        cells: list[Cell] = []

        def keep(cell: Cell) -> None:
            cells.append(cell)
            tell(f"{cell.place.case.drafter}, {batch} at once")

        contest.run(keep)
        seeded = self.params.seed is not None
        rows = make_rows(cells, contest.cases, [setting], contest.categories, seeded=seeded)
        whole = {row["method"]: row for row in rows if row["category"] == "overall"}
        return [
            _checked(each, batch, texts, self.predicted(each, batch, places), whole[case.label])
            for case, each in cases.items()
        ]

    def predicted(self, candidate: Candidate, batch: int, places: Sequence[int]) -> float:
        """For these texts, which wait at the door, and with the company they have at the end."""
        walks = [candidate.walks[place] for place in places]
        profile = self.profiles[batch]
        reading = profile.reading * sum(own.prompt for own in walks)

        plain = {size: known.plain_seconds() for size, known in self.profiles.items()}
        drafting = {
            size: step_seconds(walks, known.costs(), size) + drafting_seconds(candidate, size)
            for size, known in self._known(candidate).items()
        }
        without = closed_seconds([own.tokens for own in walks], batch, lambda texts: _between(texts, plain), reading)
        drafted = closed_seconds([own.steps for own in walks], batch, lambda texts: _between(texts, drafting), reading)
        return without / drafted

    def _known(self, candidate: Candidate) -> dict[int, Profile]:
        """Profiles of the batch sizes that it can be used at."""
        most = max(max(own.rows, default=0) for own in candidate.walks)
        return {
            size: known
            for size, known in self.profiles.items()
            if candidate.drafting.get(size) and known.most_drafts >= most
        }


def _tree(candidate: Candidate) -> str:
    return " ".join(f"{key}={value}" for key, value in candidate.options.items())


def _between(texts: int, seconds: Mapping[int, float]) -> float:
    sizes = sorted(seconds)
    return float(np.interp(texts, sizes, [seconds[size] for size in sizes]))


def _checked(candidate: Candidate, batch: int, texts: int, predicted: float, row: Mapping[str, Any]) -> Checked:
    return Checked(
        candidate,
        batch,
        texts,
        predicted,
        row["speedup"],
        row["speedup_low"],
        row["speedup_high"],
        row["tokens_per_pass"],
        row["identical"],
        row["error"],
    )
