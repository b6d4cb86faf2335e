"""A dynamic tree grown on the host: the same tree as `growing`, in plain numbers.

On a CPU a head's pass over a level takes half a millisecond, and the dozens of small tensor operations that grow a
batch of trees on a device would take longer than that. Here a level's candidates come from one call in C, and the rest
is a few hundred numbers. It serves requests whose law is a plain softmax: greedy ones, and seeded ones that cut
nothing off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.core.native import choice
from forerun.core.noise import Purpose, key_at
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec

MOST = 64
"""Candidates of one node, at most (`choice.candidates`)."""


@runtime_checkable
class GrowsItself(Protocol):
    """A run that has a faster way to some trees."""

    def grow(self, spec: TreeSpec, sequences: Many[Sequence], budgets: Many[Budget], taus: Taus) -> DraftTree | None:
        """None where it has not. Budgets are 0 for those who sit out."""
        ...


class HostRun(Protocol):
    """A run that can be asked in plain numbers."""

    @property
    def ids(self) -> Tensor | None: ...

    def quick_roots(self) -> Tensor:
        """Logits [R, Vd] behind the roots of those who take part."""
        ...

    def quick_level(self, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """Logits behind new nodes, by sequence; a parent is the number of an earlier node of that sequence, in the
        order in which they were asked about, -1 the root. Who has none sits out."""
        ...


def fits(spec: TreeSpec) -> bool:
    return spec.dynamic and spec.width <= MOST and choice.library() is not None


def dynamic_depth(spec: TreeSpec, budget: Budget) -> int:
    """How deep a dynamic tree may get."""
    return max(0, min(spec.depth, budget.depth, budget.nodes))


def plain_laws(sequences: Many[Sequence]) -> bool:
    """Whether each request takes its tokens from a softmax as it is: the likeliest, or by a race."""
    return all(_plain(sequence.params, sequence.coupled) for sequence in sequences)


def _plain(params: SamplingParams, coupled: bool) -> bool:
    if params.penalises or params.logit_bias:
        return False
    return params.greedy or (coupled and params.top_k == 0 and params.top_p == 1 and params.min_p == 0)


class _Growing:
    """One tree. Nodes are in the order in which they grew; 0 is the root."""

    def __init__(self, root: int, width: int, depth: int, size: int) -> None:
        self.width, self.depth, self.size = width, depth, size
        self.tokens, self.parents, self.values = [root], [-1], [0.0]
        self.numbers = {0: -1}
        """Of the nodes that the run was asked about: in which place."""
        self.frontier = [0] if depth > 0 else []

    def expand(self, tokens: list[list[int]], shares: list[list[float]], last: bool) -> None:
        """Children of the frontier; then the most valuable of them are the next one, but for those that will not be
        kept: what grows from them is worth no more than they are, so it will not be kept either."""
        first = len(self.tokens)
        for node, own, chances in zip(self.frontier, tokens, shares, strict=True):
            for token, chance in zip(own, chances, strict=True):
                if token >= 0:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.values.append(self.values[node] + min(chance, 0.0))
        if last:
            self.frontier = []
            return
        values = self.values
        best = sorted(range(first, len(values)), key=lambda i: -values[i])[: self.width]
        least = sorted(values, reverse=True)[self.size - 1] if len(values) >= self.size else -math.inf
        self.frontier = [node for node in best if values[node] > least]

    def ask(self) -> tuple[list[int], list[int]]:
        """The frontier's tokens, and the numbers of the nodes above."""
        start = len(self.numbers) - 1
        for place, node in enumerate(self.frontier):
            self.numbers[node] = start + place
        return [self.tokens[n] for n in self.frontier], [self.numbers[self.parents[n]] for n in self.frontier]

    def kept(self) -> tuple[list[int], list[int], list[float]]:
        """The most valuable nodes and the root, with their values, parents before children: values never rise along a
        path, and a sort that keeps the order of equals leaves a child behind its parent."""
        values = self.values
        order = sorted(range(len(values)), key=lambda i: -values[i])[: self.size]
        places = {node: place for place, node in enumerate(order)}
        parents = [-1 if n == 0 else places[self.parents[n]] for n in order]
        return [self.tokens[n] for n in order], parents, [values[n] for n in order]


def grow_on_host(
    spec: TreeSpec, sequences: Many[Sequence], run: HostRun, budgets: Many[Budget], taus: Taus
) -> DraftTree:
    """Budgets are 0 for those who sit out of the run."""
    width = spec.width
    growing = [
        _Growing(
            sequence.tokens[-1],
            width,
            dynamic_depth(spec, budget),
            1 + max(0, min(spec.size, budget.nodes)),
        )
        for sequence, budget in zip(sequences, budgets, strict=True)
    ]
    racing = [sequence.coupled and not sequence.params.greedy for sequence in sequences]
    named: list[int] | None = None if run.ids is None else run.ids.tolist()
    ids: Tensor | None = run.ids
    for depth in range(max(tree.depth for tree in growing)):
        if not any(tree.frontier for tree in growing):  # there was nothing to draft, or nothing more would be kept
            break
        logits = run.quick_roots() if depth == 0 else run.quick_level(*_asked(growing))
        members = [b for b, tree in enumerate(growing) for _ in tree.frontier]
        if ids is None:
            ids = torch.arange(logits.shape[1])
        places, shares = choice.candidates(
            logits,
            ids,
            width,
            temperature=[sequences[b].params.temperature for b in members],
            keys=_keys(sequences, members, depth) if any(racing) else [0] * len(members),
            raced=[racing[b] for b in members],
            taus=(taus.greedy, taus.coupled),
        )
        if named is not None:
            places = [[named[place] if place >= 0 else -1 for place in row] for row in places]
        row = 0
        for tree in growing:
            count = len(tree.frontier)
            if count:
                tree.expand(places[row : row + count], shares[row : row + count], depth + 1 == tree.depth)
                row += count
    kept = [tree.kept() for tree in growing]
    return DraftTree.of_lists(
        [(tokens, parents) for tokens, parents, _ in kept],
        [sequence.position for sequence in sequences],
        log_values=lambda: [values for _, _, values in kept],
    )


def _asked(growing: list[_Growing]) -> tuple[list[list[int]], list[list[int]]]:
    asked = [tree.ask() for tree in growing]
    return [tokens for tokens, _ in asked], [parents for _, parents in asked]


def _keys(sequences: Many[Sequence], members: list[int], depth: int) -> list[int]:
    """Of the noise at the position behind each row."""
    at = {b: sequences[b].position + 1 + depth for b in members}
    keys = {b: key_at(sequences[b].seed, position, Purpose.TOKEN) for b, position in at.items()}
    return [keys[b] for b in members]
