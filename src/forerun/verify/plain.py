"""The plain side of verification: one sequence, lists and numpy, code that reads like the equations.

The batched forms are held against these, verdict for verdict. Uniform numbers only ever stand on the left of
`<`, perhaps after a multiplication, so that the proof can put an object there which takes both branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.core.exact import UNIT
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree

Row = NDArray[Any]  # [V] float32 or float64


class Uniform(Protocol):
    """A number on [0, 1): a float, or the proof's stand-in for all of them."""

    def __mul__(self, factor: float, /) -> Any: ...
    def __lt__(self, bound: float, /) -> bool: ...


class PlainNoise(Protocol):
    """The noise of one step of one sequence; see `StepNoise` for what each number is keyed by."""

    def accept(self, node: int, rank: int = 0) -> Uniform: ...
    def final(self, depth: int) -> Uniform: ...
    def race(self, depth: int) -> Row: ...


@dataclass(frozen=True)
class Draw:
    """One sample of a child: the node it became, and the row of q it came from."""

    child: int
    q_row: int


@dataclass(frozen=True)
class PlainTree:
    """One tree of a batch, as lists."""

    tokens: list[int]
    parents: list[int]
    children: list[list[Draw]]  # in the order drawn; equal tokens drawn twice are two draws of one node
    q: Row | None  # [R, V]

    @classmethod
    def of(cls, tree: DraftTree, b: int) -> PlainTree:
        rows = tree.children[b].tolist()
        laws = rows if tree.q_rows is None else tree.q_rows[b].tolist()
        children = [
            [Draw(child, law) for child, law in zip(row, law_row, strict=True) if child >= 0]
            for row, law_row in zip(rows, laws, strict=True)
        ]
        q = None if tree.q is None else tree.q[b].cpu().numpy()
        return cls(tree.tokens[b].tolist(), tree.parents[b].tolist(), children, q)

    def law(self, draw: Draw) -> Row:
        assert self.q is not None, "only sampled trees have q"
        row: Row = self.q[draw.q_row]
        return row


@dataclass(frozen=True)
class PlainVerdict:
    path: tuple[int, ...]  # accepted nodes
    token: int  # the last token, drawn from the target


@dataclass(frozen=True)
class SequenceNoise:
    """Sequence b of a batch's noise, as plain numbers."""

    noise: StepNoise
    b: int
    vocabulary: int

    def _row(self) -> StepNoise:
        return StepNoise(self.noise.seeds[self.b : self.b + 1], self.noise.starts[self.b : self.b + 1])

    def accept(self, node: int, rank: int = 0) -> float:
        return float(self._row().accept(torch.tensor([node], device=self.noise.seeds.device), rank))

    def final(self, depth: int) -> float:
        return float(self._row().final(torch.tensor([depth], device=self.noise.seeds.device)))

    def race(self, depth: int) -> Row:
        depths = torch.tensor([depth], device=self.noise.seeds.device)
        row: Row = self._row().race(depths, self.vocabulary)[0].cpu().numpy()
        return row


def mass(weights: Row) -> float:
    """Σ of the weights, counted in units of 2^-50 so that no order of summation matters."""
    return int(np.floor(weights * weights.dtype.type(UNIT)).astype(np.int64).sum()) / UNIT


def draw(weights: Row, u: Uniform) -> int:
    """The token at quantile u of the law proportional to `weights`: the first with u · total < cumulative."""
    counts = np.floor(weights * weights.dtype.type(UNIT)).astype(np.int64)
    level = u * float(counts.sum())
    cumulative = 0
    for token in np.flatnonzero(counts):
        cumulative += int(counts[token])
        if level < float(cumulative):
            return int(token)
    raise AssertionError("a law without weight cannot be drawn from")


def positive(weights: Row) -> Row:
    """[z]+"""
    part: Row = np.maximum(weights, 0)
    return part


def follow(tree: PlainTree, choose: Callable[[int, int], int]) -> PlainVerdict:
    """Walk from the root: `choose(node, depth)` is the target's token there; while a child holds it, move."""
    path: list[int] = []
    node = 0
    while True:
        token = choose(node, len(path))
        matches = [draw.child for draw in tree.children[node] if tree.tokens[draw.child] == token]
        if not matches:
            return PlainVerdict(tuple(path), token)
        node = matches[0]
        path.append(node)
