"""Counter-based noise: every number is a pure function of (seed, absolute position, purpose, index).

Nothing is drawn in sequence, so the bits do not depend on the batch, on the order of work or on the device,
and any single number can be made anywhere. That is what lets a drafter rank its candidates with the very
noise that the target will use later (Gumbel coupling), and what makes a request reproducible inside any batch.

The generator is SplitMix64 read at random places: `mix` is its output function, and a row's key is the
seed, the position and the purpose mixed in one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.largest import above
from forerun.core.native import choice as native
from forerun.kernels.kernel import Kernel
from forerun.kernels.race import race_on_device


class Purpose(IntEnum):
    """What a number is for. Two purposes never share a number."""

    TOKEN = 1  # which token the target takes at a position; shared by drafter and target under coupling
    FINAL = 2  # the token drawn where a walk ends, keyed by the position of that token
    ACCEPT = 3  # accept or reject a draft, keyed by the position where the step starts
    DRAFT = 4  # what the drafter draws, keyed by the position where the step starts
    DRAFT_RACE = 5  # the same for draws without replacement


def _signed(constant: int) -> int:
    """Torch has no full uint64 arithmetic; int64 wraps to the same bits. Python's own numbers do not wrap, and torch
    refuses one that needs more than 64 bits."""
    constant %= 1 << 64
    return constant - (1 << 64) if constant >> 63 else constant


_ALL = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64, on int64 [..]; the masks make the shifts logical ones."""
    x = ((x >> 30).bitwise_and_((1 << 34) - 1)).bitwise_xor_(x).mul_(_FIRST)
    x = ((x >> 27).bitwise_and_((1 << 37) - 1)).bitwise_xor_(x).mul_(_SECOND)
    return ((x >> 31).bitwise_and_((1 << 33) - 1)).bitwise_xor_(x)


