"""How fast text for training is written, beside `generate` of `transformers` at several batches."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.device.models import Measured, in_transformers
from forerun.core.params import SamplingParams
from forerun.drafters.none import NoDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request

TOKENS = 256
LONGEST = 256


def prompts_of(measured: Measured, texts: list[str], count: int) -> list[list[int]]:
    tokenizer = measured.model.tokenizer
    asked = [tokenizer.apply_chat([{"role": "user", "content": text}])[-LONGEST:] for text in texts[:count]]
    return [asked[i % len(asked)] for i in range(count)]


def ours(measured: Measured, prompts: list[list[int]], batch: int, **params: Any) -> dict[str, Any]:
    target = measured.target
    slots = batch * (LONGEST + TOKENS + 64)
    engine = Engine(target, NoDrafter(), slots=slots, max_batch=batch, max_rows=16384, max_ahead=32, prompts_alone=True)
    settings = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **params)

    def run(chosen: list[list[int]]) -> tuple[int, float]:
        tokens = 0
        torch.cuda.synchronize()
        started = time.perf_counter()
        for prompt in chosen:
            engine.add(Request(prompt, settings))
        while engine.has_work:
            tokens += sum(len(update.tokens) for update in engine.step())
        torch.cuda.synchronize()
        return tokens, time.perf_counter() - started

    run(prompts[:batch])  # captures
    before = dict(engine.statistics.seconds)
    tokens, seconds = run(prompts)
    row = {"method": "forerun", "batch": batch, **params, "tokens": tokens, "tokens_per_second": tokens / seconds}
    row["shares"] = {name: (spent - before[name]) / seconds for name, spent in engine.statistics.seconds.items()}
    print(f"forerun, batch {batch}, {params}: {tokens / seconds:,.0f} tokens/s, {row['shares']}", flush=True)
    return row


def theirs(measured: Measured, prompts: list[list[int]], batch: int, model: Any) -> dict[str, Any]:
    device = measured.target.device
    longest = max(len(prompt) for prompt in prompts[:batch])
    ids = torch.zeros(batch, longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts[:batch]):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(8)
    seconds = run(TOKENS)
    speed = batch * TOKENS / seconds
    print(f"transformers, batch {batch}: {speed:,.0f} tokens/s", flush=True)
    return {"method": "transformers", "batch": batch, "tokens": batch * TOKENS, "tokens_per_second": speed}


def measure(measured: Measured, texts: list[str], beside: str) -> list[dict[str, Any]]:
    rows = []
    prompts = prompts_of(measured, texts, 4096)
    for batch in (1024, 2048):
        rows.append(ours(measured, prompts, batch, temperature=0.0))
    if not beside:
        return rows
    peer = in_transformers(measured.target, measured.model.tokenizer)
    for batch in map(int, beside.split(",")):
        try:
            rows.append(theirs(measured, prompts, batch, peer))
        except torch.cuda.OutOfMemoryError as error:
            print(f"transformers, batch {batch}: {str(error).splitlines()[0]}")
    return rows


def sampled(measured: Measured, texts: list[str]) -> list[dict[str, Any]]:
    prompts = prompts_of(measured, texts, 1024)
    ways: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}]
    return [ours(measured, prompts, 512, **params) for params in ways]
