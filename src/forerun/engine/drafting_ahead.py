"""Drafting on a device in runs: several rounds before the host has to look at one.

A learned head drafts where the target checks, so a round can tell the next all it needs without the host
(`drafters/rounds.py`). One round is always under way while the host reads what the one before took: what it does for
every text costs nothing then. When texts have ended, or somebody wants to join, the round that is under way is the
last; what a text was given after its end is dropped, as drafts are that were accepted beyond it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.core.law import law
from forerun.core.noise import StepNoise
from forerun.core.transfer import Homeward
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.host_growth import plain_laws
from forerun.drafters.in_rounds import InRounds, Opened, in_rounds
from forerun.drafters.rounds import Choose, Rounds, RoundsOf
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.judge import LIKELIEST, Decision, one_way, takes_the_likeliest
from forerun.engine.laws import SettingsMemo
from forerun.engine.packing import Packed, kept_states
from forerun.engine.request import Job
from forerun.engine.scheduler import Turn
from forerun.engine.statistics import Clock
from forerun.models.cache import KVCache
from forerun.models.static.rows import Result
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer
from forerun.verify.rule import all_rules

MOST_ROUNDS = 8
"""Of a run: what they take comes to its readers together."""
ENDED = 8
"""A run goes on while less than one in so many texts have ended: for them it works in vain, but to begin another run
takes the host as long as the device a round, with many texts."""

SMALLER = (1, 2, 3, 4, 6, 7, 11, 15, 23, 31, 47, 63)
"""Sizes of trees where a text may not have all that its drafter likes. Each is captured on its own."""


class DraftingAhead:
    """What one target and one drafter have for it."""

    def __init__(self, target: Transformer, drafts: InRounds, cache: KVCache) -> None:
        assert target.static is not None
        self.target, self.drafts, self.cache = target, drafts, cache
        self.rounds = RoundsOf(target.static, cache.storage)

    @classmethod
    def of(cls, target: TargetModel, drafter: Drafter, cache: KVCache) -> DraftingAhead | None:
        """None where one of them works elsewhere, or in another way."""
        if not isinstance(target, Transformer) or not drafter.layers or cache.storage.whole is None:
            return None
        if not target.prepared:  # else the first engine of a target would never know
            target.prepare()
        if target.static is None:
            return None
        drafts = in_rounds(drafter, target.static.graphs)
        return None if drafts is None else cls(target, drafts, cache)

    def begin(self, turns: Many[Turn], most: int, settings: SettingsMemo) -> Run | None:
        """A run of up to `most` rounds, with what it needs reserved; None where every round has to be
        looked at."""
        spec, sequences = self._spec(turns), [turn.job.sequence for turn in turns]
        if spec is None or not self.target.writes_ahead or not plain_laws(sequences):
            return None
        way = one_way(_way(turn.job) for turn in turns)
        if way is None:
            return None
        taken, reach = 1 + spec.depth, self.target.context_length
        if self.drafts.context_length is not None:
            reach = min(reach, self.drafts.context_length)
        most = min(most, MOST_ROUNDS, max(sequence.remaining for sequence in sequences))

        def rows(rounds: int) -> int:
            return (rounds - 1) * taken + 1 + spec.size

        def room(rounds: int) -> bool:
            needed = sum(self.cache.blocks_for(sequence.id, rows(rounds)) for sequence in sequences)
            longest = max(sequence.position for sequence in sequences) + rounds * taken
            return needed <= self.cache.free_blocks and longest < reach

        while most > 1 and not room(most):
            most -= 1
        if most < 2:
            return None
        opened = self.drafts.open(sequences, spec, most)
        if opened is None:
            return None
        for sequence in sequences:
            self.cache.reserve(sequence.id, rows(most))
        return Run(self, list(turns), spec, opened, most, way, settings)

    def read_along(self, turns: Many[Turn], packed: Packed, features: Mapping[int, Tensor]) -> bool:
        """The drafter reads the prompts of a step that is under way, whose rows stay whatever it decides: what the host
        does for that costs nothing while the target works. Whether it did."""
        reading = [place for place, turn in enumerate(turns) if turn.chain]
        if not reading or self.drafts.context_length is None:
            return False
        starts, chains = [packed.starts[place] for place in reading], [range(turns[place].chain) for place in reading]
        seen = [
            Observation(turns[place].job.sequence, [], states, self.cache.committed(turns[place].job.sequence.id))
            for place, states in zip(reading, kept_states(features, starts, chains), strict=True)
        ]
        self.drafts.read_along(seen, [turn.job.sequence for turn in turns])
        return True

    def _spec(self, turns: Many[Turn]) -> TreeSpec | None:
        """The tree that all of them may have who may have one; the others' rows are there as well, and come to
        nothing."""
        if any(turn.budget is None or turn.chain or turn.forced for turn in turns):
            return None
        allowed = [turn.budget.nodes for turn in turns if turn.budget is not None and turn.budget.nodes]
        if 2 * len(allowed) < len(turns):
            return None
        return self._within(min(allowed))

    def _within(self, nodes: int) -> TreeSpec:
        spec = self.drafts.drafter.spec
        if spec.size <= nodes:
            return spec
        size = max(size for size in SMALLER if size <= nodes)
        return replace(spec, numbers=(min(spec.width, size), min(spec.depth, size), size))

    def prepare(self, texts: int, nodes: Iterable[int]) -> None:
        """Capture the rounds of so many texts, with trees within each of the `nodes`."""
        for spec in dict.fromkeys(self._within(each) for each in nodes if each):
            for raced in (False, True):
                self.rounds.of(self.drafts.growth(spec, texts, raced), 1)


def _way(job: Job) -> str | None:
    """The rule that tells a node's token from logits and noise alone; None where it takes more."""
    if job.walk is not None or job.sequence.params.logprobs is not None or job.rule.choose is None:
        return None
    return LIKELIEST if takes_the_likeliest(job) else job.rule.name


