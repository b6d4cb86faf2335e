"""Closed forms of speculative decoding: tokens per step, speedup, the best draft length.

p is the target's law, q the draft's. A step commits the accepted drafts and one more token of the target, so
plain decoding commits 1 token per step and γ drafts commit between 1 and γ + 1. Everything here follows from
one list: R_d, the probability that the draft at depth d is accepted (R_0 = 1 is the root). Then

    E[tokens] = Σ_d R_d        P(k tokens) = R_{k-1} − R_k
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.core.shape import TreeShape
from forerun.theory import checks
from forerun.theory.costs import PassCosts

if TYPE_CHECKING:
    import torch

RankAcceptance = Sequence[float] | Sequence[Sequence[float]]
"""a_b by child rank b, the same at every depth; or one such list per depth."""

VerifyCost = float | Mapping[int, float]
"""v(γ), the checking pass in target passes: one number, or measured by rows (γ + 1 of them)."""

LONGEST = 32


def expected_tokens(alpha: float, gamma: int) -> float:
    """E = (1 − α^{γ+1})/(1 − α), tokens per step with i.i.d. acceptance α and γ drafts; γ + 1 at α = 1."""
    alpha = checks.probability("alpha", alpha)
    gamma = checks.whole("gamma", gamma)
    if alpha == 1.0:
        return gamma + 1.0
    if alpha == 0.0:
        return 1.0
    # 1 − α^{γ+1} as −expm1((γ+1)·ln α): near α = 1 the plain difference would lose every digit.
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1.0 - alpha)


def accepted_drafts(alpha: float, gamma: int) -> float:
    """E − 1 = α(1 − α^γ)/(1 − α), without the cancellation of subtracting 1 when α is small."""
    gamma = checks.whole("gamma", gamma)
    return checks.probability("alpha", alpha) * expected_tokens(alpha, gamma - 1) if gamma else 0.0


def speedup(alpha: float, gamma: int, draft_cost: float, verify_cost: VerifyCost = 1.0) -> float:
    """E/(v(γ) + γc) against plain decoding; c, one draft step, and v are counted in target passes.

    γ = 0 is plain decoding itself, hence exactly 1 whatever v is.
    """
    tokens = expected_tokens(alpha, gamma)
    return gain(tokens, rows=gamma + 1, draft_steps=gamma, draft_cost=draft_cost, verify_cost=verify_cost)


def gain(tokens: float, *, rows: int, draft_steps: int, draft_cost: float, verify_cost: VerifyCost = 1.0) -> float:
    """Tokens per step over the step's cost in target passes, for a chain or a tree of any kind."""
    draft_cost = checks.non_negative("draft_cost", draft_cost)
    if isinstance(verify_cost, Mapping):
        check = PassCosts.in_target_passes(verify_cost).at(rows)
    else:
        check = checks.positive("verify_cost", verify_cost)
    return 1.0 if rows == 1 else tokens / (check + draft_steps * draft_cost)


def best_gamma(alpha: float, draft_cost: float, verify_cost: VerifyCost = 1.0, max_gamma: int = LONGEST) -> int:
    """The γ of 0..max_gamma with the largest speedup; 0 says: do not speculate. Ties go to the smaller γ.

    With measured costs only the γ whose γ + 1 rows lie within the measurements are considered.
    """
    longest = checks.whole("max_gamma", max_gamma)
    if isinstance(verify_cost, Mapping):
        longest = min(longest, PassCosts.in_target_passes(verify_cost).most_rows - 1)
    best, most = 0, speedup(alpha, 0, draft_cost, verify_cost)
    for gamma in range(1, longest + 1):
        # A tie may differ in the last digit (α = c = 0.7: 1.7/1.7), so a longer draft must win by more.
        if (candidate := speedup(alpha, gamma, draft_cost, verify_cost)) > most * (1.0 + 1e-12):
            best, most = gamma, candidate
    return best


def acceptance(p: ArrayLike | torch.Tensor, q: ArrayLike | torch.Tensor) -> NDArray[np.float64]:
    """α = Σ_x min(p(x), q(x)) = 1 − TV(p, q), one per row: p and q are [..., V], the answer is [...]."""
    target, draft = _laws("p", p), _laws("q", q)
    if target.shape != draft.shape:
        raise ValueError(f"p has shape {target.shape} and q {draft.shape}: give both over the same rows and tokens")
    shared: NDArray[np.float64] = np.minimum(target, draft).sum(axis=-1)
    return np.minimum(shared, 1.0)  # a sum of rounded numbers may pass 1 by a hair


