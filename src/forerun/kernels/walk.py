"""Down a draft tree along the tokens that the target takes, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.kernel import Kernel, ahead, power_of_two


@dataclass(frozen=True)
class Walked:
    """How far the walks down B trees came. S = depth + 1 is the most nodes that one can meet."""

    nodes: Tensor  # [B, S] the nodes on the way, the root first; −1 behind the last
    tokens: Tensor  # [B, S] what the target takes behind each of them; 0 where there is none
    counts: Tensor  # [B] how many there are
    refused: Tensor  # [B] 1 where drafts stood behind the last of them

    @classmethod
    def room(cls, texts: int, steps: int, device: torch.device) -> Walked:
        def numbers(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int64, device=device)

        return cls(numbers(texts, steps), numbers(texts, steps), numbers(texts), numbers(texts))


def _plain_walk(tokens: Tensor, parents: Tensor, chosen: Tensor, active: Tensor, *, depth: int) -> Walked:
    """Tokens and parents [B, N] of trees, and the tokens [B, N] that the target takes behind their nodes; −1 is no
    token, and ends a walk. Of equal siblings the first is taken. Texts that are not `active` [B] meet no node."""
    going = active > 0
    at = torch.zeros_like(active)
    nodes, taken = [], []
    counts, refused = torch.zeros_like(active), torch.zeros_like(active)
    for _ in range(depth + 1):
        token = chosen.gather(1, at[:, None])
        nodes.append(torch.where(going, at, -1))
        taken.append(torch.where(going, token[:, 0], 0))
        counts += going
        below = parents == at[:, None]
        refused = torch.where(going, below.any(1).long(), refused)
        same = below & (tokens == token)
        going = going & same.any(1)
        at = torch.where(going, same.int().argmax(1), at)
    return Walked(torch.stack(nodes, 1), torch.stack(taken, 1), counts, refused)


def _device_walk(tokens: Tensor, parents: Tensor, chosen: Tensor, active: Tensor, *, depth: int) -> Walked:
    from forerun.kernels.gpu import walk as gpu

    texts, size = tokens.shape
    assert all(each.is_contiguous() for each in (tokens, parents, chosen, active))
    walked = Walked.room(texts, depth + 1, tokens.device)
    gpu.walk[(texts,)](
        tokens, parents, chosen, active, walked.nodes, walked.tokens, walked.counts, walked.refused, size,
        PAD=max(16, power_of_two(size)), STEPS=depth + 1, num_warps=1, **ahead(tokens.device),
    )  # fmt: skip
    return walked


walk = Kernel("walk", _device_walk, _plain_walk)
