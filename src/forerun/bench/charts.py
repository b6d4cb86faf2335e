"""Small charts as SVG text: bars, lines, points. Colours are the page's own variables, so that they follow its theme.

Drawn by hand, so that a report needs no package and no script. Everything is 480 units wide: the width of a phone, and
of a card on a desk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480
COLOURS = 8
"""How many hues the page has; behind them come dashes."""
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 14, 40


@dataclass(frozen=True)
class Series:
    name: str
    colour: int | None
    """None is plain decoding, in grey."""
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()
    """Low and high of each point."""

    @property
    def paint(self) -> str:
        return "var(--plain)" if self.colour is None else f"var(--c{self.colour % COLOURS})"

    @property
    def swatch(self) -> str:
        """For a legend: a ring where the line is dashed."""
        dashed = f"box-shadow:inset 0 0 0 3px {self.paint}"
        return dashed if self.dashes else f"background:{self.paint}"

    @property
    def dashes(self) -> str:
        return ' stroke-dasharray="6 4"' if self.colour is not None and self.colour >= COLOURS else ""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= about)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * place, 10) for place in range(first, max(last, first + 1) + 1)]


def times(value: float) -> str:
    return f"{value:g}×"


def percent(value: float) -> str:
    return f"{value:.0%}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def lines(
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    y_text: Callable[[float], str] = times,
    x_text: Callable[[float], str] = number,
    x_marks: Sequence[float] = (),
    low: float = 0.0,
    high: float | None = None,
    even: bool = False,
    level: float | None = None,
) -> str:
    """`even` puts the marks of x at equal distances; `level` is a dashed line across."""
    height = 300
    xs = list(x_marks) or sorted({x for each in series for x, _ in each.points})
    tops = [y for each in series for _, y in [*each.points, *each.spread]]
    y_ticks = ticks(low, max([*tops, level or low]) if high is None else high)
    place = (lambda x: xs.index(x) / max(1, len(xs) - 1)) if even else _scale(min(xs), max(xs))

    def at(x: float, y: float) -> tuple[float, float]:
        share = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        inner = WIDTH - LEFT - RIGHT
        return LEFT + 10 + place(x) * (inner - 20), height - BOTTOM - share * (height - BOTTOM - TOP)

    parts = _frame(height, y_ticks, y_text, lambda y: at(xs[0], y)[1], x_name, y_name)
    parts += [_text(at(x, y_ticks[0])[0], height - BOTTOM + 17, x_text(x), "tick", "middle") for x in _thinned(xs)]
    if level is not None:
        y = at(xs[0], level)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="level"/>')
    for each in series:
        path = [at(x, y) for x, y in each.points]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        parts.append(f'<polyline points="{points}" class="line" style="stroke:{each.paint}"{each.dashes}/>')
        for (x, _), (bottom, top) in zip(each.points, each.spread, strict=False):
            parts.append(_whisker(at(x, bottom), at(x, top), each.paint))
        for (x, y), value in zip(path, each.points, strict=True):
            parts.append(_dot(x, y, each, f"{each.name}: {y_text(round(value[1], 3))} at {x_text(value[0])}"))
    return _svg(height, parts, f"{y_name} over {x_name}")


def scatter(
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str] = times,
    diagonal: bool = False,
    level: float | None = None,
) -> str:
    """Axes reach as far as the points do. `diagonal` is the line where x and y agree, `level` one across."""
    height = 320
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points] + ([] if level is None else [level])
    x_ticks, y_ticks = _around(xs + ys if diagonal else xs), _around(xs + ys if diagonal else ys)

    def at(x: float, y: float) -> tuple[float, float]:
        right = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + right * (WIDTH - LEFT - RIGHT), height - BOTTOM - up * (height - BOTTOM - TOP)

    parts = _frame(height, y_ticks, y_text, lambda y: at(x_ticks[0], y)[1], x_name, y_name)
    ends = len(x_ticks) - 1
    for index, x in enumerate(x_ticks):
        anchor = "end" if index == ends else "middle"
        parts.append(_text(at(x, y_ticks[0])[0], height - BOTTOM + 17, x_text(x), "tick", anchor))
    if diagonal:
        (x1, y1), (x2, y2) = at(x_ticks[0], x_ticks[0]), at(x_ticks[-1], x_ticks[-1])
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="level"/>')
    if level is not None:
        y = at(x_ticks[0], level)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="level"/>')
    dots = [at(x, y) for each in series for x, y in each.points]
    taken = [(across - 6, across + 6, down + 4) for across, down in dots]
    for each in series:
        for x, y in each.points:
            across, down = at(x, y)
            parts.append(_dot(across, down, each, f"{each.name}: {x_text(round(x, 2))}, {y_text(round(y, 2))}", 6))
            parts.append(_label(across, down, each.name, taken))
    return _svg(height, parts, f"{y_name} against {x_name}")


def bars(series: Sequence[Series], *, level: float | None = 1.0, text: Callable[[float], str] = times) -> str:
    """One bar for each, from its first point's y; names stand above their bars, so that long ones have room."""
    step, wide = 38, WIDTH - 62
    height = TOP + step * len(series) + 4
    most = max([level or 0.0, *(max([each.points[0][1], *(high for _, high in each.spread)]) for each in series)])

    def at(value: float) -> float:
        return value / most * wide

    parts = []
    for place, each in enumerate(series):
        y = TOP + step * place
        value = each.points[0][1]
        parts.append(_text(0, y + 6, each.name, "name", "start"))
        parts.append(
            f'<rect x="0" y="{y + 12}" width="{max(1.0, at(value)):.1f}" height="14" rx="3" '
            f'style="fill:{each.paint}"><title>{escape(each.name)}: {text(round(value, 3))}</title></rect>'
        )
        furthest = at(value)
        for low, high in each.spread:
            parts.append(_whisker((at(low), y + 19), (at(high), y + 19), "var(--ink)", across=True))
            furthest = max(furthest, at(high))
        parts.append(_text(furthest + 7, y + 23.5, f"{value:.2f}×", "value", "start"))
    if level is not None:
        x = at(level)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 2}" class="level"/>')
    return _svg(height, parts, "speedup by method")


