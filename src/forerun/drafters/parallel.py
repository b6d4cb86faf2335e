"""PaSS, parallel speculative sampling (Monea et al., 2023): the target drafts for itself, in the pass that verifies.

T trained *look-ahead embeddings* stand for words that are not known yet. Behind the root and behind drafted nodes hangs
a chain of rows that read them, as tokens V, V + 1, … which no text has. They are silent: computed, never accepted.

    root ── x ── y          drafts
     │      │    └─ V, V+1  look-ahead rows
     │      └─ V, V+1
     └─ V, V+1

Let n be the last accepted node, at position i. The target's own token behind it, at i + 1, is the next root. Look-ahead
row j behind n (j = 1 … T) stands at i + j, so what the target finds likely there is a guess for i + j + 1, which is
depth j below the next root. The guesses of one depth do not know those of another. Their product is a tree, and a table
of accuracies by depth and rank says which of its nodes are worth a row, as for Medusa's heads.

Drafts and look-ahead rows share a budget. A step without drafts has guesses behind its root, which the next one uses; a
step with drafts leaves guesses to the next one where the path ended at a node with a chain, with probability c, say.
Then a share 1 / (2 − c) of all steps has drafts; where these are expected to have G accepted, a step commits
1 + G / (2 − c) tokens. Chains are so long, and so many nodes are drafted, as makes that largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import logs_of
from forerun.drafters.drafter import Budget, Checked, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.kinds import cheap_nodes
from forerun.drafters.none import roots_only
from forerun.drafters.trained_folder import Calibration, find_head
from forerun.drafters.tree_spec import MAX_NODES, MAX_WIDTH, TreeSpec
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer
from forerun.trees.static import greedy

METHOD = "parallel"
WEIGHT = "look_ahead.weight"
"""The name of the embeddings [T, H] in their folder."""
ACCURACIES = ((0.45, 0.15, 0.08, 0.05, 0.03), (0.3, 0.12, 0.07, 0.04), (0.22, 0.1, 0.06))
"""By depth and rank: a guess, for embeddings that were not measured."""

Ranks = tuple[int, ...]
"""A node by the ranks on the way to it; () is the root."""


@dataclass(frozen=True)
class Options:
    path: str = ""
    """The folder of the look-ahead embeddings; by default those that come with Forerun for this target."""
    tree: str = ""
    """The shape that is filled: "fixed:3,2", or "3" for the first candidates only. Empty is a shape that is wide under
    likely nodes and narrow under others."""
    nodes: int = 0
    """How many rows a pass has besides the root, drafts and look-ahead rows; 0 for as many as this device checks at
    little more than the cost of one."""
    top: int = 8
    """How many candidates of a look-ahead row are looked at."""

    def __post_init__(self) -> None:
        for name, least, most in (("nodes", 0, MAX_NODES), ("top", 1, MAX_WIDTH)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"the parallel option {name} is {value!r}: give a whole number from {least} to {most}")
        if self.tree:
            spec = TreeSpec.parse(self.tree)
            if spec.kind not in {"chain", "fixed"}:
                raise ValueError(f'parallel cannot make the tree {self.tree!r}: write "fixed:3,2", or "3" for one path')
            if spec.width > self.top:
                raise ValueError(
                    f"the tree {self.tree!r} has {spec.width} children at a node and the parallel option top is "
                    f"{self.top}: look at as many candidates as a node has children"
                )


def make(options: Options, setup: Setup) -> Drafter:
    head, target = find_head(METHOD, options.path, setup)
    if WEIGHT not in head.tensors:
        raise ValueError(f"{head.path} holds no {WEIGHT}, the look-ahead embeddings: train them again")
    accuracies = Calibration.of(head.manifest).accuracies or ACCURACIES
    return Parallel(options, target, head.tensors[WEIGHT], accuracies)


@dataclass(frozen=True)
class Layout:
    """The rows of a tree below its root, before tokens are known: first the drafts, then the look-ahead rows."""

    parents: list[int]  # of all rows, the root included
    picks: list[tuple[int, int]]  # for each draft: the depth and the rank of the candidate
    steps: list[int]  # for each look-ahead row: which look-ahead token it reads
    values: list[float]  # of the root and of each draft: the chance that it is right


def falling(accuracies: Many[Many[float]], depths: int, ranks: int) -> list[list[float]]:
    """A table of so many depths and ranks at most, in which no candidate counts more than the one before it: a rank is
    a place among siblings, and has to come after it. Behind the last depth that is known the others are like it."""
    table = [list(accumulate(row[:ranks], min)) for row in accuracies[:depths]]
    return table + [table[-1]] * (depths - len(table))


class Planner:
    """Divides a budget between drafts and look-ahead rows. It looks at no token."""

    def __init__(self, options: Options, table: Many[Many[float]], rows: int) -> None:
        """`table` are accuracies that fall with the rank, a row for each of T depths; `rows` what a pass has besides
        the root where the options do not say."""
        ahead = len(table)
        self.whole = bool(options.tree)  # a shape that somebody wrote is drafted whole, where there is room
        if options.tree:
            spec = TreeSpec.parse(options.tree)
            if spec.depth > ahead:
                raise ValueError(
                    f"the tree {options.tree!r} is {spec.depth} deep and there are {ahead} look-ahead embeddings: "
                    f"write one that is not deeper"
                )
            shape = spec.shape
            self.rows = options.nodes or max(rows, spec.size + spec.depth)
        else:
            self.rows = options.nodes or rows
            shape = greedy(table, 1 + self.rows)
        self.depth, self.width = shape.depth, shape.width
        # Products of accuracies; of what the table does not know, those of its last rank.
        self.values: dict[Ranks, float] = {
            path: math.prod(table[d][min(r, len(table[d]) - 1)] for d, r in enumerate(path))
            for path in shape.rank_paths
        }
        order = sorted(self.values, key=lambda path: (-self.values[path], len(path), path))
        self.order = list(shape.rank_paths if options.tree else order)[1:]  # any beginning of it is a tree
        self._layouts: dict[tuple[int, int, int, int], Layout] = {}
        self._lengths: dict[tuple[int, int], int] = {}

    def layout(self, rows: int, depth: int, longest: int, reach: int) -> Layout:
        """At most so many rows, with drafts down to a depth, in chains of at most `longest` look-ahead rows and none
        deeper than `reach`. They are kept, since budgets seldom change."""
        key = (rows, depth, longest, reach)
        if key not in self._layouts:
            self._layouts[key] = self._made(*key)
        return self._layouts[key]

    def gain(self, rows: int) -> float:
        """Tokens that are expected to come of so many rows beside the root, in every step."""
        length = self._length(rows, self.depth)
        return self._promise(*self._plan(rows, length, length, 2 * length))

    def _made(self, rows: int, depth: int, longest: int, reach: int) -> Layout:
        length = self._length(rows, longest)
        drafts, chains = self._plan(rows, min(depth, length), length, reach)
        places = {path: place for place, path in enumerate([(), *drafts])}
        parents = [-1, *(places[path[:-1]] for path in drafts)]
        steps: list[int] = []
        for path, length in chains.items():
            for step in range(length):
                parents.append(len(parents) - 1 if step else places[path])
                steps.append(step)
        picks = [(len(path) - 1, path[-1]) for path in drafts]
        return Layout(parents, picks, steps, [self.values[path] for path in places])

    def _length(self, rows: int, longest: int) -> int:
        """Of chains, and with them of the drafts that come of them: few rows are better spent on few depths."""
        if self.whole or longest < 2:
            return longest
        if (rows, longest) not in self._lengths:
            promises = [
                self._promise(*self._plan(rows, length, length, 2 * length)) for length in range(1, longest + 1)
            ]
            self._lengths[rows, longest] = 1 + promises.index(max(promises))
        return self._lengths[rows, longest]

    def _plan(self, rows: int, depth: int, length: int, reach: int) -> tuple[list[Ranks], dict[Ranks, int]]:
        """The drafts, and the length of the chain behind each node."""
        fitting = [path for path in self.order if len(path) <= depth]
        whole = self.whole and len(fitting) + min(length, reach) <= rows
        counts = [len(fitting)] if whole else range(min(len(fitting), rows) + 1)
        plans = [(fitting[:count], self._chains(fitting[:count], rows - count, length, reach)) for count in counts]
        return max(plans, key=lambda plan: self._promise(*plan))

    def _chains(self, drafts: list[Ranks], rows: int, longest: int, reach: int) -> dict[Ranks, int]:
        """How long a chain hangs behind which node: behind the root, then behind the nodes that are most likely to be
        the last accepted ones, as long as there are rows."""
        last = self._last(drafts)
        chains: dict[Ranks, int] = {}
        for path in sorted(last, key=lambda path: (path != (), -last[path])):
            length = max(0, min(longest, reach - len(path), rows))
            rows -= length
            chains[path] = length
        return chains

    def _last(self, drafts: list[Ranks]) -> dict[Ranks, float]:
        """For each node the chance that it is accepted and none of its children is."""
        last = {path: self.values[path] for path in [(), *drafts]}
        for path in drafts:
            last[path[:-1]] -= self.values[path]
        return last

    def _promise(self, drafts: list[Ranks], chains: dict[Ranks, int]) -> float:
        """G / (2 − c). A chain that is cut short is worth the part of G that its depths have."""
        gain = sum(self.values[path] for path in drafts)
        if not gain:
            return 0.0
        last = self._last(drafts)
        worth = [sum(self.values[path] for path in drafts if len(path) <= length) for length in range(self.depth + 1)]
        covered = sum(last[path] * worth[min(length, self.depth)] / gain for path, length in chains.items())
        return gain / (2 - min(1.0, max(0.0, covered)))


class Parallel:
    drawing = Drawing.FIXED
    layers: tuple[int, ...] = ()

    def __init__(
        self, options: Options, target: TargetModel, embeddings: Tensor, accuracies: Many[Many[float]] = ACCURACIES
    ) -> None:
        """`embeddings` [T, H], which the target takes as its own; `accuracies[d][r]` is the chance that the r-th
        candidate for depth d + 1 is right."""
        if not isinstance(target, Transformer):
            raise ValueError(
                "parallel gives the target embeddings to read, which the adapter for this model cannot: choose another "
                "drafter, such as ngram or draft_model"
            )
        if not accuracies or not all(accuracies):
            raise ValueError("the table of accuracies has an empty row: give at least one rank for each depth")
        self.measured = accuracies is not ACCURACIES
        target.add_embeddings(embeddings)
        self.vocabulary, self.context_length = target.vocab_size, target.context_length
        table = falling(accuracies, embeddings.shape[0], min(options.top, target.vocab_size))
        self.plan = Planner(options, table, cheap_nodes(target))
        self.branches = self.plan.width > 1
        self.top = max(1, self.plan.width)
        self._guesses: dict[int, list[list[int]]] = {}
        """By text, where the last accepted node had look-ahead rows: candidates by depth and rank."""

    def gain(self, nodes: int | None) -> float:
        if not self.measured:
            return 0.0
        return self.plan.gain(self.plan.rows if nodes is None else min(nodes, self.plan.rows))

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        trees: list[tuple[list[int], list[int]]] = []
        silent: list[int] = []
        values: list[list[float]] = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            guesses = self._guesses.get(sequence.id, [])
            layout = self._layout(sequence, budget, len(guesses))
            drafts = [guesses[depth][rank] for depth, rank in layout.picks]
            ahead = [self.vocabulary + step for step in layout.steps]
            trees.append(([sequence.tokens[-1], *drafts, *ahead], layout.parents))
            silent.append(len(ahead))
            values.append(layout.values)
        if all(len(tokens) == 1 for tokens, _ in trees):
            return roots_only(sequences)
        positions = [sequence.position for sequence in sequences]
        return DraftTree.of_lists(trees, positions, silent, log_values=logs_of(values))

    def _layout(self, sequence: Sequence, budget: Budget, known: int) -> Layout:
        """Where guesses for `known` depths are there."""
        room = self.context_length - 1 - sequence.position
        depth = min(known, budget.depth, room)
        if budget.nodes < 1 or budget.depth < 1:
            return Layout([-1], [], [], [1.0])
        longest = min(self.plan.depth, budget.depth)
        # Behind a node at depth d comes the target's own token. What row j there guesses is the (d + 1 + j)th token
        # from here, and then another one of the target's own must have room: d + j + 2 ≤ remaining.
        reach = max(0, min(room, sequence.remaining - 2, depth + longest))
        return self.plan.layout(min(budget.nodes, self.plan.rows), depth, longest, reach)

    def observe(self, observations: Many[Observation]) -> None:
        for seen in observations:
            self._guesses.pop(seen.sequence.id, None)
            if seen.checked is not None and seen.tokens:
                guesses = guesses_behind(seen.checked, seen.tokens[:-1], self.vocabulary)
                if guesses:
                    self._guesses[seen.sequence.id] = guesses

    def forget(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence.id, None)


def guesses_behind(checked: Checked, accepted: Many[int], vocabulary: int) -> list[list[int]]:
    """What the target finds likely at each look-ahead row behind the node that an accepted path leads to."""
    known = {pair: node for node, pair in enumerate(zip(checked.parents, checked.tokens, strict=True))}
    node: int | None = 0
    for token in accepted:
        node = None if node is None else known.get((node, token))
    rows: list[int] = []
    while node is not None:
        node = known.get((node, vocabulary + len(rows)))
        if node is not None:
            rows.append(node)
    guesses: list[list[int]] = checked.top[rows].tolist()
    return guesses
