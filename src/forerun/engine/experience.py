"""What a controller remembers: of steps with so many texts, of drafts, and of each text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

SIZES = (0, 2, 6, 15, None)
"""The most that is drafted for a text; None for all that the drafter likes. Trees on a device come in these sizes: of a
larger one that comes to less it would seem that the drafter likes no more."""
PLAIN, WHOLE = 0, len(SIZES) - 1
KEPT = 9
"""Steps that a time is the median of."""
FEW = 3
"""Steps up to which the lower of two in the middle is their median."""
LONG_AGO, MUCH = 16, 0.8
"""Passes without a plain step after which one that takes so much less time is believed, with several texts: others were
slow as well."""
FIRST_TRIES = 2
"""Steps of a size before it is judged: the slower one of two was cold."""
DOUBT, SHAPE_DOUBT, OWN_DOUBT = 4.0, 200.0, 8.0
"""Drafts that a guess counts as: of what they gain, of what sizes gain beside each other, and of one text's luck."""
LEVEL_MEMORY, SHAPE_MEMORY, OWN_MEMORY = 80.0, 800.0, 40.0
"""Drafts that a mean is of: of what drafts gain, of what sizes gain beside each other, and of one text's luck."""


class Step(NamedTuple):
    """What came of one: see `Controller.observe`."""

    texts: Many[int]
    drafted: Many[int]
    tokens: Many[int]
    seconds: float
    passes: int
    beside: float
    settled: bool

    def goes_on_with(self, other: Step) -> bool:
        """Whether both are plain ones for the same texts: then they are as good as one of more passes."""
        plain = not any(self.drafted) and not any(other.drafted)
        return plain and self.settled and other.settled and self.texts == other.texts

    def and_then(self, other: Step) -> Step:
        tokens = [mine + theirs for mine, theirs in zip(self.tokens, other.tokens, strict=True)]
        seconds, beside = self.seconds + other.seconds, self.beside + other.beside
        return self._replace(tokens=tokens, seconds=seconds, passes=self.passes + other.passes, beside=beside)


def see(seen: list[Step], step: Step) -> None:
    """It comes behind the others, or makes the last one longer."""
    if seen and seen[-1].goes_on_with(step):
        seen[-1] = seen[-1].and_then(step)
    else:
        seen.append(step)


def bucket_of(texts: int, *, rounded: bool) -> int:
    """Numbers of texts that count as one: up to the next power of two, or to three quarters of it where every row takes
    its time (not `rounded`): there seven texts take half as long again as five."""
    bucket = 1 << (texts - 1).bit_length()
    return 3 * bucket // 4 if not rounded and 2 < texts <= 3 * bucket // 4 else bucket


def _usual(seconds: Many[float]) -> float:
    """The median, of a few the lower one: another program can make a step a hundred times as long."""
    return median(seconds) if len(seconds) > FEW else median_low(seconds)


@dataclass
class Times:
    """Of steps with so many texts."""

    seconds: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=KEPT) for _ in SIZES])
    tries: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    since: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    """Passes since each size was last taken."""
    chosen: int = PLAIN
    beside: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Seconds that a step of the chosen size takes beside itself: a plain one, and one with drafts."""
    part: Mean = field(default_factory=lambda: Mean(1.0, LEVEL_MEMORY, 0.25))
    """Of the texts that may, how many have drafts where any has."""

    _medians: list[float] = field(default_factory=lambda: [math.inf] * len(SIZES))
    _pace: list[float] = field(default_factory=lambda: [1.0] * len(SIZES))
    """How much longer the chosen size takes than when each was last taken."""
    _known: list[float | None] = field(default_factory=lambda: [None] * len(SIZES))

    def add(self, size: int, seconds: float, *, telling: bool = False, alone: bool = False) -> None:
        """Texts grow, and other programs come and go: what is seldom taken is believed to have become slower or faster
        as the chosen size has since, where its time is `telling`. With one text, `alone`, all sizes tell: there one
        fast step is a fast moment."""
        own, before = self.seconds[size], self._pace[size] * self._medians[size]
        if self._pace[size] != 1.0:
            own.extend([self._pace[size] * own.popleft() for _ in range(len(own))])
            self._pace[size] = 1.0
        if self.tries[size] == FIRST_TRIES:
            own.remove(max(own))
        elif size == PLAIN and not alone and self.since[size] >= LONG_AGO and seconds < MUCH * before:
            own.clear()
        own.append(seconds)
        self.tries[size] += 1
        if self.tries[size] >= FIRST_TRIES:
            self._medians[size] = _usual(own)
            if telling and size == self.chosen and 0 < before < math.inf:
                change = self._medians[size] / before
                self._pace = [1.0 if each == size else pace * change for each, pace in enumerate(self._pace)]
            self._weigh()

    def of(self, size: int) -> float | None:
        """None as long as it was hardly tried."""
        return self._known[size]

    def of_rows(self, size: int, seconds: float, nodes: Mapping[int, int]) -> float:
        """What drafts of this size for one more text would add: as much as a step takes longer by their number, beside
        smaller or larger ones. Nothing where few take as long as many."""
        slopes = []
        for other, count in nodes.items():
            known, apart = self.of(other), nodes[size] - count
            if known is not None and apart:
                slopes.append(((seconds - known) / apart, other == PLAIN))
        drafting = [slope for slope, plain in slopes if not plain] or [slope for slope, _ in slopes]
        return max(0.0, min(drafting)) * nodes[size]

    def _weigh(self) -> None:
        """A larger size takes no less time: where it seems to, the smaller one was disturbed."""
        least = math.inf
        for size in range(WHOLE, -1, -1):
            least = min(least, self._pace[size] * self._medians[size])
            if self.tries[size] >= FIRST_TRIES:
                self._known[size] = least

    def faded(self, sizes: Many[int] = range(len(SIZES))) -> Times:
        """Such that a few new steps outweigh it."""
        own = Times(chosen=self.chosen, part=self.part.faded(DOUBT))
        for size in sizes:
            seconds = self.of(size)
            if seconds is not None:
                own.seconds[size].extend([seconds] * FIRST_TRIES)
                own.tries[size] = FIRST_TRIES + 1
                own._medians[size] = seconds
        own._weigh()
        return own


@dataclass
class Mean:
    """Of what was seen; the latest counts most once there is much of it."""

    value: float
    memory: float
    count: float = DOUBT

    def add(self, value: float, weight: float = 1.0) -> None:
        self.count = min(self.memory, self.count + weight)
        self.value += weight / self.count * (value - self.value)

    def faded(self, count: float) -> Mean:
        return Mean(self.value, self.memory, min(self.count, count))


@dataclass
class Standing:
    """Of one text."""

    luck: Mean = field(default_factory=lambda: Mean(1.0, OWN_MEMORY, OWN_DOUBT))
    """What its drafts gain, as a multiple of what is usual."""
    left_out: int = 0
    """Choices since it was last drafted for."""
    entered: bool = False
    """Whether it ever was: what drafts take once for a text is spent."""
    tokens: int = 0
    """That were committed."""

    def take(self, drafted: int, tokens: int) -> bool:
        """What came of a step; whether it was the first to draft for this text."""
        first = drafted > 0 and not self.entered
        self.entered, self.tokens = self.entered or first, self.tokens + tokens
        return first
