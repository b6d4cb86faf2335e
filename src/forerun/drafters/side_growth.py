"""Trees of heads that guess from one state, grown on an accelerator: one graph from the states to the trees.

What such heads say about a depth is the same for all its nodes, and a node is worth the product of the shares of the
candidates on the way to it. Candidates come in falling order, so a node whose ranks are nowhere lower than another's
is worth no more than that one. A tree of N nodes therefore never reaches beyond the nodes with less than N such
betters, 825 for 60 nodes of four heads: these are listed once, and in every round valued and ranked all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.device_growth import best_tree, token_noise
from forerun.drafters.drafter import Budget
from forerun.drafters.told import Told
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels.growth import Nodes, Race, best_children
from forerun.kernels.walk import Walked
from forerun.models.heads.side_heads import SideHeads
from forerun.models.static.capture import Graphs, Replayed

MOST_LISTED = 4096
"""Each of them is compared with every other."""


def within_reach(width: int, depth: int, size: int) -> Iterator[tuple[int, ...]]:
    """The ranks on the way to each node that the best tree of so many nodes may have, whatever the shares; the root
    first, and parents before their children."""
    yield ()
    level: list[tuple[tuple[int, ...], int, int]] = [((), 0, 1)]
    """With the number of nodes that are no worse, and how many of these are as deep."""
    for _ in range(depth):
        below = []
        for path, betters, alike in level:
            for rank in range(width):
                own = alike * (rank + 1)
                if betters + own > size:
                    break
                below.append(((*path, rank), betters + own, own))
                yield below[-1][0]
        level = below


def fits(heads: SideHeads, spec: TreeSpec) -> bool:
    if not spec.dynamic or spec.depth > heads.count or spec.width > heads.vocabulary:
        return False
    listed = islice(within_reach(spec.width, spec.depth, spec.size), MOST_LISTED + 1)
    return sum(1 for _ in listed) <= MOST_LISTED


class SideGrowth:
    """For some number of texts and one kind of tree."""

    def __init__(
        self, heads: SideHeads, spec: TreeSpec, texts: int, raced: bool, taus: Taus, graphs: Graphs, pool: Any
    ) -> None:
        assert fits(heads, spec)
        device = heads.device
        self.heads, self.spec, self.texts, self.raced, self.taus = heads, spec, texts, raced, taus
        self.layers, self.graphs, self.pool = (heads.layer,), graphs, pool
        self.told = Told(texts, device)
        self.states = torch.zeros(texts, heads.lm_head.in_features, dtype=heads.dtype, device=device)
        self.ids = torch.arange(heads.vocabulary, device=device) if heads.ids is None else heads.ids.contiguous()
        self.each_depth = torch.arange(spec.depth, device=device)
        self.first_nodes = torch.arange(texts, device=device) * (1 + spec.size)
        self._list_nodes(list(within_reach(spec.width, spec.depth, spec.size)))
        self.run = Replayed(self._launch, graphs, pool, f"trees of {texts} texts")

    def bring(self, states: Tensor, sequences: Many[Sequence], budgets: Many[Budget]) -> None:
        """States [B, H] at the tokens before the roots."""
        self.states[: len(sequences)].copy_(states)
        self.told.bring(sequences, budgets)

    @property
    def fixed(self) -> bool:
        return self.run.graph is not None

    def rest(self) -> None:
        """These heads write nothing."""

    def go_on(self, features: Mapping[int, Tensor], walked: Walked) -> None:
        last = walked.nodes.gather(1, (walked.counts - 1).clamp_min(0)[:, None])[:, 0]
        (layer,) = self.layers
        self.states.copy_(features[layer].index_select(0, self.first_nodes + last.clamp_min(0)))
        self.told.go_on(walked)

    def _list_nodes(self, paths: list[tuple[int, ...]]) -> None:
        """A node's places among the candidates of all depths, of which there is one more that is worth nothing."""
        width, depth = self.spec.width, self.spec.depth
        nothing = depth * width
        numbers = {path: number for number, path in enumerate(paths)}
        places = [[level * width + rank for level, rank in enumerate(path)] for path in paths]
        parents = [numbers[path[:-1]] if path else -1 for path in paths]
        device = self.states.device
        self.ways = torch.tensor([own + [nothing] * (depth - len(own)) for own in places], device=device)
        self.own = torch.tensor([own[-1] if own else nothing for own in places], device=device)
        self.parents = torch.tensor(parents, device=device).repeat(self.texts, 1)
        self.levels = torch.tensor([len(path) for path in paths], device=device)

    def _launch(self) -> DraftTree:
        told, spec = self.told, self.spec
        logits = self.heads(self.states, told["tokens"], spec.depth).float()
        shares, columns = best_children(logits.flatten(0, 1), spec.width, self._race(), self.taus.greedy)
        shares = shares.nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0.0).view(self.texts, -1)
        shares = torch.cat([shares, shares.new_zeros(self.texts, 1)], 1)
        tokens = torch.cat([self.ids[columns].view(self.texts, -1), told["tokens"][:, None]], 1)
        values = shares[:, self.ways].sum(2)
        values = values.masked_fill(self.levels > told["depths"][:, None], -math.inf)
        tokens = torch.where(values > -math.inf, tokens[:, self.own], 0)
        return best_tree(told["positions"], told["nodes"], Nodes(tokens, self.parents, values), spec)

    def _race(self) -> Race | None:
        """Every depth has noise of its own."""
        if not self.raced:
            return None
        told, depth = self.told, self.spec.depth
        places = (told["positions"][:, None] + self.each_depth).flatten()
        seeds, heat, raced = (each.repeat_interleave(depth) for each in (told["seeds"], told.heat, told["raced"]))
        return Race(token_noise(seeds, places, self.ids, 1), heat, raced, self.taus.coupled)
