"""The kernels on a CUDA device, at the shape of an 8B model: are they right, and how far from the memory floor?

Every kernel is checked against its plain form, on fresh random inputs and a poisoned output. Times are of replayed
graphs of many launches, by device events; attention goes through enough layers that keys and values come from memory
and not from the cache of the device. The floor is what must be read and written, at the speed of a measured copy.

    PYTHONPATH=src:. python -m benchmarks.kernels_device            # all of it
    PYTHONPATH=src:. python -m benchmarks.kernels_device --tune     # besides, other plans for attention
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tests.kernels.packing import random_case, random_tree
from torch import Tensor

from forerun.bench.provenance import provenance
from forerun.kernels.attention import PackedRows, Plan, _processors, mask_words, tree_attention
from forerun.kernels.rows import rms_norm, silu_mul, write_and_rotate
from forerun.kernels.step import move_rows

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, LAYERS, BLOCK = 32, 8, 128, 4096, 14336, 32, 16
CONTEXTS, BATCHES, ROWS = (512, 8192), (1, 8, 32, 64), (1, 16, 64)
KIND = torch.bfloat16
SCALE = SIZE**-0.5
FRESH = 256 << 20
"""Bytes of keys and values that a round of launches goes through: several times what the device caches."""


def seconds(launches: list[Callable[[], Any]], replays: int = 5) -> float:
    """Of one launch: the median replay of a graph of them all."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=KIND, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)] * 3)


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite where something was not written."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


