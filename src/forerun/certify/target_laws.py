"""The target's exact laws along a text: its logits from a pass over the whole text as a plain chain, with an empty
cache. Nothing of what is certified takes part, neither drafts nor trees nor the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.law import Context, LawSettings, law
from forerun.core.params import SamplingParams
from forerun.models.batch import Batch, TextRows
from forerun.models.cache import KVCache
from forerun.models.target import TargetModel

ID = -1
"""Of the sequence; engines count theirs from 0."""
BLOCK, CHUNK = 16, 512
LIKELY = 50
"""Tokens by which rounding is judged: of two alone the error may be small by chance."""
LEAST, MOST = 2, 8
"""Last places of a logit, between which rounding is believed. A fault may move logits too, and further."""


def untruncated(params: SamplingParams) -> SamplingParams:
    """The same settings with no token left out, and temperature 1 in place of 0: log p is the score then."""
    return replace(params, temperature=params.temperature or 1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class TargetLaws:
    target: TargetModel

    def along(self, prompt: Sequence[int], text: Sequence[int], params: SamplingParams) -> Tensor:
        """[len(text) + 1, V]: the law of each token of the text, and of the one after it."""
        begun = self.target.begin(ID, list(prompt))
        logits = self._logits([*begun, *text], len(text) + 1)
        self.target.forget(ID)
        rows = torch.zeros(len(text) + 1, dtype=torch.int64)
        context = None
        if params.penalises:
            path = torch.full((len(text) + 1, len(text)), -1)
            for row in range(1, len(text) + 1):
                path[row, :row] = torch.tensor(text[:row])
            context = Context.of([begun], [[]], logits.shape[1], rows, path)
        return law(logits, LawSettings.of([params]).take(rows), context)

    def rounding(self, prompt: Sequence[int], text: Sequence[int]) -> float:
        """How far apart two logits after the text may come to lie by rounding alone: twice what it makes to read the
        end token by token instead of all at once."""
        tokens = [*self.target.begin(ID, list(prompt)), *text]
        at_once, slowly = self._logits(tokens, 1)[0], self._logits(tokens, 1, alone=4)[0]
        self.target.forget(ID)
        values, likely = at_once.topk(min(LIKELY, at_once.shape[0]))
        place = torch.finfo(self.target.dtype).eps * float(values.abs().max())
        apart = float((at_once - slowly)[likely].abs().max())
        return min(max(2 * apart, LEAST * place), MOST * place)

    @torch.inference_mode()
    def _logits(self, tokens: list[int], wanted: int, alone: int = 0) -> Tensor:
        """[wanted, V] behind the last tokens, of which the last `alone` are read one by one."""
        slots = -(-len(tokens) // BLOCK) * BLOCK
        cache = KVCache(self.target.new_storage(slots), BLOCK)
        ends = [*range(CHUNK, len(tokens) - alone, CHUNK), *range(max(1, len(tokens) - alone), len(tokens) + 1)]
        parts: list[Tensor] = []
        start = 0
        for end in ends:
            cache.reserve(ID, end - start)
            logits = max(1, min(end - start, wanted - (len(tokens) - end)))
            own = TextRows(ID, end - start, tokens[start:end], None, start, cache.blocks(ID), BLOCK, logits)
            parts.append(self.target.forward_rows(Batch(texts=(own,)), cache.storage).logits.float().cpu())
            cache.commit({ID: range(end - start)})
            start = end
        return torch.cat(parts)[-wanted:].clone()
