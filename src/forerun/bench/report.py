"""The report: one page with tables and plots, self-contained, for light and dark, for desks and phones."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from forerun.bench import charts
from forerun.bench.cases import Setting
from forerun.bench.charts import Series
from forerun.bench.report_tables import all_figures, categories, figures, origin

Row = dict[str, Any]

STYLE = Path(__file__).with_name("report.css")
MOST = 8
"""Methods in a plot; more cannot be told apart. The tables have all."""
OFTEN = 10
PARTS = {"draft": "var(--draft)", "target": "var(--target)", "verify": "var(--verify)", "rest": "var(--rest)"}


def render(result: dict[str, Any]) -> str:
    """The page of a result, as `store` has it."""
    rows: list[Row] = result["rows"]
    p = result["provenance"]
    model = str(p["arguments"].get("model", ""))
    where = p["device"] if p["device"] != "cpu" else f"{p['cpu']}, {p['threads']} threads"
    colours = _colours(rows)
    body = [
        f"<h1>{escape(model)}: methods side by side</h1>",
        f'<p class="soft">{escape(where)} · forerun {escape(p["forerun"])} · {escape(p["time"][:10])}</p>',
        _tiles(rows),
    ]
    if not result.get("complete", True):
        body.append('<div class="banner">This run was interrupted: it shows what was measured until then.</div>')
    body += _over_batches(rows, colours)
    for setting in dict.fromkeys(_setting(row) for row in rows):
        body += _section([row for row in rows if _setting(row) == setting], colours)
    body += ["<h2>How it was measured</h2>", f'<div class="card">{WORDS}{origin(p)}</div>']
    inside = "\n".join(body)
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(model)}: forerun bench</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{inside}\n</main>\n</body>\n</html>\n"
    )


WORDS = """
<p>Plain decoding of the same engine (<b>none</b>) is the denominator, measured in the same rounds on the same prompts.
Speedups are ratios of tokens per second over whole answers, reading the prompt included; figures are medians over
rounds, whiskers and ranges are the smallest and the largest round. With arrivals, and for categories in batches, they
are ratios of the speed that a request sees. Tokens are counted in one way for all: ids of the model's tokenizer, up to
the one that ends the text.</p>
<p><b>Predicted</b> is the closed form: tokens per pass from the acceptance at each depth, over the measured cost of a
target pass with drafts and of drafting, both in plain passes; prompts are read as fast as plain decoding reads them.
What lies between it and the measured figure is what the engine adds around model and drafter. <b>First token</b> counts
from a request's first step, with arrivals from its arrival. <b>Memory</b> is the peak of the process with this method
alone, all that is reserved for the cache included; <b>cache</b> is the most that texts held of it.</p>
"""


def _setting(row: Row) -> Setting:
    return Setting(row["batch"], row["temperature"], row["arrivals"])


def _colours(rows: list[Row]) -> dict[str, int | None]:
    """A method has the same colour everywhere."""
    named = dict.fromkeys(row["method"] for row in rows if row["drafter"] != "none")
    return {"none": None, **{name: place for place, name in enumerate(named)}}


def _overall(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["category"] == "overall" and row["speedup"] is not None]


def _fastest(rows: list[Row], most: int = MOST) -> list[Row]:
    """In the order they were named, plain decoding left out."""
    others = [row for row in rows if row["drafter"] != "none"]
    best = sorted(others, key=lambda row: -float(row["speedup"]))[:most]
    return [row for row in others if row in best]


def _tiles(rows: list[Row]) -> str:
    """What a reader wants to know first."""
    whole = _overall(rows)
    closed = [row for row in whole if row["arrivals"] is None]
    tiles = []
    if ours := [row for row in closed if row["drafter"] != "none" and row["shares"] is not None]:
        best = max(ours, key=lambda row: float(row["speedup"]))
        tiles.append((f"{best['speedup']:.2f}×", f"the best speedup: {best['method']}, {_setting(best).label}"))
    if plain := [row for row in closed if row["drafter"] == "none"]:
        first = plain[0]
        tiles.append((f"{first['tokens_per_second']:.1f}", f"tokens/s of plain decoding, {_setting(first).label}"))
        most = max(closed, key=lambda row: float(row["tokens_per_second"] or 0))
        tiles.append(
            (f"{most['tokens_per_second']:.0f}", f"tokens/s at most: {most['method']}, {_setting(most).label}")
        )
    compared = [row for row in whole if row["identical"] is not None and row["shares"] is not None]
    if compared:
        same = sum(row["identical"] for row in compared)
        tiles.append((f"{same}/{sum(row['answers'] for row in compared)}", "of our texts are those of plain decoding"))
    failed = len({(row["method"], _setting(row)) for row in rows if row["error"]})
    if failed:
        tiles.append((str(failed), "failed: the reason is in the row"))
    cells = "".join(f'<div class="tile"><b>{figure}</b><span>{escape(words)}</span></div>' for figure, words in tiles)
    return f'<div class="tiles">{cells}</div>'


def _over_batches(rows: list[Row], colours: dict[str, int | None]) -> list[str]:
    cards = []
    closed = [row for row in _overall(rows) if row["arrivals"] is None]
    for heat in dict.fromkeys(row["temperature"] for row in closed):
        own = [row for row in closed if row["temperature"] == heat]
        batches = sorted({row["batch"] for row in own})
        if len(batches) < 2:
            continue
        best: dict[str, float] = {}
        for row in own:
            if row["drafter"] != "none":
                best[row["method"]] = max(best.get(row["method"], 0.0), row["speedup"])
        chosen = sorted(best, key=lambda name: -best[name])[:MOST]
        series = []
        for name in (name for name in colours if name in chosen):
            points = sorted((row for row in own if row["method"] == name), key=lambda row: int(row["batch"]))
            series.append(
                Series(
                    name,
                    colours[name],
                    [(row["batch"], row["speedup"]) for row in points],
                    [(row["speedup_low"], row["speedup_high"]) for row in points],
                )
            )
        if series:
            drawn = charts.lines(series, x_name="batch size", y_name="speedup", x_marks=batches, even=True, level=1.0)
            cards.append(_card(f"Temperature {heat:g}", _left_out(len(best)), _legend(series) + drawn))
    return ["<h2>Speedup over batch size</h2>", _cards(cards)] if cards else []


def _section(rows: list[Row], colours: dict[str, int | None]) -> list[str]:
    whole = _overall(rows)
    cards = []
    if drawn := _fastest(whole):
        plain = [row for row in whole if row["drafter"] == "none"]
        bars = [
            Series(
                row["method"],
                colours[row["method"]],
                [(0, row["speedup"])],
                [(row["speedup_low"], row["speedup_high"])] if row["drafter"] != "none" else [],
            )
            for row in [*plain, *drawn]
        ]
        left_out = _left_out(len(whole) - len(plain))
        cards.append(_card("Speedup by method", left_out, charts.bars(bars)))
        cards += _plots(drawn, plain, colours, left_out)
    parts = [f"<h2>{escape(_setting(rows[0]).label.capitalize())}</h2>", _cards(cards)]
    parts.append(_card("Figures", "", figures(rows), wide=True))
    if len({row["category"] for row in rows}) > 2:
        parts.append(_card("Speedup by category", "", categories(rows), wide=True))
    parts.append(f"<details><summary>All figures</summary>{_card('', '', all_figures(rows), wide=True)}</details>")
    return parts


def _plots(rows: list[Row], plain: list[Row], colours: dict[str, int | None], left_out: str) -> list[str]:
    cards = []
    timed = [row for row in rows if row["shares"] is not None]
    if timed:
        drawn = charts.stacked([row["method"] for row in timed], [row["shares"] for row in timed], PARTS)
        legend = "".join(f'<span><i style="background:{paint}"></i>{part}</span>' for part, paint in PARTS.items())
        cards.append(_card("Where the time goes", left_out, f'<div class="legend">{legend}</div>{drawn}'))
    drafted = [row for row in rows if _reached_often(row)]
    if drafted:
        series = [
            Series(
                row["method"],
                colours[row["method"]],
                _reached_often(row),
            )
            for row in drafted
        ]
        plot = charts.lines(series, x_name="depth", y_name="accepted", y_text=charts.percent, low=0.0, high=1.0)
        note = f"Of the steps that got there with a draft, the share that accepted it; at least {OFTEN} such steps."
        cards.append(_card("Acceptance by depth", note, _legend(series) + plot))
    predicted = [row for row in rows if row["predicted_speedup"] is not None]
    if predicted:
        points = [_point(row, colours, row["predicted_speedup"]) for row in predicted]
        plot = charts.scatter(points, x_name="predicted", y_name="measured", x_text=charts.times, diagonal=True)
        cards.append(_card("Predicted against measured", "On the line theory and clock agree.", plot))
    weighed = [row for row in (*plain, *rows) if row["peak_bytes"] is not None]
    if weighed:
        points = [_point(row, colours, row["peak_bytes"] / 2**20) for row in weighed]
        plot = charts.scatter(points, x_name="peak memory, MB", y_name="speedup", x_text=charts.number, level=1.0)
        cards.append(_card("Memory against speedup", left_out, plot))
    return cards


def _reached_often(row: Row) -> list[tuple[float, float]]:
    """Acceptance by depth, as deep as there were steps enough to tell."""
    pairs = zip(row["acceptance_by_depth"] or [], row["offered_by_depth"] or [], strict=True)
    return [(depth, share) for depth, (share, offered) in enumerate(pairs, start=1) if offered >= OFTEN]


def _point(row: Row, colours: dict[str, int | None], x: float) -> Series:
    return Series(row["method"], colours[row["method"]], [(x, row["speedup"])])


def _left_out(count: int) -> str:
    return f"The {MOST} fastest of {count}; the tables have all." if count > MOST else ""


def _legend(series: list[Series]) -> str:
    entries = (f'<span><i style="{each.swatch}"></i>{escape(each.name)}</span>' for each in series)
    return f'<div class="legend">{"".join(entries)}</div>'


def _card(heading: str, note: str, inside: str, *, wide: bool = False) -> str:
    head = f"<h3>{escape(heading)}</h3>" if heading else ""
    head += f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" wide" if wide else ""}">{head}{inside}</section>'


def _cards(cards: list[str]) -> str:
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""
