"""All outcomes of a rule, with their exact probabilities.

A rule meets its uniform numbers only in comparisons `u < t` and `u * c < t`. `World` hands it stand-ins that
take both sides: the code under test runs once for every combination of answers, each uniform shrinks to the
interval that gives those answers, and the product of the interval lengths is the probability of the outcome.
Nothing is sampled and nothing of the rule is written a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

Outcome = TypeVar("Outcome")
Key = tuple[str, int, int]


class NeedsRaceError(Exception):
    """The rule uses Gumbel noise: it is not enumerated but compared with plain sampling token for token."""


@dataclass
class AnyUniform:
    """Every number of an interval at once; asking where it lies splits the world."""

    world: World
    low: float = 0.0
    high: float = 1.0

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, factor)

    def __lt__(self, bound: float) -> bool:
        if bound <= self.low or bound >= self.high:
            return bound >= self.high
        if self.world.decide():
            self.high = bound
            return True
        self.low = bound
        return False

    def __le__(self, bound: float) -> bool:
        return self < bound  # they differ on a set without length


@dataclass(frozen=True)
class Scaled:
    uniform: AnyUniform
    factor: float

    def __lt__(self, bound: float) -> bool:
        if self.factor == 0:
            return bound > 0
        return self.uniform < bound / self.factor

    def __le__(self, bound: float) -> bool:
        return self < bound


@dataclass
class World:
    """One way through a rule; `script` holds the answers that are settled, `taken` all that were given."""

    script: list[bool]
    taken: list[bool] = field(default_factory=list)
    uniforms: dict[Key, AnyUniform] = field(default_factory=dict)

    def decide(self) -> bool:
        answer = self.script[len(self.taken)] if len(self.taken) < len(self.script) else True
        self.taken.append(answer)
        return answer

    def _uniform(self, key: Key) -> AnyUniform:
        return self.uniforms.setdefault(key, AnyUniform(self))

    def accept(self, node: int, rank: int = 0) -> AnyUniform:
        return self._uniform(("accept", node, rank))

    def final(self, depth: int) -> AnyUniform:
        return self._uniform(("final", depth, 0))

    def race(self, depth: int) -> NoReturn:
        raise NeedsRaceError

    @property
    def probability(self) -> float:
        product = 1.0
        for uniform in self.uniforms.values():
            product *= uniform.high - uniform.low
        return product

    def middles(self) -> dict[Key, float]:
        """One number for each uniform that leads to this very outcome, away from the thresholds."""
        return {key: (uniform.low + uniform.high) / 2 for key, uniform in self.uniforms.items()}


@dataclass(frozen=True)
class Branch(Generic[Outcome]):
    probability: float
    uniforms: dict[Key, float]
    outcome: Outcome


def all_outcomes(run: Callable[[World], Outcome]) -> Iterator[Branch[Outcome]]:
    """Run once for every combination of answers that can occur."""
    open_scripts: list[list[bool]] = [[]]
    while open_scripts:
        world = World(open_scripts.pop())
        settled = len(world.script)
        outcome = run(world)
        for place in range(settled, len(world.taken)):
            open_scripts.append([*world.taken[:place], not world.taken[place]])
        yield Branch(world.probability, world.middles(), outcome)
