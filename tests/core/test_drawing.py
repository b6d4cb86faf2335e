"""Drawing children: the law a rule assumes is the law they really have."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import ABSENT, iid_children, race_children, top_children
from forerun.core.noise import StepNoise

SIZE = 40_000


def steps(seed: int) -> tuple[StepNoise, Tensor]:
    """Many steps of one request, each drawing at its root."""
    return StepNoise(torch.full((SIZE,), seed), torch.arange(SIZE)), torch.zeros(SIZE, dtype=torch.int64)


def fits(drawn: Tensor, law: dict[tuple[int, ...], float]) -> float:
    """The p-value of the drawn tuples under an exact law, which must hold everything that was drawn."""
    assert sum(law.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(law, 0)
    for row in drawn.tolist():
        counts[tuple(row)] += 1
    observed = [counts[key] for key in law]
    return float(stats.chisquare(observed, [law[key] * len(drawn) for key in law]).pvalue)


def without_replacement(q: list[float], count: int) -> dict[tuple[int, ...], float]:
    """Plackett–Luce: each draw from what is left, renormalised."""
    law = {}
    support = [token for token, weight in enumerate(q) if weight > 0]
    for order in permutations(support, count):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= q[token] / left
            left -= q[token]
        law[order] = chance
    return law


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_race_is_sampling_without_replacement_in_order(count: int, dtype: torch.dtype) -> None:
    q = [0.4, 0.0, 0.3, 0.2, 0.1]
    noise, nodes = steps(seed=11)
    drawn = race_children(torch.tensor(q, dtype=dtype).expand(SIZE, -1), noise.draft_race(nodes, 5), count)
    assert drawn.shape == (SIZE, count)
    assert fits(drawn, without_replacement(q, count)) > 1e-3


def test_race_draws_at_two_nodes_are_independent() -> None:
    q = [0.5, 0.3, 0.2]
    noise, nodes = steps(seed=3)
    rows = torch.tensor(q).expand(SIZE, -1)
    first = race_children(rows, noise.draft_race(nodes, 3), 1)
    second = race_children(rows, noise.draft_race(nodes + 1, 3), 1)
    law: dict[tuple[int, ...], float] = {(x, y): q[x] * q[y] for x, y in product(range(3), repeat=2)}
    assert fits(torch.cat([first, second], 1), law) > 1e-3


def test_race_does_not_change_with_the_scale_of_q() -> None:
    noise, nodes = steps(seed=5)
    race = noise.draft_race(nodes, 4)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).expand(SIZE, -1)
    assert torch.equal(race_children(q, race, 3), race_children(q * 0.25, race, 3))


def test_race_with_the_noise_of_the_target_puts_its_token_first() -> None:
    """Gumbel coupling: with q = p the first candidate is the token that plain sampling will take."""
    noise, nodes = StepNoise(torch.arange(200), torch.full((200,), 9)), torch.zeros(200, dtype=torch.int64)
    p = torch.softmax(torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)), -1)
    race = noise.race(nodes, 1000)
    candidates = race_children(p, race, 4)
    assert torch.equal(candidates[:, 0], (p / race.to(p.dtype)).argmax(-1))
    scores = (p.double() / race).gather(1, candidates)
    assert bool((scores[:, :-1] >= scores[:, 1:]).all())


def test_iid_children_are_independent_samples_of_q() -> None:
    q = [0.5, 0.0, 0.3, 0.2]
    noise, nodes = steps(seed=7)
    drawn = iid_children(torch.tensor(q).expand(SIZE, -1), noise.draft(nodes, 2))
    support = [token for token, weight in enumerate(q) if weight > 0]
    law: dict[tuple[int, ...], float] = {(x, y): q[x] * q[y] for x, y in product(support, repeat=2)}
    assert fits(drawn, law) > 1e-3
    assert bool((drawn[:, 0] == drawn[:, 1]).any())


def test_iid_children_are_the_quantiles_of_their_uniforms() -> None:
    q = torch.softmax(torch.randn(3, 5, 300, generator=torch.Generator().manual_seed(1)), -1)
    u = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = iid_children(q, u)
    assert drawn.shape == (3, 5, 4)
    for k in range(4):
        assert torch.equal(drawn[..., k], exact.draw(q, u[..., k]))
    none = iid_children(q, u[..., :0])
    assert none.shape == (3, 5, 0)
    assert none.dtype is torch.int64


def test_absent_where_the_law_has_too_few_tokens() -> None:
    q = torch.tensor([[0.0, 0.75, 0.0, 0.25], [0.0, 0.0, 1.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    race = torch.ones(3, 4, dtype=torch.float64)
    expected = [[1, 3, ABSENT, ABSENT, ABSENT], [2, *[ABSENT] * 4], [3, 2, 1, 0, ABSENT]]
    assert race_children(q, race, 5).tolist() == expected
    assert top_children(q, 5).tolist() == expected
    assert top_children(q, 2).tolist() == [row[:2] for row in expected]
    assert top_children(q, 0).shape == (3, 0)


def test_unlikely_tokens_are_drawn_last_not_lost() -> None:
    q = torch.tensor([[1.0, 1e-30, 0.0, 1e-20]])
    noise = StepNoise(torch.tensor([1]), torch.tensor([2]))
    assert race_children(q, noise.draft_race(torch.tensor([0]), 4), 4).tolist() == [[0, 3, 1, ABSENT]]


@pytest.mark.parametrize("vocabulary", [5, 300, 5000])
def test_top_children_are_the_likeliest_in_order(vocabulary: int) -> None:
    q = torch.softmax(torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2, -1)
    top = top_children(q, 5)
    assert torch.equal(q.gather(1, top), q.sort(-1, descending=True).values[:, :5])
    assert torch.equal(top, q.argsort(-1, descending=True)[:, :5])


def test_ties_of_top_children() -> None:
    """Which of the tied come, and in which order, is open; that they are different and likeliest is not."""
    q = torch.tensor([[0.125, 0.25, 0.125, 0.25, 0.125, 0.125], [1 / 6] * 6])
    for count in range(1, 7):
        top = top_children(q, count)
        assert torch.equal(q.gather(1, top), q.sort(-1, descending=True).values[:, :count])
        assert all(len(set(row)) == count for row in top.tolist())
        for row in range(2):  # a deterministic function of its own row
            assert torch.equal(top_children(q[row : row + 1], count)[0], top[row])
    assert set(top_children(q, 2)[0].tolist()) == {1, 3}
