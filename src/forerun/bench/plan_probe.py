"""A drafter at work, watched: how often it is right and how long it takes, for drafts of several sizes at once.

In every step it is asked for drafts of all sizes, and one of them is used. The text that the target then writes says
of each how much would have been accepted. So one run over some texts tells what every size of drafts is worth on them.
How long they take is found out in runs of its own, since it depends on how many texts are drafted for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.engine.engine import MAX_NODES

WHOLE = MAX_NODES
"""All that it likes to draft."""


@dataclass(frozen=True)
class Step:
    """Of one text."""

    committed: int
    accepted: dict[int, int] = field(default_factory=dict)
    """By size, how many drafts the text went on with."""
    rows: dict[int, int] = field(default_factory=dict)
    """By size, the rows that drafts took in the target's pass."""


@dataclass(frozen=True)
class _Draft:
    tokens: list[int]
    parents: list[int]
    rows: int

    def cut(self, size: int) -> _Draft:
        return _Draft(self.tokens[: 1 + size], self.parents[: 1 + size], min(size, self.rows))


class Probe:
    """Stands between the engine and a drafter."""

    def __init__(
        self, drafter: Drafter, sizes: Many[int], batch: int, device: torch.device, *, timing: bool = False
    ) -> None:
        """It either finds out what drafts are worth, and the target checks all that it likes to draft; or, with
        `timing`, how long they take in steps of `batch` texts, and the target checks a single one."""
        self.inner, self.sizes, self.batch = drafter, tuple(sizes), batch
        self.used = 1 if timing else WHOLE
        """The size of the drafts that the target checks."""
        self.natural = 0
        """The most rows that its drafts have taken."""
        self.texts: dict[int, list[Step]] = {}
        """Steps by the number of the text."""
        self.seconds: dict[int, list[float]] = {}
        """By size: drafting for all texts of a step."""
        self.observing: list[float] = []
        self._device, self._timing = device, timing
        self._drafts: dict[int, dict[int, _Draft]] = {}
        self._turn = 0

    @property
    def drawing(self) -> Drawing:
        return self.inner.drawing

    @property
    def branches(self) -> bool:
        return self.inner.branches

    @property
    def layers(self) -> tuple[int, ...]:
        return self.inner.layers

    @property
    def top(self) -> int:
        return self.inner.top

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        return self._time(sequences, budgets) if self._timing else self._compare(sequences, budgets)

    def _compare(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        """What is used is drafted last: that is what the drafter will learn from."""
        if not self.natural:
            self.natural = _most_rows(self._draft(sequences, budgets, WHOLE)[0])
        trees = {}
        if self.branches:
            for size in self.sizes:
                if size < self.natural:
                    trees[size] = self._draft(sequences, budgets, size)[0]
        trees[WHOLE], _ = self._draft(sequences, budgets, WHOLE)
        self.natural = max(self.natural, _most_rows(trees[WHOLE]))
        drafts = {size: _drafts(tree) for size, tree in trees.items()}
        if not self.branches:  # a shorter chain is the beginning of a longer one
            drafts |= {size: [each.cut(size) for each in drafts[WHOLE]] for size in self.sizes}
        for place, sequence in enumerate(sequences):
            self._drafts[sequence.id] = {size: own[place] for size, own in drafts.items()}
        return trees[WHOLE]

    def _time(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        """One size in each step, in turns, and it is drafted first: so it catches up with what was committed, and finds
        the processor's caches as the target's pass has left them."""
        size = self.sizes[self._turn % len(self.sizes)]
        self._turn += 1
        tree, seconds = self._draft(sequences, budgets, size)
        if len(sequences) == self.batch:
            self.seconds.setdefault(size, []).append(seconds)
        return tree if size == self.used else self._draft(sequences, budgets, self.used)[0]

    def observe(self, observations: Many[Observation]) -> None:
        writing = all(len(seen.sequence.output) > len(seen.tokens) > 0 for seen in observations)
        for seen in observations:
            drafts = self._drafts.pop(seen.sequence.id, {})
            if len(seen.sequence.output) > len(seen.tokens) > 0:  # the first token is that of the prompt's pass
                accepted = {size: _accepted(draft, seen.tokens) for size, draft in drafts.items()}
                rows = {size: draft.rows for size, draft in drafts.items()}
                self.texts.setdefault(seen.sequence.id, []).append(Step(len(seen.tokens), accepted, rows))
        start = self._now()
        self.inner.observe(observations)
        if writing and len(observations) == self.batch:
            self.observing.append(self._now() - start)

    def forget(self, sequence: Sequence) -> None:
        self._drafts.pop(sequence.id, None)
        self.inner.forget(sequence)

    def _draft(self, sequences: Many[Sequence], budgets: Many[Budget], size: int) -> tuple[DraftTree, float]:
        cut = [Budget(min(budget.nodes, size), min(budget.depth, size)) for budget in budgets]
        start = self._now()
        tree = self.inner.draft(sequences, cut)
        return tree, self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _most_rows(tree: DraftTree) -> int:
    return max(len(tokens) - 1 for _, tokens, _ in tree.rows())


def _drafts(tree: DraftTree) -> list[_Draft]:
    """One for each text."""
    rows = [len(tokens) - 1 for _, tokens, _ in tree.rows()]
    lists = tree.lists()
    return [_Draft(tokens, parents, own) for (_, tokens, parents), own in zip(lists, rows, strict=True)]


def _accepted(draft: _Draft, text: Many[int]) -> int:
    """How many drafts in a row are what the text went on with. Its last token is the target's own."""
    pairs = zip(draft.parents, draft.tokens, strict=True)
    children = {pair: node for node, pair in enumerate(pairs)}
    node = count = 0
    for token in text[:-1]:
        found = children.get((node, token))
        if found is None:
            break
        node, count = found, count + 1
    return count
