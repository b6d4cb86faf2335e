"""The picture of a drafter's calibration: what share of its candidates the target takes, over how sure it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.theory.plot import GRID, INK, MUTED, blank_figure, content

COLOURS = {"greedy": "#2a788e", "coupled": "#d1495b"}


def draw_confidence(kind: str, drafter: str, calibration: dict[str, Any]) -> bytes:
    """The content of a picture file, from what a drafter's folder has of its calibration."""
    figure = blank_figure(6.0, 6.0)
    axes = figure.add_axes((0.12, 0.1, 0.84, 0.76))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="as sure as right")
    for way, bins in calibration["confidence"].items():
        x, y = [row["confidence"] for row in bins], [row["acceptance"] for row in bins]
        look: dict[str, Any] = {"color": COLOURS[way], "linewidth": 2.2, "markersize": 8, "mec": "white"}
        axes.plot(x, y, "o-", clip_on=False, label=way_of_choosing(way, calibration), **look)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xticks([tenth / 10 for tenth in range(0, 11, 2)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=1.0)
    axes.tick_params(colors=MUTED, length=0, labelsize=10, pad=6)
    axes.set_xlabel("the drafter's confidence in a candidate", fontsize=10.5, color=INK, labelpad=6)
    axes.legend(loc="best", frameon=False, fontsize=10.5, labelcolor=INK)
    figure.text(0.05, 0.945, "Confidence against acceptance", fontsize=15, fontweight="bold", color=INK)
    what = f"Share of candidates that the target takes; {Path(drafter).name}"
    figure.text(0.05, 0.9, what, fontsize=10.5, color=MUTED, parse_math=False)
    return content(figure, kind)


def way_of_choosing(way: str, calibration: dict[str, Any]) -> str:
    name, tau = {"greedy": ("temperature 0", "greedy_tau"), "coupled": ("temperature 1 with a seed", "tau")}[way]
    return f"{name}, τ = {calibration.get(tau, 1.0):g}"
