"""The rows of one pass. A sequence brings the tokens that its cache does not hold yet, as a chain, and behind them
its draft tree; a prompt being read, a tree being checked and a text being recomputed are all the same to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEYS = 64
"""Keys are padded to a multiple of this. A sum over a vector's lanes is then cut in the same way however many keys come
after a row's own, so a chain of drafts has bit for bit the rows that plain decoding would have."""


@dataclass(frozen=True)
class Segment:
    """What one sequence brings: C + N rows, of which the first C are a chain that leads to the root of a tree.

    A tree of N = 0 nodes is a chunk of a prompt that goes on; N = 1 is plain decoding.
    """

    sequence: int  # its id
    tokens: Tensor  # [C + N]
    positions: Tensor  # [C + N] absolute
    ancestors: Tensor | None  # [N, N] bool over the tree's own nodes; None where the whole segment is a chain
    context: Tensor  # [P] slots of the tokens that come before, in order
    slots: Tensor  # [C + N] where the keys and values of these rows go
    logits: int
    """Of that many rows at the end the logits are wanted."""
    context_visible: Tensor | None = None
    """[C + N, T] bool: what each row sees of the last T tokens of the context; of those before, and without it, all.
    For a tree that is read level by level: then the context ends with rows of earlier levels, and a node sees its own
    ancestors among them."""
    context_positions: Tensor | None = None
    """[T'] the absolute positions of the last T' tokens of the context; those before, and without it all, lie at
    positions 0, 1, …"""
    blocks: list[int] | None = None
    """Where context and rows lie one behind the other in the blocks of a `KVCache`: these blocks."""
    run: int | None = None
    """The first slot, where the context and the rows behind it lie one after another in a storage that does not end
    within the `KEYS` after them: they can be read where they are then."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def before(self) -> int:
        """Tokens of the context."""
        return self.context.shape[0]

    @property
    def is_chain(self) -> bool:
        return self.ancestors is None

    def is_on(self, device: torch.device) -> bool:
        return all(tensor.device == device for tensor in vars(self).values() if isinstance(tensor, Tensor))

    def on(self, device: torch.device) -> Segment:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = tensors
        return replace(self, **changed)


@dataclass(frozen=True)
class Group:
    """Segments that attend together, padded to N rows and L keys."""

    rows: Tensor | None  # [G, N] places in the packed rows, R for padding; None if the rows are all rows in their order
    shape: tuple[int, int]  # G, N
    keys: Tensor  # [G, L] slots: context, then own rows; slot 0 for padding
    visible: Tensor  # [G, N, L] bool
    distance: Tensor  # [G, N, L] positions between a query and a key
    run: int | None  # the slot of the first key of a single segment whose keys lie one after another


@dataclass(frozen=True)
class Drafted:
    """Nodes that were drafted on a device: what they are is not known on the host, only where they go."""

    tokens: Tensor  # [S, N]
    positions: Tensor | None  # [S, N]; None where the segments know them
    visible: Tensor | None  # [S, N, T] what they see of the last T keys, themselves the last; None where segments know
    sources: list[int | None]  # for each segment of the batch: its row in these tables

    def __post_init__(self) -> None:
        assert self.visible is None or self.visible.shape[2] >= self.tokens.shape[1]


@dataclass(frozen=True)
class TextRows:
    """What one text brings, in plain numbers. They are made in a moment, and a pass that wants tensors makes its own.

    Its rows are a chain and then a tree, in the order of their slots, which lie right behind those of the context."""

    sequence: int  # its id
    rows: int
    tokens: list[int]  # none where only the device knows them
    parents: list[int] | None  # of the tree's nodes, which are the last rows: places among them; None for a chain
    before: int  # tokens of the text in the cache
    blocks: list[int]  # where context and rows lie
    block_size: int
    logits: int  # of that many rows at the end
    run: int | None = None  # see `Segment`

    def positions(self) -> list[int]:
        chain = self.rows - (0 if self.parents is None else len(self.parents))
        positions = list(range(self.before, self.before + chain))
        if self.parents is not None:
            root = self.before + chain
            nodes: list[int] = []
            for parent in self.parents:
                nodes.append(root if parent < 0 else nodes[parent] + 1)
            positions += nodes
        return positions

    def seen(self) -> list[int]:
        """For each row the rows that it sees, as bits; Python's numbers have as many as it takes."""
        chain = self.rows - (0 if self.parents is None else len(self.parents))
        bits = [(2 << row) - 1 for row in range(chain)]
        if self.parents is not None:
            before = (1 << chain) - 1
            for node, parent in enumerate(self.parents):
                bits.append((before if parent < 0 else bits[chain + parent]) | 1 << (chain + node))
        return bits

    def slots(self) -> NDArray[np.int64]:
        """Of the context and of the rows behind it."""
        return slots_of(self.blocks, self.block_size, self.before + self.rows)

    def segment(self, drafted: Drafted | None, source: int | None) -> Segment:
        slots = torch.from_numpy(self.slots())
        context, own = slots[: self.before], slots[self.before :]
        ancestors: Tensor | None = None
        if drafted is not None and source is not None:
            assert drafted.positions is not None
            assert drafted.visible is not None
            tokens, positions = drafted.tokens[source, : self.rows], drafted.positions[source, : self.rows]
            ancestors = drafted.visible[source, : self.rows, : self.rows]
        else:
            tokens, positions = torch.tensor(self.tokens), torch.tensor(self.positions())
            if self.parents is not None:
                ancestors = torch.from_numpy(_ancestors(self.parents))
        return Segment(
            self.sequence, tokens, positions, ancestors, context, own, self.logits, run=self.run, blocks=self.blocks
        )


