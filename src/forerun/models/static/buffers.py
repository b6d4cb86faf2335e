"""The rows of a pass in buffers of fixed sizes, so that a captured pass serves every batch of its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.attention import WORD, PackedRows, mask_words
from forerun.kernels.kernel import power_of_two
from forerun.models.batch import Batch, Segment

BLOCK = 16
"""Slots of a block, as `KVCache` hands them out."""
LEAST_BLOCKS = 64
STAGES = 8
"""Batches that may be on their way to the device at once."""

Numbers = NDArray[np.int64]
Feeds = Literal["likeliest", "chosen"]


@dataclass(frozen=True)
class Bucket:
    """Bounds that a batch must stay within. Each is rounded up, so that there are few buckets."""

    sequences: int
    rows: int
    tail: int  # keys of one sequence that are no common context: its rows, and nodes of its tree that were read before
    blocks: int  # of one sequence
    wanted: int
    layers: tuple[int, ...] = ()  # whose hidden states are wanted
    only: tuple[int, ...] | None = None  # the layers that run; None for all
    feeds: Feeds | None = None  # which tokens become the rows of the next pass: see `advance`

    @classmethod
    def of(cls, batch: Batch, layers: Sequence[int], only: Sequence[int] | None) -> Bucket:
        blocks = max(len(segment.blocks or ()) for segment in batch.segments)
        return cls(
            sequences=power_of_two(len(batch.segments)),
            rows=power_of_two(batch.rows),
            tail=power_of_two(max(tail_of(segment) for segment in batch.segments)),
            blocks=LEAST_BLOCKS << 2 * max(0, -(-((blocks - 1) // LEAST_BLOCKS).bit_length() // 2)),
            wanted=power_of_two(sum(segment.logits for segment in batch.segments)),
            layers=tuple(layers),
            only=None if only is None else tuple(only),
        )

    @property
    def words(self) -> int:
        return -(-self.tail // WORD)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What a batch brings, in the order in which it lies in memory. All numbers are int64."""
        return {
            "tokens": (self.rows,),
            "positions": (self.rows,),
            "slots": (self.rows,),
            "origins": (self.rows,),  # places in the tables of `Drafted`; −1 where the row is known on the host
            "wanted": (self.wanted,),
            "starts": (self.sequences,),
            "counts": (self.sequences,),
            "contexts": (self.sequences,),
            "tails": (self.sequences,),
            "mask": (self.rows, self.words),
            "blocks": (self.sequences, self.blocks),
        }


MOST_AHEAD = 64
"""Tokens that may be written without a look at the host."""


def tail_of(segment: Segment) -> int:
    seen = segment.context_visible
    return segment.rows + (0 if seen is None else seen.shape[1])


class Buffers:
    """On the device, one behind the other in one tensor: one copy brings a batch."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.flat, views = _cut(bucket, device)
        self.tokens, self.positions, self.slots = views["tokens"], views["positions"], views["slots"]
        self.origins, self.wanted, self.mask = views["origins"], views["wanted"], views["mask"]
        self.written = torch.zeros(MOST_AHEAD, bucket.rows if bucket.feeds else 0, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.packed = PackedRows(
            starts=views["starts"],
            counts=views["counts"],
            contexts=views["contexts"],
            tails=views["tails"],
            blocks=views["blocks"],
            mask=self.mask,
            positions=self.positions,
            max_rows=min(bucket.rows, bucket.tail),
            max_context=bucket.blocks * BLOCK,
            block_size=BLOCK,
        )


def advance(buffers: Buffers, tokens: Tensor) -> None:
    """Where each sequence has one row: write down the tokens [rows] that were chosen, and make them the next rows."""
    packed = buffers.packed
    buffers.written.index_copy_(0, buffers.step, tokens[None])
    buffers.step += 1
    buffers.tokens.copy_(tokens.clamp_min(0))
    buffers.positions += 1
    packed.contexts.add_(1)
    block = (buffers.positions // BLOCK).clamp_max(packed.blocks.shape[1] - 1)  # behind the last token there is none
    slots = packed.blocks.gather(1, block[:, None])[:, 0] * BLOCK + buffers.positions % BLOCK
    buffers.slots.copy_(torch.where(packed.counts > 0, slots, -1))


def _cut(bucket: Bucket, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    shapes = bucket.parts()
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    views = zip(shapes.items(), flat.split(sizes), strict=True)
    return flat, {name: view.view(shape) for (name, shape), view in views}


class Stage:
    """Host memory from which batches are copied while the host goes on. A place is used again when its last copy is
    known to be over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.places: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * STAGES
        self.copied: list[torch.cuda.Event | None] = [None] * STAGES
        self.next = 0

    def place(self, size: int) -> Tensor:
        self.next = (self.next + 1) % STAGES
        event = self.copied[self.next]
        if event is not None:
            event.synchronize()
        if self.places[self.next].shape[0] < size:
            pinned = self.device.type == "cuda"
            self.places[self.next] = torch.empty(power_of_two(size), dtype=torch.int64, pin_memory=pinned)
        return self.places[self.next][:size]

    def send(self, place: Tensor, target: Tensor) -> None:
        target.copy_(place, non_blocking=True)
        if self.device.type == "cuda":
            event = self.copied[self.next]
            if event is None:
                event = self.copied[self.next] = torch.cuda.Event()
            event.record()


