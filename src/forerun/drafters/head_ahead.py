"""A head that runs ahead of the committed text on the target's states, with a key/value cache of its own.

Its text is the target's without the first token: row i reads token i + 1 with the state that the target had at token
i. Observed states wait until the next run, which reads them with the root as its last row; a long prompt is read as
it is observed. Below the root a row brings what the head itself made of its parent. These rows are guesses on guesses:
unlike those of a draft model they never stay, for where they come true the target's own states are there to read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.device_growth import Growths, among
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.growth_in_c import GrowthInC
from forerun.drafters.host_growth import fits, grow_on_host, plain_laws
from forerun.drafters.run_ahead import Rows, Run
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.batch import Batch, Drafted, Segment
from forerun.models.cache import KVCache
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.native import amx
from forerun.models.target import Output

MOST_WAITING = 32
"""More observed states than these are read at once, without waiting for a run."""
PASS_ROWS = 512
"""A long text is read in passes of so many rows."""


@dataclass
class _Waiting:
    """The observed states of one text that no committed row of the cache has read."""

    states: list[Tensor] = field(default_factory=list)  # [n, H] each
    in_run: int = 0
    """So many of them were read by the last run, in rows that are only reserved."""
    run: Run | None = None

    @property
    def rows(self) -> int:
        return sum(states.shape[0] for states in self.states)

    def first(self, count: int) -> Tensor:
        """[count, H]"""
        if len(self.states) > 1:
            self.states = [torch.cat(self.states)]
        return self.states[0][:count]

    def drop(self, count: int) -> None:
        whole = self.first(self.rows)
        self.states = [whole[count:]] if count < whole.shape[0] else []


class HeadAhead:
    def __init__(self, head: FeatureHead, slots: int) -> None:
        if not head.prepared:  # which way trees grow depends on it
            head.prepare()
        self.model = head
        self.cache = KVCache(head.new_storage(slots))
        self._texts: dict[int, _Waiting] = {}
        self.in_c = GrowthInC(head)
        self.on_device = Growths(head, self.cache.storage)

    def observe(self, observations: Many[Observation]) -> None:
        """States that do not follow those before them, as after a pause in which nobody looked, are of no use: that
        text gets no more drafts until it is read from its beginning."""
        taken: list[tuple[Observation, _Waiting]] = []
        for seen in observations:
            number = seen.sequence.id
            if seen.start == 0:
                self._drop(number)
                self._texts[number] = _Waiting()
            waiting = self._texts.get(number)
            if waiting is None:
                continue
            if seen.start != self.cache.committed(number) + waiting.rows:
                self._drop(number)
                continue
            taken.append((seen, waiting))
        if not taken:
            return
        layers = {layer: torch.cat([seen.features[layer] for seen, _ in taken]) for layer in self.model.taps}
        counts = [len(seen.features[self.model.taps[0]]) for seen, _ in taken]
        fused = torch.split(self.model.fuse(layers), counts)
        for (seen, waiting), states in zip(taken, fused, strict=True):
            waiting.states.append(states)
            if waiting.rows > MOST_WAITING:
                self._read(seen.sequence, waiting)

    def start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> HeadRun:
        """Whoever finds the cache full, or has states missing, sits out."""
        shifted: list[Sequence] = []
        room: list[int | None] = []
        states: list[Tensor] = []
        taken = 0
        for sequence in sequences:  # all of them first: what they had reserved is free then
            if sequence.id in self._texts:
                self._settle(sequence.id, self._texts[sequence.id], len(sequence.tokens) - 1)
        for sequence, rows in zip(sequences, wanted, strict=True):
            shifted.append(Sequence(sequence.tokens[1:] or [0], 1, id=sequence.id))
            waiting = self._texts.get(sequence.id)
            if rows is None or waiting is None:
                room.append(None)
                continue
            held = self.cache.committed(sequence.id)
            needed = self.cache.blocks_for(sequence.id, waiting.rows + rows)
            if held + waiting.rows != len(sequence.tokens) - 1 or not waiting.rows:
                room.append(None)
            elif needed > self.cache.free_blocks - taken:
                self._drop(sequence.id)
                room.append(None)
            else:
                taken += needed
                room.append(rows)
                states.append(waiting.first(waiting.rows))
        run = HeadRun(self, shifted, room, states)
        for b, sequence in enumerate(sequences):
            if room[b] is not None:
                waiting = self._texts[sequence.id]
                waiting.run, waiting.in_run = run, waiting.rows
        return run

    def forget(self, sequence: Sequence) -> None:
        self._drop(sequence.id)

    def _drop(self, number: int) -> None:
        self._texts.pop(number, None)
        self.cache.free(number)

    def _settle(self, number: int, waiting: _Waiting, length: int) -> None:
        """Keep the rows of the text that the last run read, but for the root's where the step came to nothing: the next
        run needs it again."""
        if number not in self.cache.holders:
            return
        count = 0
        if waiting.run is not None and waiting.run.sound:
            grown = self.cache.committed(number) + waiting.in_run < length
            count = waiting.in_run if grown else max(0, waiting.in_run - 1)
        self.cache.commit({number: range(count)})
        if count:
            waiting.drop(count)
        waiting.run, waiting.in_run = None, 0

    def _read(self, sequence: Sequence, waiting: _Waiting) -> None:
        """Read the observed states, but for the last: its row is the root's of the next run."""
        number = sequence.id
        self._settle(number, waiting, len(sequence.tokens) - 1)
        while waiting.rows > 1:
            rows = min(PASS_ROWS, waiting.rows - 1)
            if self.cache.blocks_for(number, rows) > self.cache.free_blocks:
                self._drop(number)
                return
            self.cache.reserve(number, rows)
            context, own = self.cache.slots(number)
            start = context.shape[0]
            tokens = torch.tensor(sequence.tokens[start + 1 : start + 1 + rows])
            segment = Segment(
                number,
                tokens,
                torch.arange(start, start + rows),
                None,
                context,
                own,
                0,
                blocks=self.cache.blocks(number),
            )
            batch = Batch.pack([segment], features=waiting.first(rows))
            self.model.forward_rows(batch, self.cache.storage)
            self.cache.commit({number: range(rows)})
            waiting.drop(rows)


