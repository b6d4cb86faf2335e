"""Distillation (Hinton et al., 2015) of the target into a draft model.

Drafts are accepted by how close q is to p, so the student learns the whole law: KL(p ‖ q) at temperature 1, at every
token that the target wrote itself. The target's laws are computed as they are needed; nothing of them is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.transformer import Transformer
from forerun.train.loop import Loss
from forerun.train.texts import TextBatch, logits, states


class Distil:
    def __init__(self, student: Transformer, teacher: Transformer) -> None:
        assert not student.prepared, "a student's weights stay as they are"
        self.module = student
        self.teacher = teacher

    def loss(self, batch: TextBatch) -> Loss:
        q = functional.log_softmax(self._scores(self.module, batch).float(), -1)  # [W, V]
        with torch.no_grad():
            p = functional.log_softmax(self._scores(self.teacher, batch).float(), -1)
            agreed = (p.argmax(-1) == q.argmax(-1)).sum()
        total = functional.kl_div(q, p, reduction="sum", log_target=True)
        return Loss(total, q.shape[0], {"agreement": float(agreed)})

    @staticmethod
    def _scores(model: Transformer, batch: TextBatch) -> Tensor:
        return logits(model, states(model, batch.tokens)[batch.wanted])
