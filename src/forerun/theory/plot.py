"""The picture of the closed form: speedup over draft length, one line per acceptance, the best length marked.

Matplotlib is an extra and slow to load, so it is imported when a picture is asked for and not before.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.theory import closed_form

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"


class NoMatplotlibError(ValueError):
    """Apart from other mistakes, so that a demo can go on without its picture."""


def draw_speedup(
    kind: str, alphas: Sequence[float], draft_cost: float, verify_cost: float = 1.0, max_gamma: int = 16
) -> bytes:
    """The content of a picture file of one of the `FORMATS`."""
    assert kind in FORMATS
    if not alphas:
        raise ValueError("there is no alpha to draw: give at least one")
    figure = blank_figure(8.0, 5.0)
    _draw(figure, sorted(set(alphas)), draft_cost, verify_cost, max_gamma)
    return content(figure, kind)


def blank_figure(width: float, height: float) -> Figure:
    """In inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlibError("pictures need matplotlib: pip install 'forerun[bench]'") from None
    figure = Figure(figsize=(width, height), facecolor="white", layout=None)
    FigureCanvasAgg(figure)  # draws without a display
    return figure


def content(figure: Figure, kind: str) -> bytes:
    """Of a picture file of one of the `FORMATS`."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=160)
    return file.getvalue()


def picture_format(path: Path) -> str:
    """What the suffix asks for. Call it before the work, so that none is done for a picture that cannot be."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"cannot draw {path}: end the name in .png, .svg or .pdf")
    blank_figure(1.0, 1.0)  # is there a matplotlib?
    return kind


def _draw(figure: Figure, alphas: list[float], draft_cost: float, verify_cost: float, max_gamma: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patheffects import withStroke

    axes = figure.add_axes((0.085, 0.12, 0.79, 0.71))
    gammas = range(max_gamma + 1)
    shades = colormaps["viridis"]
    ends: list[float] = []
    colours: list[tuple[float, float, float, float]] = []
    for place, alpha in enumerate(alphas):
        # The brightest end of the palette is too pale on white, so it stops before.
        colour = shades(0.8 * (1.0 - place / max(1, len(alphas) - 1)) if len(alphas) > 1 else 0.35)
        speedups = [closed_form.speedup(alpha, gamma, draft_cost, verify_cost) for gamma in gammas]
        best = closed_form.best_gamma(alpha, draft_cost, verify_cost, max_gamma)
        axes.plot(gammas, speedups, color=colour, linewidth=2.2, solid_capstyle="round", zorder=3)
        axes.plot(
            best,
            speedups[best],
            "o",
            markersize=9,
            color=colour,
            mec="white",
            mew=1.8,
            zorder=5,
            clip_on=False,
        )
        if best:
            text = f"{speedups[best]:.2f}×"
            axes.annotate(
                text,
                (best, speedups[best]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
                fontweight="bold",
                color=colour,
                path_effects=[withStroke(linewidth=3.0, foreground="white")],
                zorder=6,
            )
        ends.append(speedups[-1])
        colours.append(colour)
    axes.axhline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    low, high = axes.get_ylim()
    low, high = max(0.0, min(low, 0.85)), max(high + 0.06 * (high - low), 1.2)
    axes.set_ylim(low, high)
    axes.set_xlim(0, max_gamma)
    _label_ends(axes, alphas, ends, colours)
    _dress(figure, axes, draft_cost, verify_cost, max_gamma)


def _label_ends(
    axes: Axes,
    alphas: list[float],
    ends: list[float],
    colours: list[tuple[float, float, float, float]],
) -> None:
    """Name each line where it ends; names that would lie on each other are pushed apart."""
    low, high = axes.get_ylim()
    apart = 0.05 * (high - low)
    at = low
    for end, alpha, colour in sorted(zip(ends, alphas, colours, strict=True)):
        at = max(end, at)
        axes.annotate(
            f"α = {alpha:g}",
            (1.015, at),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=10.5,
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
        at += apart


def _dress(figure: Figure, axes: Axes, draft_cost: float, verify_cost: float, max_gamma: int) -> None:
    from matplotlib.patheffects import withStroke

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=1.0)
    axes.tick_params(colors=MUTED, length=0, labelsize=10, pad=6)
    stride = max(1, -(-max_gamma // 16))
    axes.set_xticks(range(0, max_gamma + 1, stride))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel("γ, drafted tokens per target pass", fontsize=10.5, color=INK, labelpad=6)
    axes.annotate(
        "plain decoding",
        (0.01, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=9,
        color=MUTED,
        path_effects=[withStroke(linewidth=3.0, foreground="white")],
        zorder=6,
    )
    left = axes.get_position().x0 - 0.05
    figure.text(left, 0.93, "How far ahead to draft", fontsize=15, fontweight="bold", color=INK)
    costs = f"a draft step costs {draft_cost:g} of a target pass"
    if verify_cost != 1.0:
        costs += f", checking costs {verify_cost:g}"
    figure.text(left, 0.875, f"Speedup over plain decoding; {costs}; ● the best γ", fontsize=10.5, color=MUTED)
