"""A head's pass over whole texts, in the way it will be used: going on from its own states (EAGLE-3's training-time
test; Li et al., 2025).

Row i is a draft that begins behind token i + 1. At step 0 it has that token, and the state f_i of the target before it.
At step k it has token i + 1 + k, and what the head itself made of row i at step k − 1. So one row stands for the chain
of drafts that would be made there if the target agreed with all of them, which is the only case that counts. The row
of step k sees

    the rows 0 … i of step 0          what the head has read of the text when it begins to draft
    row i of the steps 1 … k          its own drafts

and gives the law of token i + 2 + k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels import joint as in_parts
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.transformer import DecoderLayer, SelfAttention
from forerun.train.dense import causal, through, turns_of


def unroll(head: FeatureHead, tokens: Tensor, features: Tensor, steps: int, *, louder: float = 1.0) -> list[Tensor]:
    """tokens [B, L], features [B, L, H] as `head.fuse` gives them → for each step [B, L − 1, H], what the head makes of
    its rows. Rows of a step that would have tokens behind the last one mean nothing. Embeddings are multiplied by
    `louder`."""
    layer = head.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    rows = tokens.shape[1] - 1
    places = torch.arange(rows, device=tokens.device)
    keys = _Keys()
    state = features[:, :-1]
    made: list[Tensor] = []
    for step in range(steps):
        with torch.no_grad():
            embedding = louder * head.embed(tokens[:, (places + 1 + step).clamp_max(rows)]).to(state.dtype)
        x, beside = head.combine(embedding, state)
        # The sum that the layer adds to is kept in full precision, whatever its products are computed in.
        x = x.to(torch.promote_types(x.dtype, head.dtype))
        made.append(through(layer, x, turns_of(head.config, places + step, x.dtype), keys.attend, beside))
        state = head.next_states(made[-1])
    return made


class _Keys:
    """What rows see: step 0 of the rows before them, and themselves at all steps."""

    def __init__(self) -> None:
        self.text: tuple[Tensor, Tensor] | None = None
        self.own: list[tuple[Tensor, Tensor]] = []

    def attend(self, attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.text is None:
            self.text = k, v
            return causal(attention, q, k, v)
        self.own.append((k, v))
        own_k = torch.stack([key for key, _ in self.own], 2)  # [B, R, k, kv, D]
        own_v = torch.stack([value for _, value in self.own], 2)
        if in_parts.supports(q):
            return in_parts.attend(q, *self.text, own_k, own_v, attention.scale)
        return joint(q, *self.text, own_k, own_v, attention.scale)


def joint(q: Tensor, text_k: Tensor, text_v: Tensor, own_k: Tensor, own_v: Tensor, scale: float) -> Tensor:
    """One softmax over the text up to a row (scores [R, R], causal) and over the row's own keys (the diagonals of as
    many more such squares, of which nothing else is computed).

    q [B, R, heads, D]; text_k, text_v [B, R, kv, D]; own_k, own_v [B, R, k, kv, D] → [B, R, heads, D].
    """
    count, rows, heads, size = q.shape
    kv, group = text_k.shape[2], heads // text_k.shape[2]
    grouped = q.view(count, rows, kv, group, size).permute(0, 2, 3, 1, 4)  # [B, kv, g, R, D]
    # The queries that share a head of keys are rows of one product.
    wide = grouped.reshape(count, kv, group * rows, size)
    past = (wide @ text_k.permute(0, 2, 3, 1)).view(count, kv, group, rows, rows).float() * scale
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
    past = past.masked_fill(later, -torch.inf)
    own = (grouped[..., None, :] * own_k.permute(0, 3, 1, 2, 4)[:, :, None]).float().sum(-1) * scale  # [B, kv, g, R, k]
    weights = torch.softmax(torch.cat([past, own], -1), -1).to(text_v.dtype)
    of_past, of_own = weights[..., :rows], weights[..., rows:]
    found = (of_past.reshape(count, kv, group * rows, rows) @ text_v.transpose(1, 2)).view_as(grouped)
    found = found + (of_own[..., None] * own_v.permute(0, 3, 1, 2, 4)[:, :, None]).sum(-2)
    return found.permute(0, 3, 1, 2, 4).reshape(count, rows, heads, size)
