"""The notation of trees, as users write it.

5, chain:5             five drafts, one after the other; each is drawn from the draft's law
3,2,1, sampled:3,2,1   three children of the root, two of each of those, one of each of those; drawn without
                       replacement
fixed:3,2,1            the same shape with the most likely tokens
dynamic:8,5,40         EAGLE-2: five levels, the 8 most promising nodes of each get 8 children, and the best 40
                       nodes of all are kept
static:26              Medusa, EAGLE-1: the 26 nodes that were most often right when the drafter was measured, with
                       the most likely tokens
sequoia:26,6           Sequoia: the tree of 26 nodes and 6 levels that promises most, by the same measurement; drawn
                       without replacement

The shape of the last two is known once there is a measurement: see `TreeSpec.measured`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from forerun.core.drawing import Drawing
from forerun.core.shape import TreeShape
from forerun.drafters.drafter import Budget
from forerun.trees.optimal import best_shape
from forerun.trees.static import cartesian, greedy

Kind = Literal["chain", "sampled", "fixed", "dynamic", "static", "sequoia"]

MAX_NODES = 256
MAX_DEPTH = 64
MAX_WIDTH = 64

_DRAWINGS = {
    "chain": Drawing.IID,
    "sampled": Drawing.WITHOUT_REPLACEMENT,
    "fixed": Drawing.FIXED,
    "dynamic": Drawing.FIXED,
    "static": Drawing.FIXED,
    "sequoia": Drawing.WITHOUT_REPLACEMENT,
}
_COUNTS = {"chain": 1, "dynamic": 3, "static": 1, "sequoia": 2}
"""How many numbers a kind has, where that is no matter of its depth."""
_EXAMPLES = (
    'write a chain as "5", a tree as "3,2,1" or "fixed:3,2,1", a dynamic one as "dynamic:8,5,40", a measured one as '
    '"static:26" or "sequoia:26,6"'
)


@dataclass(frozen=True)
class TreeSpec:
    """A tree that a drafter is asked for. Make one with `TreeSpec.parse`."""

    kind: Kind
    numbers: tuple[int, ...]
    """chain: its length; sampled, fixed: children per node, level by level; dynamic: width, depth, size; static: size;
    sequoia: size, depth."""
    found: TreeShape | None = None
    """The shape that a measurement led to, for the kinds that need one."""

    def __post_init__(self) -> None:
        if self.kind not in _DRAWINGS:
            raise ValueError(f"there is no tree of kind {self.kind!r}: {_EXAMPLES}")
        assert self.found is None or self._from_measurement
        wanted = _COUNTS.get(self.kind)
        if not self.numbers or (wanted is not None and len(self.numbers) != wanted):
            raise ValueError(f"the tree {self} has {len(self.numbers)} numbers: {_EXAMPLES}")
        if min(self.numbers) < 1:
            raise ValueError(f"the tree {self} has a number below 1: for no drafts at all use the drafter none")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"the tree {self} is {self.depth} deep: at most {MAX_DEPTH} levels are possible")
        if self._nodes() > MAX_NODES:
            raise ValueError(f"the tree {self} is too large: at most {MAX_NODES} drafted nodes are possible")
        if self.kind == "dynamic":
            width, depth, size = self.numbers
            if width > MAX_WIDTH:
                raise ValueError(f"the tree {self} grows from {width} nodes a level: at most {MAX_WIDTH} are possible")
            if size < max(width, depth):
                raise ValueError(
                    f"the tree {self} keeps {size} nodes: keep at least as many as its width and its depth"
                )

    @classmethod
    def parse(cls, text: str) -> TreeSpec:
        kind, colon, rest = text.strip().rpartition(":")
        if not all(part.strip().isascii() and part.strip().isdigit() for part in rest.split(",")):
            raise ValueError(f"the tree {text!r} is not understood: {_EXAMPLES}")
        numbers = tuple(int(part) for part in rest.split(","))
        if not colon:
            kind = "chain" if len(numbers) == 1 else "sampled"
        return cls(kind.strip(), numbers)  # type: ignore[arg-type]  # a kind that is none is refused

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.numbers))}"

    @property
    def needs_measurement(self) -> bool:
        """Whether its shape is not known before `measured` was asked."""
        return self._from_measurement and self.found is None

    def measured(self, accuracies: Sequence[Sequence[float]]) -> TreeSpec:
        """The same tree with its shape, from `accuracies[d][r]`: of all visits to nodes of depth d, the share in which
        the child of rank r was the accepted one. For kinds that need no measurement, the tree itself.

        A Sequoia tree is chosen for one acceptance by rank, the same at every depth, and so it gets what counting over
        all visits would have given: the average over the depths, each with the weight with which it is reached. The
        first depth alone would promise too much below it, where a drafter feeds on its own guesses, and a plain average
        would listen most to depths that hardly any text gets to.
        """
        if not self._from_measurement:
            return self
        if self.kind == "static":
            known = [row[:MAX_WIDTH] for row in accuracies[:MAX_DEPTH]]
            shape = greedy(known, 1 + self.numbers[0])
        else:
            nodes, depth = self.numbers
            ranks = _over_depths(accuracies[:depth])[:MAX_WIDTH]
            shape = best_shape(ranks, 1 + nodes, depth)[0] if ranks else TreeShape.chain(0)
        if shape.size == 1:
            raise ValueError(
                f"the tree {self} would be empty, since no draft was accepted when it was measured: measure again, or "
                'name a shape, as in "fixed:3,2,1"'
            )
        return replace(self, found=shape)

    @property
    def drawing(self) -> Drawing:
        """How children are drawn for a request that samples without a seed."""
        return _DRAWINGS[self.kind]

    @property
    def dynamic(self) -> bool:
        """Whether the shape is known only when the tokens are."""
        return self.kind == "dynamic"

    @property
    def branches(self) -> bool:
        return self.width > 1

    @property
    def depth(self) -> int:
        """Levels; before a measurement, the most that there may be."""
        if self.found is not None:
            return self.found.depth
        match self.kind:
            case "chain":
                return self.numbers[0]
            case "dynamic" | "sequoia":
                return self.numbers[1]
            case "static":
                return min(self.numbers[0], MAX_DEPTH)
            case _:
                return len(self.numbers)

    @property
    def size(self) -> int:
        """Drafted nodes, at most: the root is not counted."""
        return self._nodes()

    @property
    def width(self) -> int:
        """The most children of one node; before a measurement, the most that there may be."""
        if self.found is not None:
            return self.found.width
        match self.kind:
            case "chain":
                return 1
            case "dynamic":
                return self.numbers[0]
            case "static" | "sequoia":
                return min(self.numbers[0], MAX_WIDTH)
            case _:
                return max(self.numbers)

    @cached_property
    def shape(self) -> TreeShape:
        """Breadth first."""
        assert not self.dynamic, "a dynamic tree gets its shape from its tokens"
        assert not self.needs_measurement, f"the shape of {self} comes from a measurement: ask `measured` first"
        if self.found is not None:
            return self.found
        return TreeShape.chain(self.depth) if self.kind == "chain" else cartesian(self.numbers)

    def cut_size(self, budget: Budget) -> int:
        """How many nodes of `shape`, from the root on, fit a budget. Nodes come breadth first, so these keep their
        parents and elder siblings, and node i is the same node whatever the budget."""
        fit = sum(depth <= budget.depth for depth in self.shape.depths)
        return max(1, min(fit, 1 + budget.nodes))

    def cut(self, budget: Budget) -> TreeShape:
        """The beginning of `shape` that fits a budget. It looks at nothing else, so no law changes."""
        return TreeShape(self.shape.parents[: self.cut_size(budget)])

    def within(self, depth: int) -> TreeSpec:
        """For a drafter that guesses no further: a dynamic tree that is no deeper. Others are cut by a budget."""
        if not self.dynamic:
            return self
        width, own, size = self.numbers
        return replace(self, numbers=(width, min(own, depth), size))

    @property
    def _from_measurement(self) -> bool:
        return self.kind in {"static", "sequoia"}

    def _nodes(self) -> int:
        if self.found is not None:
            return self.found.size - 1
        if self.kind in {"chain", "static", "sequoia"}:
            return self.numbers[0]
        if self.kind == "dynamic":
            width, depth, size = self.numbers
            return min(size, width + width * width * (depth - 1))
        level, nodes = 1, 0
        for width in self.numbers:
            level *= width
            nodes += level
        return nodes


def _over_depths(accuracies: Sequence[Sequence[float]]) -> list[float]:
    """By rank, over all visits. A depth is visited as often as a child was accepted at the one above."""
    total = [0.0] * max(map(len, accuracies), default=0)
    visits, reached = 0.0, 1.0
    for row in accuracies:
        for rank, accuracy in enumerate(row):
            total[rank] += reached * accuracy
        visits += reached
        reached *= min(1.0, sum(row))
    return [share / visits for share in total]