def chain_reach(by_depth: Iterable[float]) -> tuple[float, ...]:
    """R_d for a chain, from the acceptance at each depth given that the draft before it was accepted."""
    reach = [1.0]
    for depth, value in enumerate(by_depth):
        reach.append(reach[-1] * checks.probability(f"acceptance at depth {depth + 1}", value))
    return tuple(reach)


def expected_tokens_by_depth(by_depth: Iterable[float]) -> float:
    """Σ_d Π_{i ≤ d} a_i: a chain whose acceptance changes as it gets longer."""
    return math.fsum(chain_reach(by_depth))


def node_reach(shape: TreeShape, ranks: RankAcceptance) -> tuple[float, ...]:
    """For each node, the probability that it is accepted: the product of a_rank along its path."""
    table = rank_table(shape, ranks)
    reach = [1.0]
    for parent, rank, depth in zip(shape.parents[1:], shape.ranks[1:], shape.depths[1:], strict=True):
        reach.append(reach[parent] * table[depth - 1][rank])
    return tuple(reach)


def tree_reach(shape: TreeShape, ranks: RankAcceptance) -> tuple[float, ...]:
    """R_d for a tree: the nodes of one depth exclude each other, so their probabilities add up."""
    reach = [0.0] * (shape.depth + 1)
    for depth, probability in zip(shape.depths, node_reach(shape, ranks), strict=True):
        reach[depth] += probability
    return tuple(reach)


def expected_tokens_of_tree(shape: TreeShape, ranks: RankAcceptance) -> float:
    """Σ over the nodes, the root included, of the product of a_rank along the node's path."""
    return math.fsum(node_reach(shape, ranks))


def distribution(reach: Sequence[float]) -> tuple[float, ...]:
    """P(k tokens) = R_{k-1} − R_k, as a list over k from 0; a step never commits 0, so the first is 0."""
    return (0.0, *(here - after for here, after in zip(reach, (*reach[1:], 0.0), strict=True)))


def rank_table(shape: TreeShape, ranks: RankAcceptance) -> tuple[tuple[float, ...], ...]:
    """One checked list of a_b per depth of the tree, wide enough for the nodes that are there."""
    if not len(ranks):
        raise ValueError("rank acceptance is empty: give the acceptance of at least the first child")
    if isinstance(ranks[0], Sequence):
        rows = cast(Sequence[Sequence[float]], ranks)
        table = [checks.rank_acceptance(f"rank acceptance at depth {d + 1}", row) for d, row in enumerate(rows)]
    else:
        row = checks.rank_acceptance("rank acceptance", cast(Sequence[float], ranks))
        table = [row] * shape.depth
    if shape.depth > len(table):
        raise ValueError(
            f"the tree is {shape.depth} deep, the acceptances {len(table)}: add some depths or cut the tree"
        )
    for rank, depth in zip(shape.ranks[1:], shape.depths[1:], strict=True):
        if rank >= len(table[depth - 1]):
            raise ValueError(
                f"the tree has {rank + 1} siblings at depth {depth}, the acceptance "
                f"{len(table[depth - 1])} ranks: add ranks or narrow the tree"
            )
    return tuple(table[: shape.depth])


def _laws(name: str, law: Any) -> NDArray[np.float64]:
    # A tensor may sit on a device, require grad or be bfloat16, none of which numpy can read.
    array = law.detach().cpu().double().numpy() if hasattr(law, "detach") else law
    laws = np.asarray(array, dtype=np.float64)
    if laws.ndim == 0 or laws.shape[-1] == 0:
        raise ValueError(f"{name} has shape {laws.shape}: give rows over the vocabulary")
    if not np.isfinite(laws).all() or (laws < 0.0).any():
        raise ValueError(f"{name} has negative or non-finite entries: give probabilities, not logits")
    if np.abs(laws.sum(axis=-1) - 1.0).max(initial=0.0) > 1e-4:
        raise ValueError(f"{name} has rows that do not add up to 1: normalise them, in float32 or better")
    return laws
