"""A closed form beside its simulation: the pair that `forerun simulate` shows, and that must agree."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.shape import TreeShape
from forerun.theory import checks, closed_form
from forerun.theory.closed_form import RankAcceptance
from forerun.theory.monte_carlo import LONGEST, Progress, Simulation, simulate_chain, simulate_tree


@dataclass(frozen=True)
class Conditions:
    """What a step costs, in target passes, and how it is simulated."""

    draft_cost: float = 0.1
    verify_cost: float = 1.0
    rounds: int = 100_000
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """`distribution[k]` is the closed form's probability of committing k tokens."""

    depth: int
    distribution: tuple[float, ...]
    expected_tokens: float
    speedup: float
    simulation: Simulation

    @property
    def simulated_speedup(self) -> float:
        return self.speedup * self.simulation.mean / self.expected_tokens

    @property
    def deviation(self) -> float | None:
        """How many standard errors the simulation is off; None where every round was the same."""
        if self.simulation.standard_error == 0.0:
            return None
        return (self.simulation.mean - self.expected_tokens) / self.simulation.standard_error


def compare_chain(alpha: float, gamma: int, conditions: Conditions, progress: Progress | None = None) -> Comparison:
    alpha = checks.probability("alpha", alpha)
    gamma = checks.whole("gamma", gamma, most=LONGEST)  # before a list of that length is made
    return Comparison(
        depth=gamma,
        distribution=closed_form.distribution(closed_form.chain_reach([alpha] * gamma)),
        expected_tokens=closed_form.expected_tokens(alpha, gamma),
        speedup=closed_form.speedup(alpha, gamma, conditions.draft_cost, conditions.verify_cost),
        simulation=simulate_chain(alpha, gamma, conditions.rounds, conditions.seed, progress),
    )


def compare_tree(
    shape: TreeShape, ranks: RankAcceptance, conditions: Conditions, progress: Progress | None = None
) -> Comparison:
    """A tree of depth d takes d draft steps: the nodes of a level are drafted together."""
    tokens = closed_form.expected_tokens_of_tree(shape, ranks)
    return Comparison(
        depth=shape.depth,
        distribution=closed_form.distribution(closed_form.tree_reach(shape, ranks)),
        expected_tokens=tokens,
        speedup=closed_form.gain(
            tokens,
            rows=shape.size,
            draft_steps=shape.depth,
            draft_cost=conditions.draft_cost,
            verify_cost=conditions.verify_cost,
        ),
        simulation=simulate_tree(shape, ranks, conditions.rounds, conditions.seed, progress),
    )