def fill(buffers: Buffers, batch: Batch, stage: Stage) -> None:
    """Bring a batch into the buffers of its bucket."""
    bucket = buffers.bucket
    place = stage.place(buffers.flat.shape[0])
    numbers: dict[str, Numbers] = {}
    start = 0
    whole: Numbers = place.numpy()
    for name, shape in bucket.parts().items():
        end = start + int(np.prod(shape))
        numbers[name] = whole[start:end].reshape(shape)
        start = end
    for name in ("tokens", "positions", "wanted", "counts", "mask"):
        numbers[name][:] = 0
    numbers["slots"][:] = -1
    numbers["origins"][:] = -1
    row = want = 0
    for b, segment in enumerate(batch.segments):
        source = None if batch.drafted is None else batch.drafted.sources[b]
        _fill_segment(numbers, b, row, segment, batch, source)
        end = row + segment.rows
        numbers["wanted"][want : want + segment.logits] = np.arange(end - segment.logits, end)
        row, want = end, want + segment.logits
    stage.send(place, buffers.flat)
    if batch.drafted is not None:
        _fill_drafted(buffers, batch)


def _fill_segment(
    numbers: dict[str, Numbers], b: int, row: int, segment: Segment, batch: Batch, source: int | None
) -> None:
    assert segment.blocks is not None
    rows, tail = segment.rows, tail_of(segment)
    own = slice(row, row + rows)
    drafted = batch.drafted if source is not None else None
    before = segment.before
    numbers["starts"][b], numbers["counts"][b], numbers["tails"][b] = row, rows, tail
    numbers["contexts"][b] = before + rows - tail
    blocks = np.array(segment.blocks, np.int64)
    numbers["blocks"][b, : len(blocks)] = blocks
    at = np.arange(before, before + rows)
    numbers["slots"][own] = blocks[at // BLOCK] * BLOCK + at % BLOCK
    if drafted is None:
        numbers["tokens"][own] = segment.tokens.numpy()
    else:
        assert source is not None
        numbers["origins"][own] = np.arange(rows) + source * drafted.tokens.shape[1]
    if drafted is None or drafted.positions is None:
        numbers["positions"][own] = segment.positions.numpy()
    if drafted is None or drafted.visible is None:
        numbers["mask"][own] = _mask(segment, numbers["mask"].shape[1])


def _mask(segment: Segment, words: int) -> Numbers:
    """[rows, words]"""
    rows, tail = segment.rows, tail_of(segment)
    if rows == tail == 1:
        return np.ones((1, 1), np.int64) if words == 1 else np.array([[1, *[0] * (words - 1)]])
    visible = np.zeros((rows, words * WORD), np.bool_)
    visible[:, tail - rows : tail] = np.tri(rows, dtype=np.bool_)
    if segment.context_visible is not None:
        visible[:, : tail - rows] = segment.context_visible.numpy()
    if segment.ancestors is not None:
        nodes = segment.ancestors.shape[0]
        visible[rows - nodes :, tail - nodes : tail] = segment.ancestors.numpy()
    return np.packbits(visible, axis=1, bitorder="little").view(np.int64)


def _fill_drafted(buffers: Buffers, batch: Batch) -> None:
    """Rows that only the device knows, from tables that lie there."""
    drafted = batch.drafted
    assert drafted is not None
    known, origins = buffers.origins < 0, buffers.origins.clamp_min(0)
    torch.where(known, buffers.tokens, drafted.tokens.reshape(-1)[origins], out=buffers.tokens)
    if drafted.positions is not None:
        torch.where(known, buffers.positions, drafted.positions.reshape(-1)[origins], out=buffers.positions)
    if drafted.visible is not None:
        words = mask_words(drafted.visible).flatten(0, 1)[origins]
        part = buffers.mask[:, : words.shape[1]]
        part.copy_(torch.where(known[:, None], part, words))
