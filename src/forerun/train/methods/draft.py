"""Distillation (Hinton et al., 2015) of the target into a draft model: KL(p ‖ q) at temperature 1, at every token that
the target wrote itself. The target's laws are computed as they are needed; nothing of them is kept.

A set of drafts side by side is boosted (SpecInfer, Miao et al. 2023): each learns what those before it miss. A place
counts by the chance that none of theirs is accepted there, Π_k (1 − Σ min(p, q_k)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.models.transformer import Transformer
from forerun.train.compiled import maybe_compiled
from forerun.train.dense import states
from forerun.train.folder import write_draft
from forerun.train.law_loss import Laws, compare, distance, overlaps
from forerun.train.loop import Loss
from forerun.train.measure import CHAIN
from forerun.train.methods.method import Task, figures
from forerun.train.student import StudentShape, frozen, new_student, student_hf_config
from forerun.train.texts import TextBatch

OWN = "the student"


class Distil:
    name = "draft"

    def __init__(
        self,
        student: Transformer,
        teacher: Transformer,
        *,
        beside: Mapping[str, Transformer] | None = None,
        compiled: bool = False,
    ) -> None:
        """`beside` are the drafts that were trained before, by name."""
        assert not student.prepared, "a student's weights stay as they are"
        self.module, self.teacher, self.beside = student, teacher, dict(beside or {})
        self._compare = maybe_compiled(compare, compiled, teacher.device)

    def loss(self, batch: TextBatch) -> Loss:
        own: Tensor = batch.at(states(self.module, batch.tokens).normed)
        with torch.no_grad():
            taught = batch.at(states(self.teacher, batch.tokens).normed)
        laws = Laws(taught, self.teacher.head_rows())
        missed = self._missed(batch, laws)
        found = distance(own[:, None], self.module.lm_head.weight, laws, missed[:, None], self._compare)
        told = figures(found)
        return Loss(found.total, batch.laws, {**told, "missed": missed.sum()} if self.beside else told)

    def _missed(self, batch: TextBatch, laws: Laws) -> Tensor:
        """[W] how likely all drafts of the others are refused."""
        missed = torch.ones(batch.laws, device=laws.states.device)
        for other in self.beside.values():
            with torch.no_grad():
                theirs = batch.at(states(other, batch.tokens).normed)
            missed *= 1 - overlaps(theirs, other.head_rows(), laws).clamp(0, 1)
        return missed

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        drafts = {OWN: frozen(self.module, self.teacher.dtype), **self.beside}
        setup = replace(setup, load=drafts.__getitem__)
        if len(drafts) == 1:
            return make_drafter("draft_model", setup, {"model": OWN, "tree": str(CHAIN)})
        return make_drafter("multi_draft", setup, {"models": ",".join(drafts), "samples": 1, "length": CHAIN})


class DraftMethod(Distil):
    """With a student of its own."""

    def __init__(self, shape: StudentShape, task: Task) -> None:
        self.hf = student_hf_config(task.hf, task.target.config, shape)
        student = new_student(self.hf, task.target, task.seed)
        super().__init__(student, task.target, beside=task.beside, compiled=task.compile)
        self.folder = task.folder

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        if bits != 16:
            raise ValueError("--bits is 8: a draft model is read as other models are, in 16 bits; leave --bits out")
        write_draft(out, self.module, self.hf, self.folder, {"method": self.name, **manifest})
