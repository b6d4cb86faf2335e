"""How long a step of the engine takes, by texts and rows: the target's pass, and what the engine does around it.

Steps of all sizes take turns on the same texts, plain decoding among them, so that a noisy machine is as noisy for
all. What a drafter takes is not in them: it is measured with the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.none import NoDrafter
from forerun.engine.engine import MAX_NODES, MAX_ROWS, Engine
from forerun.engine.request import Request
from forerun.models.target import TargetModel, WritesAhead
from forerun.theory.costs import PassCosts

ROWS = (2, 3, 5, 9, 16, 20, 32, 64)
"""Rows of a text that are timed besides a single one, as far as they are asked for and a step holds them."""
REPEAT = 9
WARM_UP = 2
"""Rounds before the clock counts."""
HOPELESS = 6
"""How much longer than plain decoding a step takes that is not timed any further: no draft pays for it."""
PRIME = 7919
Round = dict[int, float]
"""Seconds of steps by rows of a text, one after the other; 0 stands for plain decoding."""
PLAIN = 0


@dataclass
class Profile:
    """Of steps with so many texts; seconds, without what drafting takes."""

    batch: int
    rounds: list[Round] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=dict)
    """The target's pass by rows of a text."""
    reading: float = 0.0
    """A token of a prompt."""

    @property
    def rows(self) -> list[int]:
        return sorted(set.intersection(*map(set, self.rounds)) - {PLAIN})

    @property
    def most_drafts(self) -> int:
        """Drafted tokens of a text whose check was timed."""
        return max(self.rows) - 1

    def plain_seconds(self, rounds: Many[Round] | None = None) -> float:
        return median(each[PLAIN] for each in rounds or self.rounds)

    def costs(self, rounds: Many[Round] | None = None) -> PassCosts:
        """By rows of a text. Rounds see the machine in different moods, so it is ratios within a round whose median is
        taken. More rows do no less work: where they seem to, it is noise, and the neighbours share their mean."""
        chosen = rounds or self.rounds
        plain = self.plain_seconds(chosen)
        ratios = [median(each[count] / each[PLAIN] for each in chosen) for count in self.rows]
        return PassCosts(tuple(self.rows), tuple(plain * ratio for ratio in never_falling(ratios)))

    def as_dict(self) -> dict[str, Any]:
        steps = {count: [each[count] for each in self.rounds] for count in self.rows}
        return {
            "batch": self.batch,
            "plain_ms": 1000 * self.plain_seconds(),
            "reading_ms_per_token": 1000 * self.reading,
            "rows": self.rows,
            "ms": [1000 * median(self.passes[count]) for count in self.rows],
            "step_ms": [1000 * cost for cost in self.costs().costs],
            "step_ms_low": [1000 * min(times) for times in steps.values()],
            "step_ms_high": [1000 * max(times) for times in steps.values()],
        }


def never_falling(values: Many[float]) -> list[float]:
    """The nearest sequence that does not fall, by least squares: neighbours that do are pooled."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [fmean(pool) for pool in pools for _ in pool]


class RowsDrafter:
    """Drafts a chain of as many tokens as it is told, which no text goes on with but by chance."""

    drawing = Drawing.FIXED
    branches = False
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, vocabulary: int) -> None:
        self.rows = 1
        self._vocabulary = vocabulary

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        trees = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            count = min(self.rows - 1, budget.nodes, budget.depth)
            start = PRIME * (sequence.position + sequence.id)
            drafts = [(start + PRIME * place) % self._vocabulary for place in range(count)]
            trees.append(([sequence.tokens[-1], *drafts], list(range(-1, count))))
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences])

    def observe(self, observations: Many[Observation]) -> None:
        """There is nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing was kept."""


def engine_of(
    target: TargetModel, drafter: Drafter, prompts: Many[list[int]], params: SamplingParams, batch: int
) -> Engine:
    """With all prompts at its door."""
    longest = max(map(len, prompts)) + params.max_tokens + MAX_NODES
    slots = batch * (min(longest, target.context_length) + 32)
    engine = Engine(target, drafter, slots=slots, max_batch=batch, max_rows=max(MAX_ROWS, 2 * batch))
    for prompt in prompts:
        engine.add(Request(prompt, params))
    return engine


def profile(
    target: TargetModel,
    prompts: Many[list[int]],
    batch: int,
    most_rows: int,
    params: SamplingParams,
    *,
    repeat: int = REPEAT,
    tell: Callable[[], None] = lambda: None,
) -> Profile:
    """On `batch` texts that begin with some of the prompts, up to so many rows of each; `tell` hears of each round."""
    counts = [1, *(rows for rows in ROWS if rows * batch <= MAX_ROWS)]
    counts = [rows for place, rows in enumerate(counts) if place == 0 or counts[place - 1] < most_rows]
    rounds = WARM_UP + repeat
    # Drafts need room in the text: a step checks no more than could be committed.
    params = replace(params, max_tokens=2 * rounds * len(counts) + max(counts), ignore_eos=True)
    room = target.context_length - params.max_tokens - 1
    if room < 1:
        raise ValueError(
            f"a context of {target.context_length} tokens is too short to time steps in: use forerun bench"
        )
    texts = [prompts[place % len(prompts)][:room] for place in range(batch)]
    drafter = RowsDrafter(target.vocab_size)
    wide = engine_of(target, drafter, texts, params, batch)
    _read(wide, batch)  # which also brings the weights into memory
    plain = engine_of(target, NoDrafter(), texts, params, batch)
    found = Profile(batch, reading=_read(plain, batch) / sum(map(len, texts)))
    runs_ahead = isinstance(target, WritesAhead) and target.writes_ahead  # then plain decoding is quicker than one row
    warming: list[Round] = []
    for number in range(rounds):
        times: Round = {}
        seconds, _, tokens = _step(plain)
        times[PLAIN] = seconds * batch / tokens
        for count in list(counts):
            drafter.rows = count
            before = wide.statistics.rows
            times[count], passing, _ = _step(wide)
            if wide.statistics.rows - before != count * batch:  # the engine drafts nothing for so many texts
                counts.remove(count)
                del times[count]
                continue
            if number >= WARM_UP:
                found.passes.setdefault(count, []).append(passing)
        if not runs_ahead:
            times[PLAIN] = times[1] = (times[PLAIN] + times[1]) / 2  # twice the same
        if number >= WARM_UP:
            found.rounds.append(times)
        else:
            warming.append(times)
        if len(warming) == number + 1 == WARM_UP:
            counts = _hopeful(warming, counts)
        tell()
    return found


def _hopeful(rounds: Many[Round], counts: list[int]) -> list[int]:
    """Up to the first that takes too long to be of any use, in every round."""
    plain = max(each[PLAIN] for each in rounds)
    long = [count for count in counts if min(each[count] for each in rounds) > HOPELESS * plain]
    return [count for count in counts if not long or count <= long[0]]


def _read(engine: Engine, batch: int) -> float:
    """Seconds until every text has its first token."""
    begun: set[int] = set()
    while len(begun) < batch:
        begun |= {update.request for update in engine.step()}
    return engine.statistics.total_seconds


def _step(engine: Engine) -> tuple[float, float, int]:
    """Seconds without drafting, of these the target's pass, and tokens."""
    statistics = engine.statistics
    before, tokens = dict(statistics.seconds), statistics.tokens
    engine.step()
    spent = {name: statistics.seconds[name] - before[name] for name in before}
    return sum(spent.values()) - spent["draft"], spent["target"], statistics.tokens - tokens
