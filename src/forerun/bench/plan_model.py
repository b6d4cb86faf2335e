"""What a drafter gains with drafts of some size, from what was measured of its parts, and how sure that is.

Tokens per pass come from the texts that a drafter was watched on. It drafted at its largest there; with smaller drafts
a step that committed c tokens, of which a + 1 would have come of the smaller draft, becomes ⌈c/(a + 1)⌉ steps: where
the large draft was right all along, the small one is right again a few tokens later. A step then costs the engine's
step over as many rows, as the profile has it, and the drafter's own time:

    gain = E[tokens] · plain step / (step over 1 + drafted rows + drafting)

Whole answers gain less, since reading prompts takes as long as it takes plain decoding.

The interval is a bootstrap. Texts are drawn with replacement from those that were watched, and so are the repetitions
of every time, those of one round together; the middle 90% of the gains that follow are the interval. It says how much
other texts of the same kind and the noise of this machine would move the gain. It does not know of texts of another
kind, nor of a machine that is busier tomorrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from forerun.bench.cases import shown
from forerun.bench.plan_probe import WHOLE, Step
from forerun.bench.plan_profile import Profile, Round
from forerun.theory.closed_form import gain
from forerun.theory.costs import PassCosts

DRAWS = 200
"""Of the bootstrap."""
SURE = 0.9
"""The share of them within the interval."""
FAR = 4
"""Medians."""
CLEAR = 1.03
"""What a gain must be to be worth its trouble: less is within what a busy machine or other texts take away."""
FEW_TEXTS = 0.3
"""Beyond 1, the gain that a single text has to show, since no other says whether others are like it; of n texts an nth
part of that."""
T = TypeVar("T")


@dataclass(frozen=True)
class Walk:
    """One text, written with drafts of one size."""

    prompt: int
    """Tokens."""
    tokens: int
    """Behind the first one, which comes of reading the prompt."""
    rows: tuple[int, ...]
    """Of drafts, in each step."""

    @property
    def steps(self) -> int:
        return len(self.rows)


def walk(prompt: int, steps: Sequence[Step], size: int) -> Walk:
    """With drafts of at most `size` tokens. Where a size was not tried, the whole draft was no larger."""
    rows: list[int] = []
    for step in steps:
        kept = size if size in step.accepted else WHOLE
        accepted = min(step.accepted.get(kept, 0), step.committed - 1)
        rows += [step.rows.get(kept, 0)] * math.ceil(step.committed / (accepted + 1))
    return Walk(prompt, sum(step.committed for step in steps), tuple(rows))


@dataclass(frozen=True)
class Candidate:
    """A drafter with drafts of some size."""

    given: str
    """As a user names it: a name, or a folder's path."""
    size: int
    """The most tokens that are drafted for a text in a step."""
    kind: str
    """chain or tree"""
    options: Mapping[str, str]
    """Of the drafter, that make it draft as much."""
    walks: Sequence[Walk]
    drafting: Mapping[int, list[float]]
    """By texts of a step: seconds that it drafts and learns."""

    @property
    def drafter(self) -> str:
        """Its name: where things lie is no part of a result."""
        return shown(self.given)

    @property
    def label(self) -> str:
        return " ".join([self.drafter, *(f"{key}={shown(value)}" for key, value in self.options.items())])


@dataclass(frozen=True)
class Expected:
    """At one batch size."""

    candidate: Candidate
    batch: int
    tokens_per_pass: float
    rows: float
    """Of a text in a step, on average, its root among them."""
    step_seconds: float
    draft_seconds: float
    """Of these."""
    gain: float
    """Of whole answers over plain decoding, while as many texts are on their way as the batch holds."""
    low: float
    high: float

    @property
    def needed(self) -> float:
        """The gain that would be worth it: more where few texts were watched."""
        return max(CLEAR, 1 + FEW_TEXTS / len(self.candidate.walks))

    @property
    def pays(self) -> bool:
        """Whether it is a clear gain, and a gain as surely as the interval says."""
        return self.low > 1.0 and self.gain >= self.needed


