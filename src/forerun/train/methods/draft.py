"""Distillation (Hinton et al., 2015) of the target into a draft model: KL(p ‖ q) at temperature 1, at every token that
the target wrote itself. The target's laws are computed as they are needed; nothing of them is kept.

A set of drafts side by side is boosted (SpecInfer, Miao et al. 2023): each learns what those before it miss. A place
counts by the chance that none of theirs is accepted there, Π_k (1 − Σ min(p, q_k)).

Where it can, a draft reads and speaks with the target's own embedding and head, which are most of the weights of a
small model, and learns laws over the draft vocabulary (`shared_draft.py`). Else it is a small model of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.models.heads.files import HeadFolder, read_head
from forerun.models.heads.shared_draft import SharedDraft, load_shared_draft, new_shared_draft, shared_hf_config
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.folder import write_draft
from forerun.train.law_loss import Laws, distance, overlaps
from forerun.train.loss import Loss
from forerun.train.measure import CHAIN
from forerun.train.methods.method import VOCABULARY, Task, draft_vocabulary, figures, write_method
from forerun.train.student import StudentShape, frozen, new_student, student_hf_config
from forerun.train.texts import TextBatch
from forerun.train.whole_texts import taught

OWN = "the student"


class Distil:
    name = "draft"

    def __init__(
        self,
        student: Transformer,
        teacher: Transformer,
        *,
        beside: Mapping[str, Transformer] | None = None,
    ) -> None:
        """`beside` are the drafts that were trained before, by name."""
        assert not student.prepared, "a student's weights stay as they are"
        self.module, self.teacher, self.beside = student, teacher, dict(beside or {})
        self._rows = teacher.head_rows(student.ids)

    def loss(self, batch: TextBatch) -> Loss:
        own: Tensor = batch.at(states(self.module, batch.tokens).normed)
        right = batch.at(taught(self.teacher, batch.tokens).normed)
        missed = self._missed(batch, right)
        laws = Laws(right, self._rows)
        found = distance(own[:, None], self.module.lm_head.weight, laws, missed[:, None])
        told = figures(found)
        return Loss(found.total, batch.laws, {**told, "missed": missed.sum()} if self.beside else told)

    def _missed(self, batch: TextBatch, right: Tensor) -> Tensor:
        """[W] how likely all drafts of the others are refused."""
        missed = torch.ones(batch.laws, device=right.device)
        if not self.beside:
            return missed
        laws = Laws(right, self.teacher.head_rows())
        for other in self.beside.values():
            with torch.no_grad():
                theirs = batch.at(states(other, batch.tokens).normed)
            missed *= 1 - overlaps(theirs, other.head_rows(), laws, other.ids).clamp(0, 1)
        return missed

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        # By other names than they have: these may be folders, which would be read anew.
        earlier = {f"draft {number}": other for number, other in enumerate(self.beside.values(), start=1)}
        drafts = {OWN: self.copy(bits), **earlier}
        setup = replace(setup, load=drafts.__getitem__)
        if len(drafts) == 1:
            return make_drafter("draft_model", setup, {"model": OWN, "tree": str(CHAIN)})
        return make_drafter("multi_draft", setup, {"models": ",".join(drafts), "samples": 1, "length": CHAIN})

    def copy(self, bits: int) -> Transformer:
        """To draft with, as it is now."""
        return frozen(self.module, self.teacher.dtype)


class SharedDraftMethod(Distil):
    """With the target's embedding and head."""

    module: SharedDraft

    def __init__(self, shape: StudentShape, task: Task) -> None:
        size = VOCABULARY if shape.draft_vocabulary is None else shape.draft_vocabulary
        draft = new_shared_draft(task.target, shape.layers, ids=draft_vocabulary(task, size))
        super().__init__(draft, task.target, beside=task.beside)
        self.depth, self.hf = CHAIN, task.hf

    def folder(self) -> HeadFolder:
        return HeadFolder(self.name, shared_hf_config(self.module, self.hf), self.module.trained())

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        write_method(self, out, manifest, bits)

    def copy(self, bits: int) -> Transformer:
        """By way of a folder, so that it is rounded as it will be."""
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / self.name
            write_method(self, out, {}, bits)
            return load_shared_draft(read_head(out, self.name), self.teacher)


class DraftMethod(Distil):
    """With a student that has matrices of its own."""

    def __init__(self, shape: StudentShape, task: Task) -> None:
        if shape.draft_vocabulary is not None:
            raise ValueError(
                "--draft-vocabulary is for drafts that share the target's head, and this one has its own: leave it out"
            )
        self.hf = student_hf_config(task.hf, task.target.config, shape)
        student = new_student(self.hf, task.target, task.seed)
        super().__init__(student, task.target, beside=task.beside)
        self.target_folder = task.folder

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        assert bits == 16, "it is read as other models are"
        write_draft(out, self.module, self.hf, self.target_folder, {"method": self.name, **manifest})
