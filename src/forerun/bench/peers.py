"""`transformers` as a contestant: plain generation, and its own prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.bench.contest import Answer, Messages, Work
from forerun.core.params import SamplingParams
from forerun.models.tokenizer import Tokenizer

PEERS: dict[str, dict[str, Any]] = {"transformers": {}, "transformers-lookup": {"prompt_lookup_num_tokens": 10}}
"""Names that stand beside drafters, and what `generate` is told. It takes one prompt at a time."""


@dataclass
class Transformers:
    model: Any
    tokenizer: Tokenizer
    options: dict[str, Any]
    passes: int = 0

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype, options: dict[str, Any]) -> Transformers:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return cls(model, tokenizer, options)

    def answer(self, conversations: Sequence[Messages], params: SamplingParams) -> tuple[list[Answer], Work]:
        if not params.greedy:
            raise ValueError("transformers is measured at temperature 0 only: leave it out, or use --temperature 0")
        answers = []
        total = Work(0.0, 0, 0.0)
        hook = self.model.register_forward_pre_hook(self._count)
        try:
            for conversation in conversations:
                ids = torch.tensor([self.tokenizer.apply_chat(conversation)])
                self.passes = 0
                started = time.perf_counter()
                with torch.inference_mode():
                    out = self.model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=params.max_tokens,
                        do_sample=False,
                        eos_token_id=sorted(self.tokenizer.eos),
                        **self.options,
                    )
                seconds = time.perf_counter() - started
                tokens = out[0, ids.shape[1] :].tolist()
                answers.append(Answer(tokens, self.tokenizer.decode(tokens)))
                total = Work(total.seconds + seconds, total.passes + self.passes, total.inside + seconds)
        finally:
            hook.remove()
        return answers, total

    def _count(self, module: Any, inputs: Any) -> None:
        self.passes += 1

    def close(self) -> None:
        """Shared by all rounds."""
