"""Products of few rows on a CUDA device: how close to the time that reading the weight takes, beside cuBLAS?

For the weights of an 8B and of a 135M model, each product goes through so many copies of the weight that they come from
memory and not from the cache of the device; times are of replayed graphs, by device events. The floor is the weight's
bytes at the speed of a measured copy. A plan belongs to a weight: it is chosen by its times for 8 and for 64 rows
together, and the rows of the table all use it. Then the products of all layers of the 8B model, each layer's with their
real dependence on each other, in one graph.

    PYTHONPATH=src:. python -m benchmarks.product_device --json product.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels_device import bandwidth, error, seconds
from forerun.bench.provenance import provenance
from forerun.kernels.product import Plan, gated_product, skinny_product
from forerun.kernels.rows import silu_mul

KIND = torch.bfloat16
ROWS = (1, 8, 16, 32, 64)
TUNED = (8, 64)
"""Rows by which plans are judged: what most passes have, and the most."""
FRESH = 400 << 20
"""Bytes of weight that a round of launches goes through: several times what the device caches."""
LAYERS = 32
PRODUCTS = ("qkv", "out", "gated", "down")
"""Of a layer of the 8B model, in order."""


@dataclass(frozen=True)
class Shape:
    name: str
    size: int  # rows of the weight
    depth: int
    gated: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.size * self.depth

    @property
    def outputs(self) -> int:
        return self.size // 2 if self.gated else self.size

    def plans(self) -> list[Plan]:
        """The one that would be chosen, and some beside it. Steps that divide the depth need no masks."""
        wide, short = self.outputs >= 64 * 132, self.depth < 2048
        if self.gated:
            tried = [(64, 64, 1, 4, 5), (64, 64, 1, 4, 3), (64, 128, 1, 4, 3), (128, 64, 1, 8, 3), (128, 64, 1, 8, 5)]
            if short:
                tried = [(16, 64, 1, 4, 4), (16, 64, 1, 4, 9), (32, 64, 1, 4, 6)]
        elif short:
            tried = [(16, 64, 1, 4, 9), (16, 64, 1, 2, 6), (32, 64, 1, 4, 6), (16, 64, 3, 4, 4)]
            if wide:
                tried = [(64, 64, 1, 4, 4), (64, 64, 1, 4, 6), (128, 64, 1, 4, 4), (128, 64, 1, 8, 5)]
        elif wide:
            tried = [
                (64, 128, 1, 4, 3), (64, 64, 1, 4, 6), (128, 64, 1, 4, 4), (128, 64, 1, 8, 5), (128, 128, 1, 8, 3),
                (256, 64, 1, 8, 4),
            ]  # fmt: skip
        else:
            tried = [
                (64, 128, 1, 4, 6), (64, 256, 1, 4, 5), (32, 128, 1, 4, 9), (64, 128, 2, 4, 5), (64, 128, 4, 4, 4),
                (128, 64, 2, 8, 8), (128, 64, 4, 4, 6), (128, 128, 4, 8, 4),
            ]  # fmt: skip
        return list(dict.fromkeys([Plan.choose(self.outputs, self.depth, self.gated), *(Plan(*cut) for cut in tried)]))


SHAPES = (
    Shape("8B qkv", 6144, 4096),
    Shape("8B out", 4096, 4096),
    Shape("8B gate_up", 28672, 4096),
    Shape("8B gated", 28672, 4096, gated=True),
    Shape("8B down", 4096, 14336),
    Shape("8B head", 49152, 4096),
    Shape("135M qkv", 960, 576),
    Shape("135M out", 576, 576),
    Shape("135M gate_up", 3072, 576),
    Shape("135M gated", 3072, 576, gated=True),
    Shape("135M down", 576, 1536),
    Shape("135M head", 49152, 576),
)


class Bench:
    """One weight in enough copies, and rows for it."""

    def __init__(self, shape: Shape, rows: tuple[int, ...] = ROWS) -> None:
        self.shape = shape
        copies = max(2, -(-FRESH // shape.bytes))
        self.weights = torch.empty(copies, shape.size, shape.depth, dtype=KIND, device="cuda").normal_(0, 0.02)
        self.x = torch.randn(max(rows), shape.depth, device="cuda").to(KIND)
        self.out = torch.empty(max(rows), shape.outputs, dtype=KIND, device="cuda")
        both = self.x.float() @ self.weights[0].float().T
        self.want = silu_mul.plain(both) if shape.gated else both

    def launch(self, rows: int, copy: int, plan: Plan) -> Tensor:
        product: Any = gated_product if self.shape.gated else skinny_product
        result: Tensor = product.device(self.x[:rows], self.weights[copy], out=self.out[:rows], plan=plan)
        return result

    def theirs(self, rows: int, copy: int) -> Tensor:
        both = functional.linear(self.x[:rows], self.weights[copy])
        return silu_mul.device(both) if self.shape.gated else both

    def fresh(self, rows: int, plan: Plan) -> Tensor:
        self.out.fill_(torch.nan)
        return self.launch(rows, 0, plan).clone()

    def wrong(self, got: Tensor) -> float:
        """The largest difference from float32, against the largest number; infinite where nothing was written."""
        if not bool(got.isfinite().all()):
            return math.inf
        want = self.want[: got.shape[0]]
        return float((got.float() - want).abs().max() / want.abs().max())

    def us(self, rows: int, plan: Plan | None) -> float:
        """Of one launch; None is cuBLAS."""
        launch = partial(self.theirs, rows) if plan is None else partial(self.launch, rows, plan=plan)
        return 1e6 * seconds([partial(launch, copy) for copy in range(self.weights.shape[0])], replays=9)

    def same(self, plan: Plan) -> bool:
        """Whether rows have the same bits beside 1, 16, 32 and 64 rows."""
        most = self.fresh(max(ROWS), plan)
        return all(torch.equal(self.fresh(rows, plan), most[:rows]) for rows in ROWS)

    def tune(self, until: float) -> tuple[Plan, list[dict[str, Any]]]:
        """The best plan, and all that were tried. Past `until` no more are."""
        tried: list[tuple[float, Plan]] = []
        found: list[dict[str, Any]] = []
        for plan in self.shape.plans():
            if tried and time.perf_counter() > until:
                print(f"{self.shape.name}: no time left for {plan}")
                continue
            try:
                wrong = self.wrong(self.fresh(max(ROWS), plan))
                if wrong > 2e-2:
                    raise ArithmeticError(f"error {wrong}")
                took = [self.us(rows, plan) for rows in TUNED]
            except Exception as failure:  # one plan that does not fit must not end the rest
                print(f"{self.shape.name}: {plan} fails: {type(failure).__name__}: {str(failure)[:300]}")
                continue
            tried.append((math.prod(took), plan))
            found.append({"shape": self.shape.name, "plan": asdict(plan), "us": dict(zip(TUNED, took, strict=True))})
        if not tried:
            raise SystemExit(f"{self.shape.name}: no plan works")
        for rows in TUNED:
            fastest = sorted(found, key=lambda one: one["us"][rows])[:3]
            print(f"  {rows:2d} rows:", ", ".join(f"{one['us'][rows]:.2f} ({cut(one['plan'])})" for one in fastest))
        return min(tried, key=lambda one: one[0])[1], found

    def table(self, plan: Plan, speed: float, threads: int) -> list[dict[str, Any]]:
        floor = 1e6 * self.shape.bytes / speed
        kinds = (plan, replace(plan, overlap=False))
        build([partial(self.launch, rows, 0, kind) for rows in (16, 32, 64) for kind in kinds], threads)
        same = self.same(plan)
        found = []
        for rows in ROWS:
            row = {
                "shape": self.shape.name, "rows": rows, "floor_us": floor, "cublas_us": self.us(rows, None),
                "us": self.us(rows, plan), "alone_us": self.us(rows, replace(plan, overlap=False)),
                "error": self.wrong(self.fresh(rows, plan)), "cublas_error": self.wrong(self.theirs(rows, 0)),
                "same_bits": same, "plan": asdict(plan),
            }  # fmt: skip
            found.append(row)
            print(line(row), flush=True)
        return found


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{row[key]:8.2f} {row['floor_us'] / row[key]:6.1%}" for key in ("cublas_us", "us", "alone_us"))
    errors = f"{row['error']:.1e} {row['cublas_error']:.1e}"
    name = f"{row['shape']:13s} {row['rows']:4d} {row['floor_us']:8.2f}"
    return f"{name}  {times}  {errors}  {row['same_bits']!s:5s}  {cut(row['plan'])}"


def cut(plan: dict[str, Any]) -> str:
    return " ".join(str(int(value)) for value in plan.values())


HEADER = (
    f"{'weight':13s} rows {'floor µs':>8s}  {'cuBLAS':>15s}  {'overlapped':>15s}  {'not overlapped':>15s}  "
    "errors          bits   plan (tile_n tile_k splits warps stages overlap)"
)


def build(launches: list[Callable[[], Any]], threads: int) -> None:
    """Runs each once, many at a time: a kernel takes about a second to build. What fails is told when it is used."""
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(launch) for launch in launches]:
                future.exception()
        torch.cuda.synchronize()


def trials(shape: Shape) -> list[Callable[[], Any]]:
    """Everything that tuning will launch."""
    weight = torch.zeros(shape.size, shape.depth, dtype=KIND, device="cuda")
    x = torch.zeros(max(ROWS), shape.depth, dtype=KIND, device="cuda")
    product: Any = gated_product if shape.gated else skinny_product
    return [partial(product.device, x[:rows], weight, plan=plan) for plan in shape.plans() for rows in TUNED]


class Chain:
    """The products of all layers of the 8B model. Layers start from the same rows, so that numbers stay of one size."""

    def __init__(self, plans: dict[Shape, Plan]) -> None:
        self.plans = plans
        self.shapes = [next(shape for shape in SHAPES if shape.name == f"8B {name}") for name in PRODUCTS]
        self.layers = [
            [torch.empty(s.size, s.depth, dtype=KIND, device="cuda").normal_(0, 0.02) for s in self.shapes]
            for _ in range(LAYERS)
        ]
        self.x = torch.randn(max(ROWS), 4096, device="cuda").to(KIND)
        self.out = torch.empty(LAYERS, max(ROWS), 4096, dtype=KIND, device="cuda")

    def theirs(self, rows: int) -> None:
        for (qkv, out, both, down), result in zip(self.layers, self.out, strict=True):
            heads = functional.linear(self.x[:rows], qkv)
            mixed = functional.linear(heads[:, :4096], out)
            inner = silu_mul.device(functional.linear(mixed, both))
            torch.mm(inner, down.T, out=result[:rows])

    def ours(self, rows: int, overlap: bool) -> None:
        plans = [replace(self.plans[shape], overlap=overlap) for shape in self.shapes]
        for (qkv, out, both, down), result in zip(self.layers, self.out, strict=True):
            heads = skinny_product.device(self.x[:rows], qkv, plan=plans[0])
            mixed = skinny_product.device(heads[:, :4096], out, plan=plans[1])
            inner = gated_product.device(mixed, both, plan=plans[2])
            skinny_product.device(inner, down, out=result[:rows], plan=plans[3])

    def run(self, rows: int, speed: float) -> dict[str, Any]:
        forms: dict[str, Callable[[], None]] = {
            "cublas": partial(self.theirs, rows),
            "overlapped": partial(self.ours, rows, True),
            "alone": partial(self.ours, rows, False),
        }
        took, results = {}, {}
        for name, form in forms.items():
            took[name] = 1e3 * seconds([form], replays=9)
            results[name] = self.out[:, :rows].clone()  # of the last replay: an order that is lost would show
        return {
            "rows": rows,
            "floor_ms": 1e3 * LAYERS * sum(shape.bytes for shape in self.shapes) / speed,
            "ms": took,
            "same_bits": torch.equal(results["overlapped"], results["alone"]),
            "error": error(results["overlapped"], results["cublas"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for everything")
    parser.add_argument("--seconds", type=float, default=80, help="after these no further plan is tried")
    parser.add_argument("--threads", type=int, default=8, help="that build kernels; 0 to build each when it is used")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: tests/kernels checks the kernels without one")
    begin = time.perf_counter()
    torch.manual_seed(0)
    speed = bandwidth()
    print(f"copy {speed / 1e12:.2f} TB/s")
    build([launch for shape in SHAPES for launch in trials(shape)], arguments.threads)
    print(f"built after {time.perf_counter() - begin:.0f} s", flush=True)
    result: dict[str, Any] = {"provenance": provenance({}, "cuda"), "copy": speed, "tried": [], "rows": [], "chain": []}
    plans: dict[Shape, Plan] = {}
    print(HEADER)
    for shape in SHAPES:
        bench = Bench(shape)
        plans[shape], tried = bench.tune(begin + arguments.seconds)
        result["tried"] += tried
        result["rows"] += bench.table(plans[shape], speed, arguments.threads)
        del bench
        torch.cuda.empty_cache()
    chain = Chain(plans)
    for rows in (1, 16, 64):
        row = chain.run(rows, speed)
        result["chain"].append(row)
        times = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        kept = f"same bits overlapped: {row['same_bits']}, error {row['error']:.1e}"
        print(f"{LAYERS} layers × {rows:2d} rows, ms: floor {row['floor_ms']:.3f}  {times}  {kept}", flush=True)
    print("MEASURED = {")
    for shape, plan in plans.items():
        print(f"    ({shape.size}, {shape.depth}, {shape.gated}): {plan},")
    print("}")
    print(f"{time.perf_counter() - begin:.0f} s, builds included")
    if arguments.json is not None:
        result["seconds"] = time.perf_counter() - begin
        result["plans"] = {shape.name: asdict(plan) for shape, plan in plans.items()}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    every = [*result["rows"], *({"shape": "chain", **row} for row in result["chain"])]
    bad = [f"{row['shape']} × {row['rows']}" for row in every if not (row["error"] < 2e-2 and row["same_bits"])]
    if bad:
        raise SystemExit(f"WRONG: {', '.join(bad)}")


if __name__ == "__main__":
    main()
