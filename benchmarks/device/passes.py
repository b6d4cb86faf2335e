"""How long a pass takes, and how long reading the weights and the cache would take at the speed of a copy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from benchmarks.device.models import Measured
from forerun.core.transfer import event
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache

CASES = [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (1, 64), (8, 1), (8, 8), (32, 1), (32, 2), (64, 1), (64, 2)]
CASES += [(64, 4), (64, 8)]
"""Texts and rows of each."""
REPLAYS = 30
KINDS = {
    "product": ("multiply", "add_splits", "gemm", "nvjet", "cutlass", "splitK"),
    "attention": ("attend", "combine"),
    "norm, rotation, gate": ("rms_norm", "write_and_rotate", "gated"),
}


def copy_speed() -> float:
    """Bytes per second, read and written: the best of many, since the machine's clocks have to wake up."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(30):
        start, end = event(timing=True), event(timing=True)
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 4 * 2 * source.nbytes / (start.elapsed_time(end) / 1e3))
    return best


def measure(measured: Measured, context: int, speed: float) -> list[dict[str, Any]]:
    rows = []
    one_row: dict[int, float] = {}
    for texts, each in CASES:
        milliseconds, shares = _pass(measured, texts, each, context)
        one_row.setdefault(texts, milliseconds)
        cached = texts * context * measured.target.new_storage(16).bytes_per_slot
        floor = 1e3 * (measured.weight_bytes + cached) / speed
        rows.append(
            {
                "model": measured.name,
                "texts": texts,
                "rows": each,
                "context": context,
                "ms": milliseconds,
                "floor_ms": floor,
                "over_floor": milliseconds / floor,
                "over_one_row": milliseconds / one_row[texts],
                "shares": shares,
            }
        )
        named = ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares.items())
        print(
            f"{measured.name:>5} {texts:3} × {each:2} rows: {milliseconds:7.3f} ms, floor {floor:6.3f}, "
            f"{milliseconds / floor:5.2f}× of it, {milliseconds / one_row[texts]:5.2f}× of one row; {named}",
            flush=True,
        )
    return rows


def _pass(measured: Measured, texts: int, rows: int, context: int) -> tuple[float, dict[str, float]]:
    """Milliseconds between stamps of the device, replays queued one behind the other; and the kernels' shares."""
    target = measured.target
    cache = KVCache(target.new_storage(texts * -(-(context + rows) // 16) * 16))
    generator = torch.Generator().manual_seed(0)
    segments = []
    for text in range(texts):
        cache.reserve(text, context)
        cache.commit({text: range(context)})
        cache.reserve(text, rows)
        before, slots = cache.slots(text)
        seen, depths = _tree(rows, generator)
        tokens = torch.randint(0, target.vocab_size, (rows,), generator=generator)
        segments.append(Segment(text, tokens, context + depths, seen, before, slots, rows, blocks=cache.blocks(text)))
    batch = Batch.pack(segments)
    for layer in (*cache.storage.keys, *cache.storage.values):
        layer.normal_()
    target.forward_rows(batch, cache.storage)
    assert target.static is not None
    (captured,) = target.static.captured[id(cache.storage)].buckets.values()
    stamps = [event(timing=True) for _ in range(REPLAYS + 1)]
    for stamp in stamps:
        stamp.record()
        captured.run()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(stamps[5:])]
    shares = _shares(captured.run)
    return statistics.median(times), shares


def _tree(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.eye(rows, dtype=torch.bool)
    depths = torch.zeros(rows, dtype=torch.int64)
    for node in range(1, rows):
        parent = int(torch.randint(0, node, (), generator=generator))
        seen[node] |= seen[parent]
        depths[node] = depths[parent] + 1
    return seen, depths


def _shares(run: Callable[[], object]) -> dict[str, float]:
    """Of the time that kernels run; what is none of `KINDS` is called other."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for each in seen.events():
        if "CUDA" in str(each.device_type):
            kind = next((k for k, names in KINDS.items() if any(n in each.name for n in names)), "other")
            times[kind] += each.device_time
    total = sum(times.values())
    return {kind: time / total for kind, time in times.most_common()} if total else {}
