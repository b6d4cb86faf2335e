"""Medusa-2 (Cai et al., 2024): heads and the model below them learn together, so that the model's states say more about
what comes later. What comes out is another model, whose text is no longer the original's.

    L = KL(p ‖ p') + λ · Σ_k 0.8^k · KL(p ‖ q_k)

p is the original's law, which stays as it was; p' is that of the new model and q_k that of head k. The first part keeps
the new model at the original (self-distillation: the texts are the original's own answers). The heads have learned
alone before, and λ rises from nothing along a sine, so that the layers are not torn away in the beginning. They learn
several times slower than the heads. The embedding and the output head, which all heads share, stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.models.heads.files import HeadFolder
from forerun.models.heads.side_heads import SideHeads
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.folder import write_draft
from forerun.train.law_loss import Laws, distance
from forerun.train.loss import Loss
from forerun.train.methods.method import Task, figures, head_drafter, write_method
from forerun.train.methods.side import SideMethod
from forerun.train.student import StudentShape, frozen, new_student, student_hf_config
from forerun.train.texts import Text, TextBatch
from forerun.train.whole_texts import taught

LAMBDA = 0.2
"""What the heads count in the end."""
FOLDER = "backbone"
"""Of the new model, in that of its heads."""
AT_ONCE = 8
"""Texts in a pass that measures."""


@dataclass(frozen=True)
class Apart:
    """How far the new model is from the original, on texts of the original."""

    places: int
    mean_kl: float
    """KL(p ‖ p'), in nats a token."""
    greedy_differs: float
    """The share of places at which another token is the likeliest one."""


class Both(nn.Module):
    def __init__(self, heads: SideHeads, backbone: Transformer) -> None:
        super().__init__()
        self.heads, self.backbone = heads, backbone


class BackboneMethod:
    """The second part of a training; the first has made the heads."""

    def __init__(self, first: SideMethod, rate: float, task: Task) -> None:
        """The layers learn with `rate` times the heads' learning rate."""
        self.first, self.name, self.depth, self.rate = first, first.name, first.depth, rate
        self.original, self.original_folder = task.target, task.folder
        self.hf = student_hf_config(task.hf, task.target.config, StudentShape(layers=len(task.target.config.layers)))
        backbone = new_student(self.hf, task.target, task.seed)
        for shared in (backbone.model.embed_tokens, backbone.lm_head):
            shared.requires_grad_(False)
        self.module = Both(first.heads, backbone)
        self.weight = 0.0

    def pace(self, name: str) -> float:
        return self.rate if name.startswith("backbone.") else 1.0

    def proceed(self, done: float) -> None:
        self.weight = LAMBDA * math.sin(math.pi / 2 * done)

    def loss(self, batch: TextBatch) -> Loss:
        right = batch.at(taught(self.original, batch.tokens).normed)
        normed = states(self.module.backbone, batch.tokens).normed
        whole = self.original.head_rows()
        ones = torch.ones(batch.laws, 1, device=right.device)
        apart = distance(batch.at(normed)[:, None], whole, Laws(right, whole), ones)
        ahead = self.first.ahead(batch, normed, right)
        told = {**figures(ahead), "heads": ahead.total.detach(), "apart": apart.total.detach()}
        return Loss(apart.total + self.weight * ahead.total, batch.laws, told)

    def stored(self) -> Transformer:
        """The new model as its folder will have it, in the original's precision."""
        return frozen(self.module.backbone, torch.bfloat16).to(self.original.dtype)

    def folder(self) -> HeadFolder:
        return self.first.folder()

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        write_method(self, out, manifest, bits)

    def write_backbone(self, out: Path, manifest: Mapping[str, Any]) -> None:
        """As a model like others, in the folder of its heads."""
        write_draft(out / FOLDER, self.module.backbone, self.hf, self.original_folder, manifest)

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        return head_drafter(self, setup, bits)


@torch.no_grad()
def apart(original: Transformer, other: Transformer, texts: Sequence[Text]) -> Apart:
    places, kl, agreed = 0, 0.0, 0.0
    head, own = original.head_rows(), other.head_rows()
    for start in range(0, len(texts), AT_ONCE):
        batch = TextBatch.pack(texts[start : start + AT_ONCE], original.device)
        right, said = (batch.at(taught(model, batch.tokens).normed) for model in (original, other))
        ones = torch.ones(batch.laws, 1, device=original.device)
        found = distance(said[:, None], own, Laws(right, head), ones)
        places, kl, agreed = places + batch.laws, kl + float(found.total), agreed + float(found.agreed)
    return Apart(places, round(kl / max(1, places), 6), round(1 - agreed / max(1, places), 6))