class _Rows:
    """Rows of a pass in C, as they are listed."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.prefix: list[int] = []
        self.tail: list[int] = []
        self.tail_start = [0]
        self.first_row, self.first_key = [0], [0]
        self.slots: list[NDArray[np.int64]] = []
        self.keys: list[NDArray[np.int64]] = []

    def reading(self) -> amx.Reading:
        rows = len(self.positions)
        most = max(end - start for start, end in pairwise(self.first_key))
        seen = amx.Seen(
            torch.tensor(self.first_row),
            torch.tensor(self.first_key),
            torch.from_numpy(np.concatenate(self.keys)),
            torch.tensor(self.prefix, dtype=torch.int32),
            torch.tensor(self.tail_start, dtype=torch.int32),
            torch.tensor(self.tail, dtype=torch.int32),
            most,
        )
        slots = torch.from_numpy(np.concatenate(self.slots))
        return amx.Reading(torch.tensor(self.positions), slots, torch.arange(rows), seen)


class _Text:
    """The nodes of one text that were read."""

    def __init__(self, slots: NDArray[np.int64], length: int) -> None:
        self.slots, self.length = slots, length
        self.paths: list[list[int]] = []  # of each node: the places of its ancestors among the text's keys, and its own
        self.states: list[int] = []  # of each node: where its state is among those of the run

    def read(self, above: list[int], rows: _Rows, states: int) -> None:
        """List nodes below `above` as rows; `states` are there before theirs."""
        first = self.length + len(self.paths)
        start = len(rows.positions)
        for place, parent in enumerate(above):
            path = [*(self.paths[parent] if parent >= 0 else ()), first + place]
            self.paths.append(path)
            self.states.append(states + start + place)
            rows.positions.append(self.length - 1 + len(path))
            rows.tail += path
            rows.tail_start.append(len(rows.tail))
        end = first + len(above)
        rows.prefix += [self.length] * len(above)
        rows.slots.append(self.slots[first:end])
        rows.keys.append(self.slots[:end])
        rows.first_row.append(len(rows.positions))
        rows.first_key.append(rows.first_key[-1] + end)


class HeadRun(Run):
    """As any run, and each row brings a state: the target's up to the root, below it what its parent's row gave."""

    def __init__(
        self, ahead: HeadAhead, sequences: Many[Sequence], room: Many[int | None], states: Many[Tensor]
    ) -> None:
        """`states` [n, H] of those who take part, for each of their unread rows."""
        super().__init__(ahead.model, ahead.cache, sequences, room)
        self._ahead, self._head = ahead, ahead.model
        self._texts: dict[int, _Text] = {}
        self._states: list[Tensor] = []  # [n, H] behind the roots, by sequence, and behind all nodes, as they were read
        self._brought = torch.cat(list(states)) if states else None
        self._made: Tensor | None = None  # [B, 1 + I, H] behind the root and the nodes read so far

    def grow(self, spec: TreeSpec, sequences: Many[Sequence], budgets: Many[Budget], tau: float) -> DraftTree | None:
        if not plain_laws(sequences):
            return None
        if len(sequences) == 1 and all(self.takes_part) and self._ahead.in_c.takes(spec):
            logits = self.quick_roots()
            slots, storage = self._texts[0].slots, self._cache.storage
            return self._ahead.in_c.grow(
                spec, sequences[0], budgets[0], logits, self._states[0][0], slots, storage, tau
            )
        if self._head.amx is not None and fits(spec):
            return grow_on_host(spec, sequences, self, budgets, tau)
        batch, _ = self._text_rows()
        if not self._ahead.on_device.take(spec, batch):
            return None
        members = [b for b, part in enumerate(self.takes_part) if part]
        drafting = [sequences[b] for b in members]
        self.sound = False
        tree = self._ahead.on_device.grow(spec, batch, drafting, [budgets[b] for b in members], tau)
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
        for b, (context, own) in self._slots.items():
            self._texts[b] = _Text(torch.cat([context, own]).numpy(), self.length(b))
        return rows.logits

    def quick_level(self, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """Every row sees the text, and of the nodes those on its own path."""
        assert self._head.amx is not None
        self.sound = False
        brought: list[int] = []
        at = _Rows()
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
        output = self._head.amx.run(x, beside, at.reading(), self._cache.storage, (1,), summed=False)
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
