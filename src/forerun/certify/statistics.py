"""Tests of a law, their correction and their power, from torch alone.

Power is stated for the worst error of its size. If a law is off by δ, the statistic of a G-test over cells e has the
noncentrality λ ≈ n·Σδ²/e, and by Cauchy and Schwarz Σδ²/e ≥ (Σ|δ|)² = 4·TV². So n samples see *every* error of the
cells' law with TV ≥ √(λ/4n), where λ is what the test needs; most errors are seen earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0
"""Counts of a cell, below which a chi-square law describes them badly."""
POWER = 0.95


@dataclass(frozen=True)
class Fit:
    """Counts against a law."""

    samples: int
    cells: int
    statistic: float
    total_variation: float
    """Of what was counted, over the cells. Of right counts it is not 0 either: see `sampled.Distance`."""

    @property
    def freedom(self) -> int:
        return self.cells - 1

    @property
    def p_value(self) -> float:
        return survival(self.statistic, self.freedom)


def fit(counts: Tensor, law: Tensor) -> Fit | None:
    """The G-test of counts [V] against a law [V], with Williams' correction; None where there are no two cells.

    Tokens are put in the order of their probability, and rare ones share a cell with their neighbours, so that each
    cell is expected at least five times. What the law forbids counts to the last cell."""
    order = law.argsort(descending=True, stable=True)
    observed, expected = counts[order].double(), law[order].double()
    n = float(observed.sum())
    cell = _cells((expected * (n / expected.sum())).tolist())
    count = int(cell.max()) + 1
    if count < 2:
        return None
    o = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, observed)
    e = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, expected)
    e *= n / e.sum()
    g = 2 * torch.where(o > 0, o * (o / e).log(), 0.0).sum()
    williams = 1 + float((n / e).sum() - 1) / (6 * n * (count - 1))
    return Fit(int(n), count, float(g) / williams, float((o - e).abs().sum()) / (2 * n))


def balance(hits: Sequence[float], chances: Sequence[float]) -> Fit | None:
    """Events against their chances, each of its own: the squared distance of their numbers in standard deviations."""
    chance = torch.tensor(chances, dtype=torch.float64).clamp(0, 1)
    variance = float((chance * (1 - chance)).sum())
    if variance < LEAST_EXPECTED:
        return None
    excess = math.fsum(hits) - float(chance.sum())
    return Fit(len(chances), 2, excess**2 / variance, abs(excess) / len(chances))


def _cells(expected: list[float]) -> Tensor:
    """The cell of each token, the likeliest first; what is left in the end joins the last one."""
    cells, cell, held = [], 0, 0.0
    left = math.fsum(expected)
    for value in expected:
        cells.append(cell)
        held += value
        left -= value
        if held >= LEAST_EXPECTED and left >= LEAST_EXPECTED:
            cell, held = cell + 1, 0.0
    return torch.tensor(cells)


def survival(x: float, freedom: int) -> float:
    """P(χ² > x)"""
    return float(torch.special.gammaincc(_wide(freedom / 2), _wide(max(0.0, x) / 2)))


def visible_error(samples: int, freedom: int, level: float) -> float:
    """The total variation from which on a G-test at that level sees an error with a chance of 95%."""
    return min(1.0, math.sqrt(noncentrality(freedom, level) / (4 * samples)))


def samples_for(error: float, freedom: int, level: float) -> int:
    """How many samples see an error of that total variation with a chance of 95%."""
    return math.ceil(noncentrality(freedom, level) / (4 * error**2))


def noncentrality(freedom: int, level: float) -> float:
    """λ for which a noncentral χ² passes the critical value with a chance of 95%."""
    critical = _solve(lambda x: level - survival(x, freedom))
    return _solve(lambda value: _noncentral_survival(critical, freedom, value) - POWER)


def _noncentral_survival(x: float, freedom: int, noncentral: float) -> float:
    """A χ² whose degrees of freedom grow by twice a Poisson number of mean λ/2."""
    mean = noncentral / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean) + 60), dtype=torch.float64)
    log_weight = j * math.log(max(mean, 1e-300)) - mean - torch.lgamma(j + 1)
    return float((log_weight.exp() * torch.special.gammaincc(freedom / 2 + j, _wide(x / 2).expand_as(j))).sum())


def _solve(rising: Callable[[float], float]) -> float:
    """Where a rising function passes 0, above 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _wide(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


PERMUTATIONS = 4999
Text = Sequence[int]


def same_source(pairs: Sequence[tuple[Sequence[Text], Sequence[Text]]], seed: int) -> float:
    """p-value of a permutation test that both sides of every pair, the texts after one context, have one law.

    The statistic is the squared distance of the sides' mean vectors of tokens and pairs of tokens: counts of what is
    written and in which order are what a wrong rule shifts, and permuting texts within a context is exact for any
    statistic and any length of text."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.zeros((), dtype=torch.float64)
    shuffled = torch.zeros(PERMUTATIONS, dtype=torch.float64)
    for one, other in pairs:
        likeness = _likeness([*one, *other])
        sides = torch.cat([torch.full((len(one),), 1 / len(one)), torch.full((len(other),), -1 / len(other))]).double()
        found += sides @ likeness @ sides
        orders = torch.rand(PERMUTATIONS, len(sides), generator=generator).argsort(1)
        mixed = sides[orders]  # [permutations, texts]
        shuffled += ((mixed @ likeness) * mixed).sum(1)
    return (1 + int((shuffled >= found - 1e-12).sum())) / (1 + PERMUTATIONS)


def _likeness(texts: Sequence[Text]) -> Tensor:
    """[n, n] cosines between the texts' counts of tokens and of pairs."""
    ids: dict[Text, int] = {}
    rows, columns = [], []
    for row, text in enumerate(texts):
        grams = [(token,) for token in text] + list(pairwise(text))
        rows += [row] * len(grams)
        columns += [ids.setdefault(gram, len(ids)) for gram in grams]
    counts = torch.zeros(len(texts), max(1, len(ids)), dtype=torch.float64)
    counts.index_put_((torch.tensor(rows), torch.tensor(columns)), _wide(1.0), accumulate=True)
    counts = torch.nn.functional.normalize(counts, dim=1)
    return counts @ counts.T
