"""How much to draft, chosen while writing: what has paid so far, for this many texts and for this one.

A step that may draft takes longer and commits more. Which is more is measured: for every number of texts and every
*size* of drafts (nothing, a quarter, half, or all that the drafter likes to draft) the controller keeps how long a step
took, and how many tokens came of it. It takes the size with the most tokens per second,

    Σ_texts E[tokens of the text | size] / seconds(texts, size),

and leaves out texts whose own drafts have not been worth their share of the time. Times are medians of the last few
steps, since a captured graph, a page fault or another program can make one step a hundred times as long. A size is left
only for one that is clearly better.

Nothing is known of what is never tried. Trying costs time, and that is limited: the steps that try another size than
the best may take no more than a small share of all, beyond what the best would have taken. What a try would take is
foreseen from steps with as many rows, whatever their texts.

What is chosen depends on the committed text and on the load, never on what the next draft would be: so the choice
changes no law.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Sizes, of what the drafter drafts if it may."""
PLAIN, WHOLE = 0, len(SHARES) - 1
KEPT = 9
"""Steps that a time is the median of."""
FADE = 0.98
"""What the tokens of a text's step count when the next is seen."""
OWN_FADE = 0.9
"""The same where only one text is looked at."""
CLEARLY = 1.03
"""How much better another size must be."""
TRIED = 0.007
"""Of all time, what may be lost by trying."""
GRANTED = 3
"""Steps of plain decoding that may be lost besides, where a number of texts is new."""
OFTEN = 16
"""Steps between two tries."""
RETURN = 32
"""Steps after which a text that was left out is drafted for again."""
FIRST_TRIES = 2
"""Steps of a size before it is judged."""
HOPELESS = 5
"""How much longer than plain decoding a step takes that will hardly pay, whatever is accepted."""
POOR = 0.5
"""How much less than its share of the time a text's drafts give before it is left out."""
FEW = 1
"""Texts up to which drafting is what one begins with, where nothing is known."""


@dataclass
class Times:
    """Of steps with so many texts."""

    seconds: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=KEPT) for _ in SHARES])
    chosen: int = WHOLE
    granted: bool = False
    since: list[int] = field(default_factory=lambda: [0] * len(SHARES))
    """Steps since each size was last taken."""

    def of(self, size: int) -> float | None:
        """None as long as it was hardly tried. Once is enough where it was hopeless."""
        own, plain = self.seconds[size], self.seconds[PLAIN]
        tries = 1 if size != PLAIN and own and plain and own[0] > HOPELESS * median(plain) else FIRST_TRIES
        return median(own) if len(own) >= tries else None


@dataclass
class Standing:
    """Of one text."""

    luck: float = 1.0
    """What its drafts gain, as a multiple of what is usual."""
    left_out: int = 0
    """Steps since it was last drafted for."""


