"""The checks that make up the proof. The proof runs them on the real thing, and `test_faults.py` on planted faults,
where they must fail."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.verify.plain import PlainTree, Row
from forerun.verify.rule import VerificationRule

from .toy import ToyEngine, ToyPair

TOLERANCE = 1e-12


def check_law(engine: ToyEngine, length: int, eos: frozenset[int] = frozenset()) -> float:
    """The committed text has exactly the law of plain decoding; returns the largest difference."""
    error = engine.error(length, eos)
    assert error <= TOLERANCE, f"the law of the text is off by {error:.3g}"
    return error


def check_everything_commits(engine: ToyEngine) -> None:
    """Where the drafter's law is the target's, a sampled chain is accepted whole, and the bonus comes on top."""
    tokens = engine.tokens_per_step()
    assert abs(tokens - (engine.shape.depth + 1)) < 1e-9, f"{tokens} of {engine.shape.depth + 1} tokens committed"


def equal_pair(vocabulary: int, seed: int) -> ToyPair:
    """p = q."""
    table = ToyPair.random(vocabulary, seed).target
    return ToyPair(table, table, table)


class Constant:
    """Noise whose uniforms are all the same number."""

    def __init__(self, u: float) -> None:
        self.u = u

    def accept(self, node: int, rank: int = 0) -> float:
        return self.u

    def final(self, depth: int) -> float:
        return self.u

    def race(self, depth: int) -> Row:
        return torch.ones(3, dtype=torch.float64).numpy()


class ConstantBatch:
    def __init__(self, u: float) -> None:
        self.u = u

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        return torch.full(nodes.shape, self.u, dtype=torch.float64)

    def final(self, depths: Tensor) -> Tensor:
        return torch.full(depths.shape, self.u, dtype=torch.float64)

    def take(self, sequences: Tensor) -> ConstantBatch:
        return self

    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor:
        return p.argmax(-1)


def impossible_draft(drawing: Drawing) -> tuple[DraftTree, Tensor]:
    """A chain whose drafted token 0 has no probability under p = (0, 0, 1)."""
    p = torch.tensor([[[0.0, 0.0, 1.0], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64) if drawing.sampled else None
    return DraftTree.chain(torch.tensor([[1, 0]]), torch.tensor([0]), drawing, q=q), p


def check_zero_uniform(rule: VerificationRule, drawing: Drawing) -> None:
    """u = 0 must not accept a token without probability."""
    tree, p = impossible_draft(drawing)
    plain = rule.reference(PlainTree.of(tree, 0), list(p[0].numpy()), Constant(0.0))
    batched = rule.verify(tree, p, ConstantBatch(0.0))
    assert (plain.path, plain.token) == ((), 2), f"a token of probability 0 was committed: {plain}"
    found = (int(batched.lengths), int(batched.tokens))
    assert found == (0, 2), f"a token of probability 0 was committed: {batched}"


def check_empty_residual(rule: VerificationRule, drawing: Drawing) -> None:
    """A rejection that only rounding can bring about leaves p itself to draw from."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    q = p[:, :1] * (1 + 1e-9)  # above p everywhere, as rounding may leave it
    tree = DraftTree.chain(torch.tensor([[1, 0]]), torch.tensor([0]), drawing, q=q)
    u = 1 - 1e-12
    plain = rule.reference(PlainTree.of(tree, 0), list(p[0].numpy()), Constant(u))
    batched = rule.verify(tree, p, ConstantBatch(u))
    assert (plain.path, plain.token) == ((), 2), plain
    assert (int(batched.lengths), int(batched.tokens)) == (0, 2), batched