def slots_of(blocks: Sequence[int], size: int, count: int) -> NDArray[np.int64]:
    """The first `count` slots of these blocks."""
    return (np.array(blocks, np.int64)[:, None] * size + np.arange(size)).reshape(-1)[:count]


def _ancestors(parents: list[int]) -> NDArray[np.bool_]:
    """[N, N]: row i names the nodes on the way to node i, itself among them."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@dataclass(frozen=True)
class Batch:
    """What several sequences bring, row by row. It may lie on the host while the model is elsewhere: `on` brings it
    there."""

    given: tuple[Segment, ...] = ()
    texts: tuple[TextRows, ...] = ()
    """Instead of segments, which are made of them where they are wanted."""
    drafted: Drafted | None = None
    """What only a device knows of the rows: tokens, positions and ancestors, in one table for all."""
    features: Tensor | None = None
    """[R, H] what the rows bring besides their tokens, for a model that takes it."""

    @classmethod
    def pack(cls, segments: Sequence[Segment], drafted: Drafted | None = None, features: Tensor | None = None) -> Batch:
        return cls(given=tuple(segments), drafted=drafted, features=features)

    @property
    def plain(self) -> bool:
        """Whether all that is known of its rows are plain numbers."""
        return bool(self.texts) and self.drafted is None

    def on(self, device: torch.device) -> Batch:
        if self.plain and device.type == "cpu":
            return self
        if all(segment.is_on(device) for segment in self.segments):
            return self
        features = None if self.features is None else self.features.to(device)
        return Batch(tuple(segment.on(device) for segment in self.segments), features=features)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        if self.given:
            return self.given
        sources = [None] * len(self.texts) if self.drafted is None else self.drafted.sources
        return tuple(text.segment(self.drafted, source) for text, source in zip(self.texts, sources, strict=True))

    @property
    def brought(self) -> Sequence[TextRows | Segment]:
        """By each sequence, as it was given."""
        return self.texts or self.given

    @cached_property
    def counts(self) -> list[int]:
        """The rows of each sequence."""
        return [each.rows for each in self.brought]

    @cached_property
    def rows(self) -> int:
        return sum(self.counts)

    @cached_property
    def tokens(self) -> Tensor:
        """[R]"""
        if self.plain:
            return torch.tensor([token for text in self.texts for token in text.tokens])
        return torch.cat([segment.tokens for segment in self.segments])

    @cached_property
    def positions(self) -> Tensor:
        """[R]"""
        return torch.cat([segment.positions for segment in self.segments])

    @cached_property
    def slots(self) -> Tensor:
        """[R]"""
        return torch.cat([segment.slots for segment in self.segments])

    @cached_property
    def wanted(self) -> Tensor | None:
        """[W] rows whose logits are wanted, in order; None for all."""
        if all(each.logits == each.rows for each in self.brought):
            return None
        ends = accumulate(self.counts)
        wanted = [row for end, each in zip(ends, self.brought, strict=True) for row in range(end - each.logits, end)]
        device = None if self.plain else self.segments[0].slots.device
        return torch.tensor(wanted, dtype=torch.int64, device=device)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """For models whose attention takes padded keys and masks."""
        starts = [0, *accumulate(segment.rows for segment in self.segments)]
        return tuple(_group(self.segments, members, starts, self.rows) for members in _alike(self.segments))


def _alike(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Indices of segments with a similar number of rows, so that little is padded: a prompt of 500 tokens does not make
    500 rows of every running text."""
    classes: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        classes.setdefault(max(0, (segment.rows - 1).bit_length() - 3), []).append(index)
    return [tuple(members) for members in classes.values()]


