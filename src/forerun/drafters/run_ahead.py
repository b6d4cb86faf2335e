"""A model that runs ahead of the committed text, with a key/value cache of its own.

A run reads what the cache does not hold yet, up to the root, and then any number of levels of a tree, one pass each. A
level's nodes see the text and their own ancestors, whose keys and values earlier passes of the run left in the cache.
None of these rows is committed. The next run of the sequence compares them with the text as it went on, keeps those
that lie on it and drops the others: a refused guess leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.transfer import Homeward
from forerun.drafters.level_run import Rows
from forerun.models.batch import Batch, Drafted, Segment, TextEnds
from forerun.models.cache import KVCache
from forerun.models.target import Output, TargetModel, WritesAhead
from forerun.models.transformer import Transformer

PASS_ROWS = 512
"""A long text is read in passes of so many rows."""
SHORT = 32
"""So much unread text goes with the root, in its pass."""
NOBODY = -1
"""No sequence has this id."""


class Text(Protocol):
    """A text as a run reads it."""

    @property
    def id(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...


class Ahead(Protocol):
    """Where the runs of a drafter come from."""

    @property
    def model(self) -> TargetModel: ...

    @property
    def cache(self) -> KVCache: ...

    def start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> Run:
        """A run of a batch. `wanted` are the rows that each tree will take below its root; None sits out. Where the
        cache is full a sequence sits out as well."""
        ...

    def forget(self, sequence: Sequence) -> None: ...


class RunAhead:
    def __init__(self, model: TargetModel, slots: int) -> None:
        start = model.begin(NOBODY, [0, 0])
        model.forget(NOBODY)
        if start != [0, 0]:
            raise ValueError("the draft model reads prompts with an encoder: choose a decoder-only model as the draft")
        self.model = model
        self.cache = KVCache(model.new_storage(slots))
        self._guesses: dict[int, _Guess] = {}
        self._begun: set[int] = set()
        self._dropped: set[int] = set()

    def start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> Run:
        asked = [sequence for sequence, rows in zip(sequences, wanted, strict=True) if rows is not None]
        self._settle(asked)
        room = self._room(sequences, wanted)
        taking_part = [sequence for sequence, rows in zip(sequences, room, strict=True) if rows is not None]
        for sequence in taking_part:
            self._begin(sequence)
        self._read(taking_part)
        run = Run(self.model, self.cache, sequences, room)
        for b, sequence in enumerate(sequences):
            if room[b] is not None:
                self._guesses[sequence.id] = _Guess(run, b)
        return run

    def forget(self, sequence: Sequence) -> None:
        self._drop(sequence)
        self._dropped.discard(sequence.id)

    def _drop(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence.id, None)
        self.cache.free(sequence.id)
        if sequence.id in self._begun:
            self._begun.remove(sequence.id)
            self.model.forget(sequence.id)

    def _settle(self, sequences: Many[Sequence]) -> None:
        """Keep the guesses that came true. Where a pass broke off there may be rows that nobody knows of: they go."""
        kept: dict[int, list[int]] = {}
        for sequence in sequences:
            guess = self._guesses.pop(sequence.id, None)
            if self.cache.holds(sequence.id):
                kept[sequence.id] = [] if guess is None else guess.kept(sequence.tokens)
        self.cache.commit(kept)

    def _room(self, sequences: Many[Sequence], wanted: Many[int | None]) -> list[int | None]:
        """`wanted`, but None for whom there is no room. Whoever does not fit gives its blocks back, so that the others
        can go on, and returns when more is free than it needs: else two texts would push each other out in turn, and
        be read anew each time."""
        free = self.cache.free_blocks
        room: list[int | None] = []
        for sequence, rows in zip(sequences, wanted, strict=True):
            if rows is None:
                room.append(None)
                continue
            unread = len(sequence.tokens) - self.cache.committed(sequence.id)
            needed = self.cache.blocks_for(sequence.id, unread + rows)
            spare = self.cache.total_blocks // 16 if sequence.id in self._dropped else 0
            if needed <= free and min(needed + spare, self.cache.total_blocks) <= free:
                free -= needed
                self._dropped.discard(sequence.id)
                room.append(rows)
                continue
            before = self.cache.free_blocks
            self._drop(sequence)
            free += self.cache.free_blocks - before
            self._dropped.add(sequence.id)
            room.append(None)
        return room

    def _begin(self, sequence: Sequence) -> None:
        if sequence.id in self._begun:
            return
        self.model.begin(sequence.id, sequence.prompt)
        self._begun.add(sequence.id)

    def _read(self, sequences: Many[Sequence]) -> None:
        """Read all but the end of texts that the cache does not hold."""
        while True:
            segments: list[Segment] = []
            left = PASS_ROWS
            for sequence in sequences:
                held = self.cache.committed(sequence.id)
                rows = min(len(sequence.tokens) - held - 1, left)
                if len(sequence.tokens) - held > SHORT and rows > 0:
                    self.cache.reserve(sequence.id, rows)
                    context, own = self.cache.slots(sequence.id)
                    blocks = self.cache.blocks(sequence.id)
                    segments.append(_text(sequence, context, own, blocks, 0, reads(self.model)))
                    left -= rows
            if not segments:
                return
            self.model.forward_rows(Batch.pack(segments), self.cache.storage)
            self.cache.commit({segment.sequence: range(segment.rows) for segment in segments})


class Run:
    """Rows of one step. First `roots`, then `level` as often as the tree is deep, less one: leaves need no pass."""

    def __init__(self, model: TargetModel, cache: KVCache, sequences: Many[Text], room: Many[int | None]) -> None:
        self._model = model
        self._cache = cache
        self._sequences = sequences
        self._device = model.device
        self.ids = model.ids if isinstance(model, Transformer) else None
        self._lengths = [len(sequence.tokens) for sequence in sequences]  # now: texts go on, and this stays
        self._committed: dict[int, int] = {}  # rows that the cache held of those who take part
        self._blocks: dict[int, list[int]] = {}
        for b, (sequence, rows) in enumerate(zip(sequences, room, strict=True)):
            if rows is not None:
                self._committed[b] = held = cache.committed(sequence.id)
                cache.reserve(sequence.id, len(sequence.tokens) - held + rows)
                self._blocks[b] = cache.blocks(sequence.id)
        self._depths: list[int] = []
        self._read = [0] * len(sequences)
        self._home: Homeward | None = None
        self.sound = False  # until the roots are read, and again after a pass that broke off

    # What follows is made when it is first asked for: a tree that grows in one piece on a device needs none of it.

    @cached_property
    def _slots(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {b: self._cache.slots(self._sequences[b].id) for b in self._blocks}

    # Nodes read so far, the same numbers for every sequence: a sequence has the first ones of a level.

    @cached_property
    def tokens(self) -> Tensor:
        """[B, I]"""
        return torch.zeros(len(self._sequences), 0, dtype=torch.int64, device=self._device)

    @cached_property
    def parents(self) -> Tensor:
        """[B, I]; -1 for the root"""
        return torch.zeros(len(self._sequences), 0, dtype=torch.int64, device=self._device)

    @cached_property
    def _ancestors(self) -> Tensor:
        """[B, I, I]"""
        return torch.zeros(len(self._sequences), 0, 0, dtype=torch.bool, device=self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def vocabulary(self) -> int:
        return self._model.vocab_size

    @property
    def takes_part(self) -> list[bool]:
        return [b in self._blocks for b in range(len(self._sequences))]

    def unread(self, b: int) -> int:
        """Rows of the text itself, at the beginning of what is reserved."""
        return self._lengths[b] - self._committed[b]

    def length(self, b: int) -> int:
        """Of the text when the run started."""
        return self._lengths[b]

    def roots(self) -> Rows:
        """Read the rest of the texts. One row for each root."""
        segments = [
            _text(self._sequences[b], context, own[: self.unread(b)], self._blocks[b], 1, reads(self._model))
            for b, (context, own) in self._slots.items()
        ]
        return Rows.of([int(part) for part in self.takes_part], self._forward(segments))

    def send_home(self) -> None:
        """No further level is read: what was drafted will be compared with the text, on the host."""
        self._home = Homeward(torch.stack([self.tokens, self.parents]))

    def nodes(self, b: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes of a sequence that were read."""
        if self._home is None:
            self.send_home()
        assert self._home is not None
        tokens, parents = self._home.here()[:, b, : self._read[b]].tolist()
        return tokens, parents

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        """Read nodes of the next depth: tokens and parents [B, F], a parent being the number of an earlier node of this
        run, -1 the root. Of sequence b the first `counts[b]` are read; without a node at one level there is none at
        the next."""
        width = tokens.shape[1]
        before = len(self._depths)
        depth = 1 + (self._depths[-1] if self._depths else 0)
        chain = width == 1 and before == depth - 1  # then each node sees all that came before
        seen = None if chain else self._seen(parents)  # [B, F, I + F]
        places = torch.tensor(self._depths, dtype=torch.int64)
        segments = []
        sources: list[int | None] = []
        for b, count in enumerate(counts):
            if not count:
                continue
            context, own = self._slots[b]
            length, unread = self.length(b), self.unread(b)
            own_rows = earlier = None
            if seen is not None:
                earlier, own_rows = seen[b, :count, :before], seen[b, :count, before : before + count]
            segments.append(
                Segment(
                    sequence=self._sequences[b].id,
                    tokens=tokens[b, :count],
                    positions=torch.full((count,), length - 1 + depth),
                    ancestors=own_rows,
                    context=torch.cat([context, own[: unread + before]]),
                    slots=own[unread + before : unread + before + count],
                    logits=count,
                    context_visible=earlier,
                    context_positions=None if earlier is None else length - 1 + places,
                    blocks=self._blocks[b],
                )
            )
            sources.append(b)
            self._read[b] = before + count
        if seen is not None:
            elder = torch.nn.functional.pad(self._ancestors, (0, width))
            self._ancestors = torch.cat([elder, seen], 1)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self._depths.extend([depth] * width)
        return Rows.of(counts, self._forward(segments, Drafted(tokens, None, seen, sources)))

    @property
    def writes_ahead(self) -> bool:
        return isinstance(self._model, WritesAhead) and self._model.writes_ahead

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        """[B, count] what follows tokens [B, 1], the first drafts of all sequences, which all take part: `count` levels
        of one node each, read without a look at the host."""
        assert isinstance(self._model, WritesAhead)
        assert not self._depths
        texts = len(self._blocks)
        ends = TextEnds(tokens[:, 0], list(self._lengths), [self._blocks[b] for b in range(texts)])
        self.sound = False
        written = self._model.write_ahead(ends, self._cache.storage, count).tokens.T.clamp_min(0)
        self.sound = True
        self.tokens = torch.cat([tokens, written[:, :-1]], 1)
        self.parents = torch.arange(-1, count - 1, device=self._device).expand(texts, -1)
        self._depths = list(range(1, count + 1))
        self._read = [count] * texts
        return written

    def _seen(self, parents: Tensor) -> Tensor:
        """[B, F, I + F]: which nodes of the run the next ones see, themselves the last."""
        batch, width = parents.shape
        own = torch.eye(width, dtype=torch.bool, device=self._device).expand(batch, -1, -1)
        return torch.cat([self._ancestors_of(parents), own], 2)

    def _ancestors_of(self, parents: Tensor) -> Tensor:
        """[B, F, I]: the nodes above, for parents [B, F]."""
        batch, before = parents.shape[0], len(self._depths)
        if self._ancestors.shape[1] < before:  # so far it was a chain
            self._ancestors = self._ancestors.new_ones(before, before).tril().expand(batch, -1, -1)
        if not before:
            return self._ancestors.new_zeros(*parents.shape, 0)
        index = parents.clamp_min(0)[:, :, None].expand(-1, -1, before)
        return self._ancestors.gather(1, index) & (parents >= 0)[:, :, None]

    def _forward(self, segments: list[Segment], drafted: Drafted | None = None) -> Output:
        self.sound = False
        output = self._model.forward_rows(Batch.pack(segments, drafted), self._cache.storage)
        self.sound = True
        return output