class Bucket:
    """Sequences of one context and one number of rows, with trees of their own and their blocks strewn about."""

    def __init__(self, batch: int, context: int, rows: int, layers: int | None = None) -> None:
        generator = torch.Generator().manual_seed(batch + context + rows)
        each = -(-(context + rows) // BLOCK)
        one = batch * each * BLOCK * 2 * KV_HEADS * SIZE * 2
        layers = min(128, max(2, -(-FRESH // one))) if layers is None else layers
        self.bytes = batch * (context + rows) * 2 * KV_HEADS * SIZE * 2 + 2 * batch * rows * HEADS * SIZE * 2
        self.whole = torch.empty(layers, batch * each * BLOCK, 2, KV_HEADS, SIZE, dtype=KIND, device="cuda").normal_()
        self.q = torch.randn(batch * rows, HEADS, SIZE, dtype=KIND, device="cuda")
        self.out = torch.full((batch * rows, HEADS * SIZE), torch.nan, dtype=KIND, device="cuda")
        grown = [random_tree(rows, generator) for _ in range(min(batch, 4))]
        seen = torch.cat([mask_words(grown[b % len(grown)][0]) for b in range(batch)])
        depths = torch.cat([grown[b % len(grown)][1] for b in range(batch)])
        blocks = torch.randperm(batch * each, generator=generator).view(batch, each).int()
        number = torch.arange(batch, dtype=torch.int32)
        tensors = (number * rows, torch.full_like(number, rows), torch.full_like(number, context), blocks, seen)
        starts, counts, contexts, blocks, seen = (tensor.cuda() for tensor in tensors)
        self.packed = PackedRows(
            starts, counts, contexts, counts, blocks, seen, (context + depths).cuda(), rows, context
        )

    def launch(self, layer: int, plan: Plan | None = None) -> Tensor:
        keys, values = self.whole[layer, :, 0], self.whole[layer, :, 1]
        return tree_attention.device(self.q, keys, values, self.packed, scale=SCALE, out=self.out, plan=plan)

    def plain(self, layer: int) -> Tensor:
        return tree_attention.plain(self.q, self.whole[layer, :, 0], self.whole[layer, :, 1], self.packed, scale=SCALE)

    def time(self, plan: Plan | None = None) -> float:
        return seconds([partial(self.launch, layer, plan) for layer in range(self.whole.shape[0])])

    def plan(self) -> Plan:
        share, batch = HEADS // KV_HEADS, self.packed.starts.shape[0]
        most, context = self.packed.max_rows, self.packed.max_context
        return Plan.choose(batch, KV_HEADS, most * share, context, SIZE, _processors(self.q.device))


def odd_cases() -> dict[str, float]:
    """Attention where shapes are not the round ones."""
    cases: dict[str, tuple[dict[str, Any], int | None, Plan]] = {
        "window 20": ({"heads": 8, "size": 128, "dtype": KIND}, 20, Plan(16, 64, 4, 4, 3)),
        "groups of 3": ({"heads": 6, "size": 64, "dtype": KIND}, None, Plan(16, 64, 2, 4, 3)),
        "float32": ({"heads": 4, "size": 64}, None, Plan(16, 32, 1, 4, 2)),
        "heads of 80": ({"heads": 4, "size": 80, "dtype": KIND}, None, Plan(64, 64, 2, 4, 2)),
    }
    result = {}
    for name, (shape, window, plan) in cases.items():
        worst = 0.0
        for seed, lengths in enumerate([[(0, 1)], [(0, 7), (16, 1), (47, 20), (129, 3)], [(1000, 64), (1, 70)]]):
            case = random_case(lengths, kv_heads=2, seed=seed, **shape).to(torch.device("cuda"))
            out = torch.full((case.q.shape[0], case.q.shape[1] * case.q.shape[2]), torch.nan, device="cuda").to(
                case.q.dtype
            )
            given = (case.q, case.keys, case.values, case.packed)
            tree_attention.device(*given, scale=0.1, window=window, out=out, plan=plan)
            worst = max(worst, error(out, tree_attention.plain(*given, scale=0.1, window=window)))
        result[name] = worst
    return result


def attention(speed: float) -> list[dict[str, Any]]:
    found = []
    for context, batch, rows in product(CONTEXTS, BATCHES, ROWS):
        bucket = Bucket(batch, context, rows)
        wrong = error(bucket.launch(0), bucket.plain(0))
        took, floor = bucket.time(), bucket.bytes / speed
        name = f"attention {context:5d} × {batch:2d} × {rows:2d}"
        found.append(line(name, wrong, took, floor, plan=asdict(bucket.plan())))
    return found


def line(name: str, wrong: float, took: float, floor: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "error": wrong, "us": took * 1e6, "floor_us": floor * 1e6, **more}


def around(speed: float) -> list[dict[str, Any]]:
    """The kernels between products, for some numbers of rows."""
    found = []
    cos, sin = torch.rand(2, 9000, SIZE // 2, device="cuda").to(KIND)
    weight = torch.rand(HIDDEN, device="cuda").to(KIND)
    for rows in (1, 64, 1024):
        x, residual = torch.randn(2, rows, HIDDEN, device="cuda").to(KIND)
        want = rms_norm.plain(x.clone(), weight, 1e-5, residual=residual)
        wrong = error(rms_norm.device(x.clone(), weight, 1e-5, residual=residual), want)
        nothing = torch.zeros_like(residual)  # times must not make x grow
        took = seconds([partial(rms_norm.device, x, weight, 1e-5, residual=nothing)] * 20)
        found.append(line(f"rms_norm + residual × {rows}", wrong, took, 4 * x.nbytes / speed))
        both = torch.randn(rows, 2 * INNER, device="cuda").to(KIND)
        wrong = max(error(silu_mul.device(both, kind), silu_mul.plain(both, kind)) for kind in ("silu", "gelu"))
        took = seconds([partial(silu_mul.device, both)] * 20)
        found.append(line(f"silu_mul × {rows}", wrong, took, 1.5 * both.nbytes / speed))
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * SIZE, device="cuda").to(KIND)
        positions = torch.randint(0, 9000, (rows,), device="cuda")
        slots = torch.randperm(2048, device="cuda")[:rows]
        results = []
        for form in (write_and_rotate.plain, write_and_rotate.device):
            cache = torch.zeros(2048, 2, KV_HEADS, SIZE, dtype=KIND, device="cuda")
            q = form(qkv, cache[:, 0], cache[:, 1], positions, slots, cos=cos, sin=sin)
            results.append(torch.cat([q.flatten(), cache.flatten()]))
        given = (qkv, cache[:, 0], cache[:, 1], positions, slots)
        took = seconds([partial(write_and_rotate.device, *given, cos=cos, sin=sin)] * 20)
        found.append(line(f"write_and_rotate × {rows}", error(results[1], results[0]), took, 2 * qkv.nbytes / speed))
    return found


def step(speed: float) -> list[dict[str, Any]]:
    found = []
    whole = torch.empty(LAYERS, 64 * 64, 2, KV_HEADS, SIZE, dtype=KIND, device="cuda").normal_()
    for batch in (1, 64):
        kept = torch.rand(batch, 63, device="cuda").argsort(1)[:, :8].sort(1).values + 1  # 8 of the rows 1 to 63
        source = kept + 64 * torch.arange(batch, device="cuda")[:, None]
        target = torch.arange(1, 9, device="cuda") + 64 * torch.arange(batch, device="cuda")[:, None]
        target = torch.where(source == target, -1, target)
        want = whole.clone()
        move_rows.plain(want, source, target)
        mine = whole.clone()
        move_rows.device(mine, source, target)
        took = seconds([partial(move_rows.device, mine, source, target)] * 20)
        moved = 2 * batch * 8 * LAYERS * whole[0, 0].nbytes
        mine.copy_(whole)
        move_rows.device(mine, source, target)
        found.append(
            line(f"move_rows 8 × {batch}", 0.0 if torch.equal(mine, want) else float("inf"), took, moved / speed)
        )
    return found


def tune(speed: float) -> list[dict[str, Any]]:
    """Other plans, fastest first, for those shapes that matter most."""
    found = []
    for context, batch, rows in ((512, 1, 1), (512, 1, 64), (512, 32, 1), (512, 8, 64), (8192, 8, 16)):
        bucket = Bucket(batch, context, rows)
        chosen = bucket.plan()
        tried = []
        for tile_m, tile_n, stages in product({chosen.tile_m, max(16, chosen.tile_m // 2)}, (32, 64), (2, 3)):
            for splits in sorted({max(1, chosen.splits // 2), chosen.splits, min(64, chosen.splits * 2)}):
                plan = Plan(tile_m, tile_n, splits, 8 if tile_m == 128 else 4, stages)
                tried.append(
                    line(
                        f"tune {context} × {batch} × {rows}",
                        0.0,
                        bucket.time(plan),
                        bucket.bytes / speed,
                        plan=asdict(plan),
                    )
                )
        found += sorted(tried, key=lambda row: row["us"])[:4]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try other plans for attention too")
    parser.add_argument("--out", type=Path, help="a folder; $OUT where it is not given")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: tests/kernels checks the kernels without one")
    begin = time.perf_counter()
    torch.manual_seed(0)
    speed = bandwidth()
    odd = odd_cases()
    rows = [*around(speed), *step(speed), *attention(speed), *(tune(speed) if arguments.tune else [])]
    print(f"copy {speed / 1e12:.2f} TB/s; {time.perf_counter() - begin:.0f} s, builds included")
    for name, wrong in odd.items():
        print(f"attention, {name}: error {wrong:.1e}")
    print(f"{'kernel (attention: context × batch × rows)':42s} {'error':>8s} {'µs':>9s} {'floor':>9s} {'×':>6s}")
    for row in rows:
        plan = " ".join(f"{value}" for value in row.get("plan", {}).values())
        ratio = row["us"] / row["floor_us"]
        print(f"{row['name']:42s} {row['error']:8.1e} {row['us']:9.2f} {row['floor_us']:9.2f} {ratio:6.2f}  {plan}")
    folder = arguments.out or (Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    if folder is not None:
        settings = {"tune": arguments.tune}
        result = {"provenance": provenance(settings, "cuda"), "copy": speed, "odd": odd, "rows": rows}
        (folder / "kernels_device.json").write_text(json.dumps(result, indent=1) + "\n")
    wrong_ones = [row["name"] for row in rows if not row["error"] < 1e-2] + [n for n, e in odd.items() if not e < 1e-2]
    if wrong_ones:
        raise SystemExit(f"WRONG: {', '.join(wrong_ones)}")


if __name__ == "__main__":
    main()
