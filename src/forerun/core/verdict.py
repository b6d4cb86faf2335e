"""What verification decides: a path of accepted nodes and one more token from the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """For B sequences. Every step commits `lengths` + 1 tokens: the accepted path, then `tokens`, which is
    *corrected* where the drafts at the stopping node were all refused and a *bonus* where there were none."""

    nodes: Tensor  # [B, D] accepted nodes in order, padded with -1
    lengths: Tensor  # [B] accepted drafts
    tokens: Tensor  # [B] the last token, drawn from the target
    stops: Tensor  # [B] the node it follows; the root where nothing was accepted

    def committed(self, drafted: Tensor) -> Tensor:
        """[B, D + 1] the tokens a step commits, padded with -1; `drafted` [B, N] are the tree's tokens."""
        accepted = drafted.gather(1, self.nodes.clamp_min(0)).masked_fill(self.nodes < 0, -1)
        room = torch.full_like(self.tokens[:, None], -1)
        return torch.cat([accepted, room], 1).scatter(1, self.lengths[:, None], self.tokens[:, None])
