"""What `forerun bench` prints: for each setting its figures, the speedups by category, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from forerun.bench.cases import Setting
from forerun.cli.console import output, print_whole

Row = dict[str, Any]


def show(rows: list[Row]) -> None:
    console = output()
    for setting in dict.fromkeys(_setting(row) for row in rows):
        own = [row for row in rows if _setting(row) == setting]
        whole = [row for row in own if row["category"] == "overall"]
        print_whole(console, _figures(whole, setting.label))
        categories = list(dict.fromkeys(row["category"] for row in own if row["category"] != "overall"))
        if len(categories) > 1:
            print_whole(console, _categories(own, categories))
        measured = [row for row in whole if row["shares"] is not None]
        if measured:
            print_whole(console, _inside(measured))
        for name in dict.fromkeys(row["method"] for row in own if row["error"]):
            reason = next(row["error"] for row in own if row["method"] == name and row["error"])
            console.print(Text(f"{name}: {reason}", style="red"), soft_wrap=True)


def _setting(row: Row) -> Setting:
    return Setting(row["batch"], row["temperature"], row["arrivals"])


def _table(heading: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=heading, title_justify="left")
    for place, column in enumerate(columns):  # a category is no markup, whatever brackets it has
        table.add_column(Text(column), justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _figures(rows: list[Row], heading: str) -> Table:
    table = _table(
        heading,
        "method",
        "tokens/s",
        "a request",
        "first token",
        "tokens/pass",
        "speedup",
        "spread",
        "predicted",
        "identical",
        "memory",
        "cache",
    )
    for row in rows:
        table.add_row(
            Text(row["method"]),
            _as(row["tokens_per_second"], "{:.1f}"),
            _as(row["request_tokens_per_second"], "{:.1f}"),
            _as(row["first_token_seconds"], "{:.3f} s"),
            _as(row["tokens_per_pass"], "{:.2f}"),
            times(row["speedup"]),
            "" if row["speedup"] is None else f"{row['speedup_low']:.2f}–{row['speedup_high']:.2f}",
            times(row["predicted_speedup"]),
            "" if row["identical"] is None else f"{row['identical']}/{row['answers']}",
            _as(row["peak_bytes"], megabytes),
            _as(row["cache_bytes"], megabytes),
        )
    return table


def _categories(rows: list[Row], categories: list[str]) -> Table:
    table = _table("speedup by category", "method", *categories)
    for name in dict.fromkeys(row["method"] for row in rows):
        own = {row["category"]: row for row in rows if row["method"] == name}
        table.add_row(Text(name), *(times(own[each]["speedup"]) if each in own else "" for each in categories))
    return table


def _inside(rows: list[Row]) -> Table:
    depths = min(6, max(len(row["acceptance_by_depth"]) for row in rows))
    parts = ("draft", "target", "verify", "rest")
    heads = ("accepted", *(f"depth {depth + 1}" for depth in range(depths)))
    table = _table("shares of the time, rows, acceptance", "method", *parts, "rows checked", "wasted", *heads)
    for row in rows:
        accepted = [f"{share:.0%}" for share in row["acceptance_by_depth"][:depths]]
        table.add_row(
            Text(row["method"]),
            *(f"{row['shares'][part]:.1%}" for part in parts),
            _as(row["rows_verified"], "{:,}"),
            _as(row["rows_wasted"], "{:,}"),
            _as(row["acceptance"], "{:.0%}"),
            *accepted,
            *[""] * (depths - len(accepted)),
        )
    return table


def _as(value: float | None, how: str | Callable[[float], str]) -> str:
    if value is None:
        return ""
    return how.format(value) if isinstance(how, str) else how(value)


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def megabytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"
