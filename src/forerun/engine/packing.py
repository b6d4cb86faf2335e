"""From turns and trees to the rows of a target pass, and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from forerun.core.tree import DraftTree
from forerun.engine.scheduler import Turn
from forerun.models.batch import KEYS, Batch, Segment
from forerun.models.cache import KVCache


@dataclass(frozen=True)
class Packed:
    """The rows of a pass. Trees come padded; only nodes that are there become rows."""

    batch: Batch
    nodes: list[list[int]]  # for each deciding turn: the nodes of its tree that are rows, the root first
    tokens: list[list[int]]  # of these nodes
    parents: list[list[int]]  # of these nodes: places in the list, -1 for the root
    starts: list[int]  # for each turn: its first row

    def logit_starts(self) -> list[int]:
        """For each deciding turn the first of its rows of logits."""
        return [0, *accumulate(len(nodes) for nodes in self.nodes)]


def pack(turns: list[Turn], tree: DraftTree | None, cache: KVCache) -> Packed:
    """Reserves a slot for every row. Tree b belongs to the b-th turn that has a budget."""
    device = cache.storage.keys[0].device
    segments: list[Segment] = []
    nodes: list[list[int]] = []
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    starts: list[int] = []
    present = None if tree is None else tree.present
    for turn in turns:
        sequence = turn.job.sequence
        first = cache.committed(sequence.id)
        chain = torch.tensor(sequence.tokens[first : first + turn.chain], dtype=torch.int64, device=device)
        positions = torch.arange(first, first + turn.chain, device=device)
        ancestors = None
        drafted = 0
        if turn.budget is not None:
            assert tree is not None
            assert present is not None
            b = len(nodes)
            own = present[b].nonzero()[:, 0]
            drafted = own.shape[0]
            listed = own.tolist()
            places = dict(zip(listed, range(drafted), strict=True)) | {-1: -1}
            tokens.append(tree.tokens[b, own].tolist())
            parents.append([places[parent] for parent in tree.parents[b, own].tolist()])
            assert drafted <= 1 + turn.budget.nodes, "the drafter went over its budget"
            chain = torch.cat([chain, tree.tokens[b, own]])
            positions = torch.cat([positions, tree.positions[b, own]])
            if tree.width > 1:
                ancestors = tree.ancestors[b, own][:, own]
            nodes.append(listed)
        cache.reserve(sequence.id, chain.shape[0])
        context, slots = cache.slots(sequence.id)
        starts.append(sum(segment.rows for segment in segments))
        run = cache.run(sequence.id, KEYS)
        segments.append(Segment(sequence.id, chain, positions, ancestors, context, slots, drafted, run=run))
    return Packed(Batch.pack(segments), nodes, tokens, parents, starts)
