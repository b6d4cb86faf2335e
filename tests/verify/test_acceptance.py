"""How much the rules accept, measured on wide laws with fixed seeds: the orders that the papers prove."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.core import drawing as draws
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.verify.rule import all_rules

from .drafting import Drafted, draw_trees, generator

VOCABULARY = 200
DISTANCES = [0.4, 0.9]
"""The spread of log q around log p; total variation is about 0.16 and 0.34."""
CHAIN = TreeShape.chain(4)
FORK = TreeShape.from_rank_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)])
BUSH = TreeShape.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])


@dataclass(frozen=True)
class Mean:
    value: float
    error: float

    @classmethod
    def of(cls, numbers: Tensor) -> Mean:
        numbers = numbers.to(torch.float64)
        return cls(float(numbers.mean()), float(numbers.std()) / math.sqrt(len(numbers)))


def laws(distance: float, batch: int, depths: int) -> tuple[Tensor, Tensor]:
    """p and q [B, depths, V]: a law belongs to a context, here to a sequence and a depth."""
    rng = generator(int(100 * distance))
    scores = 1.5 * torch.randn(batch, depths, VOCABULARY, generator=rng)
    shifted = scores + distance * torch.randn(scores.shape, generator=rng)
    return scores.softmax(-1), shifted.softmax(-1)


def step_noise(batch: int) -> StepNoise:
    return StepNoise(torch.arange(batch), torch.full((batch,), 9))


def sampled(shape: TreeShape, drawing: Drawing, distance: float, batch: int) -> Drafted:
    p, q = laws(distance, batch, shape.depth + 1)
    depths = torch.tensor(shape.depths)
    parents = torch.tensor(shape.parents).expand(batch, -1)
    return draw_trees(generator(0), step_noise(batch), drawing, parents, p[:, depths], q[:, depths])


def tokens(rule: str, drafted: Drafted) -> Tensor:
    """[B] the tokens committed by one step."""
    return all_rules()[rule].verify(drafted.tree, drafted.p, drafted.noise).lengths + 1


def candidates(distance: float, batch: int, *, coupled: bool) -> Drafted:
    """Two candidates at every node: the most likely ones, or those that arrive first in the target's own race."""
    p, q = laws(distance, batch, BUSH.depth + 1)
    noise = step_noise(batch)
    depths = torch.tensor(BUSH.depths)
    found = []
    for depth in range(BUSH.depth):
        race = noise.race(torch.full((batch,), depth), VOCABULARY)
        law = q[:, depth]
        found.append(draws.race_children(law, race, 2) if coupled else draws.top_children(law, 2))
    columns = [torch.zeros(batch, dtype=torch.int64)]
    columns += [found[BUSH.depths[node] - 1][:, BUSH.ranks[node]] for node in range(1, BUSH.size)]
    tree = DraftTree.from_shape(BUSH, torch.stack(columns, 1), noise.starts - 1, Drawing.FIXED)
    return Drafted(tree, p[:, depths], noise)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(
    ("better", "worse", "drawing", "shape", "batch"),
    [
        ("block", "chain_rejection", Drawing.IID, CHAIN, 2000),
        ("traversal", "recursive_without_replacement", Drawing.WITHOUT_REPLACEMENT, FORK, 2000),
        ("recursive_iid", "sample_match", Drawing.IID, BUSH, 2000),
        ("recursive_without_replacement", "recursive_fixed", Drawing.WITHOUT_REPLACEMENT, BUSH, 2000),
    ],
)
def test_the_better_rule(
    better: str, worse: str, drawing: Drawing, shape: TreeShape, batch: int, distance: float
) -> None:
    """Both judge the same drafts with the same noise; the mean difference is beyond 3 standard errors."""
    drafted = sampled(shape, drawing, distance, batch)
    gain = Mean.of(tokens(better, drafted) - tokens(worse, drafted))
    assert gain.value > 3 * gain.error > 0, gain


@pytest.mark.parametrize("distance", DISTANCES)
def test_two_coupled_candidates_beat_the_two_most_likely(distance: float) -> None:
    coupled = tokens("gumbel", candidates(distance, 2000, coupled=True))
    fixed = tokens("recursive_fixed", candidates(distance, 2000, coupled=False))
    gain = Mean.of(coupled - fixed)
    assert gain.value > 3 * gain.error > 0, gain
    uncoupled = Mean.of(coupled - tokens("gumbel", candidates(distance, 2000, coupled=False)))
    assert uncoupled.value > 3 * uncoupled.error > 0, uncoupled


@pytest.mark.parametrize("name", ["chain_rejection", "recursive_iid", "recursive_without_replacement"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_the_first_draft_is_accepted_with_the_common_mass(name: str, distance: float) -> None:
    """α = Σ min(p, q) = 1 − TV."""
    drafted = sampled(TreeShape.chain(1), Drawing.IID, distance, 6000)
    assert drafted.tree.q is not None
    alpha = torch.minimum(drafted.p[:, 0], drafted.tree.q[:, 0]).sum(-1).to(torch.float64)
    off = Mean.of((tokens(name, drafted) - 1).to(torch.float64) - alpha)
    assert abs(off.value) < 4 * off.error
    assert off.error < 0.007  # or else agreeing would mean nothing


@pytest.mark.parametrize("distance", DISTANCES)
def test_one_coupled_candidate_matches_often_enough(distance: float) -> None:
    """At least (1 − TV)/(1 + TV), where uncoupled candidates match with Σ p·q only."""
    batch = 8000
    p, q = laws(distance, batch, 2)
    noise = step_noise(batch)
    candidate = draws.race_children(q[:, 0], noise.race(torch.zeros_like(noise.seeds), VOCABULARY), 1)
    drafted = torch.cat([torch.zeros_like(candidate), candidate], 1)
    tree = DraftTree.chain(drafted, noise.starts - 1, Drawing.FIXED)
    match = (tokens("gumbel", Drafted(tree, p, noise)) - 1).to(torch.float64)
    common = torch.minimum(p[:, 0], q[:, 0]).sum(-1).to(torch.float64)
    above = Mean.of(match - common / (2 - common))
    assert above.value > 3 * above.error, above
    below = Mean.of(common - match)  # no coupling passes 1 − TV
    assert below.value > -3 * below.error, below
