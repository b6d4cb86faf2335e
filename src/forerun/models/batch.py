"""The rows of one pass. A sequence brings the tokens that its cache does not hold yet, as a chain, and behind them
its draft tree; a prompt being read, a tree being checked and a text being recomputed are all the same to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
    """[C + N, P] bool: what each row sees of the context; None for all of it. For a tree that is read level by level:
    then the context ends with rows of earlier levels, and a node sees its own ancestors among them."""
    context_positions: Tensor | None = None
    """[P] the absolute positions of the context, where it is not one text from position 0 on."""
    run: int | None = None
    """The first slot, where the context and the rows behind it lie one after another in a storage that does not end
    within the `KEYS` after them: they can be read where they are then."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_chain(self) -> bool:
        return self.ancestors is None


@dataclass(frozen=True)
class Group:
    """Segments that attend together, padded to N rows and L keys."""

    members: tuple[int, ...]
    rows: Tensor | None  # [G, N] places in the packed rows, R for padding; None if the rows are all rows in their order
    shape: tuple[int, int]  # G, N
    keys: Tensor  # [G, L] slots: context, then own rows; slot 0 for padding
    visible: Tensor  # [G, N, L] bool
    distance: Tensor  # [G, N, L] positions between a query and a key
    run: int | None  # the slot of the first key of a single segment whose keys lie one after another


@dataclass(frozen=True)
class Batch:
    """Segments packed row by row."""

    segments: tuple[Segment, ...]
    tokens: Tensor  # [R]
    positions: Tensor  # [R]
    slots: Tensor  # [R]
    wanted: Tensor | None  # [W] rows whose logits are wanted, in order; None for all
    groups: tuple[Group, ...]

    @classmethod
    def pack(cls, segments: Sequence[Segment]) -> Batch:
        device = segments[0].tokens.device
        starts: list[int] = []
        wanted: list[int] = []
        total = 0
        for segment in segments:
            starts.append(total)
            total += segment.rows
            wanted.extend(range(total - segment.logits, total))
        return cls(
            segments=tuple(segments),
            tokens=torch.cat([segment.tokens for segment in segments]),
            positions=torch.cat([segment.positions for segment in segments]),
            slots=torch.cat([segment.slots for segment in segments]),
            wanted=None if len(wanted) == total else torch.tensor(wanted, dtype=torch.int64, device=device),
            groups=tuple(_group(segments, members, starts, total) for members in _alike(segments)),
        )

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]


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
        lies_at = segment.context_positions
        key_positions[g, :before] = torch.arange(before, device=device) if lies_at is None else lies_at
        key_positions[g, before : before + count] = segment.positions
        positions[g, :count] = segment.positions
        visible[g, :count, :before] = True if segment.context_visible is None else segment.context_visible
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
    return Group(members, rows, (size, height), keys, visible, distance, run)
