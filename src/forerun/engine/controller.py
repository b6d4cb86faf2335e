"""How much to draft, chosen while writing: what has paid so far, for this many texts and for this one.

A step that may draft takes longer and commits more. Which is more is measured: for every number of texts and every
*size* of drafts the controller keeps how long a step took, and for every size how many tokens came of it. It takes the
size with the most tokens per second,

    Σ_texts (1 + part(texts) · level · shape(size) · luck(text)) / seconds(texts, size),

where texts are left out whose own drafts are not worth the time of their rows. `level`, what whole drafts gain, follows
the text quickly; `shape`, what sizes gain beside each other, slowly. `part` of the texts have any drafts in a step in
which somebody has: who looks things up often finds nothing. Times are medians of the last few steps: another program
can make one step a hundred times as long, and a first one, which captures a graph or touches fresh memory, is no
evidence at all. A size is left only for one that is clearly better.

Nothing is known of what is never tried. Trying costs time, and that is limited: the steps that try another size than
the best may take no more than a small share of all, beyond what the best would have taken. The smallest size is tried
first; what a larger one would take is foreseen from it. What was learnt is handed on to the next engine for the same
target and drafter.

What is chosen depends on the committed text and on the load, never on what the next draft would be: so the choice
changes no law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from forerun.engine.experience import (
    DOUBT,
    FIRST_TRIES,
    KEPT,
    LEVEL_MEMORY,
    PLAIN,
    SHAPE_DOUBT,
    SHAPE_MEMORY,
    SIZES,
    WHOLE,
    Mean,
    Standing,
    Step,
    Times,
    bucket_of,
    see,
)

GUESSED = (0.0, 0.4, 0.65, 0.85, 1.0)
"""What a size gains beside the whole, as long as nothing else is known."""
LEVEL, MEASURED, SETTLED = 0.8, 12.0, 14.0
"""Tokens that whole drafts are guessed to gain; drafts that what a drafter was measured to gain counts as; and what a
text's luck must count before its drafts say what a size gains: at first it is a guess."""
LEAST, WORTH = 0.05, 1.03
"""Below the first nothing is divided by a gain; and drafts must promise that many times what plain steps write."""
CLEARLY, TRIED = 0.2, 0.009
"""How much better another size must be, over the root of drafts seen of it; and of all time, what trying may lose."""
GRANTED, GRANTED_LATER, SAVED = 5.0, 1.0, 5.0
"""Plain steps that may be lost besides: in the beginning, and where a number of texts is new (both over the root of
that number: of many texts a step is more of all there is to write); and that may be saved up for trying."""
OFTEN, LONG, SELDOM = 16, 32, 512
"""Passes between two tries of a size that may be best, of plain steps with several texts on a CPU, and of any."""
STANDS = 4
"""Passes for which a choice stands: on an accelerator, which would wait for the host, where nothing is new or tried;
elsewhere plain steps, of which one is a small part of what there is to know."""
POOR, RETURN = 0.8, 32
"""How much less than the time of its rows a text's drafts give before it is left out, and for how many choices."""
UNKNOWN, MANY_ROWS, FORGOTTEN = 1.4, 64, 128
"""What the first step with drafts is guessed to take, in plain steps, and no less than reading lets expect; rows of a
step that reads, before it says what a row takes; and plain steps in which it is forgotten what steps with drafts took
beside themselves."""
LENGTH, LATEST, MOST_ONCE = 64.0, 16.0, 64.0
"""Tokens that a text is guessed to have, texts that means of texts are of, and steps that one may take once."""
MOST_BESIDE, BEYOND = 8.0, 1.5
"""Plain steps that a try may have taken beside itself, and how much longer than foreseen it may take, before something
else is to blame."""


