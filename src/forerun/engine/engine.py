"""The engine: schedule, draft, one target pass, verify, commit.

Plain decoding is the drafter that proposes nothing; reading a prompt and recomputing a text that had stepped back are
rows before the root of a tree. So there is one loop, and beside it a shortcut: on a device plain decoding goes in runs
of several tokens (`writing_ahead`). The engine knows tokens, not text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.core.history import History
from forerun.core.largest import largest
from forerun.core.sequence import Sequence
from forerun.core.step_record import StepRecord
from forerun.drafters.drafter import Checked, Drafter, Observation, PutsOff, SharesCache
from forerun.engine.admission import begin_text, refuse_overflow, refuse_strays, rule_for
from forerun.engine.controller import Controller
from forerun.engine.drafting import draft, most_beside, most_drafting
from forerun.engine.drafting_ahead import DraftingAhead, Run
from forerun.engine.grammar_walk import begin_walk, refuse_misfit
from forerun.engine.judge import Decision, judge
from forerun.engine.laws import SettingsMemo, StepLaws
from forerun.engine.logprobs import logprobs
from forerun.engine.packing import Packed, all_checked, kept_states, pack
from forerun.engine.records import records
from forerun.engine.request import Job, Kind, Request, Update
from forerun.engine.scheduler import Scheduler, Turn
from forerun.engine.statistics import Clock, Statistics
from forerun.engine.writing_ahead import observations, run_length, write
from forerun.models.cache import KVCache
from forerun.models.target import Output, TargetModel
from forerun.verify.rule import VerificationRule

MAX_NODES = 64
"""Drafted tokens per text and step, if its request sets no smaller number."""
MAX_ROWS = 512
"""Rows of one pass, of all texts together; a longer prompt is read in chunks."""
MAX_AHEAD = 8
"""Tokens that plain decoding on a device writes before the host looks at them."""

Given = tuple[list[int], list[Kind]]
"""Tokens of several steps, and what each is."""


class Engine:
    """One target, one drafter, any number of requests. `step` until `has_work` is False."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        *,
        slots: int,
        max_batch: int = 8,
        max_rows: int = MAX_ROWS,
        max_ahead: int = MAX_AHEAD,
        max_drafting: int | None = None,
        prompts_alone: bool = False,
        rule: str | None = None,
        trace: Callable[[StepRecord], None] | None = None,
        controller: Controller | None = None,
    ) -> None:
        """`max_ahead`: tokens that plain decoding writes on a device before the host looks; `max_drafting`: texts of a
        step up to which drafts are made; `prompts_alone` lets texts wait while others are read; a `controller`
        chooses how much is drafted."""
        if max_batch < 1 or max_rows <= max_batch:
            raise ValueError(f"max_batch is {max_batch} and max_rows {max_rows}: a step needs a row for each text")
        if drafter.branches and not target.branches:
            raise ValueError("this target checks chains only: choose a drafter or a --tree that does not branch")
        self.target, self.drafter, self.rule, self.trace = target, drafter, rule, trace
        self.max_ahead, self.controller = max_ahead, controller
        self._late = drafter.late if isinstance(drafter, PutsOff) else float
        if max_drafting is None:
            max_drafting = most_drafting(target, drafter)
        self.cache = KVCache(target.new_storage(slots))
        if isinstance(drafter, SharesCache):
            drafter.share(self.cache)
        self.ahead = DraftingAhead.of(target, drafter, self.cache)
        self.scheduler = Scheduler(
            self.cache,
            max_batch=max_batch,
            max_rows=max_rows,
            max_nodes=MAX_NODES,
            max_drafting=max_drafting,
            max_beside=most_beside(target, in_runs=self.ahead is not None),
            prompts_alone=prompts_alone,
            controller=controller,
        )
        if controller is not None:
            controller.together, controller.rounded = self.ahead is not None, target.device.type == "cuda"
        self._drafts = controller is None
        """Whether drafts were made where they could be, the last time."""
        self.meanwhile: Callable[[], None] | None = None
        """Called in every step: on an accelerator while it works, so that what it does costs nothing there."""
        self.called: Callable[[], bool] = bool
        """Whether somebody waits for the step to end, to add a request or to cancel one: it is kept short then."""
        self.statistics = Statistics()
        self.history = History(target.vocab_size, target.device)
        self._settings = SettingsMemo()
        self._jobs: dict[int, list[Job]] = {}
        self._cancelled: list[Update] = []
        self._sequences = self._requests = self._steps = 0

    @property
    def context_length(self) -> int:
        """The longest text, prompt and output, that the model and the cache allow."""
        return min(self.target.context_length, self.cache.total_blocks * self.cache.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._cancelled)

    def add(self, request: Request) -> int:
        """Queue a request; its id marks its updates. A request that cannot be served is refused here."""
        rule = self.rule_for(request)
        refuse_strays(request, self.target.vocab_size)
        refuse_overflow(request.params, self.target.vocab_size)
        refuse_misfit(request.params, self.target.vocab_size)
        prompts = [self.target.begin(self._sequences + index, request.prompt) for index in range(request.params.n)]
        room = self.context_length - len(prompts[0])
        if room < 1:
            for index in range(request.params.n):
                self.target.forget(self._sequences + index)
            raise ValueError(
                f"the prompt has {len(prompts[0])} tokens and the context holds {self.context_length}: shorten the "
                f"prompt, so that at least one token of output fits"
            )
        jobs = [self._job(request, index, prompt, rule, room) for index, prompt in enumerate(prompts)]
        for job in jobs:
            self.scheduler.add(job)
        self._jobs[self._requests] = jobs
        self._requests += 1
        return jobs[0].request

    def cancel(self, request: int) -> None:
        """End all texts of a request; the next step says so. One that is over already stays as it is."""
        for job in list(self._jobs.get(request, [])):
            job.sequence.finish_reason = "cancelled"
            self._end(job)
            self._cancelled.append(Update(request, job.index, [], [], None, "cancelled", job.statistics))

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Every running text gets at least one token further, or a chunk of its prompt read, unless it waits while
        others are read."""
        if self.target.device.type == "cpu":
            self._go_on_meanwhile()
        clock, _ = Clock(self.target.device), self._late()  # of this step alone
        cancelled, self._cancelled = self._cancelled, []
        turns, stepped_back = self.scheduler.schedule()
        for job in stepped_back:
            self.statistics.preemptions += 1
            self.drafter.forget(job.sequence)
        if not turns:
            return cancelled
        count = run_length(turns, self.target, self.drafter, self.cache, 1 if self.trace else self.max_ahead)
        if count > 1:
            return [*cancelled, *self._write_ahead(turns, count, clock)]
        if self.ahead is not None and self.trace is None:
            trying = self.controller is not None and self.controller.trying
            run = self.ahead.begin(turns, min(2, self.max_ahead) if trying else self.max_ahead, self._settings)
            if run is not None:
                return [*cancelled, *self._draft_ahead(run, clock)]
        jobs = [turn.job for turn in turns if turn.budget is not None]
        with clock.phase("draft"):
            tree, broken = draft(turns, self.drafter)
        try:
            packed = pack(turns, tree, self.cache, broken)
            with clock.phase("target"):
                output = self.target.forward_rows(packed.batch, self.cache.storage, self.drafter.layers)
                if self._top(turns) and tree is not None:
                    packed.bring_along(largest(output.logits, self.drafter.top, output.peaks)[1])
            if self.target.device.type != "cpu":
                self._go_on_meanwhile()
            along = False
            if self.ahead is not None and self._drafts:
                with clock.phase("draft"):
                    along = self.ahead.read_along(turns, packed, output.features)
            with clock.phase("verify"):
                decisions: list[Decision] = []
                if tree is not None:
                    settings = self._settings.of(jobs, self.target.device)
                    seen_to = output.likeliest is not None and self.target.device.type != "cpu"
                    laws = StepLaws(output.logits, jobs, tree, packed, self.history, settings, checked=seen_to)
                    decisions = judge(tree, output, jobs, packed, laws)
        except BaseException:
            self.cache.abandon()  # texts and cache are as before the step; what a head read along it may have to drop
            raise
        used = self.cache.used
        checked = all_checked(packed)
        updates, observations = self._commit(turns, packed, output, decisions, checked, along)
        with clock.phase("draft", learning=True):
            self.drafter.observe(observations)
        clock.stop()
        self._count(turns, packed, clock.seconds, used, sum(len(update.tokens) for update in updates.values()))
        if tree is not None and not any(turn.chain or turn.forced for turn in turns):
            drafted = [len(nodes) - 1 for nodes in packed.nodes]
            self._show(turns, drafted, [len(updates[place].tokens) for place in range(len(turns))], clock)
        if self.trace is not None:
            sequences = records(turns, packed, tree, decisions, updates)
            self.trace(StepRecord(self._steps, packed.batch.rows, used, clock.seconds, sequences))
        self._steps += 1
        for turn in turns:
            if turn.job.sequence.finish_reason is not None:
                self._end(turn.job)
        return [*cancelled, *updates.values()]

    def check_integrity(self) -> None:
        """Nothing is lost or owned twice, and nobody holds cache who is not running."""
        self.scheduler.check_integrity()

    def rule_for(self, request: Request) -> VerificationRule:
        return rule_for(request, self.rule, self.drafter)

    def _job(self, request: Request, index: int, prompt: list[int], rule: VerificationRule, room: int) -> Job:
        sequence = begin_text(self._sequences, request, index, prompt, rule, room, self.target.eos)
        self._sequences += 1
        walk = begin_walk(sequence, self.target.vocab_size)
        job = Job(self._requests, index, sequence, rule, request.draft, walk=walk)
        job.statistics.prompt_tokens = len(request.prompt)  # also where an encoder reads it
        self.statistics.prompt_tokens += len(request.prompt)
        return job

    def _go_on_meanwhile(self) -> None:
        if self.controller is not None and self.target.device.type != "cpu":
            self.controller.catch_up()
        if self.meanwhile is not None:
            self.meanwhile()

    def _top(self, turns: list[Turn]) -> int:
        """Nobody looks at the target's candidates where there are too many texts for drafts."""
        return self.drafter.top if len(turns) <= self.scheduler.max_drafting else 0

    def _write_ahead(self, turns: list[Turn], count: int, clock: Clock) -> list[Update]:
        """Several steps of plain decoding at once."""
        self._drafts = False
        layers, top = self.drafter.layers, self._top(turns)
        try:
            with clock.phase("target"):
                texts, written = write(
                    turns, self.target, self.cache, count, self._settings, layers, top, self._go_on_meanwhile
                )
        except BaseException:
            self.cache.abandon()
            raise
        given: list[Given] = []
        for turn, tokens in zip(turns, texts, strict=True):
            taken = turn.job.sequence.commit(tokens)
            for statistics in (turn.job.statistics, self.statistics):
                statistics.count_plain(taken)
            given.append((tokens[:taken], ["bonus"] * taken))
        with clock.phase("draft", learning=True):
            self.drafter.observe(observations(turns, [tokens for tokens, _ in given], written, count))
        updates = self._finish_run(turns, given, clock, count)
        self._show(turns, [0] * len(turns), [len(tokens) for tokens, _ in given], clock, count)
        return updates

    def _draft_ahead(self, run: Run, clock: Clock) -> list[Update]:
        """Several steps at once, where a device drafts and checks by itself."""
        self._drafts, turns = True, run.turns
        given: list[Given] = [([], []) for _ in turns]
        gained: list[list[int]] = []
        try:
            for decisions in run.rounds(clock, self._go_on_meanwhile):
                gained.append([self._take(*each) for each in zip(turns, decisions, given, run.nodes, strict=True)])
                if run.worn or self.called():
                    run.stop()
        except BaseException:
            self.cache.abandon()
            raise
        updates = self._finish_run(turns, given, clock, len(gained))
        for turn in turns:
            turn.job.statistics.rows += len(gained) * run.rows
        self.statistics.rows += len(gained) * run.rows * len(turns)
        for taken in gained:
            if all(taken):  # else somebody had ended before
                self._show(turns, run.nodes, taken, clock, share=len(gained))
        return updates

    def _take(self, turn: Turn, decision: Decision, given: Given, drafted: int) -> int:
        """What a round decided, if the text has not ended in an earlier one."""
        sequence = turn.job.sequence
        if sequence.finish_reason is not None:
            return 0
        count = sequence.commit(decision.tokens)
        given[0].extend(decision.tokens[:count])
        given[1].extend(decision.kinds[:count])
        for statistics in (turn.job.statistics, self.statistics):
            statistics.count_verdict(drafted, len(decision.path), decision.corrected, count)
        return count

    def _finish_run(self, turns: list[Turn], given: list[Given], clock: Clock, steps: int) -> list[Update]:
        """Texts have taken what they were given; the caches hold it where it belongs."""
        used = self.cache.used
        self.cache.commit({turn.job.sequence.id: range(len(own)) for turn, (own, _) in zip(turns, given, strict=True)})
        clock.stop()
        self._steps += steps
        self.statistics.count_step(clock.seconds, used)
        updates = []
        for turn, (tokens, kinds) in zip(turns, given, strict=True):
            job, reason = turn.job, turn.job.sequence.finish_reason
            job.statistics.count_step(clock.seconds, used)
            updates.append(Update(job.request, job.index, tokens, kinds, None, reason, job.statistics))
            if reason is not None:
                self._end(job)
        return updates

    def _commit(
        self,
        turns: list[Turn],
        packed: Packed,
        output: Output,
        decisions: list[Decision],
        checked: list[Checked] | None,
        along: bool,
    ) -> tuple[dict[int, Update], list[Observation]]:
        """Take what was decided into texts and cache; updates by the place of their turn, and what the drafter may see,
        but for what it read `along`."""
        kept: dict[int, list[int]] = {}
        updates: dict[int, Update] = {}
        seen: list[tuple[Sequence, int, int, Checked | None]] = []
        shown: list[list[int]] = []
        deciding = 0
        logit_row = 0
        for place, turn in enumerate(turns):
            job, sequence = turn.job, turn.job.sequence
            start = self.cache.committed(sequence.id)
            rows, count, said = list(range(turn.chain)), 0, None
            if turn.budget is not None:
                said = None if checked is None else checked[deciding]
                decision, nodes = decisions[deciding], packed.nodes[deciding]
                places = {node: row for row, node in enumerate(nodes)}
                path = [0, *(places[node] for node in decision.path)]
                rows += [turn.chain + row for row in path]
                count = sequence.commit(decision.tokens)
                parents = [logit_row + row for row in path[:count]]
                updates[place] = Update(
                    job.request,
                    job.index,
                    decision.tokens[:count],
                    decision.kinds[:count],
                    logprobs(output.logits, parents, decision.tokens[:count], job.sequence.params.logprobs),
                    sequence.finish_reason,
                    job.statistics,
                )
                drafted = len(nodes) - 1 - packed.silent[deciding]
                for statistics in (job.statistics, self.statistics):
                    statistics.count_verdict(drafted, len(decision.path), decision.corrected, count)
                deciding += 1
                logit_row += len(nodes)
            kept[sequence.id] = rows
            shown.append(rows[turn.chain :] if along else rows)
            seen.append((sequence, count, start + len(rows) - len(shown[-1]), said))
        self.cache.commit(kept)
        states = kept_states(output.features, packed.starts, shown)
        return updates, [
            Observation(sequence, sequence.tokens[-count:] if count else [], own, start, said)
            for (sequence, count, start, said), own in zip(seen, states, strict=True)
            if own.count
        ]

    def _end(self, job: Job) -> None:
        self.scheduler.remove(job)
        self.drafter.forget(job.sequence)
        self.target.forget(job.sequence.id)
        self.history.forget(job.sequence)
        if self.controller is not None:
            self.controller.forget(job.sequence.id)
        jobs = self._jobs[job.request]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.request]

    def _show(
        self, turns: list[Turn], drafted: list[int], tokens: list[int], clock: Clock, steps: int = 1, share: int = 1
    ) -> None:
        """To the controller, what came of `steps` passes, or of one of `share` that the clock has timed. Where a device
        goes on by itself, what the host takes besides says nothing of what was chosen; but it was spent."""
        if self.controller is not None:
            spent = clock.spent(with_rest=True) / share
            seconds = spent - self._late() if self.ahead is None else clock.spent(with_rest=False) / share
            numbers = [turn.job.sequence.id for turn in turns]
            self.controller.observe(numbers, drafted, tokens, seconds, steps, spent - seconds, clock.undisturbed)

    def _count(self, turns: list[Turn], packed: Packed, seconds: dict[str, float], used: float, tokens: int) -> None:
        self.statistics.count_step(seconds, used)
        if any(turn.budget is None or turn.chain for turn in turns):
            self.statistics.seconds_reading += sum(seconds.values())
            self.statistics.tokens_reading += tokens
            if self.controller is not None:
                self.controller.read(packed.batch.rows, sum(seconds.values()))
        self.statistics.rows += packed.batch.rows
        for turn, rows in zip(turns, packed.batch.counts, strict=True):
            turn.job.statistics.count_step(seconds, used)
            turn.job.statistics.rows += rows
            turn.job.statistics.prompt_passes += turn.budget is None
        self.statistics.prompt_passes += all(turn.budget is None for turn in turns)
