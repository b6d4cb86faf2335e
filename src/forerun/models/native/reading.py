"""The rows of a pass in C: where they stand, where their keys and values go, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.models.batch import Batch, Segment, TextRows


@dataclass(frozen=True)
class Seen:
    """Which keys each row sees: all of its segment's up to some place, and then a path."""

    first_row: Tensor  # [segments + 1]
    first_key: Tensor  # [segments + 1] in `keys`
    keys: Tensor  # slots of a segment's keys, its own rows last
    prefix: Tensor  # [rows] int32: so many keys of the segment are seen, from the first on,
    tail_start: Tensor  # [rows + 1] int32: and then these,
    tail: Tensor  # int32: places among the segment's keys
    most: int  # keys of a segment

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Seen:
        keys: list[Tensor] = []
        prefix: list[Tensor] = []
        counts: list[Tensor] = []
        tails: list[Tensor] = []
        rows, ends = [0], [0]
        for segment in segments:
            keys += [segment.context, segment.slots]
            rows.append(rows[-1] + segment.rows)
            ends.append(ends[-1] + segment.context.shape[0] + segment.rows)
            common, length, tail = _path(segment)
            prefix.append(common)
            counts.append(length)
            tails.append(tail)
        return cls(
            torch.tensor(rows),
            torch.tensor(ends),
            torch.cat(keys),
            torch.cat(prefix).int(),
            torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)).int(),
            torch.cat(tails).int(),
            max(end - start for start, end in pairwise(ends)),
        )


@dataclass(frozen=True)
class Reading:
    """The rows of a pass: where they stand, where they go, whose logits are wanted, and what they see."""

    positions: Tensor  # [R]
    slots: Tensor  # [R]
    wanted: Tensor  # [W]
    seen: Seen

    @classmethod
    def of(cls, batch: Batch) -> Reading:
        wanted = torch.arange(batch.rows) if batch.wanted is None else batch.wanted
        if not batch.plain:
            return cls(batch.positions, batch.slots, wanted, Seen.of(batch.segments))
        rows = ListedRows()
        for text in batch.texts:
            rows.add(text)
        return rows.reading(wanted)


class ListedRows:
    """Rows in plain numbers, as they are listed."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.prefix: list[int] = []
        self.tail: list[int] = []
        self.tail_start = [0]
        self.first_row, self.first_key = [0], [0]
        self.slots: list[NDArray[np.int64]] = []
        self.keys: list[NDArray[np.int64]] = []

    def add(self, text: TextRows) -> None:
        keys, nodes = text.slots(), text.parents or ()
        self.keys.append(keys)
        self.slots.append(keys[text.before :])
        self.positions += text.positions()
        tree = text.before + text.rows - len(nodes)
        self.prefix += range(text.before + 1, tree + 1)
        self.tail_start += [len(self.tail)] * (text.rows - len(nodes))
        paths: list[list[int]] = []
        for node, parent in enumerate(nodes):
            paths.append([*(paths[parent] if parent >= 0 else ()), tree + node])
            self.prefix.append(tree)
            self.tail += paths[-1]
            self.tail_start.append(len(self.tail))
        self.first_row.append(len(self.positions))
        self.first_key.append(self.first_key[-1] + len(keys))

    def reading(self, wanted: Tensor) -> Reading:
        seen = Seen(
            _column(self.first_row),
            _column(self.first_key),
            torch.from_numpy(np.concatenate(self.keys)),
            _column(self.prefix, np.int32),
            _column(self.tail_start, np.int32),
            _column(self.tail, np.int32),
            max(end - start for start, end in pairwise(self.first_key)),
        )
        return Reading(_column(self.positions), torch.from_numpy(np.concatenate(self.slots)), wanted, seen)


def _column(values: list[int], dtype: type[np.signedinteger] = np.int64) -> Tensor:
    """`torch.tensor` takes several times as long."""
    return torch.from_numpy(np.array(values, dtype))


def _path(segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
    """For each row how many keys it sees from the first on, how many more, and which."""
    before, rows = segment.context.shape[0], segment.rows
    if segment.context_visible is None:
        chain = rows if segment.ancestors is None else rows - segment.ancestors.shape[0]
        common = torch.arange(before + 1, before + rows + 1).clamp_(max=before + chain)
        if segment.ancestors is None:
            return common, torch.zeros_like(common), common[:0]
        counts = torch.zeros_like(common)
        counts[chain:] = segment.ancestors.sum(1)
        return common, counts, segment.ancestors.nonzero()[:, 1] + (before + chain)
    own = torch.ones(rows, rows, dtype=torch.bool).tril_()
    if segment.ancestors is not None:
        nodes = segment.ancestors.shape[0]
        own[rows - nodes :, rows - nodes :] = segment.ancestors
    visible = torch.cat([segment.context_visible, own], 1)
    everyone = int(visible.all(0).long().cumprod(0).sum())
    rest = visible[:, everyone:]
    seen_by_all = before - segment.context_visible.shape[1] + everyone
    return torch.full((rows,), seen_by_all), rest.sum(1), rest.nonzero()[:, 1] + seen_by_all
