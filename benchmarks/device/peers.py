"""Others on the same weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.device.models import Measured, in_transformers
from forerun.bench.questions import Question


def measure(measured: Measured, questions: list[Question], tokens: int) -> list[dict[str, Any]]:
    """`generate` of `transformers` on the same weights: plain, and with its prompt lookup."""
    model = in_transformers(measured.target, measured.model.tokenizer)
    tokenizer = measured.model.tokenizer
    rows = []
    for name, options in (("transformers", {}), ("transformers-lookup", {"prompt_lookup_num_tokens": 10})):
        written, seconds = 0, 0.0
        for number, question in enumerate([questions[0], *questions]):
            asked = torch.tensor([tokenizer.apply_chat([{"role": "user", "content": question.turns[0]}])])
            asked = asked.to(measured.target.device)
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    asked,
                    attention_mask=torch.ones_like(asked),
                    max_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=sorted(tokenizer.eos),
                    **options,
                )
            torch.cuda.synchronize()
            if number:  # the first one warms up
                seconds += time.perf_counter() - started
                written += out.shape[1] - asked.shape[1]
        rows.append(
            {
                "model": measured.name,
                "drafter": name,
                "batch": 1,
                "tokens": written,
                "tokens_per_second": written / seconds,
            }
        )
        print(f"{measured.name:>5} {name}: {written / seconds:.1f} tokens/s", flush=True)
    return rows
