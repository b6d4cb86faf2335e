"""A head that runs ahead of the committed text on the target's states, with a key/value cache of its own.

Its text is the target's without the first token: row i reads token i + 1 with the state that the target had at token
i. Observed states wait until the next run, which reads them with the root as its last row; a long prompt is read as
it is observed, and on an accelerator that drafts while the target still works on it. Below the root a row brings what
the head itself made of its parent. These rows are guesses on guesses: unlike those of a draft model they never stay,
for where they come true the target's own states are there to read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.device_growth import Growths, among
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.growth_in_c import GrowthInC
from forerun.drafters.host_growth import fits, grow_on_host, plain_laws
from forerun.drafters.level_run import Rows
from forerun.drafters.listed_rows import ReadNodes
from forerun.drafters.run_ahead import Run, Text
from forerun.drafters.tree_spec import TreeSpec
from forerun.drafters.waiting_states import Fused, Piece, Waiting, joined, pieces_of
from forerun.kernels.kernel import power_of_two
from forerun.models.batch import Batch, Drafted, Segment, TextRows
from forerun.models.cache import KVCache
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.native.reading import ListedRows
from forerun.models.target import Output

MOST_WAITING, MOST_WAITING_TOGETHER = 2048, 32768
"""More observed states than these, of a text or of all together, are read at once, without waiting for a run: a text
for which nothing is drafted should cost nothing, but neither should it fill the memory."""
MOST_UNREAD = 32
"""With more of them a run does not begin before they are read: an accelerator captures every number of rows that a run
begins with on its own, and what had been put off is no part of the time that drafts take."""
PASS_ROWS = 512
"""A long text is read in passes of so many rows."""


@dataclass(frozen=True)
class _Shifted:
    """A text as the head reads it: without its first token."""

    id: int
    tokens: list[int]


class HeadAhead:
    def __init__(self, head: FeatureHead, slots: int) -> None:
        if not head.prepared:  # which way trees grow depends on it
            head.prepare()
        self.model = head
        self.cache = KVCache(head.new_storage(slots))
        self._texts: dict[int, Waiting] = {}
        self.reading = 0.0
        """Seconds of the host for what had been put off."""
        self.keeps = False
        """Whether another text may begin where one has ended: then what was seen of it is read before it is over."""
        self.in_c = GrowthInC(head)
        self.on_device = Growths(head, self.cache.storage)

    def observe(self, observations: Many[Observation]) -> None:
        """States that do not follow those before them, as after a pause in which nobody looked, are of no use: that
        text gets no more drafts until it is read from its beginning."""
        taken: list[tuple[Observation, Waiting]] = []
        for seen in observations:
            number = seen.sequence.id
            if seen.start == 0:
                self._drop(number)
                self._texts[number] = Waiting()
            waiting = self._texts.get(number)
            if waiting is None:
                continue
            if seen.start != self.cache.committed(number) + waiting.rows:
                self._drop(number)
                continue
            taken.append((seen, waiting))
        if not taken:
            return
        pieces = pieces_of(self.model, [seen.features for seen, _ in taken])
        for (_, waiting), piece in zip(taken, pieces, strict=True):
            waiting.add(piece)
        together = sum(waiting.rows for waiting in self._texts.values())
        most = MOST_WAITING
        if together > MOST_WAITING_TOGETHER:
            most = min(most, max(1, MOST_WAITING_TOGETHER // len(self._texts)))
        self._read_down([seen.sequence for seen, _ in taken], most)

    def read_along(self, observations: Many[Observation], sequences: Many[Sequence]) -> None:
        """As `observe`; and what waits of these texts is read, but for the last state of each, and for texts that this
        step drafts for."""
        self.observe(observations)
        waiting = [(sequence, self._texts.get(sequence.id)) for sequence in sequences]
        self._read([sequence for sequence, own in waiting if own is not None and own.run is None])

    def start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> HeadRun:
        """Whoever finds the cache full, or has states missing, sits out."""
        # All of them first: what they had reserved is free then.
        self._settle([sequence for sequence in sequences if sequence.id in self._texts])
        asked = [sequence for sequence, rows in zip(sequences, wanted, strict=True) if rows is not None]
        self._read_down(asked, MOST_UNREAD)
        return self._start(sequences, wanted)

    def _start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> HeadRun:
        shifted: list[_Shifted] = []
        room: list[int | None] = []
        states: list[Piece] = []
        taken = 0
        for sequence, rows in zip(sequences, wanted, strict=True):
            shifted.append(_Shifted(sequence.id, sequence.tokens[1:] or [0]))
            waiting = self._texts.get(sequence.id)
            if rows is None or waiting is None:
                room.append(None)
                continue
            unread = waiting.rows
            held = self.cache.committed(sequence.id)
            needed = self.cache.blocks_for(sequence.id, unread + rows)
            if held + unread != len(sequence.tokens) - 1 or not unread:
                room.append(None)
            elif needed > self.cache.free_blocks - taken:
                self._drop(sequence.id)
                room.append(None)
            else:
                taken += needed
                room.append(rows)
                states += waiting.states
        run = HeadRun(self, shifted, room, states)
        for b, sequence in enumerate(sequences):
            if room[b] is not None:
                waiting = self._texts[sequence.id]
                waiting.run, waiting.in_run = run, waiting.rows
        return run

    def open_rounds(self, sequences: Many[Sequence], most: int, rows: int) -> HeadRun | None:
        """With room for `rows` behind what is unread, which is brought down to `most` rows of each text; None where
        somebody could not take part. The roots are not read yet."""
        self._settle([sequence for sequence in sequences if sequence.id in self._texts])
        self._read_down(sequences, most)
        unread = [self._texts[sequence.id].rows if sequence.id in self._texts else 0 for sequence in sequences]
        needed = sum(
            self.cache.blocks_for(sequence.id, own + rows) for sequence, own in zip(sequences, unread, strict=True)
        )
        if not all(unread) or needed > self.cache.free_blocks:
            return None
        run = self._start(sequences, [rows] * len(sequences))
        return run if all(run.takes_part) else None

    def close_rounds(self, sequences: Many[Sequence], read: Many[int], left: Many[int], states: Tensor) -> None:
        """Of each text so many rows were read, and `left` have not been: what they bring stands in `states`, the same
        number of places for each text."""
        self.cache.commit({sequence.id: range(rows) for sequence, rows in zip(sequences, read, strict=True)})
        whole, each = Fused(states), states.shape[0] // len(sequences)
        for b, (sequence, rows) in enumerate(zip(sequences, left, strict=True)):
            self._texts[sequence.id] = Waiting([Piece(whole, b * each, b * each + rows)], rows)

    def forget(self, sequence: Sequence) -> None:
        """What was read of it stays, until its room is needed."""
        if sequence.id in self._texts:
            self._settle([sequence])
            if self.keeps:
                self._read_down([sequence], 1)
            self._texts.pop(sequence.id, None)
        self.cache.retire(sequence.id, sequence.tokens[1:])

    def resume(self, sequence: Sequence, rows: int) -> int:
        """Row i needs the state of the target's row i, which is nowhere kept: so the target goes on where the head
        does."""
        found = self.cache.adopt(sequence.id, sequence.tokens[1 : rows + 2])
        if found:
            self._texts[sequence.id] = Waiting()
        return found

    def _drop(self, number: int) -> None:
        self._texts.pop(number, None)
        self.cache.free(number)

    def _settle(self, sequences: Many[Sequence]) -> None:
        """Keep the rows of the texts that the last run read, but for the root's where the step came to nothing: the
        next run needs it again."""
        kept: dict[int, range] = {}
        for sequence in sequences:
            number, length = sequence.id, len(sequence.tokens) - 1
            if not self.cache.holds(number):
                continue
            waiting = self._texts[number]
            if waiting.run is None:
                continue
            count = 0
            if waiting.run.sound:
                grown = self.cache.committed(number) + waiting.in_run < length
                count = waiting.in_run if grown else max(0, waiting.in_run - 1)
            kept[number] = range(count)
            waiting.drop(count)
            waiting.run, waiting.in_run = None, 0
        self.cache.commit(kept)

    def _read_down(self, sequences: Many[Sequence], most: int) -> None:
        """Such that no text has more than `most` unread rows."""
        long = [each for each in sequences if each.id in self._texts and self._texts[each.id].rows > most]
        if long:
            before = time.perf_counter()
            self._read(long)
            self.reading += time.perf_counter() - before

    def _read(self, sequences: Many[Sequence]) -> None:
        """Read the observed states, but for the last of each text: its row is the root's of the next run."""
        self._settle(sequences)
        while True:
            texts: list[TextRows] = []
            states: list[Piece] = []
            left = PASS_ROWS
            for sequence in sequences:
                number, waiting = sequence.id, self._texts.get(sequence.id)
                rows = 0 if waiting is None else min(left, waiting.rows - 1)
                if waiting is None or rows < 1:
                    continue
                if self.cache.blocks_for(number, rows) > self.cache.free_blocks:
                    self._drop(number)
                    continue
                self.cache.reserve(number, rows)
                held = self.cache.committed(number)
                tokens = sequence.tokens[held + 1 : held + 1 + rows]
                blocks, size = self.cache.blocks(number), self.cache.block_size
                texts.append(TextRows(number, rows, tokens, None, held, blocks, size, logits=0))
                states += waiting.first(rows)
                waiting.drop(rows)
                left -= rows
            if not texts:
                return
            self.model.forward_rows(Batch(texts=tuple(texts), features=joined(states)), self.cache.storage)
            self.cache.commit({text.sequence: range(text.rows) for text in texts})


