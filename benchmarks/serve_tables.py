"""Tables of what was measured of the server: its gain, its answers under load, and structured output."""

from __future__ import annotations

from typing import Any


def speed(result: dict[str, Any]) -> str:
    lines = [
        "| clients | with the drafter, tokens/s | plainly | tokens per pass | gain | of the rounds |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['clients']} | {row['drafted_tokens_per_second']:.0f} | {row['plain_tokens_per_second']:.0f} | "
            f"{row['tokens_per_pass']:.2f} | {row['gain']:.2f}× | {row['worst']:.2f}–{row['best']:.2f} |"
        )
    return "\n".join(lines)


def structured(result: dict[str, Any]) -> str:
    lines = ["| | answers | parse | fit their schema | tokens per pass |", "|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        counts = " | ".join(str(row[name]) for name in ("texts", "parse", "fit"))
        lines.append(f"| {row['arm']} | {counts} | {row['tokens_per_pass']:.2f} |")
    return "\n".join(lines)


def load(result: dict[str, Any]) -> str:
    found = result["result"]
    memory = ", ".join(f"{megabytes:,.0f}" for megabytes in found["memory"])
    rows = {
        "requests": f"{found['requests']:,}",
        "answered": f"{found['answered']:,}",
        "given up by their clients": f"{found['cancelled']:,}",
        "hung, or of a wrong status": f"{found['hung'] + len(found['wrong_status'])}",
        "asked again alone": f"{found['compared']}",
        "of these, different": f"{len(found['different'])}",
        "MB of memory, by quarters of the load": memory,
    }
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows.items())])
