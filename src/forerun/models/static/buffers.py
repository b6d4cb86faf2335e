"""The rows of a pass in buffers of fixed sizes, so that a captured pass serves every batch of its bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.transfer import event
from forerun.kernels.attention import WORD, PackedRows, mask_words
from forerun.kernels.kernel import power_of_two
from forerun.models.batch import Batch, Drafted, Segment, TextEnds, TextRows

BLOCK = 16
"""Slots of a block, as `KVCache` hands them out."""
LEAST_BLOCKS = 128
"""Of a text: attention reads what there is, so a bound may be generous, and few texts are ever beyond it."""
LEAST_ROWS = 16
LEAST_HALF = 64
"""Up to so many rows a pass takes as long as over the next power of two."""
LEAST_STEPS, MOST_STEPS, STEP = 256, 512, 64
"""Between so many rows a pass takes as long as it has rows, and they are counted in such steps."""
TAILS = (16, 64, 512)
TAILS_OF_MANY = (4, 8, 16, 32, 64, 512)
MANY = 8
"""Texts from which on attention takes long enough for tails to be told apart more finely."""
PLACES = 8
"""Batches of a bucket that may be on their way to the device at once."""
HALF = PLACES // 2

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
        brought = batch.brought
        blocks = _rounded(max(len(each.blocks or ()) for each in brought))
        sequences = power_of_two(len(brought))
        tail = max(map(tail_of, brought))
        rows = wanted = sequences
        if tail > 1:  # up to 16 rows cost what two cost
            rows = wanted = max(LEAST_ROWS, _rounded_rows(batch.rows))
            tail = _rounded_tail(tail, sequences)
            wanted = _rounded_wanted(sum(each.logits for each in brought), sequences)
        chosen = None if only is None else tuple(only)
        return cls(sequences, rows, tail, blocks, wanted, tuple(layers), chosen)

    @classmethod
    def of_roots(cls, texts: int, layers: Sequence[int], feeds: Feeds | None) -> Bucket:
        """Of so many texts, none of them long, with a row each."""
        return cls(texts, texts, 1, LEAST_BLOCKS, texts, tuple(layers), None, feeds)

    @classmethod
    def of_trees(cls, texts: int, rows: int, longest: int, layers: Sequence[int]) -> Bucket:
        """Of so many texts, none of them long, with so many rows in all and at most `longest` of one, all wanted."""
        sequences = power_of_two(texts)
        read, wanted = max(LEAST_ROWS, _rounded_rows(rows)), _rounded_wanted(rows, sequences)
        return cls(sequences, read, _rounded_tail(longest, sequences), LEAST_BLOCKS, wanted, tuple(layers))

    @classmethod
    def of_reading(cls, texts: int, rows: int, longest: int) -> Bucket:
        """Of so many texts, none of them long, of which so many rows are read, at most `longest` of one: no scores."""
        return cls(texts, max(LEAST_ROWS, _rounded_rows(rows)), _rounded_tail(longest, texts), LEAST_BLOCKS, texts)

    @classmethod
    def regular(cls, texts: int, each: int, blocks: int, layers: Sequence[int], *, all_wanted: bool) -> Bucket:
        """Of texts that have `each` rows at most, whose scores are all wanted, or of one row of each text."""
        rows = max(LEAST_ROWS, _rounded_rows(texts * each))
        tail = _rounded_tail(each, texts)
        return cls(texts, rows, tail, _rounded(blocks), rows if all_wanted else texts, tuple(layers))

    @classmethod
    def of_ends(cls, ends: TextEnds, feeds: Feeds, layers: Sequence[int], only: Sequence[int] | None) -> Bucket:
        texts = power_of_two(len(ends.positions))
        blocks = _rounded(max(map(len, ends.blocks)))
        chosen = None if only is None else tuple(only)
        return cls(texts, texts, 1, blocks, texts, tuple(layers), chosen, feeds)

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


def _rounded_rows(rows: int) -> int:
    """To a power of two, or half-way to one where rows begin to cost, and more finely where rows are all that costs."""
    if LEAST_STEPS < rows <= MOST_STEPS:
        return -(-rows // STEP) * STEP
    rounded = power_of_two(rows)
    between = 3 * rounded // 4
    return between if LEAST_HALF < rows <= between else rounded


def _rounded_wanted(wanted: int, sequences: int) -> int:
    """Prompts ask for few."""
    rounded = _rounded_rows(wanted)
    return sequences if rounded <= sequences else max(LEAST_ROWS, rounded)


def tails(sequences: int) -> tuple[int, ...]:
    """To which they are rounded, as far as these go."""
    return TAILS if sequences < MANY else TAILS_OF_MANY


def _rounded_tail(tail: int, sequences: int) -> int:
    return next((size for size in tails(sequences) if size >= tail), power_of_two(tail))


def rounded_texts(texts: int) -> int:
    """So that there are few numbers of them, and little is computed for nobody."""
    rounded = power_of_two(texts)
    between = 3 * rounded // 4
    return between if MANY < texts <= between else rounded


def _rounded(blocks: int) -> int:
    """Attention reads as many as there are, so this may be rounded by more than the rest."""
    return LEAST_BLOCKS << 2 * max(0, -(-((blocks - 1) // LEAST_BLOCKS).bit_length() // 2))


MOST_AHEAD = 64
"""Tokens that may be written without a look at the host."""


def tail_of(brought: TextRows | Segment) -> int:
    seen = brought.context_visible if isinstance(brought, Segment) else None
    return brought.rows + (0 if seen is None else seen.shape[1])


class Buffers:
    """On the device, one behind the other in one tensor: one copy brings a batch."""

    def __init__(self, bucket: Bucket, device: torch.device, features: Tensor | None = None) -> None:
        """`features` [H] is like what a row brings besides its token, to a model that takes it."""
        self.bucket = bucket
        self.features = None if features is None else features.new_zeros(bucket.rows, features.shape[0])
        self.flat, views = _cut(bucket, device)
        self.stage = Stage(bucket, device)
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
    places = torch.where(packed.counts > 0, buffers.positions, -1)
    buffers.slots.copy_(slots_at(packed, places[:, None])[:, 0])


def slots_at(packed: PackedRows, places: Tensor) -> Tensor:
    """[B, n] the slots of places [B, n] of each sequence's text; −1 for a place below 0."""
    block = (places // BLOCK).clamp(0, packed.blocks.shape[1] - 1)  # behind the last there is none
    slots = packed.blocks.gather(1, block) * BLOCK + places % BLOCK
    return slots.masked_fill_(places < 0, -1)


def _cut(bucket: Bucket, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    shapes = bucket.parts()
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    views = zip(shapes.items(), torch.split(flat, sizes), strict=True)
    return flat, {name: view.view(shape) for (name, shape), view in views}


class Stage:
    """Host memory from which the batches of a bucket are copied while the host goes on. The places are used in turn,
    and before one half of them is used again, its copies are waited for."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        pinned = device.type == "cuda"
        size = sum(math.prod(shape) for shape in bucket.parts().values())
        self.places = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(PLACES)]
        self.numbers = [_split(place.numpy(), bucket) for place in self.places]
        self.halves = [event() for _ in range(2)] if pinned else []
        self.sent = 0

    def place(self) -> dict[str, Numbers]:
        at = self.sent % PLACES
        if self.halves and self.sent >= PLACES and at % HALF == 0:
            self.halves[at // HALF].synchronize()
        return self.numbers[at]

    def send(self, target: Tensor) -> None:
        at = self.sent % PLACES
        target.copy_(self.places[at], non_blocking=True)
        if self.halves and at % HALF == HALF - 1:
            self.halves[at // HALF].record(torch.cuda.current_stream(target.device))
        self.sent += 1


def _split(whole: Numbers, bucket: Bucket) -> dict[str, Numbers]:
    views: dict[str, Numbers] = {}
    start = 0
    for name, shape in bucket.parts().items():
        end = start + math.prod(shape)
        views[name] = whole[start:end].reshape(shape)
        start = end
    return views


def fill(buffers: Buffers, batch: Batch) -> None:
    """Bring a batch into the buffers of its bucket."""
    numbers = buffers.stage.place()
    numbers["slots"][batch.rows :] = -1
    numbers["positions"][batch.rows :] = 0
    numbers["counts"][len(batch.counts) :] = 0
    numbers["wanted"][:] = 0
    drafted = batch.drafted
    if drafted is not None:
        numbers["origins"][:] = -1
    row = want = 0
    for b, brought in enumerate(batch.brought):
        source = None if drafted is None else drafted.sources[b]
        _fill_places(numbers, b, row, brought)
        own = slice(row, row + brought.rows)
        if drafted is not None and source is not None:
            first = source * drafted.tokens.shape[1]
            numbers["origins"][own] = range(first, first + brought.rows)
        if isinstance(brought, TextRows):
            if source is None:
                _fill_text(numbers, own, brought)
        else:
            _fill_segment(numbers, own, brought, drafted if source is not None else None)
        end = row + brought.rows
        if brought.logits == 1:
            numbers["wanted"][want] = end - 1
        elif brought.logits:
            numbers["wanted"][want : want + brought.logits] = range(end - brought.logits, end)
        row, want = end, want + brought.logits
    buffers.stage.send(buffers.flat)
    if drafted is not None:
        _fill_drafted(buffers, drafted)
    if buffers.features is not None:
        assert batch.features is not None
        buffers.features[: batch.rows].copy_(batch.features)


def fill_ends(buffers: Buffers, ends: TextEnds) -> None:
    """The same for texts that bring one row each; hundreds of them, perhaps."""
    numbers = buffers.stage.place()
    texts = len(ends.positions)
    each = np.arange(texts)
    positions = np.array(ends.positions, np.int64)
    longest = max(map(len, ends.blocks))
    blocks = np.array([[*own, *[0] * (longest - len(own))] for own in ends.blocks], np.int64)
    numbers["blocks"][:texts, :longest] = blocks
    numbers["positions"][:texts] = numbers["contexts"][:texts] = positions
    numbers["positions"][texts:] = 0  # `advance` counts them up too, and there is an end to positions
    numbers["slots"][texts:] = -1
    numbers["slots"][:texts] = blocks[each, positions // BLOCK] * BLOCK + positions % BLOCK
    numbers["wanted"][:] = 0
    numbers["wanted"][:texts] = numbers["starts"][:texts] = each
    numbers["counts"][texts:] = 0
    numbers["counts"][:texts] = numbers["tails"][:texts] = 1
    numbers["mask"][:, 0] = 1
    known = ends.tokens.device.type == "cpu"
    if known:
        numbers["tokens"][:texts] = ends.tokens.numpy()
    buffers.stage.send(buffers.flat)
    if not known:
        buffers.tokens[:texts].copy_(ends.tokens)


def _fill_places(numbers: dict[str, Numbers], b: int, row: int, brought: TextRows | Segment) -> None:
    assert brought.blocks is not None
    rows, tail, before = brought.rows, tail_of(brought), brought.before
    blocks = numbers["blocks"][b]
    blocks[: len(brought.blocks)] = brought.blocks
    numbers["starts"][b], numbers["counts"][b], numbers["tails"][b] = row, rows, tail
    numbers["contexts"][b] = before + rows - tail
    if rows == 1:
        numbers["slots"][row] = brought.blocks[before // BLOCK] * BLOCK + before % BLOCK
    else:
        at = np.arange(before, before + rows)
        numbers["slots"][row : row + rows] = blocks[at // BLOCK] * BLOCK + at % BLOCK


def _fill_text(numbers: dict[str, Numbers], own: slice, text: TextRows) -> None:
    numbers["tokens"][own] = text.tokens
    words = numbers["mask"].shape[1]
    if text.parents is None:
        numbers["positions"][own] = range(text.before, text.before + text.rows)
        numbers["mask"][own] = _chain(text.rows, words)
        return
    numbers["positions"][own] = text.positions()
    seen = b"".join(bits.to_bytes(8 * words, "little") for bits in text.seen())
    numbers["mask"][own] = np.frombuffer(seen, np.int64).reshape(-1, words)


@lru_cache(maxsize=1024)
def _chain(rows: int, words: int) -> Numbers:
    """[rows, words]: each row sees those before it and itself."""
    return np.packbits(np.tri(rows, words * WORD, dtype=np.bool_), axis=1, bitorder="little").view(np.int64)


def _fill_segment(numbers: dict[str, Numbers], own: slice, segment: Segment, drafted: Drafted | None) -> None:
    """`drafted` where only the device knows what its rows are."""
    if drafted is None:
        numbers["tokens"][own] = segment.tokens.numpy()
    if drafted is None or drafted.positions is None:
        numbers["positions"][own] = segment.positions.numpy()
    if drafted is None or drafted.visible is None:
        numbers["mask"][own] = _mask(segment, numbers["mask"].shape[1])


def _mask(segment: Segment, words: int) -> Numbers:
    """[rows, words]"""
    rows, tail = segment.rows, tail_of(segment)
    visible = np.zeros((rows, words * WORD), np.bool_)
    visible[:, tail - rows : tail] = np.tri(rows, dtype=np.bool_)
    if segment.context_visible is not None:
        visible[:, : tail - rows] = segment.context_visible.numpy()
    if segment.ancestors is not None:
        nodes = segment.ancestors.shape[0]
        visible[rows - nodes :, tail - nodes : tail] = segment.ancestors.numpy()
    return np.packbits(visible, axis=1, bitorder="little").view(np.int64)


def _fill_drafted(buffers: Buffers, drafted: Drafted) -> None:
    """Rows that only the device knows, from tables that lie there."""
    known, origins = buffers.origins < 0, buffers.origins.clamp_min(0)
    torch.where(known, buffers.tokens, drafted.tokens.reshape(-1)[origins], out=buffers.tokens)
    if drafted.positions is not None:
        torch.where(known, buffers.positions, drafted.positions.reshape(-1)[origins], out=buffers.positions)
    if drafted.visible is not None:
        words = mask_words(drafted.visible).flatten(0, 1)[origins]
        part = buffers.mask[:, : words.shape[1]]
        part.copy_(torch.where(known[:, None], part, words))
