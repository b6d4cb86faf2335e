"""Drafters whose trees are grown and checked in rounds, on a device that has the target's states.

What such a drafter keeps of a text between two steps is brought to the device when a run of rounds is opened, and taken
back when it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.drafters import side_growth
from forerun.drafters.device_growth import DeviceGrowth, fits
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.head_ahead import HeadAhead, HeadRun
from forerun.drafters.rounds import Growth
from forerun.drafters.side_growth import SideGrowth
from forerun.drafters.told import races
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.static.buffers import Bucket, rounded_texts
from forerun.models.static.capture import Graphs


class Opened(Protocol):
    """A run for some texts."""

    def growth(self, spec: TreeSpec) -> Growth: ...

    def bring(self, budgets: Many[Budget]) -> None:
        """To that growth, what it needs. What is captured with it has to be captured before."""
        ...

    def close(self, counts: Many[list[int]]) -> None:
        """`counts` of each round, and in it of each text: the rows that stay. The texts have taken what they were
        given."""
        ...


class InRounds(Protocol):
    @property
    def drafter(self) -> FeatureDrafter | SideDrafter: ...

    @property
    def context_length(self) -> int | None:
        """None where it reads no text."""
        ...

    @property
    def possible(self) -> bool:
        """Whether the trees that it likes can be grown in rounds."""
        ...

    def growth(self, spec: TreeSpec, texts: int, raced: bool) -> Growth:
        """For so many texts, none of them long."""
        ...

    def open(self, sequences: Many[Sequence], spec: TreeSpec, most: int) -> Opened | None:
        """For `most` rounds at most; None where somebody cannot take part."""
        ...

    def read_along(self, observations: Many[Observation], sequences: Many[Sequence]) -> None:
        """Before a step that reads prompts is over: what was observed of some of its texts, all of which `sequences`
        are. Only asked of who reads texts."""
        ...


def in_rounds(drafter: Drafter, graphs: Graphs) -> InRounds | None:
    """None for a drafter that works in another way, or elsewhere, or grows other trees."""
    made: InRounds | None = None
    if isinstance(drafter, SideDrafter):
        made = SideInRounds(drafter, graphs)
    elif isinstance(drafter, FeatureDrafter) and isinstance(drafter.ahead, HeadAhead):
        made = HeadInRounds(drafter, drafter.ahead) if drafter.ahead.model.static is not None else None
    return made if made is not None and made.possible else None


# --- heads that go on from state to state --------------------------------------------------------------------------


class HeadInRounds:
    def __init__(self, drafter: FeatureDrafter, ahead: HeadAhead) -> None:
        self.drafter, self.ahead = drafter, ahead

    @property
    def context_length(self) -> int | None:
        return self.ahead.model.context_length

    @property
    def possible(self) -> bool:
        spec = self.drafter.spec
        return fits(spec) and spec.width <= self.ahead.model.vocab_size

    def growth(self, spec: TreeSpec, texts: int, raced: bool, blocks: int = 1) -> DeviceGrowth:
        """`blocks`: what a text has at most in the head's cache."""
        bucket = Bucket.regular(texts, 1 + spec.depth, blocks, (1,), all_wanted=False)
        return self.ahead.on_device.of(spec, bucket, raced, self.drafter.taus)

    def open(self, sequences: Many[Sequence], spec: TreeSpec, most: int) -> OpenHead | None:
        taken = 1 + spec.depth
        run = self.ahead.open_rounds(sequences, taken, (most - 1) * taken + spec.width * (spec.depth - 1))
        return None if run is None else OpenHead(self, run, list(sequences))

    def read_along(self, observations: Many[Observation], sequences: Many[Sequence]) -> None:
        self.ahead.read_along(observations, sequences)


@dataclass(eq=False)
class OpenHead:
    owner: HeadInRounds
    run: HeadRun
    sequences: list[Sequence]

    def __post_init__(self) -> None:
        self.batch = self.run.brought_rows()

    def growth(self, spec: TreeSpec) -> DeviceGrowth:
        blocks = max(len(each.blocks or ()) for each in self.batch.brought)
        texts = rounded_texts(len(self.sequences))
        self.grown = self.owner.growth(spec, texts, races(self.sequences), blocks)
        return self.grown

    def bring(self, budgets: Many[Budget]) -> None:
        self.grown.bring(self.batch, self.sequences, budgets)

    def close(self, counts: Many[list[int]]) -> None:
        """The head's cache has read all but what the last round took."""
        texts = range(len(self.sequences))
        read = [self.run.unread(b) + sum(own[b] for own in counts[:-1]) for b in texts]
        self.owner.ahead.close_rounds(self.sequences, read, counts[-1], self.grown.waiting(len(texts)))


# --- heads that guess from one state -------------------------------------------------------------------------------


class SideInRounds:
    context_length = None

    def __init__(self, drafter: SideDrafter, graphs: Graphs) -> None:
        self.drafter, self.graphs, self.pool = drafter, graphs, graphs.pool()
        self.known: dict[tuple[Any, ...], SideGrowth] = {}

    @property
    def possible(self) -> bool:
        return side_growth.fits(self.drafter.heads, self.drafter.spec)

    def growth(self, spec: TreeSpec, texts: int, raced: bool) -> SideGrowth:
        key = spec, texts, raced
        if key not in self.known:
            own = self.drafter
            self.known[key] = SideGrowth(own.heads, spec, texts, raced, own.taus, self.graphs, self.pool)
        return self.known[key]

    def open(self, sequences: Many[Sequence], spec: TreeSpec, most: int) -> OpenSide | None:
        states = [self.drafter.state(sequence) for sequence in sequences]
        present = [state for state in states if state is not None]
        return OpenSide(self, list(sequences), torch.stack(present)) if len(present) == len(states) else None

    def read_along(self, observations: Many[Observation], sequences: Many[Sequence]) -> None:
        """It reads no text, but the last state of each."""


@dataclass(eq=False)
class OpenSide:
    owner: SideInRounds
    sequences: list[Sequence]
    states: Tensor

    def growth(self, spec: TreeSpec) -> SideGrowth:
        self.grown = self.owner.growth(spec, rounded_texts(len(self.sequences)), races(self.sequences))
        return self.grown

    def bring(self, budgets: Many[Budget]) -> None:
        self.grown.bring(self.states, self.sequences, budgets)

    def close(self, counts: Many[list[int]]) -> None:
        self.owner.drafter.go_on(self.sequences, self.grown.states[: len(self.sequences)].clone())
