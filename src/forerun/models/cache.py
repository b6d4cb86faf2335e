"""The paged key/value cache: which slots of a `Storage` hold which tokens of which sequence.

A pass *reserves* slots for its rows behind the committed ones, and *commits* those that stay. Kept rows move down to
where they belong in the text, so a sequence's slots always lie in order in its blocks, and nothing of a rejected row
can be reached again.

A text that is over may leave its rows behind: they count as free, and go when their blocks are needed, the oldest
first. Until then another text that begins with the same tokens takes them over instead of computing them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.step import USUAL_MOVES
from forerun.models.batch import slots_of
from forerun.models.storage import Moves, Storage


class CacheFullError(Exception):
    """There are not enough free blocks."""


@dataclass
class _Entry:
    blocks: list[int] = field(default_factory=list)
    committed: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class _Kept:
    """What an ended text left behind: its tokens, and the blocks that hold just these."""

    tokens: list[int]
    blocks: list[int]


class KVCache:
    """Slots are handed out in blocks of `block_size`."""

    def __init__(self, storage: Storage, block_size: int = 16) -> None:
        self.storage = storage
        self.block_size = block_size
        self.total_blocks = storage.slots // block_size
        if self.total_blocks < 1:
            raise ValueError(f"a cache of {storage.slots} tokens is too small: it needs at least {block_size}")
        self._free = list(range(self.total_blocks - 1, -1, -1))
        self._entries: dict[int, _Entry] = {}
        self._kept: list[_Kept] = []  # the one that was used last stands last
        self._left = 0  # blocks of these
        self._device = storage.keys[0].device

    @property
    def free_blocks(self) -> int:
        return len(self._free) + self._left

    @property
    def used(self) -> float:
        """The share of blocks in use."""
        return 1 - self.free_blocks / self.total_blocks

    @property
    def holders(self) -> set[int]:
        """The sequences that have blocks."""
        return set(self._entries)

    def holds(self, sequence: int) -> bool:
        """Whether the sequence has blocks."""
        return sequence in self._entries

    def committed(self, sequence: int) -> int:
        """How many tokens of the sequence are in the cache."""
        entry = self._entries.get(sequence)
        return entry.committed if entry else 0

    def blocks_for(self, sequence: int, rows: int) -> int:
        """How many more blocks `rows` further tokens take."""
        entry = self._entries.get(sequence)
        if entry is None:
            return -(-rows // self.block_size)
        return max(0, -(-(entry.committed + rows) // self.block_size) - len(entry.blocks))

    def spare_rows(self, sequence: int, rows: int, blocks: int) -> int:
        """How many rows beyond `rows` fit, if `blocks` blocks are free besides those that `rows` need."""
        entry = self._entries.get(sequence, _Entry())
        held = len(entry.blocks) + self.blocks_for(sequence, rows) + blocks
        return held * self.block_size - entry.committed - rows

    def reserve(self, sequence: int, rows: int) -> None:
        """Make room for `rows` rows behind the committed ones."""
        needed = self.blocks_for(sequence, rows)
        if needed > self.free_blocks:
            raise CacheFullError(f"{needed} blocks are needed and {self.free_blocks} are free")
        entry = self._entries.setdefault(sequence, _Entry())
        assert entry.reserved == 0, "commit the rows of one pass before the next"
        entry.blocks.extend(self._take(needed))
        entry.reserved = rows

    def slots(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The slots of the committed tokens [P] and of the reserved rows [C], on the host."""
        committed, slots = self._entries[sequence].committed, torch.from_numpy(self.all_slots(sequence))
        return slots[:committed], slots[committed:]

    def all_slots(self, sequence: int) -> NDArray[np.int64]:
        """[P + C] of both."""
        entry = self._entries[sequence]
        return slots_of(entry.blocks, self.block_size, entry.committed + entry.reserved)

    def blocks(self, sequence: int) -> list[int]:
        """The blocks that hold these slots, in order; a copy."""
        return list(self._entries[sequence].blocks)

    def run(self, sequence: int, beyond: int) -> int | None:
        """The first slot of a sequence whose blocks lie one after another, at least `beyond` slots before the end of
        the storage."""
        entry = self._entries[sequence]
        first, count = entry.blocks[0], len(entry.blocks)
        if entry.blocks[-1] - first != count - 1 or entry.blocks != list(range(first, first + count)):
            return None
        start = first * self.block_size
        return start if start + entry.committed + entry.reserved + beyond <= self.storage.slots else None

    def commit(self, kept: Mapping[int, Many[int]]) -> None:
        """For each sequence the reserved rows that stay, in the order of the text; the others are gone."""
        moves: list[Moves] = []
        for sequence, rows in kept.items():
            entry = self._entries[sequence]
            assert not rows or (min(rows) >= 0 and max(rows) < entry.reserved), "only reserved rows can be kept"
            moved = [(row, place) for place, row in enumerate(rows) if place != row]
            if moved:
                source, target = (
                    [self._slot(entry, entry.committed + at) for at in side] for side in zip(*moved, strict=True)
                )
                moves.append((source, target))
            entry.committed += len(rows)
            entry.reserved = 0
            self._shrink(entry)
        if moves:
            self.storage.move(moves)

    def abandon(self) -> None:
        """Give back whatever is reserved and not committed."""
        for entry in self._entries.values():
            entry.reserved = 0
            self._shrink(entry)

    def trim(self, sequence: int, committed: int) -> None:
        """Forget all but the first tokens of a sequence."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        assert committed <= entry.committed
        assert entry.reserved == 0
        entry.committed = committed
        self._shrink(entry)

    def free(self, sequence: int) -> None:
        entry = self._entries.pop(sequence, None)
        if entry is not None:
            self._free.extend(reversed(entry.blocks))

    def retire(self, sequence: int, tokens: Many[int]) -> None:
        """As `free`, but the rows of these tokens, the sequence's own, stay as long as nobody needs their blocks. An
        accepted path may run past the end of its text, and the rows there belong to nobody."""
        if sequence not in self._entries:
            return
        self.trim(sequence, min(len(tokens), self.committed(sequence)))
        entry = self._entries.pop(sequence)
        if entry.committed >= self.block_size:
            self._leave(_Kept(list(tokens[: entry.committed]), entry.blocks))
        else:
            self._free.extend(reversed(entry.blocks))

    def adopt(self, sequence: int, tokens: Many[int]) -> int:
        """Begin a sequence with the rows that are left of another one, as far as its tokens are the same; returns how
        many. The last token is never among them: it is the root, and has to be computed.

        Rows of a text that this one goes on with are taken; of one that only begins alike they are copied, if blocks
        are free, so that others can begin with them too."""
        assert sequence not in self._entries, "a sequence begins once"
        text = list(tokens[:-1])
        lengths = [_common(kept.tokens, text) for kept in self._kept]
        common = max(lengths, default=0)
        if common < self.block_size:
            return 0
        kept = self._pick_up(lengths.index(common))
        needed = -(-common // self.block_size)
        if common < len(kept.tokens) and needed <= len(self._free):
            self._entries[sequence] = entry = _Entry(self._take(needed), common)
            self._leave(kept)
            source = [self._slot(_Entry(kept.blocks), place) for place in range(common)]
            target = [self._slot(entry, place) for place in range(common)]
            parts = range(0, common, USUAL_MOVES)
            self.storage.move([(source[at : at + USUAL_MOVES], target[at : at + USUAL_MOVES]) for at in parts])
        else:
            self._entries[sequence] = entry = _Entry(list(kept.blocks), common)
            self._shrink(entry)
        return common

    def check_integrity(self) -> None:
        """Every block is free, left behind or belongs to one sequence, and each has just the blocks it needs."""
        owned = [block for entry in self._entries.values() for block in entry.blocks]
        owned += [block for kept in self._kept for block in kept.blocks]
        everything = sorted(owned + self._free)
        if everything != list(range(self.total_blocks)) or self._left != sum(len(kept.blocks) for kept in self._kept):
            raise AssertionError("a block is lost, or belongs to two")
        for sequence, entry in self._entries.items():
            needed = -(-(entry.committed + entry.reserved) // self.block_size)
            if len(entry.blocks) != needed:
                raise AssertionError(f"sequence {sequence} has {len(entry.blocks)} blocks and needs {needed}")
        for kept in self._kept:
            if len(kept.blocks) != -(-len(kept.tokens) // self.block_size):
                raise AssertionError("a text that is over holds blocks without tokens")

    def unused_slots(self) -> Tensor:
        """Every slot that holds no committed token, nor one that was left behind: what stands there must not matter."""
        taken = torch.zeros(self.storage.slots, dtype=torch.bool)
        for sequence in self._entries:
            taken[self.slots(sequence)[0]] = True
        for kept in self._kept:
            left = _Entry(kept.blocks)
            taken[[self._slot(left, place) for place in range(len(kept.tokens))]] = True
        return (~taken).nonzero()[:, 0].to(self._device)

    def _leave(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._left += len(kept.blocks)

    def _pick_up(self, place: int) -> _Kept:
        kept = self._kept.pop(place)
        self._left -= len(kept.blocks)
        return kept

    def _take(self, count: int) -> list[int]:
        """So many free blocks; what was left behind goes for them, the oldest first."""
        while len(self._free) < count:
            self._free.extend(reversed(self._pick_up(0).blocks))
        return [self._free.pop() for _ in range(count)]

    def _slot(self, entry: _Entry, place: int) -> int:
        return entry.blocks[place // self.block_size] * self.block_size + place % self.block_size

    def _shrink(self, entry: _Entry) -> None:
        needed = -(-entry.committed // self.block_size)
        self._free.extend(reversed(entry.blocks[needed:]))
        del entry.blocks[needed:]


def _common(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same: by halves, since lists compare in a moment."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
