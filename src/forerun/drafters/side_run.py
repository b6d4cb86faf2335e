"""A step of heads that need no pass below the root: what they say about a depth is the same for all its nodes.

So the candidates of all depths are found at once, and the rest is counting on the host. A node is worth the product of
its candidates' shares on the way to it, and of all nodes the most valuable ones can be listed one after the other: a
dynamic tree needs no levels here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch
from torch import Tensor

from forerun.core.noise import StepNoise
from forerun.core.sequence import Sequence
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus, token_race
from forerun.drafters.drafter import Budget
from forerun.drafters.host_growth import dynamic_depth, plain_laws
from forerun.drafters.level_run import Rows
from forerun.drafters.tree_spec import TreeSpec


class SideRun:
    """A `LevelRun` over logits that are all there already."""

    writes_ahead = False

    def __init__(self, logits: Tensor | None, takes_part: Many[bool], device: torch.device, ids: Tensor | None) -> None:
        """logits [B', K, Vd] of those who take part, by depth."""
        self.device, self.ids = device, ids
        self.takes_part = list(takes_part)
        self._logits = logits
        self._depth = 0
        places = iter(range(len(self.takes_part)))
        self._place = [next(places) if part else -1 for part in self.takes_part]

    @property
    def vocabulary(self) -> int:
        return 0 if self._logits is None else self._logits.shape[2]

    def roots(self) -> Rows:
        return self._rows([int(part) for part in self.takes_part])

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        self._depth += 1
        return self._rows(counts)

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        raise NotImplementedError("these heads write nothing ahead")

    def grow(self, spec: TreeSpec, sequences: Many[Sequence], budgets: Many[Budget], taus: Taus) -> DraftTree | None:
        """None for requests that cut their laws, or draw from them."""
        if self._logits is None or spec.width > self.vocabulary or not plain_laws(sequences):
            return None
        members = [sequences[b] for b, part in enumerate(self.takes_part) if part]
        columns, shares = candidates(self._logits, self.ids, members, spec.width, taus)
        tokens: list[list[list[int]]] = columns.tolist()
        told: list[list[list[float]]] = shares.tolist()
        trees = []
        for sequence, budget, place in zip(sequences, budgets, self._place, strict=True):
            tree = _Tree(sequence.tokens[-1])
            if place >= 0 and budget.nodes > 0 and budget.depth > 0:
                tree.fill(spec, budget, tokens[place], told[place])
            trees.append(tree)
        return DraftTree.of_lists(
            [(tree.tokens, tree.parents) for tree in trees],
            [sequence.position for sequence in sequences],
            log_values=lambda: [tree.values for tree in trees],
        )

    def _rows(self, counts: list[int]) -> Rows:
        assert self._logits is not None
        members = [b for b, count in enumerate(counts) for _ in range(count)]
        columns = [place for count in counts for place in range(count)]
        index = to_device([members, columns, [self._place[b] for b in members]], self.device)
        return Rows(counts, index[0], index[1], self._logits[index[2], self._depth])


@dataclass
class _Tree:
    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [0.0])
    """Logarithms of the chances that all up to a node is right."""

    def __post_init__(self) -> None:
        self.tokens = [self.root]

    def fill(self, spec: TreeSpec, budget: Budget, tokens: list[list[int]], shares: list[list[float]]) -> None:
        """From the candidates of each depth, and the logarithms of their shares."""
        if spec.dynamic:
            return self._fill_best(dynamic_depth(spec, budget), min(spec.size, budget.nodes), tokens, shares)
        shape = spec.cut(budget)
        for parent, depth, rank in zip(shape.parents[1:], shape.depths[1:], shape.ranks[1:], strict=True):
            self._add(parent, tokens[depth - 1][rank], shares[depth - 1][rank])
        return None

    def _fill_best(self, depth: int, nodes: int, tokens: list[list[int]], shares: list[list[float]]) -> None:
        """The most valuable ones. Behind a node come, as far as they are not there yet, its next sibling and its first
        child, neither of them more valuable."""
        waiting = [(-shares[0][0], 0, 0, 0)] if depth else []  # by value: parent, depth and rank
        while waiting and len(self.tokens) <= nodes:
            value, parent, level, rank = heappop(waiting)
            if value == math.inf:
                return
            self._add(parent, tokens[level][rank], shares[level][rank])
            if rank + 1 < len(tokens[level]):
                heappush(waiting, (-self.values[parent] - shares[level][rank + 1], parent, level, rank + 1))
            if level + 1 < depth:
                heappush(waiting, (-self.values[-1] - shares[level + 1][0], len(self.tokens) - 1, level + 1, 0))

    def _add(self, parent: int, token: int, share: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(self.values[parent] + min(0.0, share))


def candidates(
    logits: Tensor, ids: Tensor | None, sequences: Many[Sequence], count: int, taus: Taus
) -> tuple[Tensor, Tensor]:
    """The best tokens [B, K, count] at each of K depths, from logits [B, K, C], with the logarithms of their shares:
    what `Scores` says of a softmax as it is, or of a race."""
    scores = logits.float().nan_to_num()
    racing = [sequence.coupled and not sequence.params.greedy for sequence in sequences]
    if any(racing):
        warmth = [
            sequence.params.temperature if race else 1.0 for sequence, race in zip(sequences, racing, strict=True)
        ]
        scores = scores.double() / torch.tensor(warmth, dtype=torch.float64, device=scores.device)[:, None, None]
        scores = torch.where(
            to_device(racing, scores.device)[:, None, None].bool(),
            (scores - _race(sequences, scores.shape[1], scores.shape[2], ids, scores.device).log_()) / taus.coupled,
            scores / taus.greedy,
        )
    elif taus.greedy != 1:
        scores = scores / taus.greedy
    best = scores.topk(count)
    shares = best.values - scores.logsumexp(2, keepdim=True)
    return (best.indices if ids is None else ids[best.indices]), shares


def _race(sequences: Many[Sequence], depths: int, columns: int, ids: Tensor | None, device: torch.device) -> Tensor:
    """[B, K, C] the exponentials of the target's own race at each depth."""
    seeds, starts = to_device([[each.seed for each in sequences], [each.position + 1 for each in sequences]], device)
    tokens = torch.arange(columns, device=device) if ids is None else ids
    return torch.stack([token_race(StepNoise(seeds, starts), depth, tokens) for depth in range(depths)], 1)