class Controller:
    def __init__(self, before: Controller | None = None, gains: Many[float] = GUESSED) -> None:
        """It begins with what another one, of the same target and drafter, has learnt; else with the `gains` of each
        size that the drafter expects: it believes what they gain beside each other, and for a while how much."""
        self.expected = tuple(gains) if gains is not GUESSED and gains[-1] else None
        """Of each size; None where the drafter was never measured."""
        if before is not None and self.expected is None:
            self.expected = before.expected
        self.most = 0
        """That was ever drafted for a text."""
        self.level = Mean(LEVEL, LEVEL_MEMORY) if self.expected is None else Mean(gains[-1], LEVEL_MEMORY, MEASURED)
        known = SHAPE_DOUBT if self.expected is None else SHAPE_MEMORY
        self.shape = [Mean(gain / max(LEAST, gains[-1]), SHAPE_MEMORY, known) for gain in gains]
        self.texts: dict[int, Standing] = {}
        self.once, self.length = Mean(0.0, LATEST, 1.0), Mean(LENGTH, LATEST, 1.0)
        """Seconds that drafts for a text take once, as for its prompt; and tokens of a text."""
        self.times: dict[int, Times] = {}
        self.credit = 0.0
        """Seconds that may still be lost by trying."""
        self.trying = False
        """Whether what was chosen last is not what is best so far."""
        self.together = False
        """Whether all texts of a step have rows for as much as any of them drafts: then none is worth leaving out."""
        self.rounded = False
        """Whether there is an accelerator: a step takes as long as one of the next power of two of texts."""
        self.room = math.inf
        """For so many drafts of each text there are rows in this step."""
        self.row = 0.0
        """Seconds of a row where many are read at once, at the fastest; 0 until that was seen."""
        self._tries = [0] * len(SIZES)
        self._size = PLAIN
        self._drafting: set[int] = set()
        self._asked: list[int] = []
        self._limits: list[int | None] = []
        self._stands = 0  # for so many more passes
        self._seen: list[Step] = []  # since it was made
        if before is not None:
            self.most, self.row, self.credit = before.most, before.row, before.credit
            self._tries = list(before._tries)
            self.level = before.level.faded(2 * DOUBT)
            self.shape = [each.faded(max(known, 2 * SHAPE_DOUBT)) for each in before.shape]
            self.once, self.length = before.once.faded(DOUBT), before.length.faded(DOUBT)
            self.times = {texts: times.faded() for texts, times in list(before.times.items())}

    def limits(self, texts: Many[int]) -> list[int | None]:
        """How many tokens may be drafted for each of the texts (by their numbers) in this step; None for all that the
        drafter likes."""
        if self._stands > 0 and not self.trying and list(texts) == self._asked:
            return self._limits
        self.catch_up()
        times = self._times(len(texts))
        standings = [self.texts.setdefault(text, Standing()) for text in texts]
        trial = self._trial(times, standings)
        self.trying = trial is not None
        self._size = self._best(times, standings) if trial is None else trial
        worthy = self._worthy(times, standings, self._size)
        if self._size != PLAIN:
            for standing, drafts in zip(standings, worthy, strict=True):
                standing.left_out = 0 if drafts else standing.left_out + 1
        self._drafting = {text for text, drafts in zip(texts, worthy, strict=True) if drafts}
        self._limits = [SIZES[self._size] if drafts else 0 for drafts in worthy]
        known = all(times.of(size) is not None for size in (self._sizes() if self.rounded else [self._size]))
        stands = known and trial is None and (self.rounded or self._size == PLAIN)
        self._asked, self._stands = list(texts), STANDS if stands else 0
        return self._limits

    def usual(self, texts: Many[int]) -> list[int | None]:
        """As `limits`, with what is best so far and nothing tried: for steps that also read prompts, which are not
        shown to `observe`."""
        self.catch_up()
        times = self._times(len(texts))
        worthy = self._worthy(times, [self.texts.get(text, Standing()) for text in texts], times.chosen)
        return [SIZES[times.chosen] if drafts else 0 for drafts in worthy]

    def observe(
        self,
        texts: Many[int],
        drafted: Many[int],
        tokens: Many[int],
        seconds: float,
        steps: int = 1,
        beside: float = 0.0,
        settled: bool = True,
    ) -> None:
        """What came of the step: how much was drafted for each text and how many tokens were committed, in `steps`
        passes. Steps that read prompts are not shown. `beside` are seconds that it took this time and need not take
        again, as for what was put off until something is drafted. A step in which something was captured or built is
        not `settled`: it says nothing of how long its like take, but if drafts were tried, they are paid for."""
        self._stands -= steps
        see(self._seen, Step(texts, drafted, tokens, seconds, steps, beside, settled))
        if self._stands <= 0 or self.trying:
            self.catch_up()

    def catch_up(self) -> None:
        """With what was observed since the last choice, which may wait as long as that stands: on an accelerator until
        it works again."""
        seen, self._seen = self._seen, []
        for step in seen:
            self._take(step)

    def _take(self, step: Step) -> None:
        times = self._times(len(step.texts))
        size = self._size if any(step.drafted) else PLAIN
        known = zip(step.texts, step.drafted, step.tokens, strict=True)
        entering = sum(self.texts[text].take(drafted, tokens) for text, drafted, tokens in known if text in self.texts)
        if not step.settled:
            usual = step.passes * self._foreseen(times, len(step.texts), size)
            if size != times.chosen:
                beside = step.beside + max(0.0, step.seconds - usual)
                self._settle(times, size, step._replace(seconds=usual, beside=beside), entering)
            return
        if entering:
            self.once.add(min(step.beside / entering, MOST_ONCE * step.seconds), entering)
        self._settle(times, size, step, entering)
        first, unknown = not any(each.of(PLAIN) for each in self.times.values()), times.of(PLAIN) is None
        tried = size == self._size or not self.trying  # else for nothing
        if tried and (size == PLAIN or 2 * len(self._drafting) > len(step.texts)):  # else it says little of the size
            alone = len(step.texts) == 1
            telling = alone or (size == PLAIN and not self.rounded)  # else it tells who was drafted for
            times.add(size, step.seconds / step.passes, telling=telling, alone=alone)
        times.since = [0 if each == size else passes + step.passes for each, passes in enumerate(times.since)]
        if unknown and (plain := times.of(PLAIN)) is not None:
            self.credit += (GRANTED if first else GRANTED_LATER) / math.sqrt(len(step.texts)) * plain
        if size != PLAIN:
            self._tries[size] += 1
            self.most = max(self.most, *step.drafted)
            self._learn(times, size, step)

    def read(self, rows: int, seconds: float) -> None:
        """How long a step took that also read prompts."""
        if rows >= MANY_ROWS:
            self.row = min(self.row or math.inf, seconds / rows)

    def forget(self, text: int) -> None:
        self.catch_up()
        standing = self.texts.pop(text, None)
        if standing is not None and standing.tokens:
            self.length.add(standing.tokens)

    # --- learning ----------------------------------------------------------------------------------------------

    def _settle(self, times: Times, size: int, step: Step, entering: int) -> None:
        """What was lost is the time beyond what the best would have taken for as many tokens; what a pause of the
        machine or a first step took besides was not."""
        best = times.of(times.chosen)
        if best is None:
            return
        if size == times.chosen and not self.trying:
            each = 0.0 if entering else min(step.beside / step.passes, MOST_BESIDE * best)
            times.beside[size > 0] += (each - times.beside[size > 0]) / KEPT
        if times.chosen == PLAIN:
            times.beside[True] *= (1 - 1 / FORGOTTEN) ** step.passes  # else what it once took would never be seen again
        self.credit += TRIED * min(step.seconds, 4 * step.passes * best)
        looked = self._size == PLAIN and self._checks(times, len(step.texts))
        least = min(-0.5 * best, self.credit) if looked else -2 * SAVED * best
        if self.trying and (size == self._size or times.chosen == PLAIN):  # else there was nothing to draft anyhow
            usual = self._tokens(times, [self.texts.get(text, Standing()) for text in step.texts], times.chosen)
            likely = BEYOND * step.passes * self._foreseen(times, len(step.texts), size)
            extra = max(0.0, step.beside - step.passes * times.beside[times.chosen != PLAIN])
            taken = min(step.seconds, likely) + min(extra, MOST_BESIDE * best)
            self.credit -= max(0.0 if size == self._size else -math.inf, taken - sum(step.tokens) / usual * best)
        self.credit = max(least, min(self.credit, SAVED * best))

    def _learn(self, times: Times, size: int, step: Step) -> None:
        """The size that is chosen tells what drafts gain now; others, beside it, what they gain of that."""
        times.part.add(sum(map(bool, step.drafted)) / max(1, len(self._drafting)))
        for text, count, committed in zip(step.texts, step.drafted, step.tokens, strict=True):
            if not count:
                continue
            gain, standing = committed - 1, self.texts.get(text) or Standing()  # which one that is over has not
            level, shape, luck = (max(LEAST, each.value) for each in (self.level, self.shape[size], standing.luck))
            if size != times.chosen and standing.luck.count >= SETTLED:
                self.shape[size].add(gain / (level * luck), luck)
            if times.chosen in (size, PLAIN):
                rooted = math.sqrt(luck)  # so that what all texts have in common ends up in the level
                self.level.add(gain / (shape * rooted), shape * rooted)
                standing.luck.add(min(8.0, gain / (level * shape)), min(1.0, level * shape))

    # --- choosing ----------------------------------------------------------------------------------------------

    def _times(self, texts: int) -> Times:
        """What pays for more texts pays for fewer."""
        bucket = bucket_of(texts, rounded=self.rounded)
        if bucket not in self.times:
            above = min((each for each in self.times if each > bucket), default=None)
            self.times[bucket] = Times() if above is None else self.times[above].faded([PLAIN])
        return self.times[bucket]

    def _paying(self, texts: int) -> int:
        """The size that is best for the next larger number of texts of which anything is known: what pays for more pays
        for fewer."""
        tried = [bucket for bucket, times in self.times.items() if bucket > texts and any(times.tries[1:])]
        return self.times[min(tried)].chosen if tried else PLAIN

    def _sizes(self) -> range:
        """Those that there is room for and that differ: where no more is expected of a larger one, it is the same.
        Where nothing is expected, that is where more was allowed than was ever drafted; else a drafter may have left
        some that were too few."""
        for size in range(1, WHOLE):
            if self.room < (SIZES[size + 1] or 1 + self._nodes(size)):
                same = True
            elif self.expected is None:
                same = self._tries[size] >= FIRST_TRIES and self.most < (SIZES[size] or 0)
            else:
                same = self.expected[size] == self.expected[WHOLE]
            if same:
                return range(size + 1)
        return range(len(SIZES))

    def _nodes(self, size: int) -> int:
        """About so many tokens are drafted for a text."""
        most = SIZES[size]
        return max(self.most, 2 * (SIZES[size - 1] or 0)) if most is None else most

    def _best(self, times: Times, standings: Many[Standing]) -> int:
        if times.chosen == PLAIN and not any(times.tries[1:]):
            times.chosen = self._paying(len(standings))
        sizes = self._sizes()
        times.chosen = min(times.chosen, sizes[-1])  # for more there may be no room any more
        rates = {size: self._rate(times, standings, size) for size in sizes}
        known = {size: rate * (WORTH if size == PLAIN else 1) for size, rate in rates.items() if rate is not None}
        best = max(known, key=lambda size: known[size], default=times.chosen)
        if best != times.chosen and times.chosen in known:  # else until it is known
            seen = min(self.shape[size].count for size in (best, times.chosen) if size != PLAIN)
            if known[best] > (1 + CLEARLY / math.sqrt(seen)) * known[times.chosen]:
                times.chosen = best
        return times.chosen

    def _trial(self, times: Times, standings: Many[Standing]) -> int | None:
        """A size to be tried in this step, if it is time for one and there is time to lose: the first that is not
        known, or, also where that one takes too long, the one that may be best, as far as is known."""
        best = self._rate(times, standings, times.chosen)
        if best is None:
            return None  # it is what is tried
        if self._checks(times, len(standings)) and times.since[PLAIN] >= LONG and not self.trying:
            return PLAIN
        sizes = self._sizes()
        unknown = [size for size in sizes if times.of(size) is None]
        if unknown and self._affordable(times, standings, unknown[0], best):
            return unknown[0]
        waiting = [size for size in sizes if size not in (times.chosen, *unknown) and times.since[size] >= OFTEN]
        hopes = {size: self._hope(times, standings, size) for size in waiting}
        size = max(hopes, key=lambda each: hopes[each], default=None)
        if size is None or (hopes[size] < best and times.since[size] < SELDOM):
            return None
        return size if self._affordable(times, standings, size, best) else None

    def _affordable(self, times: Times, standings: Many[Standing], size: int, best: float) -> bool:
        """Whether there is time to lose for a try of that size."""
        if 0 < times.tries[size] < FIRST_TRIES and not times.since[size]:
            return True  # right behind the first, which would be for nothing without it
        loss = self._foreseen(times, len(standings), size) - self._tokens(times, standings, size) / best
        if times.chosen == PLAIN and times.tries[size]:  # no more than can be saved up, else it would never be tried
            entering = self.once.value * sum(not each.entered for each in standings)
            loss = max(loss, min(loss + entering, 0.8 * SAVED * (times.of(PLAIN) or 0.0)))
        # Where drafts pay, what seems to gain is tried at any time: then it rests on more than a guess.
        return loss <= (self.credit if times.chosen == PLAIN else max(0.0, self.credit))

    def _checks(self, times: Times, texts: int) -> bool:
        """Whether plain steps are looked at now and then, for little debt: drafts for some tell little of them."""
        return not self.rounded and texts > 1 and times.chosen != PLAIN

    def _gains(self, times: Times, standings: Many[Standing], size: int) -> list[float]:
        """Tokens beyond the first of each text that is worth drafting for."""
        if size == PLAIN:
            return []
        usual, least = self.level.value * self.shape[size].value, self._least(times, len(standings), size)
        gains = [usual * each.luck.value for each in standings]
        return [gain for gain in gains if gain >= least]

    def _tokens(self, times: Times, standings: Many[Standing], size: int) -> float:
        return len(standings) + times.part.value * sum(self._gains(times, standings, size))

    def _rate(self, times: Times, standings: Many[Standing], size: int) -> float | None:
        seconds = times.of(size)
        if seconds is None:
            return None
        tokens = self._tokens(times, standings, size)
        if size != PLAIN:  # what a text takes once is spread over its steps
            steps = max(1.0, self.length.value * len(standings) / tokens)
            seconds += times.beside[True] + sum(not each.entered for each in standings) * self.once.value / steps
        return tokens / seconds

    def _hope(self, times: Times, standings: Many[Standing], size: int) -> float:
        """The rate that a size may have, if what few drafts have shown was bad luck."""
        doubt = 0.0 if size == PLAIN else 1 / math.sqrt(self.shape[size].count)
        gains = sum(gain * (1 + doubt) + doubt for gain in self._gains(times, standings, size))
        return (len(standings) + times.part.value * gains) / self._foreseen(times, len(standings), size)

    def _foreseen(self, times: Times, texts: int, size: int) -> float:
        """Seconds of a step: as it was; or as smaller sizes let expect; or as it was for other numbers of texts."""
        found, plain = times.of(size), times.of(PLAIN)
        if found is not None:
            return found
        if plain is None:
            return times.of(times.chosen) or 0.0
        known = [(self._nodes(each), times.of(each) or 0.0) for each in range(1, size) if times.of(each) is not None]
        if known:
            (fewer, less), (nodes, seconds) = known[-2:] if len(known) > 1 else [(0, plain), *known]
            return seconds + max(0.0, seconds - less) / (nodes - fewer) * (self._nodes(size) - nodes)
        ratios = []
        for bucket, other in list(self.times.items()):
            theirs, own = other.of(PLAIN), other.of(size)
            if theirs is not None and own is not None:
                ratios.append(1 + max(0.0, own / theirs - 1) * max(1.0, texts / bucket))
        if ratios:
            return plain * min(ratios)
        return max(UNKNOWN * plain, plain + texts * self._nodes(size) * self.row)

    def _worthy(self, times: Times, standings: Many[Standing], size: int) -> list[bool]:
        """Which texts are drafted for."""
        if size == PLAIN:
            return [False] * len(standings)
        usual, least = self.level.value * self.shape[size].value, self._least(times, len(standings), size)
        return [usual * each.luck.value >= least or each.left_out >= RETURN for each in standings]

    def _least(self, times: Times, texts: int, size: int) -> float:
        """What drafts must gain to be worth the time of their rows: the tokens that a text writes in it plainly."""
        plain, seconds = times.of(PLAIN), times.of(size)
        if texts == 1 or self.together or plain is None or seconds is None:
            return 0.0
        nodes = {each: self._nodes(each) for each in (*self._sizes(), size)}
        return POOR / plain * times.of_rows(size, seconds, nodes)
