"""What a pass of the target costs by its number of rows: a tree of that many nodes behind a context.

Row counts take turns, so that a busy moment of the machine hits all of them; the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from forerun.bench.provenance import provenance
from forerun.engine.loaded import LoadedModel
from forerun.models.batch import KEYS, Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.target import TargetModel

ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)


def passes(target: TargetModel, context: int, rows: tuple[int, ...], repeat: int) -> dict[int, list[float]]:
    """Seconds of each pass, packing included."""
    cache = KVCache(target.new_storage(context + max(rows) + 2 * KEYS))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, target.vocab_size, (context,), generator=generator)
    cache.reserve(0, context)
    before, slots = cache.slots(0)
    first = Segment(0, text, torch.arange(context), None, before, slots, 1)
    target.forward_rows(Batch.pack([first]), cache.storage)
    cache.commit({0: range(context)})
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(repeat + 1):
        for count in rows:
            tokens = torch.randint(0, target.vocab_size, (count,), generator=generator)
            start = time.perf_counter()
            cache.reserve(0, count)
            before, slots = cache.slots(0)
            nodes = torch.arange(count)
            tree = torch.eye(count, dtype=torch.bool)  # a root and its children
            tree[:, 0] = True
            run = cache.run(0, KEYS)
            segment = Segment(0, tokens, context + (nodes > 0).long(), tree, before, slots, count, run=run)
            target.forward_rows(Batch.pack([segment]), cache.storage)
            times[count].append(time.perf_counter() - start)
            cache.abandon()
    return {count: seconds[1:] for count, seconds in times.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    target = LoadedModel.load(arguments.model, dtype=arguments.dtype, device="cpu").target
    measured = passes(target, arguments.context, ROWS, arguments.repeat)
    rows = [
        {"rows": count, "ms": statistics.median(seconds) * 1e3, "fastest_ms": min(seconds) * 1e3}
        for count, seconds in measured.items()
    ]
    for row in rows:
        print(f"{row['rows']:3d} rows  {row['ms']:6.1f} ms  (fastest {row['fastest_ms']:.1f})")
    if arguments.out is not None:
        settings = {name: getattr(arguments, name) for name in ("model", "dtype", "context", "repeat")}
        result = {"provenance": provenance(settings), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
