"""Counter-based noise: a pure function with pinned bits, and as good as independent random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from forerun.core import noise
from forerun.core.noise import Purpose, StepNoise, exponential, gumbel, key_at, mix, row_key, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
Generator = Callable[[Tensor, Tensor], Tensor]
GENERATORS: list[Generator] = [uniform, exponential, gumbel]


def signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def int_mix(z: int) -> int:
    """SplitMix64's output function in Python integers, as published."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def int_unmix(z: int) -> int:
    z ^= (z >> 31) ^ (z >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


def int_bits(seed: int, position: int, purpose: int, index: int) -> int:
    key = int_mix((seed + GOLDEN) & MASK)
    key = int_mix(key ^ (position * GOLDEN & MASK))
    key = int_mix((key + purpose * GOLDEN) & MASK)
    return int_mix((key + (index + 1) * GOLDEN) & MASK) >> 12


def distinct(numbers: Tensor) -> bool:
    return len(set(numbers.flatten().tolist())) == numbers.numel()


def keys(seeds: int | Tensor, positions: int | Tensor, purpose: Purpose = Purpose.TOKEN) -> Tensor:
    return row_key(torch.as_tensor(seeds), torch.as_tensor(positions), purpose)


# --- the bits ------------------------------------------------------------------------------------------------


def test_mix_gives_the_published_splitmix64_sequence() -> None:
    state = torch.tensor([signed(1234567 + step * GOLDEN) for step in range(1, 6)])
    outputs = [value & MASK for value in mix(state).tolist()]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "index", "u", "e", "g"),
    [
        (0, 0, 1, 0, "0x1.76d7d57c1e8c4p-2", "0x1.01455686a51c5p+0", "-0x1.44887ap-8"),
        (1, 0, 1, 0, "0x1.906e90fc7e4e0p-2", "0x1.e0bb2ecc42af2p-1", "0x1.021d78p-4"),
        (0, 1, 1, 0, "0x1.ea63134d49260p-4", "0x1.0fb06a49e9e49p+1", "-0x1.81587cp-1"),
        (0, 0, 2, 0, "0x1.5d54700b2bcc0p-4", "0x1.3b1a9c7014001p+1", "-0x1.cd3f22p-1"),
        (0, 0, 1, 1, "0x1.0e64b021d5074p-2", "0x1.54e35b681cfa3p+0", "-0x1.253ffap-2"),
        (42, 1000, 3, 5 << 20, "0x1.0e5fd0f7d1416p-1", "0x1.46ebc08353cdbp-1", "0x1.cb5f78p-2"),
        (2**63 - 1, 131072, 4, 49151, "0x1.ee81aa97da168p-2", "0x1.74b0d0a27aa96p-1", "0x1.453298p-2"),
        (1234567, 17, 5, 49151, "0x1.20f233b213b18p-1", "0x1.24e840f149922p-1", "0x1.1def9ap-1"),
    ],
)
def test_pinned_values(seed: int, position: int, purpose: int, index: int, u: str, e: str, g: str) -> None:
    """A seed must give the same text in every release: these numbers never change."""
    key, at = keys(seed, position, Purpose(purpose)), torch.tensor(index)
    assert float(uniform(key, at)) == float.fromhex(u)
    assert float(exponential(key, at)) == float.fromhex(e)
    assert float(gumbel(key, at)) == float.fromhex(g)


def test_bits_equal_integer_arithmetic() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**63, 300, dtype=np.int64)
    positions, indices = rng.integers(0, 1 << 40, 300), rng.integers(0, 1 << 40, 300)
    for purpose in Purpose:
        key = row_key(torch.from_numpy(seeds), torch.from_numpy(positions), purpose)
        each = zip(seeds.tolist(), positions.tolist(), strict=True)
        assert key.tolist() == [key_at(seed, position, purpose) for seed, position in each]
        got = uniform(key, torch.from_numpy(indices)).tolist()
        columns = zip(seeds.tolist(), positions.tolist(), indices.tolist(), strict=True)
        assert got == [int_bits(s, p, int(purpose), i) * 2.0**-52 for s, p, i in columns]


def test_purposes_are_distinct() -> None:
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose) == 5
    assert min(Purpose) >= 1
    rows = torch.stack([uniform(keys(7, torch.arange(500), purpose), torch.tensor(3)) for purpose in Purpose])
    assert distinct(rows)


