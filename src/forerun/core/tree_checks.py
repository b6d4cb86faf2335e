"""What makes a draft tree invalid. These checks read the device, so a caller on a hot path may leave them out."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.drawing import Drawing


def refuse_bad_parents(parents: Tensor) -> None:
    nodes = torch.arange(parents.shape[1], device=parents.device)
    if bool((parents[:, 0] != -1).any()):
        raise ValueError("node 0 is the root: its parent must be -1")
    bad = (parents < -1) | (parents >= nodes)
    if bool(bad.any()):
        b, node = bad.nonzero()[0].tolist()
        raise ValueError(
            f"sequence {b}: node {node} has parent {int(parents[b, node])}, but a parent must come before its "
            f"child (a cycle or a wrong order)"
        )
    orphan = (parents >= 1) & (parents.gather(1, parents.clamp_min(0)) < 0)
    if bool(orphan.any()):
        b, node = orphan.nonzero()[0].tolist()
        raise ValueError(f"sequence {b}: the parent of node {node} is padding")


def refuse_bad_children(parents: Tensor, children: Tensor) -> None:
    nodes = torch.arange(parents.shape[1], device=parents.device)
    if children.dim() != 3 or children.shape[:2] != parents.shape:
        raise ValueError(f"children {tuple(children.shape)} do not fit {nodes.numel()} nodes: they must be [B, N, K]")
    inside = children.clamp(0, nodes.numel() - 1)
    mothers = parents.gather(1, inside.flatten(1)).view_as(children)
    bad = (children != -1) & ((children != inside) | (mothers != nodes[:, None]))
    if bool(bad.any()):
        b, node, rank = bad.nonzero()[0].tolist()
        raise ValueError(
            f"sequence {b}: node {int(children[b, node, rank])} is listed as a child of {node} but is none"
        )
    if bool(((children[:, :, :-1] < 0) & (children[:, :, 1:] >= 0)).any()):
        raise ValueError("children lists the draws of a node from the left, without gaps")


def refuse_bad_draws(tokens: Tensor, children: Tensor, q: Tensor, q_rows: Tensor, drawing: Drawing) -> None:
    if q.dim() != 3 or q.shape[0] != tokens.shape[0]:
        raise ValueError(f"q {tuple(q.shape)} does not fit {tokens.shape[0]} sequences: it must be [B, R, V]")
    if q_rows.shape != children.shape:
        raise ValueError(f"q_rows {tuple(q_rows.shape)} must have the width of children {tuple(children.shape)}")
    drawn = children >= 0
    if bool((drawn & ((q_rows < 0) | (q_rows >= q.shape[1]))).any()):
        raise ValueError(f"a draw names a row of q that is not there: q has {q.shape[1]} rows")
    token = tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
    if bool((drawn & ((token < 0) | (token >= q.shape[2]))).any()):
        raise ValueError(f"a drafted token lies outside q's vocabulary of {q.shape[2]}")
    if bool(drawn.any()):
        b, node, rank = drawn.nonzero(as_tuple=True)
        chance = q[b, q_rows[b, node, rank], token[b, node, rank]]
        if not bool(((chance > 0) & (chance <= 1.001)).all()):
            raise ValueError("q does not hold the probability that a drafted token was drawn with: keep the law itself")
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        twins = (token[..., :, None] == token[..., None, :]) & drawn[..., :, None] & drawn[..., None, :]
        if bool((twins.sum((-1, -2)) > drawn.sum(-1)).any()):
            raise ValueError("siblings drawn without replacement must be different tokens")
    if drawing is not Drawing.INDEPENDENT and children.shape[2] > 0:
        rows = or_first(q_rows, drawn)
        if bool((rows != rows[:, :, :1]).any()) and _laws_differ(q, rows):
            raise ValueError(f"children drawn {drawing.value} must share one law: use 'independent' for several")


def or_first(q_rows: Tensor, drawn: Tensor) -> Tensor:
    """q_rows with the row of the node's first real draw where nothing was drawn, and 0 where nothing ever was."""
    if drawn.shape[-1] == 0:
        return q_rows
    first = drawn.to(torch.int64).argmax(-1, keepdim=True)
    row = torch.where(drawn.any(-1, keepdim=True), q_rows.gather(-1, first), 0)
    return torch.where(drawn, q_rows, row)


def _laws_differ(q: Tensor, rows: Tensor) -> bool:
    """Whether draws at one node come from laws that are really different."""
    batch, size, width = rows.shape
    vocabulary = q.shape[2]
    laws = q.gather(1, rows.view(batch, -1, 1).expand(-1, -1, vocabulary)).view(batch, size, width, vocabulary)
    return bool((laws != laws[:, :, :1]).any())
