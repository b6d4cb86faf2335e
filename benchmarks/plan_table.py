"""What `forerun plan` recommends for each number of texts at once, and what its own check then measured."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    lines = [
        "| at once | best of what was tried | expected | the check: method | foreseen | measured | advice |",
        "|---:|---|---:|---|---:|---:|---|",
    ]
    for made in result["recommendations"]:
        best = made["ranked"][0]
        expected = f"{best['gain']:.2f}× ({best['low']:.2f}–{best['high']:.2f})"
        advice = f"`{made['use']}`" if made["use"] else "do not speculate"
        for place, each in enumerate(made["check"] or [None]):
            start = f"| {made['batch']} | {best['method']} | {expected} |" if place == 0 else "| | | |"
            lines.append(f"{start} {_checked(each)} {advice if place == 0 else ''} |")
    return "\n".join(lines)


def _checked(each: dict[str, Any] | None) -> str:
    if each is None:
        return "| | |"
    if each["measured_speedup"] is None:
        return f"{each['method']} | {each['predicted_speedup']:.2f}× | failed |"
    spread = f"{each['measured_low']:.2f}–{each['measured_high']:.2f}"
    return f"{each['method']} | {each['predicted_speedup']:.2f}× | {each['measured_speedup']:.2f}× ({spread}) |"