def _within(spec: TreeSpec, nodes: int) -> TreeSpec:
    """A dynamic tree that grows no wider and no deeper than `nodes` call for, which are rounded: every tree is captured
    on its own."""
    width, depth, size = spec.numbers
    least = power_of_two(nodes + 1) - 1
    return spec if least >= size else replace(spec, numbers=(min(width, least), min(depth, least), least))


class HeadRun(Run):
    """As any run, and each row brings a state: the target's up to the root, below it what its parent's row gave."""

    def __init__(self, ahead: HeadAhead, sequences: Many[Text], room: Many[int | None], states: Many[Piece]) -> None:
        """`states` of those who take part, for each of their unread rows."""
        super().__init__(ahead.model, ahead.cache, sequences, room)
        self._ahead, self._head = ahead, ahead.model
        self._texts: dict[int, ReadNodes] = {}
        self._states: list[Tensor] = []  # [n, H] behind the roots, by sequence, and behind all nodes, as they were read
        self._brought = joined(states) if states else None
        self._made: Tensor | None = None  # [B, 1 + I, H] behind the root and the nodes read so far

    def grow(self, spec: TreeSpec, sequences: Many[Sequence], budgets: Many[Budget], taus: Taus) -> DraftTree | None:
        if not plain_laws(sequences):
            return None
        if len(sequences) == 1 and all(self.takes_part) and self._ahead.in_c.takes(spec, self.unread(0)):
            assert self._brought is not None
            slots, storage = self._cache.all_slots(self._sequences[0].id), self._cache.storage
            self.sound = False
            tree = self._ahead.in_c.grow(spec, sequences[0], budgets[0], self._brought, slots, storage, taus)
            self.sound = True
            return tree
        if self._head.in_c is not None and fits(spec):
            return grow_on_host(spec, sequences, self, budgets, taus)
        batch = self.brought_rows()
        if not self._ahead.on_device.take(spec, batch):
            return None
        members = [b for b, part in enumerate(self.takes_part) if part]
        drafting = [sequences[b] for b in members]
        spec = _within(spec, max(budget.nodes for budget in budgets))
        self.sound = False
        tree = self._ahead.on_device.grow(spec, batch, drafting, [budgets[b] for b in members], taus)
        self.sound = True
        return tree if len(members) == len(sequences) else among(tree, members, sequences)

    def roots(self) -> Rows:
        batch, ends = self._text_rows()
        counts = [int(part) for part in self.takes_part]
        rows = Rows.of(counts, self._forward(list(batch.segments)))
        assert self._after is not None
        behind = self._after[ends]
        self._made = behind.new_zeros(len(counts), 1, behind.shape[1])
        self._made[rows.sequence, 0] = behind
        return rows

    def brought_rows(self) -> Batch:
        """The unread rows of the texts in plain numbers."""
        rows = [
            TextRows(
                sequence=self._sequences[b].id,
                rows=self.unread(b),
                tokens=self._sequences[b].tokens[held : self.length(b)],
                parents=None,
                before=held,
                blocks=self._blocks[b],
                block_size=self._cache.block_size,
                logits=1,
            )
            for b, held in self._committed.items()
        ]
        return Batch(texts=tuple(rows), features=self._brought)

    def _text_rows(self) -> tuple[Batch, list[int]]:
        """The unread rows of the texts, and which of them are the roots'."""
        segments, ends, end = [], [], 0
        for b, (context, own) in self._slots.items():
            unread, start = self.unread(b), context.shape[0]
            tokens = torch.tensor(self._sequences[b].tokens[start : start + unread])
            positions = torch.arange(start, start + unread)
            segments.append(
                Segment(
                    self._sequences[b].id, tokens, positions, None, context, own[:unread], 1, blocks=self._blocks[b]
                )
            )
            end += unread
            ends.append(end - 1)
        return Batch.pack(segments, features=self._brought), ends

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        assert self._made is not None
        batch, width = tokens.shape
        which = (parents + 1)[:, :, None].expand(-1, -1, self._made.shape[2])
        brought = self._made.gather(1, which)  # [B, F, H]
        full = all(count == width for count in counts)
        if full:
            self._brought = brought.flatten(0, 1)
        else:
            self._brought = torch.cat([brought[b, :count] for b, count in enumerate(counts) if count])
        rows = super().level(tokens, parents, counts)
        assert self._after is not None
        behind = self._after
        if full:
            made = behind.view(batch, width, -1)
        else:
            made = behind.new_zeros(batch, width, behind.shape[1])
            made[rows.sequence, rows.column] = behind
        self._made = torch.cat([self._made, made], 1)
        return rows

    @property
    def writes_ahead(self) -> bool:
        return False

    def send_home(self) -> None:
        """Nobody compares these guesses with the text: none of their rows stays."""

    # --- in plain numbers, where the pass is in C ---------------------------------------------------------------

    def quick_roots(self) -> Tensor:
        rows = self.roots()
        assert self._made is not None
        self._states = [self._made[:, 0]]
        for b in self._blocks:
            self._texts[b] = ReadNodes(self._cache.all_slots(self._sequences[b].id), self.length(b))
        return rows.logits

    def quick_level(self, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """Every row sees the text, and of the nodes those on its own path."""
        assert self._head.in_c is not None
        self.sound = False
        brought: list[int] = []
        at = ListedRows()
        for b, (own, above) in enumerate(zip(tokens, parents, strict=True)):
            if not own:
                continue
            text = self._texts[b]
            brought += [b if parent < 0 else text.states[parent] for parent in above]
            text.read(above, at, sum(map(len, self._states)))
        states = torch.cat(self._states) if len(self._states) > 1 else self._states[0]
        self._states = [states]
        flat = torch.tensor([token for own in tokens for token in own])
        x, beside = self._head.enter(flat, states[torch.tensor(brought)])
        reading = at.reading(torch.arange(flat.shape[0]))
        output = self._head.in_c.run(x, beside, reading, self._cache.storage, (1,), summed=False)
        self._states.append(self._head.next_states(output.features[1]))
        self.sound = True
        return output.logits

    def _forward(self, segments: list[Segment], drafted: Drafted | None = None) -> Output:
        self.sound = False
        batch = Batch.pack(segments, drafted, self._brought)
        output = self._model.forward_rows(batch, self._cache.storage, (1,))
        self._after: Tensor | None = self._head.next_states(output.features[1])
        self.sound = True
        return output