@pytest.mark.parametrize("make", GENERATORS)
def test_same_bits_alone_in_a_batch_permuted_and_sparse(make: Generator) -> None:
    seeds, positions = torch.tensor([5, 5, 9, 2**63 - 1, 0]), torch.tensor([0, 1, 0, 77, 0])
    tokens = torch.arange(1000)
    full = make(keys(seeds, positions)[:, None], tokens)
    assert full.shape == (5, 1000)
    for row in range(5):
        alone = make(keys(int(seeds[row]), int(positions[row])), tokens)
        assert torch.equal(alone, full[row])
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(make(keys(seeds[order], positions[order])[:, None], tokens), full[order])
    few = torch.tensor([999, 0, 512, 512, 31])
    assert torch.equal(make(keys(seeds, positions)[:, None], few), full[:, few])
    assert torch.equal(make(keys(seeds, positions), torch.tensor(17)), full[:, 17])


def test_arguments_are_left_alone() -> None:
    seeds, positions, index = torch.arange(4), torch.arange(4), torch.arange(4)
    key = row_key(seeds, positions, Purpose.ACCEPT)
    before = key.clone()
    for make in GENERATORS:
        make(key, index)
    mix(key)
    assert torch.equal(key, before)
    assert torch.equal(seeds, torch.arange(4))
    assert torch.equal(positions, torch.arange(4))
    assert torch.equal(index, torch.arange(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    seeds, positions, tokens = torch.arange(16) * 12345, torch.arange(16) * 7, torch.arange(49_152)
    for purpose in Purpose:
        here = row_key(seeds, positions, purpose)
        there = row_key(seeds.cuda(), positions.cuda(), purpose)
        for make in GENERATORS:
            assert torch.equal(make(here[:, None], tokens), make(there[:, None], tokens.cuda()).cpu())
    here_step, there_step = StepNoise(seeds, positions), StepNoise(seeds.cuda(), positions.cuda())
    nodes = torch.arange(16) % 5
    assert torch.equal(here_step.accept(nodes, 2), there_step.accept(nodes.cuda(), 2).cpu())
    assert torch.equal(here_step.final(nodes), there_step.final(nodes.cuda()).cpu())
    assert torch.equal(here_step.race(nodes, 5000), there_step.race(nodes.cuda(), 5000).cpu())
    assert torch.equal(here_step.draft(nodes, 9), there_step.draft(nodes.cuda(), 9).cpu())
    assert torch.equal(here_step.draft_race(nodes, 5000), there_step.draft_race(nodes.cuda(), 5000).cpu())


# --- ranges --------------------------------------------------------------------------------------------------


def test_uniforms_are_multiples_of_two_to_the_minus_52_below_one() -> None:
    u = uniform(keys(3, torch.arange(200)[:, None]), torch.arange(500))
    assert u.dtype is torch.float64
    assert bool(((u >= 0) & (u < 1)).all())
    scaled = u * 2.0**52
    assert torch.equal(scaled, scaled.floor())
    assert bool((scaled % 2 == 1).any())  # the last of the 52 bits is in use


def key_with_bits(bits: int) -> Tensor:
    """A key whose number at index 0 consists of exactly these 52 bits: SplitMix64 can be run backwards."""
    return torch.tensor(signed(int_unmix(bits << 12) - GOLDEN))


def test_extremes_stay_positive_and_finite() -> None:
    zero = torch.tensor(0)
    smallest, largest = key_with_bits(0), key_with_bits((1 << 52) - 1)
    assert float(uniform(smallest, zero)) == 0.0
    assert float(uniform(largest, zero)) == 1 - 2.0**-52
    assert float(exponential(smallest, zero)) == pytest.approx(53 * math.log(2), rel=1e-15)
    assert float(exponential(largest, zero)) == pytest.approx(2.0**-53, rel=1e-12)
    assert float(gumbel(smallest, zero)) == pytest.approx(-math.log(53 * math.log(2)), rel=1e-6)
    assert float(gumbel(largest, zero)) == pytest.approx(53 * math.log(2), rel=1e-6)


def test_gumbel_is_minus_log_of_the_exponential() -> None:
    key, tokens = keys(8, torch.arange(20)[:, None]), torch.arange(3000)
    e = exponential(key, tokens)
    assert gumbel(key, tokens).dtype is torch.float32
    assert torch.allclose(gumbel(key, tokens).double(), -torch.log(e), rtol=1e-6, atol=1e-7)
    # So the race and the Gumbel maximum have the same winner.
    p = torch.softmax(torch.randn(20, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2, -1)
    assert torch.equal((p / e).argmax(-1), (p.log() - torch.log(e)).argmax(-1))


# --- quality -------------------------------------------------------------------------------------------------

SIZE = 200_000


def along(what: str, count: int = SIZE) -> Tensor:
    """Keys and indices that vary in one coordinate only, which is where a weak mixer would show."""
    steps = torch.arange(count)
    if what == "seed":
        return uniform(keys(steps, 3), torch.tensor(0))
    if what == "position":
        return uniform(keys(11, steps), torch.tensor(0))
    return uniform(keys(11, 3), steps)


@pytest.mark.parametrize("what", ["seed", "position", "token"])
def test_uniform_in_every_direction(what: str) -> None:
    u = along(what).numpy()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert u.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * SIZE))
    assert u.var() == pytest.approx(1 / 12, rel=0.01)
    assert np.unique(u).size == SIZE
    # Every one of the 52 bits is set half of the time.
    bits = (u * 2.0**52).astype(np.int64)
    for bit in range(52):
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 5 * 0.5 / math.sqrt(SIZE), bit


def test_exponential_and_gumbel_laws() -> None:
    key, tokens = keys(1, torch.arange(100)[:, None]), torch.arange(2000)
    e, g = exponential(key, tokens).flatten().numpy(), gumbel(key, tokens).flatten().double().numpy()
    assert stats.kstest(e, "expon").pvalue > 1e-3
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-3
    assert e.mean() == pytest.approx(1.0, abs=4 / math.sqrt(e.size))
    assert e.var() == pytest.approx(1.0, abs=0.05)
    assert g.mean() == pytest.approx(np.euler_gamma, abs=4 * math.pi / math.sqrt(6 * g.size))
    assert g.var() == pytest.approx(math.pi**2 / 6, rel=0.03)


def independent(x: Tensor, y: Tensor, cells: int = 20) -> float:
    """The p-value of a chi-square test on the joint histogram of two uniforms."""
    cell: NDArray[np.int64] = ((x * cells).long() * cells + (y * cells).long()).flatten().numpy()
    return float(stats.chisquare(np.bincount(cell, minlength=cells * cells)).pvalue)


@pytest.mark.parametrize("gap", [1, 2, 64, 1 << 20])
def test_neighbours_are_independent(gap: int) -> None:
    steps, zero = torch.arange(SIZE), torch.tensor(0)
    start = uniform(keys(steps, 5), zero)
    assert independent(start, uniform(keys(steps + gap, 5), zero)) > 1e-3  # seeds
    start = uniform(keys(5, steps), zero)
    assert independent(start, uniform(keys(5, steps + gap), zero)) > 1e-3  # positions
    start = uniform(keys(5, 6), steps)
    assert independent(start, uniform(keys(5, 6), steps + gap)) > 1e-3  # tokens
    # Seed and position must not trade places, nor position and token.
    assert independent(uniform(keys(steps, steps + gap), zero), uniform(keys(steps + gap, steps), zero)) > 1e-3
    assert independent(uniform(keys(9, steps), zero + gap), uniform(keys(9, steps + gap), zero)) > 1e-3


def test_purposes_are_independent() -> None:
    steps, zero = torch.arange(SIZE), torch.tensor(0)
    rows = {purpose: uniform(keys(2, steps, purpose), zero) for purpose in Purpose}
    for one in Purpose:
        for other in Purpose:
            if one < other:
                assert independent(rows[one], rows[other]) > 1e-3, (one, other)


def test_the_independence_test_sees_dependence() -> None:
    u = along("token", 20_000)
    assert independent(u, (u * 3) % 1) < 1e-6


def test_seeds_of_neighbouring_requests_share_no_rows() -> None:
    """Seed s at position t + 1 is not seed s + 1 at position t, nor any other shift of it."""
    grid = uniform(keys(torch.arange(300)[:, None], torch.arange(300)), torch.tensor(0))
    assert distinct(grid)


# --- the noise of a step -------------------------------------------------------------------------------------


def test_consecutive_steps_never_meet_the_same_accept_number() -> None:
    """Whatever node and rank: were they keyed by the node's position, a step and the next would share some."""
    seen = [
        StepNoise(torch.tensor([7]), torch.tensor([start])).accept(torch.tensor([node]), rank)
        for start in range(100, 108)
        for node in range(20)
        for rank in range(4)
    ]
    values = torch.cat(seen)
    assert distinct(values)


def test_numbers_of_one_step_are_all_different() -> None:
    noise, nodes = StepNoise(torch.full((40,), 3), torch.full((40,), 50)), torch.arange(40)
    numbers = torch.cat(
        [
            *(noise.accept(nodes, rank) for rank in range(5)),
            noise.final(nodes),
            noise.draft(nodes, 6).flatten(),
            -torch.log(noise.race(nodes, 30)).flatten(),
            -torch.log(noise.draft_race(nodes, 30)).flatten(),
        ]
    )
    assert distinct(numbers)


def test_ranks_as_a_tensor_are_the_same_numbers() -> None:
    noise, nodes = StepNoise(torch.arange(6), torch.arange(6) + 9), torch.tensor([0, 1, 2, 0, 5, 5])
    ranks = torch.tensor([0, 1, 2, 3, 0, 1])
    together = noise.accept(nodes, ranks)
    assert together.tolist() == [float(noise.accept(nodes, int(rank))[row]) for row, rank in enumerate(ranks)]
    assert torch.equal(noise.accept(nodes), noise.accept(nodes, 0))


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_final_and_race_are_keyed_by_the_absolute_position(depth: int) -> None:
    seeds, starts = torch.tensor([3, 4]), torch.tensor([20, 0])
    deep = StepNoise(seeds, starts), torch.full((2,), depth)
    root = StepNoise(seeds, starts + depth), torch.zeros(2, dtype=torch.int64)
    assert torch.equal(deep[0].race(deep[1], 500), root[0].race(root[1], 500))
    assert torch.equal(deep[0].final(deep[1]), root[0].final(root[1]))
    assert not torch.equal(deep[0].race(root[1], 500), root[0].race(root[1], 500))
    # What the drafter draws and what is accepted belongs to the step.
    assert not torch.equal(deep[0].accept(deep[1]), root[0].accept(root[1]))
    assert not torch.equal(deep[0].draft(deep[1], 1), root[0].draft(root[1], 1))
    assert not torch.equal(deep[0].draft_race(deep[1], 9), root[0].draft_race(root[1], 9))


def test_race_is_the_token_noise_of_the_position() -> None:
    noise = StepNoise(torch.tensor([3]), torch.tensor([20]))
    expected = exponential(keys(3, 22, Purpose.TOKEN), torch.arange(50))
    assert torch.equal(noise.race(torch.tensor([2]), 50)[0], expected)


def test_rows_of_a_step_do_not_depend_on_the_batch() -> None:
    seeds, starts, nodes = torch.tensor([3, 9, 3]), torch.tensor([20, 1, 21]), torch.tensor([0, 4, 2])
    noise = StepNoise(seeds, starts)
    for row in range(3):
        alone, node = StepNoise(seeds[row : row + 1], starts[row : row + 1]), nodes[row : row + 1]
        assert torch.equal(alone.accept(node, 1)[0], noise.accept(nodes, 1)[row])
        assert torch.equal(alone.final(node)[0], noise.final(nodes)[row])
        assert torch.equal(alone.race(node, 60)[0], noise.race(nodes, 60)[row])
        assert torch.equal(alone.draft(node, 4)[0], noise.draft(nodes, 4)[row])
        assert torch.equal(alone.draft_race(node, 60)[0], noise.draft_race(nodes, 60)[row])
    # More candidates asked for are the same ones first.
    assert torch.equal(noise.draft(nodes, 4), noise.draft(nodes, 9)[:, :4])
    assert torch.equal(noise.race(nodes, 60), noise.race(nodes, 99)[:, :60])


def laws(vocabulary: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """[64, V] laws of one kind."""
    logits = torch.randn(64, vocabulary, dtype=dtype, generator=torch.Generator().manual_seed(vocabulary)) * 3
    if kind == "flat":
        logits = logits * 0.01
    elif kind == "few tokens":
        logits = logits.masked_fill(logits < logits.topk(min(3, vocabulary)).values[:, -1:], -torch.inf)
    elif kind == "one-hot":
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["wide", "flat", "few tokens", "one-hot"])
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 256, 3000, 20_000])
def test_the_first_arrival_is_the_largest_of_p_over_the_race(vocabulary: int, kind: str, dtype: torch.dtype) -> None:
    """The short cut on a CPU misses nobody."""
    p = laws(vocabulary, kind, dtype)
    seeds = torch.arange(64)
    step = StepNoise(seeds, seeds * 5 + 1)
    depths = seeds % 4
    expected = (p / step.race(depths, vocabulary)).argmax(-1)
    assert torch.equal(step.first_arrival(p, depths), expected)


def test_the_first_arrival_of_an_empty_batch() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    assert StepNoise(nobody, nobody).first_arrival(torch.zeros(0, 300), nobody).shape == (0,)


def test_the_earliest_exponential_there_is_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of all ones make E = 2^-53, so a token of tiny probability arrives first, and only just."""
    bits = torch.full((600,), (1 << 52) - 1000)
    bits[599] = (1 << 52) - 1

    def given(key: Tensor, index: Tensor) -> Tensor:
        return bits[index] + key * 0

    monkeypatch.setattr(noise, "_bits", given)
    monkeypatch.setattr("forerun.core.native.choice.library", lambda: None)  # C makes its own bits
    p = torch.ones(1, 600)
    for share, winner in ((1 / 1990, 599), (1 / 2010, 0)):
        p[0, 599] = share  # arrives at 2^-53 / share; the others at 999.5 · 2^-52
        assert noise.first_arrival(p, torch.zeros(1, dtype=torch.int64)).tolist() == [winner]
