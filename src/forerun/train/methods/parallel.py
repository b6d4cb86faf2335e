"""PaSS (Monea et al., 2023): look-ahead embeddings, which the target reads in place of tokens that are not known yet.

The target is frozen; T embeddings learn. Behind some places of a text, the anchors, hangs a chain of T rows each. Row j
(1 … T) stands at position anchor + j, sees the text up to the anchor and the rows 1 … j of its own chain, and gives the
law of the token at anchor + j + 1. The target's own law there, from the plain pass, is what it should be.

The text's rows do not depend on the embeddings. So they are computed once, without gradients, and their keys and values
are kept; what is differentiated are the chains' rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.core.noise import uniform
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.models.heads.files import HeadFolder
from forerun.models.transformer import DecoderLayer, SelfAttention, Transformer
from forerun.train.dense import causal, embedded, masked, states, through, turns_of
from forerun.train.law_loss import Laws, distance
from forerun.train.loss import Loss
from forerun.train.methods.method import Task, fading, head_drafter, write_method
from forerun.train.texts import TextBatch

SPREAD = 0.1
"""Of the first embeddings around the mean of all, in standard deviations of those."""


@dataclass(frozen=True)
class ParallelOptions:
    heads: int = 4
    """Look-ahead embeddings: how many tokens ahead are foreseen."""
    anchors: int = 16
    """Places of a text from which is looked ahead in a step, by chance."""


class LookAhead(nn.Module):
    def __init__(self, target: Transformer, count: int, seed: int) -> None:
        super().__init__()
        rows = target.model.embed_tokens.weight.detach()[: target.vocab_size].float()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, rows.shape[1], generator=generator).to(rows.device)
        self.look_ahead = nn.Embedding(count, rows.shape[1], device=rows.device)
        self.look_ahead.weight.data = rows.mean(0) + SPREAD * rows.std(0) * noise


def free_of_inference(target: Transformer) -> None:
    """A model that has been used may have weights laid out anew by inference, through which nothing can be learned:
    those are copied."""
    for weight in target.parameters():
        if weight.is_inference():
            weight.data = weight.detach().clone()


class ParallelMethod:
    name = "parallel"

    def __init__(self, options: ParallelOptions, task: Task) -> None:
        self.options, self.target, self.hf = options, task.target, task.hf
        self.depth = options.heads
        free_of_inference(task.target)
        self.module = LookAhead(task.target, options.heads, task.seed)

    def loss(self, batch: TextBatch) -> Loss:
        anchors, reached = self._anchors(batch)  # [B, A], [B, A, T]
        count = int(reached[..., 0].sum())  # a text that ends before, or that only fills a batch, has none
        anchors, reached = (each.to(batch.tokens.device, non_blocking=True) for each in (anchors, reached))
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((k, v))
            return causal(attention, q, k, v)

        with torch.no_grad():
            normed = states(self.target, batch.tokens, attend=keep).normed
        ahead = torch.arange(1, self.depth + 1, device=anchors.device)
        places = (anchors[:, :, None] + ahead).flatten(1)  # [B, A·T] positions of the rows
        x = self._rows(anchors, places, kept)
        last = normed.shape[1] - 1
        taught = torch.take_along_dim(normed, places.clamp_max(last)[..., None], 1)
        weights = (reached * fading(self.depth, x.device)).flatten()[:, None]
        head = self.target.head_rows()
        # The target drafts with its whole head, so that is what it learns with.
        found = distance(x.flatten(0, 1)[:, None], head, Laws(taught.flatten(0, 1), head), weights)
        told = {"agreement": found.agreed[0] / self.depth, "overlap": found.overlap[0] / self.depth}
        return Loss(found.total, count, told)

    def _anchors(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Where is looked ahead from, and which rows foresee a token of the answer; both on the host."""
        starts, ends = (torch.tensor(side) for side in zip(*batch.spans, strict=True))
        free = (ends - 1 - starts).clamp_min(1)  # behind the last of them there is nothing left to foresee
        drawn = uniform(torch.tensor(batch.keys())[:, None], torch.arange(self.options.anchors))
        anchors = starts[:, None] + (drawn * free[:, None]).long()  # in float64, in which drawn · free < free
        ahead = torch.arange(1, self.depth + 1)
        return anchors, (anchors[..., None] + ahead < ends[:, None, None]).float()

    def _rows(self, anchors: Tensor, places: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, A·T, H] what the target's head reads at the look-ahead rows."""
        target, depth, (count, rows) = self.target, self.depth, places.shape
        # They count like rows of the embedding, and are scaled where a family scales those.
        weight = embedded(target, self.module.look_ahead.weight)
        x = weight.repeat(rows // depth, 1).expand(count, -1, -1)
        turns = turns_of(target.config, places, x.dtype)
        length = kept[0][0].shape[1]
        text = torch.arange(length, device=x.device)
        in_text = text <= anchors.repeat_interleave(depth, 1)[..., None]  # [B, A·T, L]
        number = torch.arange(rows, device=x.device)
        chain = (number[:, None] // depth == number // depth) & (number[:, None] >= number)
        visible = torch.cat([in_text, chain.expand(count, -1, -1)], -1)
        back = places[..., None] - torch.cat([text.expand(count, -1), places], -1)[:, None]

        for layer, (text_k, text_v) in zip(target.model.layers, kept, strict=True):
            assert isinstance(layer, DecoderLayer)
            window = layer.self_attn.window
            seen = visible if window is None else visible & (back < window)

            def attend(
                attention: SelfAttention,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                before: tuple[Tensor, Tensor] = (text_k, text_v),
                seen: Tensor = seen,
            ) -> Tensor:
                keys, values = (torch.cat([old.to(q.dtype), new], 1) for old, new in zip(before, (k, v), strict=True))
                return masked(attention, q, keys, values, seen[:, None])

            x = through(layer, x, turns, attend)
        normed: Tensor = target.model.norm(x)
        return normed

    def folder(self) -> HeadFolder:
        config = {
            "architectures": ["ForerunLookAhead"],
            "model_type": self.name,
            "hidden_size": self.hf.get("hidden_size"),
            "vocab_size": self.hf.get("vocab_size"),
            "num_look_ahead": self.depth,
            "dtype": "bfloat16",
        }
        return HeadFolder(self.name, config, dict(self.module.state_dict()))

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        write_method(self, out, manifest, bits)

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        return head_drafter(self, setup, bits)
