"""Heads that foresee the target's states one after another: EAGLE (Li et al., 2024), EAGLE-3 (Li et al., 2025) and
multi-token prediction (DeepSeek-AI, 2024). How they go on from their own states is told in `unroll.py`.

    eagle3   Σ_k 0.8^k · KL(p ‖ q_k)                              T = 7 steps
    mtp      the same                                            T = 7
    eagle    SmoothL1(f̂, f) + 0.1 · KL(p ‖ q)                    T = 1, with some noise on the states it is given

p is the target's own law there, over the draft vocabulary. DeepSeek trained its modules with the target, on tokens that
people wrote, where there was no law to learn from; here it is there, and says more about what will be accepted. With
`soft` below 1 the rest goes to the token that was written. Recursive use of one module, which DeepSeek leaves to
inference, is trained for too: T = 1 is its own recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.core.noise import uniform
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.models.heads.feature_head import FeatureHead, hf_config, new_head
from forerun.models.heads.files import HeadFolder
from forerun.train.law_loss import Laws, distance
from forerun.train.loss import Loss
from forerun.train.measure import CHAIN
from forerun.train.methods.method import (
    VOCABULARY,
    Task,
    draft_vocabulary,
    fading,
    figures,
    head_drafter,
    label_places,
    take_over,
    write_method,
)
from forerun.train.texts import TextBatch
from forerun.train.unroll import unroll
from forerun.train.whole_texts import taught

UNSURE = 0.15
"""What the final norm's weight is multiplied by in the beginning."""
WEIGHED = 4
"""Texts that the sizes of states are taken from."""
LAW_SHARE = 0.1
"""What the law counts in EAGLE's loss, beside the state."""


@dataclass(frozen=True)
class FeatureOptions:
    unroll: int = 7
    """Steps of the training-time test."""
    noise: float = 0.0
    """Uniform noise on the target's states, so many times their standard deviation to either side: at inference a head
    that was trained for one step reads its own states, which are not exact."""
    inner: int | None = None
    """The width of the MLP; the target's where None."""
    attention_heads: int | None = None
    """Heads of attention, each with its own keys; the target's where None. In eagle3 all that is known of a token goes
    through their values, and where the target has few heads of keys that is narrow."""
    draft_vocabulary: int = VOCABULARY
    """The tokens that can be drafted: so many that are the most frequent ones; 0 for all."""
    soft: float = 1.0
    """How much the target's law counts; the rest goes to the token that was written."""


@torch.no_grad()
def begin_still(head: FeatureHead) -> None:
    """Let the layer add nothing at first, so that the state is handed on, and let no law that comes of it be sure.

    What the target's last layer, which it is taken from, would add to a state that it has already been added to is of
    no use: in twelve steps on SmolLM2 the drafts that agree rose to 0.39 with eagle3 and 0.73 with mtp, and to 0.31 and
    0.47 where it was added. With eagle, whose layer has no input norm, it is enormous: the loss was 86 in the
    beginning, and is 1.8 so."""
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        head.get_parameter(f"model.layers.0.{name}").zero_()
    if head.config.final_norm:
        head.get_parameter("model.norm.weight").mul_(UNSURE)


def size_of(states: Tensor) -> float:
    """That of a state in the middle, the nearest power of two."""
    return float(2.0 ** round(math.log2(max(1e-6, float(states.float().square().mean(-1).sqrt().median())))))