def stacked(names: Sequence[str], shares: Sequence[dict[str, float]], colours: dict[str, str]) -> str:
    """For each name a bar of parts that add up to one."""
    step = 38
    height = TOP + step * len(names) + 4
    parts = []
    for place, (name, own) in enumerate(zip(names, shares, strict=True)):
        y, x = TOP + step * place, 0.0
        parts.append(_text(0, y + 6, name, "name", "start"))
        for key, colour in colours.items():
            wide = own[key] * WIDTH
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 12}" width="{max(0.0, wide - 1.5):.1f}" height="14" rx="2" '
                f'style="fill:{colour}"><title>{escape(name)}: {key} {own[key]:.1%}</title></rect>'
            )
            if wide > 40:
                parts.append(_text(x + wide / 2, y + 23, f"{own[key]:.0%}", "inside", "middle"))
            x += wide
    return _svg(height, parts, "shares of the time")


def _around(values: Sequence[float]) -> list[float]:
    """Ticks with some room on both sides."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), 0.02 * high)
    return ticks(max(0.0, low - room), high + room)


def _scale(low: float, high: float) -> Callable[[float], float]:
    return lambda x: 0.5 if high == low else (x - low) / (high - low)


def _thinned(marks: Sequence[float]) -> Iterable[float]:
    return marks[:: max(1, -(-len(marks) // 10))]


def _frame(
    height: int,
    y_ticks: list[float],
    y_text: Callable[[float], str],
    at: Callable[[float], float],
    x_name: str,
    y_name: str,
) -> list[str]:
    parts = []
    for value in y_ticks:
        y = at(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(LEFT - 7, y + 4, y_text(value), "tick", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 5, x_name, "axis", "middle"))
    middle = (TOP + height - BOTTOM) / 2
    parts.append(f'<text class="axis" text-anchor="middle" transform="translate(9 {middle}) rotate(-90)">')
    parts[-1] += f"{escape(y_name)}</text>"
    return parts


def _label(x: float, y: float, name: str, taken: list[tuple[float, float, float]]) -> str:
    """Beside its point, and not over another label: on the right, on the left, or a little higher or lower."""
    wide = 6.2 * len(name)
    starts = [start for start in (x + 10, x - 10 - wide) if LEFT <= start <= WIDTH - wide] or [x - 10 - wide]
    places = [(start, y + 4 + move) for move in (0, 13, -13, 26, -26, 39, -39) for start in starts]
    start, down = next((place for place in places if _is_free(*place, wide, taken)), places[0])
    taken.append((start, start + wide, down))
    left = start < x
    return _text(x - 10 if left else x + 10, down, name, "label", "end" if left else "start")


def _is_free(start: float, down: float, wide: float, taken: list[tuple[float, float, float]]) -> bool:
    return all(abs(down - other) > 12 or start > end or start + wide < begin for begin, end, other in taken)


def _dot(x: float, y: float, series: Series, title: str, radius: float = 4.5) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="dot" style="fill:{series.paint}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _whisker(low: tuple[float, float], high: tuple[float, float], paint: str, *, across: bool = False) -> str:
    x1, y1, x2, y2 = *low, *high
    dx, dy = (0, 3) if across else (3, 0)
    path = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    for x, y in (low, high):
        path += f"M{x - dx:.1f} {y - dy:.1f}L{x + dx:.1f} {y + dy:.1f}"
    return f'<path d="{path}" class="whisker" style="stroke:{paint}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str], label: str) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'