def _group(segments: Sequence[Segment], members: tuple[int, ...], starts: list[int], total: int) -> Group:
    chosen = [segments[index] for index in members]
    device = chosen[0].tokens.device
    height = max(segment.rows for segment in chosen)
    length = max(segment.context.shape[0] + segment.rows for segment in chosen)
    length = -(-length // KEYS) * KEYS
    size = len(chosen)
    keys = torch.zeros(size, length, dtype=torch.int64, device=device)
    key_positions = torch.zeros(size, length, dtype=torch.int64, device=device)
    positions = torch.zeros(size, height, dtype=torch.int64, device=device)
    visible = torch.zeros(size, height, length, dtype=torch.bool, device=device)
    visible[:, :, 0] = True  # a padded row looks somewhere: a softmax over nothing is NaN
    packed = len(members) == len(segments) and all(segment.rows == height for segment in chosen)
    rows = None if packed else torch.full((size, height), total, dtype=torch.int64, device=device)
    for g, (index, segment) in enumerate(zip(members, chosen, strict=True)):
        before, count = segment.context.shape[0], segment.rows
        keys[g, :before] = segment.context
        keys[g, before : before + count] = segment.slots
        key_positions[g, :before] = torch.arange(before, device=device)
        if segment.context_positions is not None:
            key_positions[g, before - segment.context_positions.shape[0] : before] = segment.context_positions
        key_positions[g, before : before + count] = segment.positions
        positions[g, :count] = segment.positions
        visible[g, :count, :before] = True
        if segment.context_visible is not None:
            visible[g, :count, before - segment.context_visible.shape[1] : before] = segment.context_visible
        own = torch.ones(count, count, dtype=torch.bool, device=device).tril_()
        if segment.ancestors is not None:
            nodes = segment.ancestors.shape[0]
            own[count - nodes :, count - nodes :] = segment.ancestors
        visible[g, :count, before : before + count] = own
        if not before:
            visible[g, :count, 0] = own[:, 0]
        if rows is not None:
            rows[g, :count] = torch.arange(starts[index], starts[index] + count, device=device)
    distance = positions[:, :, None] - key_positions[:, None, :]
    run = chosen[0].run if size == 1 else None
    return Group(rows, (size, height), keys, visible, distance, run)


@dataclass(frozen=True)
class TextEnds:
    """The last tokens of S texts whose contexts are in the cache, with slots for as many as will follow."""

    tokens: Tensor  # [S]
    positions: list[int]
    blocks: list[list[int]]
