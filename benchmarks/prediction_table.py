"""What the closed form predicts of chains beside what was measured in the same run."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    lines = [
        "| method | batch | tokens per pass | predicted | measured | apart |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        if row["category"] != "overall" or row["drafter"] == "none":
            continue
        start = f"| {row['method']} | {row['batch']} |"
        if row["error"] is not None or row["predicted_speedup"] is None:
            lines.append(f"{start} failed | | | |")
            continue
        predicted, found = row["predicted_speedup"], row["speedup"]
        spread = f"{found:.2f}× ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
        lines.append(
            f"{start} {row['tokens_per_pass']:.2f} | {predicted:.2f}× | {spread} | {predicted / found - 1:+.0%} |"
        )
    return "\n".join(lines)
