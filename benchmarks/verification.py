"""How fast are the verification rules, and how much do they read?

64 sequences × 64 nodes × 49,152 tokens: the batched form of every rule against its plain reference, in seconds, and the
bytes its operations read against the bytes that must be read at least once. The second is counted by running the
reference on rows that note who looks at them: a whole row, or single entries.

    python -m benchmarks.verification --out results/verification-cpu.json
    python -m benchmarks.verification --device cuda --check
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.bytes_read import BytesRead, Ledger, watched
from forerun.bench.provenance import provenance
from forerun.core.drawing import Drawing, iid_children, race_children, top_children
from forerun.core.noise import StepNoise
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.trees.optimal import best_shape
from forerun.verify.plain import PlainTree, PlainVerdict, SequenceNoise
from forerun.verify.rule import VerificationRule, all_rules

RANK_ACCEPTANCE = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02)
"""For the shape of the tree only: about what a trained head reaches."""


@dataclass(frozen=True)
class Sizes:
    batch: int
    nodes: int
    vocabulary: int


@dataclass(frozen=True)
class Row:
    rule: str
    drawing: str
    shape: str
    tokens_per_step: float
    batched_ms: float
    spread_ms: float
    reference_ms: float
    ratio: float
    megabytes_read: float
    megabytes_needed: float
    read_over_needed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rules", default="", help="comma-separated; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="also compare every verdict with the reference's")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.batch, arguments.nodes, arguments.vocabulary)
    console = Console(width=140)
    chosen = [name for name in arguments.rules.split(",") if name] or list(all_rules())

    p, q = laws(sizes, arguments.device)
    rows = []
    for name in chosen:
        rule = all_rules()[name]
        drawing = preferred_drawing(rule)
        shape = TreeShape.chain(sizes.nodes - 1) if rule.chain_only else best_shape(RANK_ACCEPTANCE, sizes.nodes, 8)[0]
        tree, noise = draft(shape, drawing, q, coupled=name == "gumbel")
        rows.append(measure(rule, tree, p, noise, repeat=arguments.repeat, check=arguments.check))
        console.print(f"{name}: {rows[-1].batched_ms:.1f} ms, reference {rows[-1].reference_ms:.0f} ms", style="dim")
    console.print(table(rows, sizes, arguments.device))
    if arguments.out:
        settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "rules")}
        result = {"provenance": provenance(settings, arguments.device), "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def laws(sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """p and q [B, N, V]: random laws for every node, total variation about 0.35."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (sizes.batch, sizes.nodes, sizes.vocabulary)
    p = torch.randn(shape, generator=generator, device=device).mul_(2.5)
    q = torch.randn(shape, generator=generator, device=device).mul_(0.9).add_(p)
    for table in (p, q):
        for b in range(sizes.batch):  # in place, to stay within memory
            table[b] = torch.softmax(table[b], -1)
    return p, q


def preferred_drawing(rule: VerificationRule) -> Drawing:
    order = (Drawing.WITHOUT_REPLACEMENT, Drawing.IID) if Drawing.FIXED not in rule.drawings else (Drawing.FIXED,)
    return next(drawing for drawing in order if drawing in rule.drawings)


def draft(shape: TreeShape, drawing: Drawing, q: Tensor, *, coupled: bool) -> tuple[DraftTree, StepNoise]:
    """A tree whose children of node i are really drawn from row i of q."""
    batch, device = q.shape[0], q.device
    starts = torch.arange(batch, device=device) + 100
    noise = StepNoise(torch.arange(batch, device=device) * 7919 + 1, starts)
    tokens = torch.zeros(batch, shape.size, dtype=torch.int64, device=device)
    for node, children in enumerate(shape.children):
        if not children:
            continue
        at, depth = torch.full_like(starts, node), torch.full_like(starts, shape.depths[node])
        if coupled:
            drawn = race_children(q[:, node], noise.race(depth, q.shape[2]), len(children))
        elif drawing is Drawing.WITHOUT_REPLACEMENT:
            drawn = race_children(q[:, node], noise.draft_race(at, q.shape[2]), len(children))
        elif drawing is Drawing.IID:
            drawn = iid_children(q[:, node], noise.draft(at, len(children)))
        else:
            drawn = top_children(q[:, node], len(children))
        tokens[:, list(children)] = drawn.clamp_min(0)
    laws_of = q if drawing.sampled else None
    return DraftTree.from_shape(shape, tokens, starts - 1, drawing, q=laws_of), noise


