"""What a drafter is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.models.cache import KVCache


@dataclass(frozen=True)
class Budget:
    """How much may be drafted for one sequence in one step. It depends on committed text and on load, never on what
    was drafted, so a sampled tree may be cut to it without changing any law."""

    nodes: int
    """Rows of the target's pass besides the root; 0 drafts nothing."""
    depth: int
    """Tokens ahead; more could not be committed."""


@dataclass(frozen=True)
class Checked:
    """What the target said about every node of a step's tree, those it refused included."""

    tokens: list[int]
    """Of the nodes that were rows of the pass, the root first."""
    parents: list[int]
    """Places in `tokens`; -1 for the root."""
    top: Tensor
    """[nodes, k] the tokens that the target found most likely after each node, by its logits, the likeliest first."""


@dataclass(frozen=True, eq=False)
class StepStates(Mapping[int, Tensor]):
    """Hidden states by layer, of some rows among those that all texts of a step have kept. They are cut out when they
    are asked for: who wants the states of all texts takes the whole."""

    whole: Mapping[int, Tensor]  # [rows of all texts, H] each
    start: int
    count: int

    def __getitem__(self, layer: int) -> Tensor:
        return self.whole[layer][self.start : self.start + self.count]

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@dataclass(frozen=True)
class Observation:
    """What a step committed to one sequence."""

    sequence: Sequence
    tokens: list[int]
    """The committed tokens, which are also the last ones of `sequence.tokens`."""
    features: Mapping[int, Tensor]
    """For each layer asked for, [len(rows), H]: hidden states of the rows that were kept, in order. The first row of a
    step's tree is its root; after a chunk of a prompt there is one for each of its tokens."""
    start: int
    """The absolute position of the first of these rows."""
    checked: Checked | None = None
    """For a drafter that asks for `top` candidates, after a step that checked a tree."""


class Drafter(Protocol):
    """Guesses ahead. It sees committed tokens only; whatever it does to take back its own guesses stays private."""

    @property
    def drawing(self) -> Drawing:
        """How children are drawn for requests that sample. For greedy and for coupled ones any tree is right: there the
        tree should hold the most likely tokens, or the winners of the race with the request's own noise."""
        ...

    @property
    def branches(self) -> bool:
        """Whether its trees may branch. If not, rules for chains apply."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden layers of the target that `observe` wants to see."""
        ...

    @property
    def top(self) -> int:
        """How many of the target's likeliest tokens `observe` wants to see for every node; 0 for none."""
        ...

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        """One tree per sequence. The root is the last committed token, `sequence.tokens[-1]`, at
        `sequence.position`; a budget of 0 nodes gives the root alone."""
        ...

    def observe(self, observations: Many[Observation]) -> None: ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, or out of the cache for a while."""
        ...


@runtime_checkable
class SharesCache(Protocol):
    """A drafter that works in the target's own key/value cache. What it reserves there while it drafts it gives back
    before `draft` returns; committed rows it reads and never changes."""

    def share(self, cache: KVCache) -> None:
        """Told once, before the first draft."""
        ...


@runtime_checkable
class Expects(Protocol):
    """A drafter that was measured once."""

    def gain(self, nodes: int | None) -> float:
        """The tokens that it expects of a tree of so many nodes, None for all that it likes to draft, by what was found
        then; 0 where nothing was."""
        ...


@runtime_checkable
class PutsOff(Protocol):
    """A drafter that reads what it has seen when it is to draft, and not before."""

    def late(self) -> float:
        """Seconds of the host that this took since the last time somebody asked."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """A drafter that sees the target's states of all rows, and keeps what it made of them when a text is over."""

    def resume(self, sequence: Sequence, rows: int) -> int:
        """The target finds the first `rows` of a new text in its cache. Of how many of them the drafter has what it
        needs too; the target computes the others again, and is observed."""
        ...