def gain_of(candidate: Candidate, profile: Profile) -> float:
    """Of whole answers, without its interval, which takes a while."""
    return _gain(candidate.walks, profile, profile.rounds, drafting_seconds(candidate, profile.batch))


def expect(candidate: Candidate, profile: Profile) -> Expected:
    times = _tamed(candidate.drafting[profile.batch])
    drafting = fmean(times)
    random = np.random.default_rng(0)

    def again(many: Sequence[T]) -> list[T]:
        return [many[place] for place in random.integers(len(many), size=len(many))]

    draws = [_gain(again(candidate.walks), profile, again(profile.rounds), fmean(again(times))) for _ in range(DRAWS)]
    low, high = np.quantile(draws, [(1 - SURE) / 2, (1 + SURE) / 2]).tolist()
    return Expected(
        candidate,
        profile.batch,
        tokens_per_pass(candidate.walks),
        1 + mean_rows(candidate.walks),
        step_seconds(candidate.walks, profile.costs(), profile.batch) + drafting,
        drafting,
        gain_of(candidate, profile),
        low,
        high,
    )


def drafting_seconds(candidate: Candidate, batch: int) -> float:
    return fmean(_tamed(candidate.drafting[batch]))


def _tamed(times: Sequence[float]) -> list[float]:
    """A step may take a hundred times as long because of something else: what is beyond a few times the median is cut.
    Below that the mean counts, since a drafter may work in some steps only."""
    most = FAR * median(times)
    return [min(seconds, most) for seconds in times] if most else list(times)


def tokens_per_pass(walks: Sequence[Walk]) -> float:
    return sum(own.tokens for own in walks) / max(1, sum(own.steps for own in walks))


def step_seconds(walks: Sequence[Walk], costs: PassCosts, batch: int) -> float:
    """A step of `batch` texts, each at any place of any of these walks: the mean over steps put together at random."""
    rows = 1.0 + np.asarray([count for own in walks for count in own.rows], dtype=np.float64)
    if not len(rows):  # answers of a single token have no step of their own
        return costs.costs[0]
    if batch > 1:
        np.random.default_rng(0).shuffle(rows)
        rows = _groups(rows, batch)
    return float(np.interp(rows, costs.rows, costs.costs).mean())


def closed_seconds(steps: Sequence[int], batch: int, seconds: Callable[[int], float], reading: float = 0.0) -> float:
    """What answering some texts takes, of which all wait at the door: text i takes `steps[i]` steps, and a step of k
    texts takes `seconds(k)`. When one is over the next begins, and the last ones run in ever smaller company."""
    waiting = [count for count in steps if count]
    running: list[int] = []
    total = reading
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        soonest = min(running)
        total += soonest * seconds(len(running))
        running = [left - soonest for left in running if left > soonest]
    return total


def _gain(walks: Sequence[Walk], profile: Profile, rounds: Sequence[Round], drafting: float) -> float:
    tokens = sum(own.tokens for own in walks)
    if not tokens:  # answers of a single token, which comes of reading the prompt
        return 1.0
    plain = profile.plain_seconds(rounds)
    step = step_seconds(walks, profile.costs(rounds), profile.batch)
    gained = gain(
        tokens_per_pass(walks),
        rows=2,  # how many is in the measured cost
        draft_steps=1,
        draft_cost=drafting / plain,
        verify_cost=step / plain,
    )
    reading = profile.reading * sum(own.prompt for own in walks)
    writing = tokens * plain / profile.batch
    share = reading / (reading + writing)
    return 1 / (share + (1 - share) / gained)


def mean_rows(walks: Sequence[Walk]) -> float:
    return sum(sum(own.rows) for own in walks) / max(1, sum(own.steps for own in walks))


def _groups(rows: NDArray[np.float64], batch: int) -> NDArray[np.float64]:
    whole = len(rows) // batch * batch
    return np.asarray(rows[:whole].reshape(-1, batch).mean(1) if whole else [rows.mean()])
