"""Draft vocabularies (FR-Spec, Zhao et al. 2025): a head over the tokens that a target writes most often.

For a small target with a large vocabulary the output head is most of what a draft costs. Tokens outside have q = 0:
they are never drafted, and the target writes them itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

STEP = 64
"""Sizes are multiples of this, so that every kernel takes them."""


def most_frequent(texts: Iterable[Iterable[int]], size: int, vocabulary: int) -> Tensor | None:
    """[Vd] the ids of the tokens that occur most often, ascending; None where that is all of them. Of tokens that
    are equally frequent, or were never seen, the smaller ids: tokenizers have the frequent ones first."""
    size = -(-size // STEP) * STEP
    if size >= vocabulary:
        return None
    arrays = [np.asarray(text if isinstance(text, np.ndarray) else list(text), np.int64) for text in texts]
    seen = torch.from_numpy(np.bincount(np.concatenate([*arrays, np.zeros(0, np.int64)]), minlength=vocabulary))
    return torch.argsort(seen, descending=True, stable=True)[:size].sort().values


def to_offsets(ids: Tensor) -> Tensor:
    """[Vd] as checkpoints store it (d2t): how much larger the target's id is than the draft's."""
    return ids - torch.arange(ids.shape[0])


def from_offsets(offsets: Tensor, vocabulary: int) -> Tensor:
    if offsets.dim() != 1 or not offsets.numel() or offsets.is_floating_point():
        raise ValueError("the draft vocabulary (d2t) is no list of whole numbers: train the drafter again")
    ids = offsets.to(torch.int64) + torch.arange(offsets.shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError("the draft vocabulary (d2t) does not fit the target's tokens: train the drafter again")
    return ids
