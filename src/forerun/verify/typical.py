"""Typical acceptance (Medusa, Cai et al. 2024). **Lossy**: it accepts what is plausible under p, not what p would
draw, so the text no longer has the target's law. Asked for by name only.

x is accepted if p(x) > min(ε, δ·exp(−H(p))); the longest path of accepted nodes wins, of equals the one that ends
in the earliest node, and the token after it is drawn from p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import entries, rows, where
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule

EPSILON = 0.09
DELTA = 0.3
"""Medusa's published settings: δ = √ε."""


def _entropy(p: Tensor) -> Tensor:
    """H of rows [..., V] in float64, counted in units of 2^-40 so that no order of summation matters."""
    wide = p.to(torch.float64)
    terms = wide * -_log(wide)
    return (terms * 2.0**40).to(torch.int64).sum(-1).to(torch.float64) * 2.0**-40


def _log(p: Tensor) -> Tensor:
    return exact.log(p.clamp_min(torch.finfo(torch.float64).tiny))


def _plausible(p: Tensor, entropy: Tensor) -> Tensor:
    """p > min(ε, δ·exp(−H)), by logarithms: exp() does not round alike everywhere."""
    return (p > EPSILON) | (_log(p) + entropy > math.log(DELTA))


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    paths: dict[int, tuple[int, ...]] = {0: ()}  # of accepted nodes
    for node, parent in enumerate(tree.parents):
        if parent not in paths:
            continue
        law = torch.from_numpy(p[parent])
        if _plausible(law[tree.tokens[node]].to(torch.float64), _entropy(law)):
            paths[node] = (*paths[parent], node)
    stop = max(paths, key=lambda node: (len(paths[node]), -node))
    return PlainVerdict(paths[stop], draw(p[stop], noise.final(len(paths[stop]))))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    accepted = torch.zeros_like(tree.tokens, dtype=torch.bool)
    accepted[:, 0] = True
    entropy = torch.zeros(tree.batch, tree.size, dtype=torch.float64, device=p.device)
    inner = (tree.children >= 0).any(-1)
    for node in range(tree.size):  # parents come first
        if node:
            parent = tree.parents[:, node].clamp_min(0)
            here = parent[:, None]
            p_x = entries(p, parent, tree.tokens[:, node])
            fits = _plausible(p_x, entropy.gather(1, here).squeeze(1)) & (tree.parents[:, node] >= 0)
            accepted[:, node] = fits & accepted.gather(1, here).squeeze(1)
        wanted = accepted[:, node] & inner[:, node]
        if wanted.any():
            chosen = where(wanted)
            entropy[chosen, node] = _entropy(rows(p, torch.full_like(chosen, node), chosen))
    length, stop = torch.where(accepted, tree.depths, -1).max(-1)  # the first of equals
    on_path = rows(tree.ancestors, stop) & (tree.depths > 0)
    slots = torch.where(on_path, tree.depths - 1, tree.max_depth)
    nodes = tree.tokens.new_full((tree.batch, tree.max_depth + 1), -1)
    order = torch.arange(tree.size, device=p.device).expand_as(slots)
    nodes = nodes.scatter(1, slots, torch.where(on_path, order, -1))[:, : tree.max_depth]
    return Verdict(nodes, length, exact.draw(rows(p, stop), noise.final(length)), stop)


RULE = VerificationRule(
    name="typical",
    summary="LOSSY: accept whatever is plausible under p",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=verify,
    lossless=False,
)
