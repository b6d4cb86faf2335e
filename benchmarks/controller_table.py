"""What `adaptive` engines write beside plain decoding, for every drafter that comes with Forerun and several loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kept import RESULTS, load

PARTS = (
    *("1-untrained", "1-heads", "1-whole", "1-lookahead", "8-heads", "8-whole"),
    *("32-whole", "32-heads", "64-whole"),
)
DEVICE = tuple(f"device-8b-controller-{part}" for part in PARTS)
"""The later ones count."""
CPU = tuple(f"controller-{batch}-{kind}" for batch in (1, 8, 32) for kind in ("heads", "sides", "texts", "others"))
MACHINES = ("H200", "EPYC", "Xeon")
ADAPTIVE, AGAIN = ", adaptive", "none, again"

Cell = tuple[str, str, int]
"""Drafter, machine and batch."""


def table(footnote: Callable[[dict[str, Any]], str]) -> str:
    found: dict[Cell, str] = {}
    again: dict[int, list[float]] = {}
    notes = []
    for names, read in ((DEVICE, _on_device), (CPU, _on_cpu)):
        for name in names:
            if (RESULTS / f"{name}.json").exists():
                result = load(name)
                found |= dict(read(result))
                notes.append(footnote(result))
                for row in result.get("controller", ()):
                    if row["drafter"] == AGAIN:
                        again.setdefault(row["batch"], []).append(row["speedup"])
    for batch, ratios in again.items():
        found["plain decoding again", "H200", batch] = f"{min(ratios):.2f}–{max(ratios):.2f}"
    columns = list(dict.fromkeys((machine, batch) for _, machine, batch in found))
    columns.sort(key=lambda column: (MACHINES.index(column[0]), column[1]))
    lines = [
        "| drafter | " + " | ".join(f"{machine}, {batch}" for machine, batch in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for drafter in dict.fromkeys(drafter for drafter, _, _ in found):
        cells = [found.get((drafter, *column), "") for column in columns]
        lines.append(f"| {drafter} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *dict.fromkeys(notes)])


def _on_device(result: dict[str, Any]) -> Iterator[tuple[Cell, str]]:
    """With what a fixed tree gives behind it, where that was measured."""
    rows = {(row["drafter"], row["batch"]): row for row in result["controller"]}
    for (name, batch), row in rows.items():
        if name.endswith(ADAPTIVE):
            drafter = name.removesuffix(ADAPTIVE)
            fixed = rows.get((drafter, batch))
            beside = "" if fixed is None else f" of {fixed['speedup']:.2f}"
            same = row.get("same", {"answers": 0})
            where = f"{same['answers']} answers"
            if row.get("shared", {}).get("tokens"):
                same, where = row["shared"], f"{row['shared']['tokens']:,} tokens"
            if where != "0 answers" and same["speedup_whole"] > 1:
                beside += f", {(same['speedup'] - 1) / (same['speedup_whole'] - 1):.0%} in {where}"
            yield (drafter, "H200", batch), f"{row['speedup']:.2f}{beside}"


def _on_cpu(result: dict[str, Any]) -> Iterator[tuple[Cell, str]]:
    """With what a fixed tree gives behind it, where that was measured beside it."""
    rows = {row["method"]: row for row in result["rows"] if row["category"] == "overall"}
    machine = next(name for name in MACHINES if name in result["provenance"]["cpu"])
    for method, row in rows.items():
        if not method.endswith(" adaptive"):
            continue
        cell, fixed = "failed", rows.get(method.removesuffix(" adaptive"))
        if row["speedup"] is not None:
            cell = f"{row['speedup']:.2f} ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
            if fixed is not None and fixed["speedup"] is not None:
                cell += f" of {fixed['speedup']:.2f}"
        yield (row["drafter"], machine, row["batch"]), cell