def row_key(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """One 64-bit key per row from int64 seeds and positions (any shapes that broadcast)."""
    key = mix(seeds + _GOLDEN)
    key = mix(key ^ (positions * _GOLDEN))
    return mix(key + _signed(int(purpose) * _GOLDEN))


def key_at(seed: int, position: int, purpose: Purpose) -> int:
    """`row_key` of one row in Python's own numbers: for a few rows that is less than thirty operations on tensors."""
    key = _mixed(seed + _GOLDEN)
    key = _mixed(key ^ position * _GOLDEN)
    return _signed(_mixed(key + int(purpose) * _GOLDEN))


def _mixed(x: int) -> int:
    """`mix`; of x the lowest 64 bits count."""
    x &= _ALL
    x = (x ^ x >> 30) * _FIRST & _ALL
    x = (x ^ x >> 27) * _SECOND & _ALL
    return x ^ x >> 31


def _bits(key: Tensor, index: Tensor) -> Tensor:
    """52 random bits for each (key, index)."""
    return (mix(key + (index + 1) * _GOLDEN) >> 12).bitwise_and_((1 << 52) - 1)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """float64 on [0, 1): a multiple of 2^-52, so 0 can occur and 1 cannot."""
    return _bits(key, index).to(torch.float64).mul_(2.0**-52)


def exponential(key: Tensor, index: Tensor) -> Tensor:
    """float64 standard exponentials, between 1e-16 and 37: −log of (bits + ½) · 2^-52."""
    inside = _bits(key, index).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return exact.log(inside).neg_()


def gumbel(key: Tensor, index: Tensor) -> Tensor:
    """float32 standard Gumbel numbers, −log of the exponential of the same key and index.

    argmax(log p + gumbel) and argmax(p / exponential) are the same token; the second form needs no
    logarithm of p, whose last bit would depend on the device.
    """
    return exact.log(exponential(key, index)).neg_().to(torch.float32)


def first_arrival(p: Tensor, key: Tensor) -> Tensor:
    """argmax p / exponential(key) for rows p [C, V] and keys [C]: token x arrives at the time E(x)/p(x), and the first
    to arrive is a draw from p.

    On a CPU the noise is what costs, so it is made only for tokens that may win: where top_k or top_p left few tokens,
    for those; else the best of a few tokens arrives at some time t, and who is earlier has E < p·t. Since
    E = −log U ≥ 1 − U, that takes 1 − U < p·t, which a handful fulfil, and only they need a logarithm.
    """
    if p.device.type != "cpu":
        return race(p, key)
    if not p.shape[0]:
        return key
    if native.usable(p):
        return native.race(p, key)
    tokens = torch.arange(p.shape[1])
    row, token = above(p, torch.zeros_like(p[:, :1]))
    if 8 * row.shape[0] > p.numel():
        few = torch.cat([tokens[:: max(1, p.shape[1] // 256)].expand(p.shape[0], -1), exact.argmax(p)[:, None]], 1)
        t = (exponential(key[:, None], few) / p.gather(1, few)).amin(1, keepdim=True)  # [C, 1] float64
        late = _bits(key[:, None], tokens).neg_().add_((1 << 52) - 1).to(p.dtype)  # (1 − U) · 2^52, rounded down
        possible = late <= p * (t * (2.0**52 * 1.001)).to(p.dtype)  # the thousandth covers the rounding
        row, token = possible.nonzero(as_tuple=True)
    scores = p[row, token] / exponential(key[row], token)
    # Into one short row each, in the order of tokens: the first of equals wins, as in argmax.
    counts = torch.bincount(row, minlength=p.shape[0])
    start = counts.cumsum(0) - counts
    slot = torch.arange(row.shape[0]) - start[row]
    table = scores.new_zeros(p.shape[0], int(counts.max()))
    table[row, slot] = scores
    return token[start + table.argmax(1)]


def _plain_race(p: Tensor, key: Tensor) -> Tensor:
    """With the noise of all tokens."""
    return exact.argmax(p / exponential(key[:, None], torch.arange(p.shape[1], device=p.device)))


race = Kernel("race", race_on_device, _plain_race)

_DRAWS_PER_NODE = 1 << 20


@dataclass(frozen=True)
class StepNoise:
    """All the noise of one step, for a batch: `seeds` [B], and `starts` [B], the absolute position of the
    first token this step decides (the root's position + 1).

    Accept numbers are keyed by where the step starts, not by the node's position: block and traversal
    verification look at drafts beyond the token where they stop, and the next step must not meet the same
    numbers again at the same positions.
    """

    seeds: Tensor
    starts: Tensor

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        """[B] uniforms for the `rank`-th draw at `nodes` [B]."""
        key = row_key(self.seeds, self.starts, Purpose.ACCEPT)
        return uniform(key, nodes * _DRAWS_PER_NODE + rank)

    def final(self, depths: Tensor) -> Tensor:
        """[B] uniforms for drawing the token that follows a node at `depths` [B]."""
        return uniform(row_key(self.seeds, self.starts + depths, Purpose.FINAL), torch.zeros_like(depths))

    def token_keys(self, sequences: list[int], depth: int) -> list[int]:
        """The keys of the races of `first_arrival` for some sequences of the batch, behind nodes at `depth`."""
        seeds, starts = self.seeds.tolist(), self.starts.tolist()
        return [key_at(seeds[b], starts[b] + depth, Purpose.TOKEN) for b in sequences]

    def race(self, depths: Tensor, vocabulary: int) -> Tensor:
        """[B, V] exponentials of the position after nodes at `depths` [B]: the token is argmax p / race."""
        key = row_key(self.seeds, self.starts + depths, Purpose.TOKEN)
        return exponential(key[:, None], torch.arange(vocabulary, device=key.device))

    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor:
        """[B] the winners of that race, for p [B, V]."""
        return first_arrival(p, row_key(self.seeds, self.starts + depths, Purpose.TOKEN))

    def take(self, sequences: Tensor) -> StepNoise:
        """The noise of some sequences of the batch."""
        return StepNoise(self.seeds[sequences], self.starts[sequences])

    def draft(self, nodes: Tensor, count: int) -> Tensor:
        """[B, count] uniforms for drawing children of `nodes` [B]."""
        key = row_key(self.seeds, self.starts, Purpose.DRAFT)
        ranks = torch.arange(count, device=key.device)
        return uniform(key[:, None], nodes[:, None] * _DRAWS_PER_NODE + ranks)

    def draft_race(self, nodes: Tensor, vocabulary: int) -> Tensor:
        """[B, V] exponentials for drawing children of `nodes` [B] without replacement."""
        key = mix(row_key(self.seeds, self.starts, Purpose.DRAFT_RACE) + nodes * _GOLDEN)
        return exponential(key[:, None], torch.arange(vocabulary, device=key.device))
