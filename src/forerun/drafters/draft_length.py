"""How far ahead to draft, for a drafter that may be bad at it: as far as pays, and not at all where nothing does.

A drafted token is accepted with some chance, which texts tell as they go on. With it and with what drafting costs, the
closed forms say how deep a tree gains most. Where none gains, a single level is tried now and then, since texts change:
seldom while tries fail, more often once they succeed.

The answer is a function of the tokens committed so far and of costs that were measured beforehand. So a sampled tree
may be cut to it without changing any law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import MAX_NODES, TreeSpec
from forerun.theory.closed_form import expected_tokens, gain

LEAST_GAIN = 1.03
"""Drafting has to promise that much: a step does more around its passes when it drafts."""
MEMORY = 64.0
"""A rate that is well known moves by this share of 1 with every token."""
FORGOTTEN = 8.0
"""While nothing is drafted, what is known ages until it counts as so many tokens."""
AGEING = 0.97
SELDOM, OFTEN = 64, 16
"""Steps between two tries, after one that failed and after one that succeeded."""


@dataclass(frozen=True)
class Costs:
    """In passes of the target over one row."""

    level: float
    """Drafting one level of a tree."""
    rows: Mapping[int, float]
    """A pass over so many rows, for some counts of rows; 1 costs 1."""

    @cached_property
    def by_rows(self) -> dict[int, float]:
        """The same, and as it goes on: beyond what was measured, every row costs what the last ones did."""
        known = {1: 1.0, **self.rows}
        *_, before, last = [1, *sorted(known)]
        slope = max(0.0, known[last] - known[before]) / max(1, last - before)
        return {**known, MAX_NODES + 1: known[last] + slope * (MAX_NODES + 1 - last)}


class Rate:
    """The chance that a drafted token comes true: an average that forgets."""

    def __init__(self, prior: float, weight: float) -> None:
        """`prior` counts as `weight` tokens."""
        self.value = prior
        self.weight = weight

    def learn(self, came_true: bool) -> None:
        self.weight = min(MEMORY, self.weight + 1)
        self.value += (came_true - self.value) / self.weight

    def age(self) -> None:
        self.weight = max(min(FORGOTTEN, self.weight), self.weight * AGEING)


class DraftLength:
    """For all texts of an engine together."""

    def __init__(self, spec: TreeSpec, costs: Costs, rate: Rate) -> None:
        self.spec = spec
        self.costs = costs
        self.rate = rate
        self._pause = SELDOM  # between tries
        self._idle = 0  # steps since the last try
        self._trying = False
        self._known: dict[int, int] = {}

    def next(self) -> int:
        """The depth of this step's trees; 0 drafts nothing."""
        depth = self.best(self.rate.value)
        self._trying = False
        if depth:
            self._idle = 0
            return depth
        self._idle += 1
        self.rate.age()
        if self._idle < self._pause:
            return 0
        self._idle, self._trying = 0, True
        return 1

    def learn(self, parents: Sequence[int], tokens: Sequence[int], text: Sequence[int]) -> None:
        """A tree was drafted, node 0 its root and an absent node without a parent; the text went on like this."""
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        inner = set(parents)
        node = 0
        for token in text:
            if node not in inner:
                return
            found = children.get((node, token))
            self.rate.learn(found is not None)
            if self._trying:
                self._pause = SELDOM if found is None else OFTEN
            if found is None:
                return
            node = found

    def best(self, rate: float) -> int:
        """The depth with the largest gain, if a token comes true with this chance."""
        percent = round(100 * rate)  # more is not known of it, and the answers can be kept
        if percent not in self._known:
            self._known[percent] = self._best(percent / 100)
        return self._known[percent]

    def _best(self, rate: float) -> int:
        best, most = 0, LEAST_GAIN
        for depth in range(1, self.spec.depth + 1):
            reached = gain(
                expected_tokens(rate, depth),
                rows=1 + self._nodes(depth),
                draft_steps=depth,
                draft_cost=self.costs.level,
                verify_cost=self.costs.by_rows,
            )
            if reached > most:
                best, most = depth, reached
        return best

    def _nodes(self, depth: int) -> int:
        """Of a tree that is cut there."""
        if self.spec.dynamic:
            width = self.spec.width
            return min(self.spec.size, width + width * width * (depth - 1))
        return self.spec.cut_size(Budget(MAX_NODES, depth)) - 1
