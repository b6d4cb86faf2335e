"""Token recycling (Luo et al., 2024): the target's own second thoughts, kept for the next time the token comes up.

Every row of a target pass ranks the whole vocabulary, and one token of it is used. Here the first k of each row are
kept, in a table with one row for each token of the vocabulary: what the target found likely after that token when it
last read it, whether the row's own token was then accepted or refused. Drafting fills a fixed shape from the table,
level by level: the r-th child of a node is the r-th candidate of its token.

The table sees one token of context and every text of the process. So it is warm after some hundred passes, costs
V × k small integers, and a drafting step is one lookup for each level of the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Checked, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.kinds import CHEAP_NODES
from forerun.drafters.none import roots_only
from forerun.drafters.tree_spec import MAX_NODES, MAX_WIDTH, TreeSpec
from forerun.trees.static import greedy

ACCEPTANCE = (
    (0.35, 0.11, 0.062, 0.04, 0.02, 0.014, 0.012, 0.009),
    (0.35, 0.115, 0.05, 0.03, 0.015),
    *((0.4, 0.08, 0.06, 0.03),) * 4,
)
"""By depth and rank, the share of visits to a node in which that child was the accepted one. Measured on the default
model over Spec-Bench development prompts, with a table some hundred passes old, and rounded."""
LEARNING = 0.15
"""What is checked fills the table, so drafting less is worth less in the long run than the shape lets expect: where n
of N nodes are always drafted it gains (n / N) ** 0.15 of that. Found with 2, 6, 15 and 63 nodes on training prompts."""
EMPTY = -1
"""A place of the table that the target has not filled yet, and a node that is therefore not there."""


@dataclass(frozen=True)
class Options:
    tree: str = ""
    """The shape that is filled: "fixed:4,2,1", or "6" for the first candidates only. Empty is a shape that is wide
    under likely nodes and narrow under others."""
    nodes: int = 0
    """How many nodes that shape has; 0 for as many as this device checks at little more than the cost of one."""
    top: int = 8
    """How many candidates are kept for each token."""
    prompt: bool = True
    """Whether a token that the target has not checked yet gets what followed it in the prompt, for a start."""

    def __post_init__(self) -> None:
        if isinstance(self.top, bool) or not isinstance(self.top, int) or not 1 <= self.top <= MAX_WIDTH:
            raise ValueError(f"the recycling option top is {self.top!r}: give a whole number from 1 to {MAX_WIDTH}")
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or not 0 <= self.nodes <= MAX_NODES:
            raise ValueError(f"the recycling option nodes is {self.nodes!r}: give a whole number from 0 to {MAX_NODES}")
        if not isinstance(self.prompt, bool):
            raise ValueError(f"the recycling option prompt is {self.prompt!r}: give true or false")
        if self.tree:
            spec = TreeSpec.parse(self.tree)
            if spec.kind not in {"chain", "fixed"}:
                raise ValueError(
                    f'recycling cannot make the tree {self.tree!r}: write "fixed:4,2,1", or "6" for one path'
                )
            if spec.width > self.top:
                raise ValueError(
                    f"the tree {self.tree!r} has {spec.width} children at a node and the recycling option top is "
                    f"{self.top}: keep as many candidates as a node has children"
                )


def make(options: Options, setup: Setup) -> Drafter:
    return Recycling(replace(options, nodes=options.nodes or setup.nodes), setup.target.vocab_size)


class Shape:
    """A tree shape, with the order in which a budget gives its nodes up."""

    def __init__(self, shape: TreeShape, values: Many[float]) -> None:
        """Node i is worth `values[i]`, never more than its parent or its elder siblings."""
        self.depth, self.width = shape.depth, shape.width
        self.parents, self.ranks, self.depths = shape.parents, shape.ranks, shape.depths
        self._values = values
        self._order = sorted(range(shape.size), key=lambda node: (-values[node], node))
        self._cuts: dict[Budget, list[int]] = {}

    @classmethod
    def of(cls, options: Options) -> Shape:
        if options.tree:  # of a tree that a user wrote, all levels are worth the same: the first nodes are kept
            shape = TreeSpec.parse(options.tree).shape
            return cls(shape, [1.0] * shape.size)
        table = [row[: options.top] for row in ACCEPTANCE]
        shape = greedy(table, 1 + (options.nodes or CHEAP_NODES))
        return cls(shape, [math.prod(table[d][r] for d, r in enumerate(path)) for path in shape.rank_paths])

    def worth(self, nodes: int) -> float:
        """Of so many of the most valuable nodes besides the root."""
        return sum(self._values[node] for node in self._order[1 : 1 + nodes])

    def cut(self, budget: Budget) -> list[int]:
        """The nodes besides the root that a budget allows, parents first: the most valuable of those that are not too
        deep. They come with their parents and elder siblings. It looks at no token, and is kept, since budgets seldom
        change."""
        kept = self._cuts.get(budget)
        if kept is None:
            shallow = [node for node in self._order if self.depths[node] <= max(0, budget.depth)]
            kept = self._cuts[budget] = sorted(shallow[: 1 + max(0, budget.nodes)])[1:]
        return kept


class Recycling:
    drawing = Drawing.FIXED
    layers: tuple[int, ...] = ()

    def __init__(self, options: Options, vocabulary: int) -> None:
        self.top = options.top
        self.shape = Shape.of(options)
        self.measured = not options.tree
        self.prompt = options.prompt
        self._read: set[int] = set()  # the sequences whose prompts are in the table
        self.branches = self.shape.width > 1
        self.table: NDArray[np.int32] = np.full((vocabulary + 1, options.top), EMPTY, dtype=np.int32)
        """Candidates by token. The row past the vocabulary stays empty: EMPTY, which is -1, finds it as the last one,
        so nothing grows below a node that is not there."""

    def gain(self, nodes: int | None) -> float:
        if not self.measured:
            return 0.0
        most = len(self.shape.parents) - 1
        drafted = most if nodes is None else min(nodes, most)
        return self.shape.worth(drafted) * math.pow(drafted / most, LEARNING)

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        for sequence in sequences if self.prompt else ():
            if sequence.id not in self._read:
                self._read.add(sequence.id)
                self._fill(sequence.tokens)
        trees = [self._tree(sequence.tokens[-1], budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        if all(len(tokens) == 1 for tokens, _ in trees):
            return roots_only(sequences)
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences])

    def _tree(self, root: int, budget: Budget) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes that there are candidates for: a thin tree is not verified at the size of a
        full one."""
        tokens, parents = [root], [-1]
        places = {0: 0}  # of the shape's nodes in the lists
        rows: dict[int, list[int]] = {}  # candidates below the shape's nodes
        for node in self.shape.cut(budget):
            parent = self.shape.parents[node]
            place = places.get(parent)
            if place is None:
                continue
            if parent not in rows:
                rows[parent] = self.table[tokens[place]].tolist()
            token = rows[parent][self.shape.ranks[node]]
            if token != EMPTY:
                places[node] = len(tokens)
                tokens.append(token)
                parents.append(place)
        return tokens, parents

    def observe(self, observations: Many[Observation]) -> None:
        """Every row that the target checked is a fresh list of candidates for its token. Where a token stood at several
        nodes one list stays: of a node that was committed rather than refused, and of those the deepest."""
        rows: list[int] = []
        tops = []
        for seen in observations:
            if (checked := seen.checked) is not None:
                order = committed_last(checked, seen.tokens)
                rows += [checked.tokens[node] for node in order]
                tops.append(checked.top if order == list(range(len(order))) else checked.top[order])
        if rows:
            top = torch.cat(tops).cpu().numpy()  # for all texts at once: in a large batch each call would count
            self.table[rows, : top.shape[1]] = top  # of repeated rows, NumPy keeps the last
            self.table[rows, top.shape[1] :] = EMPTY

    def forget(self, sequence: Sequence) -> None:
        """The table belongs to no text and stays as it is."""
        self._read.discard(sequence.id)

    def _fill(self, text: list[int]) -> None:
        """Rows that are still empty take what followed their token in a text, the latest first."""
        followers: dict[int, dict[int, None]] = {}  # the inner ones are ordered sets
        for place in range(len(text) - 2, -1, -1):
            if self.table[text[place], 0] == EMPTY:
                followers.setdefault(text[place], {})[text[place + 1]] = None
        for token, found in followers.items():
            row = list(found)[: self.top]
            self.table[token, : len(row)] = row


def committed_last(checked: Checked, committed: Many[int]) -> list[int]:
    """The places of the checked nodes: those refused, as they come, then the path that was committed from its root."""
    if len(checked.tokens) == 1:
        return [0]
    children = {pair: node for node, pair in enumerate(zip(checked.parents, checked.tokens, strict=True))}
    path = [0]
    for token in committed:
        node = children.get((path[-1], token))
        if node is None:
            break
        path.append(node)
    on_path = set(path)
    return [node for node in range(len(checked.tokens)) if node not in on_path] + path
