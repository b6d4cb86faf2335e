"""From turns and trees to the rows of a target pass, and back."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Checked, StepStates
from forerun.engine.scheduler import Turn
from forerun.models.batch import KEYS, Batch, Drafted, TextRows
from forerun.models.cache import KVCache

HOST = torch.device("cpu")
Listed = tuple[list[int], list[int], list[int]]
"""Of a tree's nodes: their numbers, their tokens, and their parents as places in the list."""


@dataclass(frozen=True)
class Packed:
    """The rows of a pass. Trees come padded. Of one on the host only nodes that are there become rows; of one that was
    drafted on a device the host knows just how many there may be, and all of these become rows."""

    batch: Batch
    tree: DraftTree | None
    nodes: list[list[int]]  # for each deciding turn: the nodes of its tree that are rows, the root first
    tokens: list[list[int]]  # of these nodes; like `parents` empty until `fetch` where a device drafted
    parents: list[list[int]]  # of these nodes: places in the list, -1 for the root (and for a row that is no node)
    silent: list[int]  # for each deciding turn: how many of these nodes, the last ones, cannot be accepted
    starts: list[int]  # for each turn: its first row
    along: list[Tensor] = field(default_factory=list)

    def logit_starts(self) -> list[int]:
        """For each deciding turn the first of its rows of logits."""
        return [0, *accumulate(len(nodes) for nodes in self.nodes)]

    def drafted(self, b: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes of a deciding turn that can be accepted, and of its root."""
        end = len(self.tokens[b]) - self.silent[b]
        return self.tokens[b][:end], self.parents[b][:end]

    def path(self, b: int, node: int) -> list[int]:
        """The drafted tokens between the root of a deciding turn and one of its nodes that are rows."""
        row = self.nodes[b].index(node)
        path: list[int] = []
        while row:
            path.append(self.tokens[b][row])
            row = self.parents[b][row]
        return path[::-1]

    def fetch(self, *wanted: Tensor) -> list[Tensor]:
        """Integers [..] from the device to the host. What was drafted there and what else was asked for with
        `bring_along` come with them: one trip for all."""
        tree = self.tree
        drafted = [] if tree is None or self.tokens else [tree.tokens, tree.parents]
        parts = _on_host([*drafted, *self.along, *wanted])
        if drafted:
            tokens, parents = parts[0].tolist(), parts[1].tolist()
            for b, nodes in enumerate(self.nodes):
                self.tokens.append(tokens[b][: len(nodes)])
                self.parents.append(parents[b][: len(nodes)])
        self.along[:] = parts[len(drafted) : len(drafted) + len(self.along)]
        return parts[len(drafted) + len(self.along) :]

    def bring_along(self, numbers: Tensor) -> None:
        """With the next `fetch`, into `along`."""
        self.along.append(numbers)


def _on_host(parts: list[Tensor]) -> list[Tensor]:
    if all(part.device == HOST for part in parts):
        return parts
    if len(parts) == 1:
        return [parts[0].cpu()]
    brought = torch.cat([part.reshape(-1) for part in parts]).cpu()
    found = torch.split(brought, [part.numel() for part in parts])
    return [numbers.view(part.shape) for numbers, part in zip(found, parts, strict=True)]


def kept_states(features: Mapping[int, Tensor], starts: Many[int], rows: Many[Many[int]]) -> list[StepStates]:
    """For each turn the states [n, H] of the rows that it kept, counted from its start. All of a layer are picked at
    once: a device would take as long for each turn. On the host none are copied where every row stays."""
    counts = [len(own) for own in rows]
    whole = features
    if features:
        picked = [start + row for start, own in zip(starts, rows, strict=True) for row in own]
        some = next(iter(features.values()))
        if some.device != HOST or picked != list(range(len(some))):
            index = to_device(picked, some.device)
            whole = {layer: states.index_select(0, index) for layer, states in features.items()}
    firsts = [0, *accumulate(counts)]
    return [StepStates(whole, first, count) for first, count in zip(firsts, counts, strict=False)]


def pack(
    turns: list[Turn], tree: DraftTree | None, cache: KVCache, broken: Many[frozenset[int]] | None = None
) -> Packed:
    """Reserves a slot for every row. Tree b belongs to the b-th turn that has a budget; its `broken` nodes, which are
    leaves, need no row."""
    away = tree is not None and tree.tokens_on != HOST
    listed = [] if tree is None or away else tree.rows()
    texts: list[TextRows] = []
    sources: list[int | None] = []
    nodes: list[list[int]] = []
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    starts: list[int] = []
    total = 0
    for turn in turns:
        sequence = turn.job.sequence
        before = cache.committed(sequence.id)
        chain = sequence.tokens[before : before + turn.chain]
        above: list[int] | None = None
        source: int | None = None
        drafted = 0
        own: list[int] = []
        if turn.budget is not None:
            assert tree is not None
            b = len(nodes)
            if away:
                drafted = min(tree.size, 1 + turn.budget.nodes)
                nodes.append(list(range(drafted)))
                if drafted > 1:
                    assert not turn.chain, "drafts come when the text is read"
                    source = b
                else:  # the root alone, which the text knows
                    own = sequence.tokens[-1:]
            else:
                present, own, above = listed[b] if not (broken and broken[b]) else _without(listed[b], broken[b])
                drafted = len(own)
                nodes.append(present)
                tokens.append(own)
                parents.append(above)
                if above == list(range(-1, drafted - 1)):
                    above = None
            assert turn.chain + drafted <= turn.rows, "the drafter went over its budget"
        rows = turn.chain + drafted
        cache.reserve(sequence.id, rows)
        texts.append(
            TextRows(
                sequence=sequence.id,
                rows=rows,
                tokens=[] if source is not None else chain + own,
                parents=above,
                before=before,
                blocks=cache.blocks(sequence.id),
                block_size=cache.block_size,
                logits=drafted,
                run=cache.run(sequence.id, KEYS),
            )
        )
        sources.append(source)
        starts.append(total)
        total += rows
    of_device = None
    if tree is not None and any(source is not None for source in sources):
        of_device = Drafted(tree.tokens, tree.positions, tree.ancestors, sources)
    silent = [] if tree is None else tree.silent
    return Packed(Batch(texts=tuple(texts), drafted=of_device), tree, nodes, tokens, parents, silent, starts)


def _without(listed: Listed, broken: frozenset[int]) -> Listed:
    nodes, tokens, parents = listed
    left = [row for row, node in enumerate(nodes) if node not in broken]
    places = {row: place for place, row in enumerate(left)} | {-1: -1}
    return [nodes[row] for row in left], [tokens[row] for row in left], [places[parents[row]] for row in left]


def all_checked(packed: Packed) -> list[Checked] | None:
    """The target's candidates for every node, for a drafter that wants them."""
    if not packed.along:
        return None
    (top,) = packed.along
    starts = packed.logit_starts()
    trees = zip(packed.tokens, packed.parents, starts, strict=False)
    return [Checked(tokens, parents, top[start : start + len(tokens)]) for tokens, parents, start in trees]
