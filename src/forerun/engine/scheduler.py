"""Who runs in the next step, and how much each may draft.

First come, first served. Running texts go on; what rows are left read prompts, in chunks; new texts join while the
cache holds them whole. When it runs short the youngest text steps back: its cache entries are freed and later computed
again from its tokens, like a prompt. The oldest never does, so all finish.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget
from forerun.engine.controller import Controller
from forerun.engine.request import Job
from forerun.models.cache import KVCache

MAX_CHUNK = 512
"""Rows of one text in a pass."""


@dataclass(frozen=True)
class Turn:
    """What a job does in a step: read `chain` tokens of its own text and, with a budget, draft behind the last one."""

    job: Job
    chain: int
    """Rows of the text before the root. Without a budget the root is not reached yet."""
    budget: Budget | None
    forced: int = 0
    """Tokens that its grammar forces next, which are drafted whatever the budget says."""

    @property
    def rows(self) -> int:
        """At most."""
        return self.chain + (0 if self.budget is None else 1 + max(self.budget.nodes, self.forced))


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        *,
        max_batch: int,
        max_rows: int,
        max_nodes: int,
        max_drafting: int | None = None,
        max_beside: int | None = None,
        prompts_alone: bool = False,
        controller: Controller | None = None,
    ) -> None:
        """Nothing is drafted in a step of more than `max_drafting` texts, nor where the rows of prompts that it reads,
        times texts, are more than `max_beside`: where a pass takes as long as its rows, all that are no drafts give
        more. With `prompts_alone`, while texts are read those that are read wait: where plain decoding goes in long
        runs, a step that does both for hundreds of texts takes longer than the two apart."""
        self.cache = cache
        self.prompts_alone, self.controller = prompts_alone, controller
        self.max_drafting = max_batch if max_drafting is None else max_drafting
        self.max_beside = math.inf if max_beside is None else max_beside
        self.max_batch, self.max_rows, self.max_nodes = max_batch, max_rows, max_nodes
        self.reuse = False
        """Whether what a text leaves in the cache serves the next one that begins alike, until its room is needed."""
        self.resume: Callable[[Sequence, int], int] | None = None
        """What a drafter says who has to have seen all that the target does not compute again: `Resumes`."""
        self.reused = 0
        """Tokens that texts found in the cache."""
        self.waiting: list[Job] = []
        self.running: list[Job] = []

    def add(self, job: Job) -> None:
        insort(self.waiting, job, key=lambda other: other.order)

    def remove(self, job: Job) -> None:
        """It is over, or was cancelled."""
        (self.running if job in self.running else self.waiting).remove(job)
        self._give_back(job)

    def schedule(self) -> tuple[list[Turn], list[Job]]:
        """The turns of the next step, and the jobs that had to step back for it."""
        stepped_back: list[Job] = []
        while not self._fits():
            job = self.running.pop()
            self._give_back(job)
            job.statistics.preemptions += 1
            stepped_back.append(job)
            self.add(job)
        if not stepped_back:  # no room is taken by a newcomer that an older text has just been refused
            self._admit()
        turns = self._turns()
        return self._with_drafts(turns), stepped_back

    def check_integrity(self) -> None:
        """Nothing of the cache is lost or owned twice, and nobody holds any who is not running."""
        self.cache.check_integrity()
        strays = self.cache.holders - {job.sequence.id for job in self.running}
        if strays:
            raise AssertionError(f"sequences {sorted(strays)} are not running and hold cache")
        for job in self.running:
            if self.cache.committed(job.sequence.id) > job.sequence.position:
                raise AssertionError(f"the cache of sequence {job.sequence.id} is ahead of its text")

    def _missing(self, job: Job) -> int:
        """Tokens that the cache does not hold yet, the root among them."""
        return len(job.sequence.tokens) - self.cache.committed(job.sequence.id)

    def _blocks(self, job: Job) -> int:
        return self.cache.blocks_for(job.sequence.id, self._missing(job))

    def _fits(self) -> bool:
        """Whether all running texts can be read to their roots."""
        return sum(self._blocks(job) for job in self.running) <= self.cache.free_blocks

    def _admit(self) -> None:
        if not self.waiting:
            return
        free = self.cache.free_blocks - sum(self._blocks(job) for job in self.running)
        while self.waiting and len(self.running) < self.max_batch:
            needed = self._blocks(self.waiting[0])
            if needed > free:
                return
            free -= needed
            job = self.waiting.pop(0)
            if self.reuse:
                found = self._adopt(job.sequence)
                job.statistics.reused += found
                self.reused += found
            insort(self.running, job, key=lambda other: other.order)

    def _adopt(self, sequence: Sequence) -> int:
        found = self.cache.adopt(sequence.id, sequence.tokens)
        if not found or self.resume is None:
            return found
        kept = self.resume(sequence, found)
        if kept:
            self.cache.trim(sequence.id, kept)
        else:
            self.cache.free(sequence.id)
        return kept

    def _give_back(self, job: Job) -> None:
        if self.reuse:
            self.cache.retire(job.sequence.id, job.sequence.tokens)
        else:
            self.cache.free(job.sequence.id)

    def _turns(self) -> list[Turn]:
        """Texts at their roots first, one row each; then chunks of what is still to be read."""
        rows = self.max_rows
        turns: list[Turn] = []
        missing = [(self._missing(job), job) for job in self.running]
        at_roots = [each for each in missing if each[0] <= 1]  # first come, first served
        to_read = [each for each in missing if each[0] > 1]
        for lacking, job in to_read if self.prompts_alone and to_read else [*at_roots, *to_read]:
            chunk = min(lacking, rows, MAX_CHUNK)
            if chunk <= 0:
                continue
            rows -= chunk
            whole = chunk == lacking
            turns.append(Turn(job, chunk - 1, Budget(0, 0)) if whole else Turn(job, chunk, None))
        return turns

    def _with_drafts(self, turns: list[Turn]) -> list[Turn]:
        """Drafts get the rows and the blocks that nothing else needs in this step."""
        deciding = [turn for turn in turns if turn.budget is not None]
        rows = self.max_rows - sum(turn.rows for turn in turns)
        read = sum(turn.chain for turn in turns)
        bases = [self.cache.blocks_for(turn.job.sequence.id, turn.rows) for turn in turns]
        blocks = self.cache.free_blocks - sum(bases)
        allowed: dict[int, int | None] = {}
        numbers = [turn.job.sequence.id for turn in deciding if not turn.chain]
        if self.controller is not None and numbers:
            reading = len(numbers) < len(turns)
            self.controller.room = rows // len(deciding)
            limits = self.controller.usual(numbers) if reading else self.controller.limits(numbers)
            allowed = dict(zip(numbers, limits, strict=True))
        result: list[Turn] = []
        for turn, base in zip(turns, bases, strict=True):
            if turn.budget is None:
                result.append(turn)
                continue
            job, sequence = turn.job, turn.job.sequence
            asked = self.max_nodes if job.draft.nodes is None else min(job.draft.nodes, self.max_nodes)
            nodes = max(0, min(asked, rows // len(deciding)))
            spare = self.cache.spare_rows(sequence.id, turn.rows, blocks)
            nodes = min(nodes, spare)
            depth = max(0, sequence.remaining - 1)
            if job.draft.depth is not None:
                depth = min(depth, job.draft.depth)
            if len(deciding) > self.max_drafting or read * len(deciding) > self.max_beside:
                nodes = 0
            if not depth or turn.chain:  # what a prompt's rows round to must not depend on what is drafted behind them
                nodes = 0
            forced = 0 if job.walk is None or not nodes else min(nodes, depth, len(job.walk.forced()))
            limit = allowed.get(sequence.id)
            if limit is not None:
                nodes = min(nodes, limit)
            grown = Turn(job, turn.chain, Budget(nodes, min(depth, nodes)), forced)
            blocks -= self.cache.blocks_for(sequence.id, grown.rows) - base
            result.append(grown)
        return result
