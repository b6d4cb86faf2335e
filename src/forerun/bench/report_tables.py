"""The tables of the report, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

Row = dict[str, Any]
Format = str | Callable[[Any], str]


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _megabytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MB"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms"


COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("tokens/s of a request", "request_tokens_per_second", "{:.1f}"),
    ("first token", "first_token_seconds", _milliseconds),
    ("95%", "first_token_seconds_p95", _milliseconds),
    ("tokens/pass", "tokens_per_pass", "{:.2f}"),
    ("accepted", "acceptance", _percent),
    ("speedup", "speedup", _times),
    ("predicted", "predicted_speedup", _times),
    ("rows checked", "rows_verified", "{:,}"),
    ("wasted", "rows_wasted", "{:,}"),
    ("in flight", "in_flight", "{:.1f}"),
    ("memory", "peak_bytes", _megabytes),
    ("cache", "cache_bytes", _megabytes),
    ("of reserved", "cache_reserved_bytes", _megabytes),
)


def figures(rows: Sequence[Row]) -> str:
    """A line for each method, of all categories together."""
    whole = [row for row in rows if row["category"] == "overall"]
    best = max((row["speedup"] for row in whole if row["speedup"] is not None), default=None)
    lines = []
    for row in whole:
        if row["tokens"] is None:
            lines.append(_failed([row["method"]], row["error"], len(COLUMNS) + 2))
            continue
        cells = [
            _cell(row[key], how, "best" if key == "speedup" and row[key] == best else "") for _, key, how in COLUMNS
        ]
        spread = "" if row["speedup"] is None else f"{row['speedup_low']:.2f}–{row['speedup_high']:.2f}"
        cells.insert(7, f"<td>{spread}</td>")
        same = "" if row["identical"] is None else f"{row['identical']}/{row['answers']}"
        lines.append(f"<tr><td>{escape(row['method'])}</td>{''.join(cells)}<td>{same}</td></tr>")
        if row["error"]:
            lines.append(_failed(["in part"], row["error"], len(COLUMNS) + 2))
    titles = [title for title, _, _ in COLUMNS]
    return _table(["method", *titles[:7], "spread", *titles[7:], "same text"], lines)


def categories(rows: Sequence[Row]) -> str:
    """Speedups, the deeper the colour the further from plain decoding."""
    names = list(dict.fromkeys(row["category"] for row in rows))
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["category"]: row for row in rows if row["method"] == method}
        if all(row["speedup"] is None for row in own.values()):
            # Of a run that was interrupted there may be categories and nothing of all together.
            errors = [row["error"] for row in own.values() if row["error"]]
            lines.append(_failed([method], errors[0] if errors else "no speedup", len(names)))
            continue
        cells = "".join(_heat(own[name]["speedup"] if name in own else None) for name in names)
        lines.append(f"<tr><td>{escape(method)}</td>{cells}</tr>")
    return _table(["method", *(name.replace("_", " ") for name in names)], lines, "heat")


def all_figures(rows: Sequence[Row]) -> str:
    """Everything that was measured, in every category."""
    lines = []
    for row in rows:
        name = [row["method"], row["category"]]
        if row["tokens"] is None:
            lines.append(_failed(name, row["error"], len(COLUMNS) + 2))
            continue
        cells = "".join(_cell(row[key], how) for _, key, how in COLUMNS)
        depths = " ".join(f"{share:.0%}" for share in row["acceptance_by_depth"])
        first = f'<td>{escape(name[0])}</td><td class="words">{escape(name[1])}</td><td>{row["tokens"]:,}</td>'
        lines.append(f"<tr>{first}{cells}<td>{depths}</td></tr>")
    titles = [title for title, _, _ in COLUMNS]
    return _table(["method", "category", "tokens", *titles, "accepted by depth"], lines)


def origin(provenance: dict[str, Any]) -> str:
    """What it was measured with."""
    git = provenance["git"] or {}
    entries = {
        "commit": f"{git.get('commit', 'unknown')}{' and changes' if git.get('dirty') else ''}",
        "time": provenance["time"],
        "processor": f"{provenance['cpu']}, {provenance['cores']} cores, {provenance['threads']} threads",
        "device": provenance["device"],
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {
                **{name: provenance[name] for name in ("forerun", "python", "torch", "numpy")},
                **provenance.get("peers", {}),
            }.items()
        ),
        **{key.replace("_", " "): _plainly(value) for key, value in provenance["arguments"].items()},
    }
    return (
        "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in entries.items()) + "</dl>"
    )


def _plainly(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plainly(own)}" for key, own in value.items() if own) or "none"
    if isinstance(value, list):
        return ", ".join(_plainly(each) or "default" for each in value) or "none"
    return "not set" if value is None else str(value)


def _cell(value: Any, how: Format, kind: str = "") -> str:
    text = "" if value is None else how.format(value) if isinstance(how, str) else how(value)
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def _heat(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    strength = min(0.75, 0.45 * abs(value - 1)) if value >= 1 else min(0.75, 1.2 * (1 - value))
    hue = "--good" if value >= 1 else "--bad"
    return f'<td style="background:rgba(var({hue}), {strength:.2f})">{_times(value)}</td>'


def _failed(names: Sequence[str], error: str, columns: int) -> str:
    first = "".join(f"<td>{escape(name)}</td>" for name in names)
    return f'<tr>{first}<td class="error" colspan="{columns + 1 - len(names)}">{escape(error)}</td></tr>'


def _table(titles: Sequence[str], lines: Sequence[str], kind: str = "") -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
