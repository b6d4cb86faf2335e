"""The probabilities that a request asks to be told."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.engine.request import TokenLogprob


def logprobs(logits: Tensor, rows: list[int], tokens: list[int], count: int | None) -> list[TokenLogprob] | None:
    """Under the model's own law, at the rows that the tokens follow."""
    if count is None:
        return None
    scores = torch.log_softmax(logits[rows].float(), -1)
    own = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, best = scores.topk(min(count, scores.shape[1]), -1)
    tops = [list(zip(b, v, strict=True)) for b, v in zip(best.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(token, value, top) for token, value, top in zip(tokens, own, tops, strict=True)]
