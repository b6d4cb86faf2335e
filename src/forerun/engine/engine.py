"""The engine: schedule, draft, one target pass, verify, commit.

Plain decoding is the drafter that proposes nothing; reading a prompt and recomputing a text that had stepped back are
rows before the root of a tree. So there is one loop, and beside it a shortcut: on a device plain decoding goes in runs
of several tokens (`writing_ahead`). The engine knows tokens, not text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from forerun.core.history import History
from forerun.core.largest import largest
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence, never
from forerun.core.step_record import StepRecord
from forerun.drafters.drafter import Checked, Drafter, Observation, SharesCache
from forerun.engine.controller import Controller
from forerun.engine.drafting import draft
from forerun.engine.grammar_walk import begin_walk, reconciled, refuse_misfit
from forerun.engine.judge import Decision, judge
from forerun.engine.laws import SettingsMemo, StepLaws
from forerun.engine.logprobs import logprobs
from forerun.engine.packing import Packed, all_checked, kept_states, pack
from forerun.engine.records import records
from forerun.engine.request import Job, Kind, Request, Update
from forerun.engine.scheduler import Scheduler, Turn
from forerun.engine.statistics import Clock, Statistics
from forerun.engine.writing_ahead import run_length, write
from forerun.models.cache import KVCache
from forerun.models.target import Output, TargetModel, WritesAhead
from forerun.verify.rule import VerificationRule, all_rules, pair, strongest_rule

MAX_NODES = 64
"""Drafted tokens per text and step, if its request sets no smaller number."""
MAX_ROWS = 512
"""Rows of one pass, of all texts together; a longer prompt is read in chunks."""
MAX_AHEAD = 8
"""Tokens that plain decoding on a device writes before the host looks at them."""
MAX_DRAFTING = 12
"""Texts of a step on an accelerator up to which drafts that the host makes are checked. What it does for each text
takes longer than the pass from about there on, while plain decoding writes in runs (docs/log.md)."""
LARGEST_CHANGE = 1e30
"""Of a score, by a bias or a penalty. Far beyond what decides anything, and far below what float32 holds."""


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
        chooses how much is drafted, for any number of texts."""
        if max_batch < 1 or max_rows <= max_batch:
            raise ValueError(f"max_batch is {max_batch} and max_rows {max_rows}: a step needs a row for each text")
        if drafter.branches and not target.branches:
            raise ValueError("this target checks chains only: choose a drafter or a --tree that does not branch")
        self.target, self.drafter, self.rule, self.trace = target, drafter, rule, trace
        self.max_ahead, self.controller = max_ahead, controller
        if max_drafting is None:
            max_drafting = max_batch if controller is not None else _most_drafting(target, drafter)
        self.cache = KVCache(target.new_storage(slots))
        if isinstance(drafter, SharesCache):
            drafter.share(self.cache)
        self.scheduler = Scheduler(
            self.cache,
            max_batch=max_batch,
            max_rows=max_rows,
            max_nodes=MAX_NODES,
            max_drafting=max_drafting,
            prompts_alone=prompts_alone,
            controller=controller,
        )
        self.meanwhile: Callable[[], None] | None = None
        """Called in every step: on an accelerator while it works, so that what it does costs nothing there."""
        self.statistics = Statistics()
        self.history = History(target.vocab_size, target.device)
        self._settings = SettingsMemo()
        self._jobs: dict[int, list[Job]] = {}
        self._cancelled: list[Update] = []
        self._sequences = 0
        self._requests = 0
        self._steps = 0

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
        self._refuse_strays(request)
        self._refuse_overflow(request.params)
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
        clock = Clock(self.target.device)
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
        jobs = [turn.job for turn in turns if turn.budget is not None]
        with clock.phase("draft"):
            tree, broken = draft(turns, self.drafter)
        try:
            packed = pack(turns, tree, self.cache, broken)
            with clock.phase("target"):
                output = self.target.forward_rows(packed.batch, self.cache.storage, self.drafter.layers)
                if self.drafter.top and tree is not None:
                    packed.bring_along(largest(output.logits, self.drafter.top, output.peaks)[1])
            if self.target.device.type != "cpu":
                self._go_on_meanwhile()
            with clock.phase("verify"):
                decisions: list[Decision] = []
                if tree is not None:
                    settings = self._settings.of(jobs, self.target.device)
                    seen_to = output.likeliest is not None and self.target.device.type != "cpu"
                    laws = StepLaws(output.logits, jobs, tree, packed, self.history, settings, checked=seen_to)
                    decisions = judge(tree, output, jobs, packed, laws)
        except BaseException:
            self.cache.abandon()  # texts and cache are as they were before the step
            raise
        used = self.cache.used
        checked = all_checked(packed)
        updates, observations = self._commit(turns, packed, output, decisions, checked)
        with clock.phase("draft"):
            self.drafter.observe(observations)
        clock.stop()
        self._count(turns, packed, clock.seconds, used)
        usual = clock.undisturbed and not any(turn.chain or turn.forced for turn in turns)
        if self.controller is not None and tree is not None and usual:
            drafted = [len(nodes) - 1 for nodes in packed.nodes]
            tokens = [len(updates[place].tokens) for place in range(len(turns))]
            self.controller.observe([job.sequence.id for job in jobs], drafted, tokens, sum(clock.seconds.values()))
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
        self.cache.check_integrity()
        running = {job.sequence.id for job in self.scheduler.running}
        strays = self.cache.holders - running
        if strays:
            raise AssertionError(f"sequences {sorted(strays)} are not running and hold cache")
        for job in self.scheduler.running:
            if self.cache.committed(job.sequence.id) > job.sequence.position:
                raise AssertionError(f"the cache of sequence {job.sequence.id} is ahead of its text")

    # --- adding ------------------------------------------------------------------------------------------------

    def rule_for(self, request: Request) -> VerificationRule:
        """At temperature 0 every lossless rule gives the same text, so the cheapest one is taken."""
        params = request.params
        drawing, chain = self.drafter.drawing, not self.drafter.branches
        name = request.rule or self.rule
        if name is None:
            name = strongest_rule(drawing, chain=chain, greedy=params.greedy, seeded=params.seed is not None)
        rule = pair(name, drawing, chain=chain, greedy=params.greedy)
        return all_rules()["greedy"] if params.greedy and rule.lossless else rule

    def _refuse_strays(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty: give at least one token to go on from")
        vocabulary = self.target.vocab_size
        named = [("prompt", request.prompt), ("logit_bias", list(request.params.logit_bias))]
        for name, tokens in named:
            strays = [token for token in tokens if not 0 <= token < vocabulary]
            if strays:
                raise ValueError(f"{name} names token {strays[0]}, but the vocabulary ends at {vocabulary - 1}")

    def _refuse_overflow(self, params: SamplingParams) -> None:
        """Scores that are no numbers any more are found in the middle of a step, where they would end everybody's."""
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(params, name)
            if abs(value) > LARGEST_CHANGE or (name == "repetition_penalty" and value < 1 / LARGEST_CHANGE):
                raise ValueError(f"{name} is {value!r}, and scores would overflow: give a number of ordinary size")
        for token, bias in params.logit_bias.items():
            if bias > LARGEST_CHANGE:
                raise ValueError(f"the logit_bias of token {token} is {bias!r}, and scores would overflow: give less")
        forbidden = sum(bias < -torch.finfo(torch.float32).max for bias in params.logit_bias.values())
        if forbidden >= self.target.vocab_size:
            raise ValueError("logit_bias forbids every token: leave at least one")

    def _job(self, request: Request, index: int, prompt: list[int], rule: VerificationRule, room: int) -> Job:
        params = reconciled(request.params)
        ends = never if request.ends is None else request.ends()
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.target.eos)
        sequence = Sequence(
            list(prompt),
            min(params.max_tokens, room),
            eos,
            ends,
            id=self._sequences,
            params=params,
            seed=_seed(params, index),
            coupled=rule.name == "gumbel",
        )
        self._sequences += 1
        walk = begin_walk(sequence, self.target.vocab_size)
        job = Job(self._requests, index, sequence, rule, request.draft, walk=walk)
        job.statistics.prompt_tokens = len(request.prompt)  # also where an encoder reads it
        self.statistics.prompt_tokens += len(request.prompt)
        return job

    # --- one step ----------------------------------------------------------------------------------------------

    def _go_on_meanwhile(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    def _write_ahead(self, turns: list[Turn], count: int, clock: Clock) -> list[Update]:
        """Several steps of plain decoding at once."""
        try:
            with clock.phase("target"):
                texts = write(turns, self.target, self.cache, count, self._settings, self._go_on_meanwhile)
        except BaseException:
            self.cache.abandon()
            raise
        used = self.cache.used
        updates: list[Update] = []
        kept: dict[int, range] = {}
        for turn, tokens in zip(turns, texts, strict=True):
            job, sequence = turn.job, turn.job.sequence
            taken = sequence.commit(tokens)
            kept[sequence.id] = range(taken)
            job.statistics.count_plain(taken)
            self.statistics.count_plain(taken)
            kinds: list[Kind] = ["bonus"] * taken
            reason = sequence.finish_reason
            updates.append(Update(job.request, job.index, tokens[:taken], kinds, None, reason, job.statistics))
        self.cache.commit(kept)
        with clock.phase("draft"):
            self.drafter.observe(
                [_plain_observation(turn, update) for turn, update in zip(turns, updates, strict=True)]
            )
        clock.stop()
        self._steps += count
        self.statistics.count_step(clock.seconds, used)
        if self.controller is not None and clock.undisturbed:
            numbers, tokens = [turn.job.sequence.id for turn in turns], [len(update.tokens) for update in updates]
            self.controller.observe(numbers, [0] * len(turns), tokens, sum(clock.seconds.values()), count)
        for turn in turns:
            turn.job.statistics.count_step(clock.seconds, used)
            if turn.job.sequence.finish_reason is not None:
                self._end(turn.job)
        return updates

    def _commit(
        self,
        turns: list[Turn],
        packed: Packed,
        output: Output,
        decisions: list[Decision],
        checked: list[Checked] | None,
    ) -> tuple[dict[int, Update], list[Observation]]:
        """Take what was decided into texts and cache; updates by the place of their turn, and what the drafter may
        see."""
        kept: dict[int, list[int]] = {}
        updates: dict[int, Update] = {}
        seen: list[tuple[Sequence, int, int, Checked | None]] = []
        deciding = 0
        logit_row = 0
        for place, turn in enumerate(turns):
            job, sequence = turn.job, turn.job.sequence
            start = self.cache.committed(sequence.id)
            rows = list(range(turn.chain))
            count = 0
            said = None
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
            seen.append((sequence, count, start, said))
        self.cache.commit(kept)
        states = kept_states(output.features, packed.starts, list(kept.values()))
        return updates, [
            Observation(sequence, sequence.tokens[-count:] if count else [], own, start, said)
            for (sequence, count, start, said), own in zip(seen, states, strict=True)
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

    # --- telling -----------------------------------------------------------------------------------------------

    def _count(self, turns: list[Turn], packed: Packed, seconds: dict[str, float], used: float) -> None:
        self.statistics.count_step(seconds, used)
        self.statistics.rows += packed.batch.rows
        for turn, rows in zip(turns, packed.batch.counts, strict=True):
            turn.job.statistics.count_step(seconds, used)
            turn.job.statistics.rows += rows
            turn.job.statistics.prompt_passes += turn.budget is None
        self.statistics.prompt_passes += all(turn.budget is None for turn in turns)


def _most_drafting(target: TargetModel, drafter: Drafter) -> int | None:
    on_host = not drafter.layers  # what reads the target's states drafts where they are
    return MAX_DRAFTING if on_host and isinstance(target, WritesAhead) and target.device.type == "cuda" else None


def _plain_observation(turn: Turn, update: Update) -> Observation:
    sequence = turn.job.sequence
    return Observation(sequence, update.tokens, {}, sequence.position - len(update.tokens))


def _seed(params: SamplingParams, index: int) -> int:
    """The first of n texts has the request's seed, the others have seeds made from it."""
    if params.seed is None:
        return secrets.randbits(63)
    return (params.seed + index * 0x9E3779B97F4A7C15) % 2**63