@dataclass(frozen=True)
class _Guess:
    """What a sequence has reserved since its last run."""

    run: Run
    index: int  # its place in the run

    def kept(self, text: list[int]) -> list[int]:
        """The reserved rows that lie on the text as it is now, but for its last token: that one will be the root of the
        next run, which needs its row again."""
        if not self.run.sound:
            return []
        unread = self.run.unread(self.index)
        tokens, parents = self.run.nodes(self.index)
        nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        if len(text) == self.run.length(self.index):  # the step came to nothing: the root is still the root
            return list(range(unread - 1))
        rows = list(range(unread))
        node = -1
        for token in text[self.run.length(self.index) : -1]:
            found = nodes.get((node, token))
            if found is None:
                break
            node = found
            rows.append(unread + node)
        return rows


def reads(model: TargetModel) -> int:
    """How many tokens it knows as input; it may have fewer to draft with."""
    return model.reads if isinstance(model, Transformer) else model.vocab_size


def _text(sequence: Text, context: Tensor, own: Tensor, blocks: list[int], logits: int, vocabulary: int) -> Segment:
    """The part of the text that follows its context. A token that the model does not know is read as token 0."""
    start, rows = context.shape[0], own.shape[0]
    positions = torch.arange(start, start + rows)
    known = [token if token < vocabulary else 0 for token in sequence.tokens[start : start + rows]]
    tokens = torch.tensor(known, dtype=torch.int64)
    return Segment(sequence.id, tokens, positions, None, context, own, logits, blocks=blocks)