class FeatureMethod:
    depth = CHAIN

    def __init__(self, name: str, options: FeatureOptions, task: Task) -> None:
        self.name, self.options = name, options
        self.target, self.hf = task.target, task.hf
        ids = draft_vocabulary(task, options.draft_vocabulary)
        self.head: FeatureHead = new_head(
            name, task.target, ids=ids, inner=options.inner, heads=options.attention_heads, seed=task.seed
        )
        begin_still(self.head)
        self._sizes, self._louder = self._sized(task)
        self._rows = task.target.head_rows(ids)
        self._places = label_places(ids, task.target.vocab_size, task.target.device)

    @property
    def module(self) -> FeatureHead:
        return self.head

    @property
    def steady(self) -> bool:
        return not self.options.noise

    def loss(self, batch: TextBatch) -> Loss:
        options, steps = self.options, self.options.unroll
        found = taught(self.target, batch.tokens, self.head.taps)
        behind = {tap: state / self._sizes.get(tap, 1.0) for tap, state in found.behind.items()}
        features = self._noisy(self.head.fuse(behind), batch)
        made = unroll(self.head, batch.tokens, features, steps, louder=self._louder)
        # Step k of row i gives the law of row i + 1 + k.
        x = torch.stack([batch.at(state, back=1 + k) for k, state in enumerate(made)], 1)  # [W, T, H]
        weights = batch.reached(steps) * fading(steps, x.device)
        labels = None
        if options.soft < 1:
            labels = batch.labels if self._places is None else self._places[batch.labels]
        laws = Laws(batch.at(found.normed), self._rows, labels, options.soft)
        apart = distance(self.head.model.norm(x), self._rows, laws, weights)
        total = apart.total
        if self.name == "eagle":
            true = laws.states[:, None].expand_as(x).to(x.dtype)
            off = functional.smooth_l1_loss(x, true, reduction="none").mean(-1)
            total = (weights * off).sum() + LAW_SHARE * total
        return Loss(total, batch.laws, figures(apart))

    def _noisy(self, features: Tensor, batch: TextBatch) -> Tensor:
        """Each text by its own size, so that it does not matter which others are there."""
        if not self.options.noise:
            return features
        noise = torch.zeros_like(features)
        for row, (key, (_, last)) in enumerate(zip(batch.keys(), batch.spans, strict=True)):
            own = features[row, : last + 1].detach()
            index = torch.arange(own.numel(), device=own.device).view(own.shape)
            drawn = uniform(torch.tensor(key, device=own.device), index).to(own.dtype)
            noise[row, : last + 1] = (2 * drawn - 1) * (self.options.noise * own.std())
        return features + noise

    def _sized(self, task: Task) -> tuple[dict[int, float], float]:
        """What `fc` reads is brought to one size, where no norm does that: else it learns from large inputs too fast,
        and from small ones not at all. SmolLM2's states are 3 behind the second layer and 22 behind the 27th, the
        normed ones are 2, and its embeddings 0.1. → by what the states behind layers are divided (eagle3), and by what
        embeddings are multiplied (eagle)."""
        if self.name == "mtp" or not task.texts:
            return {}, 1.0
        tokens = torch.tensor([token for text in task.texts[:WEIGHED] for token in text.tokens[:256].tolist()])[None]
        found = taught(self.target, tokens.to(self.target.device), self.head.taps)
        if self.name == "eagle":
            return {}, size_of(found.normed) / size_of(self.target.embed(tokens.to(self.target.device)))
        return {tap: size_of(state) for tap, state in found.behind.items()}, 1.0

    def _columns(self) -> Tensor:
        """What the columns of `fc` are multiplied by where it reads everything as it is."""
        parts = [1 / self._sizes.get(tap, 1.0) for tap in self.head.taps]
        if self.name != "eagle3":
            parts = [self._louder, 1.0]
        return torch.tensor(parts, device=self.head.device).repeat_interleave(self.head.config.hidden_size)

    def folder(self) -> HeadFolder:
        tensors = self.head.trained()
        name = ("mtp." if self.name == "mtp" else "") + "fc.weight"
        tensors[name] = tensors[name] * self._columns()
        return HeadFolder(self.name, hf_config(self.head, self.hf), tensors)

    @torch.no_grad()
    def begin(self, other: HeadFolder) -> None:
        take_over(self.head.trained(), other)
        self.head.fc.weight.div_(self._columns())

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        write_method(self, out, manifest, bits)

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        return head_drafter(self, setup, bits)
