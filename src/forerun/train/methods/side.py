"""Heads on the target's last state: blockwise parallel decoding (Stern et al., 2018) and Medusa-1 (Cai et al., 2024).

Head k reads the state at row i and foresees token i + 2 + k: that of row i + 1 + k's own law. So for each law that is
learned there are K states, 1 … K rows before it, each read by one of the heads. Loss: Σ_k 0.8^k · KL(p ‖ q_k).
With a stem row i also reads token i + 1, which is known when head 0 is asked for the one behind it.

Medusa learned from the tokens that were written. Here it is the target's law at that place: the law says what else
would have been accepted, and has less chance in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.models.heads.files import HeadFolder
from forerun.models.heads.side_heads import SideHeads, new_side_heads, side_config
from forerun.train.law_loss import Distance, Laws, distance
from forerun.train.loss import Loss
from forerun.train.methods.method import (
    VOCABULARY,
    Task,
    draft_vocabulary,
    fading,
    figures,
    head_drafter,
    label_places,
    write_method,
)
from forerun.train.texts import TextBatch
from forerun.train.whole_texts import taught


@dataclass(frozen=True)
class SideOptions:
    heads: int = 4
    """How many tokens ahead are foreseen."""
    draft_vocabulary: int = VOCABULARY
    """The tokens that can be drafted: so many that are the most frequent ones; 0 for all."""
    inner: int | None = None
    """blockwise: the width of the hidden layer; the target's where None. Stern's was as many times that as there are
    heads."""
    layers: int = 1
    """medusa: blocks of each head."""
    stem: int = 0
    """medusa: the width of a layer by which all heads see the token that the state gave; 0 for none, as published."""
    soft: float = 1.0
    """How much the target's law counts; the rest goes to the token that was written."""
    backbone: bool = False
    """Whether the target's layers learn too, when the heads have (`backbone.py`). That makes another model."""
    backbone_rate: float = 1 / 8
    """Of the heads' learning rate, what the layers have then; Medusa-2 took 1/4 to 1/16."""


class SideMethod:
    def __init__(self, name: str, options: SideOptions, task: Task) -> None:
        self.name, self.depth, self.soft = name, options.heads, options.soft
        self.target, self.hf = task.target, task.hf
        ids = draft_vocabulary(task, options.draft_vocabulary)
        if name == "medusa" and options.inner is not None:
            raise ValueError("medusa has no option --inner: its blocks are as wide as the target")
        if name == "blockwise" and options.layers != 1:
            raise ValueError("blockwise has no option --layers: it has one hidden layer, --inner wide")
        if name == "blockwise" and options.stem:
            raise ValueError("blockwise has no option --stem: its heads read the state alone, so leave it out")
        self.heads: SideHeads = new_side_heads(
            name,
            task.target,
            options.heads,
            ids=ids,
            inner=options.inner,
            layers=options.layers,
            stem=options.stem,
            seed=task.seed,
        )
        self._rows = task.target.head_rows(ids)
        self._places = label_places(ids, task.target.vocab_size, task.target.device)

    @property
    def module(self) -> SideHeads:
        return self.heads

    @property
    def steady(self) -> bool:
        return True

    def loss(self, batch: TextBatch) -> Loss:
        normed = taught(self.target, batch.tokens).normed
        found = self.ahead(batch, normed, batch.at(normed))
        return Loss(found.total, batch.laws, figures(found))

    def ahead(self, batch: TextBatch, normed: Tensor, right: Tensor) -> Distance:
        """How far the heads are from laws, of which the output head reads the states `right` [W, H], where they
        themselves read `normed` [B, L, H]."""
        given = batch.tokens.roll(-1, 1)  # the last row has none, and nothing is learned from it
        made = self.heads.states(normed.to(self.heads.dtype), given)  # [B, L, K, H]
        x = torch.stack([batch.at(made[:, :, k], back=1 + k) for k in range(self.depth)], 1)  # [W, K, H]
        weights = batch.reached(self.depth) * fading(self.depth, x.device)
        labels = None
        if self.soft < 1:
            labels = batch.labels if self._places is None else self._places[batch.labels]
        return distance(x, self._rows, Laws(right, self._rows, labels, self.soft), weights)

    def folder(self) -> HeadFolder:
        return HeadFolder(self.name, side_config(self.heads, self.hf), self.heads.trained())

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        write_method(self, out, manifest, bits)

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        return head_drafter(self, setup, bits)
