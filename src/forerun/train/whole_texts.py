"""The pass over whole texts by the kernels of inference, for a target that only teaches: nothing is differentiated.

A layer's keys and values lie in a cache of one layer, where row by row all texts have their slots, and the next layer
writes over them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention import PackedRows
from forerun.models.static.buffers import Bucket
from forerun.models.static.rows import PassRows, Rows, supports
from forerun.models.storage import Storage
from forerun.models.transformer import SelfAttention, Transformer
from forerun.train.dense import States, causal, states


@dataclass
class WholeRows:
    """All tokens of texts [B, L], as rows."""

    tokens: Tensor  # [B · L]
    positions: Tensor
    slots: Tensor
    bucket: Bucket
    features: None = None

    @property
    def wanted(self) -> Tensor:
        raise NotImplementedError  # nobody asks for logits

    @property
    def packed(self) -> PackedRows:
        raise NotImplementedError  # it is no tree that is attended over


class WholeTexts(Rows):
    def of(self, tokens: Tensor, layers: Iterable[int]) -> States:
        count, length = tokens.shape
        rows = torch.arange(count * length, device=tokens.device)
        bucket = Bucket(count, count * length, length, 0, 0, tuple(sorted(set(layers))))
        config = self.config
        shape = (2, count * length, config.kv_heads, config.head_dim)
        cache = torch.empty(shape, dtype=self.model.dtype, device=tokens.device)
        storage = Storage([cache[0]] * len(config.layers), [cache[1]] * len(config.layers), None)
        self.length = length
        normed, behind = self.states(WholeRows(tokens.flatten(), rows % length, rows, bucket), storage)
        return States(normed.view(count, length, -1), {n: s.view(count, length, -1) for n, s in behind.items()})

    def attend(
        self, attention: SelfAttention, q: Tensor, keys: Tensor, values: Tensor, buffers: PassRows, out: Tensor
    ) -> None:
        by_text = (rows.view(-1, self.length, *rows.shape[1:]) for rows in (q, keys, values))
        out.view(-1, self.length, *q.shape[1:]).copy_(causal(attention, *by_text))


_of: weakref.WeakKeyDictionary[Transformer, WholeTexts] = weakref.WeakKeyDictionary()


def taught(model: Transformer, tokens: Tensor, layers: Iterable[int] = ()) -> States:
    """`dense.states` without gradients, by kernels where there are some."""
    with torch.no_grad():
        if not (tokens.is_cuda and model.prepared and supports(model.config)):
            return states(model, tokens, layers)
        if model not in _of:
            _of[model] = WholeTexts(model)
        return _of[model].of(tokens, layers)