class Controller:
    def __init__(self) -> None:
        self.natural = 1
        """The most that was ever drafted for a text."""
        self.gains = [0.0, 0.5, 0.75, 1.0]
        """Tokens beyond the first that a step commits for a text, by size; first guesses."""
        self.texts: dict[int, Standing] = {}
        self.times: dict[int, Times] = {}
        self.by_rows: dict[int, deque[float]] = {}
        """Seconds of steps, by the logarithm of their rows."""
        self.credit = 0.0
        """Seconds that may still be lost by trying."""
        self._size = WHOLE
        self._drafting: set[int] = set()

    def limits(self, texts: Many[int]) -> list[int | None]:
        """How many tokens may be drafted for each of the texts (by their numbers) in this step; None for all that the
        drafter likes."""
        times = self._times(len(texts))
        standings = [self.texts.setdefault(text, Standing()) for text in texts]
        trial = self._trial(times, standings)
        self._size = size = self._best(times, standings) if trial is None else trial
        times.since = [0 if each == size else steps + 1 for each, steps in enumerate(times.since)]
        if size == PLAIN:
            self._drafting = set()
            return [0] * len(texts)
        worthy = self._worthy(times, standings, size)
        for standing, drafts in zip(standings, worthy, strict=True):
            standing.left_out = 0 if drafts else standing.left_out + 1
        self._drafting = {text for text, drafts in zip(texts, worthy, strict=True) if drafts}
        allowed = None if size == WHOLE else max(1, round(SHARES[size] * self.natural))
        return [allowed if drafts else 0 for drafts in worthy]

    def usual(self, texts: Many[int]) -> list[int | None]:
        """As `limits`, with what is best so far and nothing tried: for steps that also read prompts, which are not
        shown to `observe`."""
        times = self._times(len(texts))
        if times.chosen == PLAIN:
            return [0] * len(texts)
        worthy = self._worthy(times, [self.texts.get(text, Standing()) for text in texts], times.chosen)
        allowed = None if times.chosen == WHOLE else max(1, round(SHARES[times.chosen] * self.natural))
        return [allowed if drafts else 0 for drafts in worthy]

    def observe(self, texts: Many[int], drafted: Many[int], tokens: Many[int], seconds: float, steps: int = 1) -> None:
        """What came of the step: how much was drafted for each text and how many tokens were committed, in `steps`
        passes. Steps that read prompts are not shown."""
        times = self._times(len(texts))
        self.natural = max(self.natural, *drafted)
        size = self._size if any(drafted) else PLAIN
        before = times.of(size)
        each = seconds / steps
        best = times.of(times.chosen)
        self.credit += TRIED * seconds
        if size != times.chosen and best is not None:
            # What was lost is the time beyond what the best would have taken for as many tokens.
            worth = sum(tokens) / max(1.0, self._tokens(times.chosen, [self.texts.get(t, Standing()) for t in texts]))
            self.credit -= max(0.0, min(seconds, 4 * (before or seconds)) - worth * best)
        rows = len(texts) + sum(drafted)
        self.by_rows.setdefault(rows.bit_length(), deque(maxlen=KEPT)).append(each)
        if size == PLAIN or 2 * len(self._drafting) > len(texts):  # else it says little of the size
            times.seconds[size].append(each)
        if size == PLAIN:
            if not times.granted:
                times.granted, self.credit = True, self.credit + GRANTED * each
            return
        usual = max(self.gains[size], 0.05)
        for text, count, committed in zip(texts, drafted, tokens, strict=True):
            if count:
                gain = committed - 1
                self.gains[size] = FADE * self.gains[size] + (1 - FADE) * gain
                standing = self.texts.setdefault(text, Standing())
                standing.luck = OWN_FADE * standing.luck + (1 - OWN_FADE) * min(8.0, gain / usual)

    def forget(self, text: int) -> None:
        self.texts.pop(text, None)

    def _times(self, texts: int) -> Times:
        """Up to eight each number by itself, then together with those up to the next power of two."""
        bucket = texts if texts <= 8 else 1 << (texts - 1).bit_length()
        if bucket not in self.times:
            self.times[bucket] = Times(chosen=self._promising(texts))
        return self.times[bucket]

    def _promising(self, texts: int) -> int:
        """The size to begin with."""
        if not self.by_rows:
            return WHOLE if texts <= FEW else PLAIN
        return max(range(len(SHARES)), key=lambda size: (1 + self.gains[size]) / self._foreseen(texts, size))

    def _foreseen(self, texts: int, size: int) -> float:
        """Seconds of a step, from those with about as many rows; where there were none, from those nearest below, as if
        half of their time were that of the rows."""
        rows = texts * (1 + round(SHARES[size] * self.natural))
        known = sorted(self.by_rows)
        below = max((each for each in known if each <= rows.bit_length()), default=known[0])
        return median(self.by_rows[below]) * math.sqrt(2.0 ** max(0, rows.bit_length() - below))

    def _tokens(self, size: int, standings: Many[Standing]) -> float:
        return sum(1 + self.gains[size] * standing.luck for standing in standings)

    def _rate(self, times: Times, standings: Many[Standing], size: int) -> float | None:
        seconds = times.of(size)
        return None if seconds is None else self._tokens(size, standings) / seconds

    def _best(self, times: Times, standings: Many[Standing]) -> int:
        rates = {size: self._rate(times, standings, size) for size in range(len(SHARES))}
        known = {size: rate for size, rate in rates.items() if rate is not None}
        if times.chosen not in known:
            return times.chosen  # until it is known
        best = max(known, key=lambda size: known[size])
        if known[best] > CLEARLY * known[times.chosen]:
            times.chosen = best
        return times.chosen

    def _trial(self, times: Times, standings: Many[Standing]) -> int | None:
        """A size to be tried in this step, if it is time for one and there is time to lose."""
        # What everything is measured against first, and again when something is there to compare.
        if times.of(PLAIN) is None and (times.seconds[times.chosen] or not times.seconds[PLAIN]):
            return PLAIN
        if times.of(times.chosen) is None:
            return None
        unknown = [size for size in range(len(SHARES)) if times.of(size) is None]
        stale = unknown[:1] or [max(range(len(SHARES)), key=lambda size: times.since[size])]
        (size,) = stale
        if size == times.chosen or (not unknown and times.since[size] < OFTEN):
            return None
        expected = times.of(size) or self._foreseen(len(standings), size)
        best = self._rate(times, standings, times.chosen)
        assert best is not None
        loss = expected - self._tokens(size, standings) / best
        return size if loss <= self.credit else None

    def _worthy(self, times: Times, standings: Many[Standing], size: int) -> list[bool]:
        """Which texts are drafted for: those whose drafts give more than their share of the time does elsewhere."""
        longer, plain = times.of(size), times.of(PLAIN)
        rate = self._rate(times, standings, size)
        if len(standings) == 1 or longer is None or plain is None or rate is None:
            return [True] * len(standings)
        share = max(0.0, longer - plain) / len(standings)
        return [
            self.gains[size] * standing.luck >= POOR * rate * share or standing.left_out >= RETURN
            for standing in standings
        ]