def measure(rule: VerificationRule, tree: DraftTree, p: Tensor, noise: StepNoise, *, repeat: int, check: bool) -> Row:
    verdict = rule.verify(tree, p, noise)
    times = [timed(lambda: rule.verify(tree, p, noise), p.device) for _ in range(repeat)]
    with BytesRead() as reads:
        rule.verify(tree, p, noise)
    # The reference of typical acceptance hands its rows to torch, where nobody can watch.
    ledger = Ledger(p.element_size(), p.shape[2], rows_are_read_whole=rule.name == "typical")
    started = time.perf_counter()
    plain = [reference(rule, tree, p, noise, b) for b in range(tree.batch)]
    reference_ms = (time.perf_counter() - started) * 1000
    for b in range(tree.batch):
        reference(rule, tree, p, noise, b, ledger)
    if check:
        compare(rule, verdict, plain)
    median = statistics.median(times)
    return Row(
        rule=rule.name,
        drawing=tree.drawing.value,
        shape=f"chain of {tree.max_depth}" if rule.chain_only else f"tree {tree.max_depth} deep, {tree.width} wide",
        tokens_per_step=float(verdict.lengths.double().mean()) + 1,
        batched_ms=median,
        spread_ms=max(times) - min(times),
        reference_ms=reference_ms,
        ratio=reference_ms / median,
        megabytes_read=reads.total / 1e6,
        megabytes_needed=ledger.total / 1e6,
        read_over_needed=reads.total / ledger.total,
    )


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def reference(
    rule: VerificationRule, tree: DraftTree, p: Tensor, noise: StepNoise, b: int, ledger: Ledger | None = None
) -> PlainVerdict:
    plain = PlainTree.of(tree, b)
    rows: Any = list(p[b].cpu().numpy())
    if ledger is not None:
        ledger.next_sequence()
        rows = watched(rows, ledger, "p")
        if plain.q is not None:
            plain = PlainTree(plain.tokens, plain.parents, plain.children, watched(list(plain.q), ledger, "q"))  # type: ignore[arg-type]
    return rule.reference(plain, rows, SequenceNoise(noise, b, p.shape[2]))


def compare(rule: VerificationRule, verdict: Verdict, plain: list[PlainVerdict]) -> None:
    for b, wanted in enumerate(plain):
        path = tuple(node for node in verdict.nodes[b].tolist() if node >= 0)
        found = PlainVerdict(path, int(verdict.tokens[b]))
        assert found == wanted, f"{rule.name}, sequence {b}: batched {found}, reference {wanted}"


def table(rows: list[Row], sizes: Sizes, device: str) -> Table:
    title = f"{sizes.batch} sequences × {sizes.nodes} nodes × {sizes.vocabulary:,} tokens, float32, {device}"
    result = Table(title=title)
    for heading in (
        "rule",
        "drafts",
        "tokens/step",
        "batched ms",
        "reference ms",
        "ratio",
        "MB read",
        "MB needed",
        "read/needed",
    ):
        result.add_column(heading, justify="left" if heading in ("rule", "drafts") else "right")
    for row in rows:
        result.add_row(
            row.rule,
            row.shape,
            f"{row.tokens_per_step:.2f}",
            f"{row.batched_ms:.1f}",
            f"{row.reference_ms:.0f}",
            f"{row.ratio:.0f}×",
            f"{row.megabytes_read:.0f}",
            f"{row.megabytes_needed:.1f}",
            f"{row.read_over_needed:.1f}",
        )
    return result


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
