"""The engine without the comforts of `LLM`: tokens in, tokens out, with any drafter, for many texts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.drafters.none import NoDrafter
from forerun.engine.engine import MAX_ROWS, Engine
from forerun.engine.loaded import LoadedModel, default_slots
from forerun.engine.request import Request
from forerun.engine.statistics import Statistics

CPU_BATCH, GPU_BATCH = 8, 1024
MEASURED_TOGETHER = 64
"""Texts in a batch that drafts."""
FOR_SPEED = {"max_rows": 16384, "max_ahead": 32, "prompts_alone": True}
"""Of plain decoding on an accelerator: ten times as fast as one step for all at a time (docs/log.md)."""


def batch_size(loaded: LoadedModel) -> int:
    return GPU_BATCH if loaded.target.device.type == "cuda" else CPU_BATCH


class Writer:
    """Writes texts with the target alone. Requests may be added as others end."""

    def __init__(self, loaded: LoadedModel, longest: int) -> None:
        """With a cache for a batch of such texts, if the memory has room for it."""
        self.loaded, self.batch = loaded, batch_size(loaded)
        self.longest = min(longest, loaded.target.context_length)
        slots = min(self.batch * self.longest, default_slots(loaded.target, self.batch))
        fast: dict[str, Any] = FOR_SPEED if loaded.target.device.type == "cuda" else {"max_rows": MAX_ROWS}
        self.engine = Engine(loaded.target, NoDrafter(), slots=slots, max_batch=self.batch, **fast)
        # The end of a turn ends a text, though the model may not call it so.
        self._ends = tuple(sorted(loaded.tokenizer.eos - loaded.target.eos))
        self._written: dict[int, list[int]] = {}

    @property
    def pending(self) -> int:
        """Texts on their way."""
        return len(self._written)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        """The number of the request."""
        request = self.engine.add(Request(prompt, replace(params, stop_token_ids=self._ends)))
        self._written[request] = []
        return request

    def step(self) -> list[tuple[int, list[int]]]:
        """The requests that ended, and what was written for them; the token that ends a text is a part of it."""
        ended = []
        for update in self.engine.step():
            self._written[update.request] += update.tokens
            if update.finish_reason is not None:
                ended.append((update.request, self._written.pop(update.request)))
        return ended


def drafted(
    loaded: LoadedModel,
    make: Callable[[Setup], Drafter],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    longest: int,
) -> Statistics:
    """What it takes to write answers with a drafter."""
    target = loaded.target
    batch = min(MEASURED_TOGETHER if target.device.type == "cuda" else CPU_BATCH, len(prompts))
    slots = min(batch * longest, default_slots(target, batch))
    drafter = make(Setup(target, slots, loaded.load_beside))
    engine = Engine(
        target, drafter, slots=slots, max_batch=batch, max_rows=max(MAX_ROWS, 65 * batch), max_drafting=batch
    )
    for prompt in prompts:
        engine.add(Request(list(prompt), params))
    while engine.has_work:
        engine.step()
    return engine.statistics
