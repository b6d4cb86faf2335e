"""How sure trained drafters are, and how often they are right, from what is stored with their weights.

`python -m benchmarks.confidence` draws the pictures of docs/results.md; `forerun calibrate trained` measures anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.cli.confidence_picture import draw_confidence, way_of_choosing

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "src/forerun/trained/smollm2-135m"
METHODS = ("eagle", "eagle3")

Bins = list[dict[str, float]]


def stored(method: str) -> dict[str, Any]:
    """The calibration of a shipped drafter."""
    return dict(json.loads((SHIPPED / method / "forerun.json").read_text())["calibration"])


def table() -> str:
    columns: dict[str, Bins] = {}
    for method in METHODS:
        found = stored(method)
        columns |= {f"{method}, {way_of_choosing(way, found)}": bins for way, bins in found["confidence"].items()}
    lines = ["| confidence | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    places = sorted({(row["from"], row["to"]) for bins in columns.values() for row in bins})
    for start, end in places:
        cells = [
            next((f"{r['confidence']:.2f} → {r['acceptance']:.2f}" for r in bins if r["from"] == start), "")
            for bins in columns.values()
        ]
        lines.append(f"| {start:g} to {end:g} | {' | '.join(cells)} |")
    counts = [f"{sum(int(row['candidates']) for row in bins):,}" for bins in columns.values()]
    return "\n".join([*lines, "| candidates | " + " | ".join(counts) + " |"])


if __name__ == "__main__":
    for name in METHODS:
        (ROOT / f"docs/confidence-{name}.svg").write_bytes(draw_confidence("svg", name, stored(name)))