@dataclass(eq=False)
class Run:
    """Iterate over `rounds`, which gives a verdict on each text's tree."""

    owner: DraftingAhead
    turns: list[Turn]
    spec: TreeSpec
    opened: Opened
    most: int
    way: str
    settings: SettingsMemo
    counts: list[list[int]] = field(default_factory=list)
    """Of each round, and in it of each text: the rows that stay."""

    def __post_init__(self) -> None:
        self.nodes = [self._limit(turn).nodes for turn in self.turns]
        """That are drafted for each text in a round."""
        self.rows = 1 + self.spec.size
        """Of each text in a round."""

    def stop(self) -> None:
        """The round that is under way is the last."""
        self.most = 0

    @property
    def worn(self) -> bool:
        """Whether so many texts have ended that others should take their places."""
        ended = sum(turn.job.sequence.finish_reason is not None for turn in self.turns)
        return ended * ENDED >= max(len(self.turns), 1)

    def rounds(self, clock: Clock, meanwhile: Callable[[], None]) -> Iterator[list[Decision]]:
        rounds = self._begin()
        choose = None if self.way == LIKELIEST else self._choose(rounds)
        launched = 0
        flying: deque[Homeward] = deque()
        while flying or launched < self.most:
            if launched < self.most:
                with clock.phase("draft"):
                    rounds.draft()
                with clock.phase("target"):
                    rounds.check()
                with clock.phase("verify"):
                    flying.append(Homeward(rounds.settle(choose)))
                launched += 1
                if launched == 1:
                    meanwhile()
            if len(flying) > 1 or launched >= self.most:
                yield self._decisions(flying.popleft().here())
        self.opened.close(self.counts)

    def _begin(self) -> Rounds:
        sequences = [turn.job.sequence for turn in self.turns]
        blocks = [self.owner.cache.blocks(sequence.id) for sequence in sequences]
        rounds = self.owner.rounds.of(self.opened.growth(self.spec), max(map(len, blocks)))
        self.opened.bring([self._limit(turn) for turn in self.turns])
        rounds.begin([sequence.position for sequence in sequences], blocks)
        return rounds

    def _limit(self, turn: Turn) -> Budget:
        """What a request allows; where its text ends is found by the host."""
        assert turn.budget is not None
        depth = turn.job.draft.depth
        nodes, width = min(self.spec.size, turn.budget.nodes), self.spec.width
        depth = min(nodes, self.spec.depth if depth is None else min(self.spec.depth, depth))
        return Budget(min(nodes, width + width * width * max(0, depth - 1)), depth)

    def _choose(self, rounds: Rounds) -> Choose:
        device, count = rounds.device, len(self.turns)
        owners = torch.arange(count, device=device).repeat_interleave(rounds.nodes)
        columns = self.settings.of([turn.job for turn in self.turns], device).take(owners)
        draw = all_rules()[self.way].choose
        assert draw is not None
        told = rounds.growth.told

        def choose(result: Result, tree: DraftTree) -> Tensor:
            rows = owners.shape[0]
            p = law(result.logits[:rows], columns, checked=True)
            noise = StepNoise(told["seeds"][:count], told["positions"][:count] + 1)
            chosen = draw(p, noise.take(owners), tree.depths[:count].reshape(-1))
            return torch.where(result.likeliest[:rows] < 0, -1, chosen)

        return choose

    def _decisions(self, verdicts: Tensor) -> list[Decision]:
        """From nodes and tokens on the way, how many there are, and whether drafts were refused at the last."""
        steps = 1 + self.spec.depth
        made, counts = [], []
        for row in verdicts[: len(self.turns)].tolist():
            count = row[2 * steps]
            tokens = row[steps : steps + count]
            if min(tokens) < 0:
                raise ValueError("the logits of a row hold NaN or infinity: the model's output is broken")
            made.append(Decision(row[1:count], tokens, bool(row[2 * steps + 1])))
            counts.append(count)
        self.counts.append(counts)
        return made
