"""`forerun simulate`: the theory of speculative decoding in numbers, simulation beside it, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output, print_whole, progress
from forerun.cli.files import check_writable, write_whole
from forerun.theory import checks, closed_form, plot
from forerun.theory.comparison import Comparison, Conditions, compare_chain, compare_tree
from forerun.theory.monte_carlo import MOST_ROUNDS
from forerun.trees.static import cartesian

FAMILY = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # what the picture shows around a single α
LARGEST_TREE = 4096
ACCEPTED, CORRECTED, BONUS, UNUSED = ("■", "green"), ("✗", "bold red"), ("◆", "bold blue"), ("·", "dim")
Number = TypeVar("Number", int, float)


def simulate(
    *,
    alpha: Annotated[
        str | None,
        typer.Option(help="Chance that a draft is accepted; several with commas.", show_default="0.7"),
    ] = None,
    gamma: Annotated[
        str | None, typer.Option(help="Drafts per target pass; several with commas.", show_default="4")
    ] = None,
    tree: Annotated[str | None, typer.Option(help="Widths of a draft tree by level, as in 3,2,1.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="With --tree: chance that the 1st, 2nd, … child is the accepted one.")
    ] = None,
    draft_cost: Annotated[float, typer.Option(help="Cost of one draft step, in target passes.")] = 0.1,
    verify_cost: Annotated[float, typer.Option(help="Cost of the checking pass, in target passes.")] = 1.0,
    max_gamma: Annotated[
        int, typer.Option(help="Longest draft considered for the best γ.", min=1, max=1024)
    ] = closed_form.LONGEST,
    rounds: Annotated[int, typer.Option(help=f"Steps to simulate, at most {MOST_ROUNDS:,}.")] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw speedup over γ to this .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """How many tokens a target pass commits, and how much faster that is: closed form beside simulation.

    [bold]Examples[/]

    One setting:  [green]forerun simulate --alpha 0.7 --gamma 4 --draft-cost 0.1[/]

    A grid:  [green]forerun simulate --alpha 0.5,0.7,0.9 --gamma 1,2,4,8[/]

    A tree:  [green]forerun simulate --tree 3,2,1 --ranks 0.6,0.2,0.1[/]

    A picture:  [green]forerun simulate --alpha 0.6,0.8,0.9 --plot speedup.png[/]
    """
    conditions = Conditions(draft_cost, verify_cost, rounds, seed)
    if plot_file is not None:
        kind = plot.picture_format(plot_file)
        check_writable(plot_file)
    if tree is not None or ranks is not None:
        if alpha is not None or gamma is not None or plot_file is not None:
            raise ValueError("--tree has no --alpha, --gamma or --plot: leave them out, or leave out --tree")
        answer, picture = _tree(tree, ranks, conditions)
    else:
        alphas = sorted(set(parse_list("--alpha", "0.7" if alpha is None else alpha, float)))
        gammas = sorted(set(parse_list("--gamma", "4" if gamma is None else gamma, int)))
        answer, picture = _chains(alphas, gammas, conditions, max_gamma)
        if plot_file is not None:
            lines = alphas if len(alphas) > 1 else [*FAMILY, *alphas]
            with Console(stderr=True).status(Text(f"Drawing {plot_file}")):
                drawn = plot.draw_speedup(kind, lines, draft_cost, verify_cost, max(16, *gammas))
                write_whole(plot_file, drawn)
            answer["plot"] = str(plot_file)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
    else:
        written = [] if plot_file is None else [Text(f"Picture: {plot_file}", style="dim")]
        print_whole(output(), picture, *written)


def parse_list(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers with commas between them; an empty place is a slip, not a number."""
    values = []
    for part in text.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{option} is {text!r}: give {what} with commas between them") from None
    return values


def _chains(
    alphas: list[float], gammas: list[int], conditions: Conditions, max_gamma: int
) -> tuple[dict[str, Any], RenderableType]:
    if len(alphas) * len(gammas) > 1:
        rows = grid_rows(alphas, gammas, conditions, max_gamma)
        return {**asdict(conditions), "rows": rows}, grid_table(rows, conditions.draft_cost)
    with progress(conditions.rounds) as advance:
        result = compare_chain(alphas[0], gammas[0], conditions, advance)
    row = _row(alphas[0], gammas[0], result, conditions, max_gamma)
    title = f"α = {alphas[0]:g}, γ = {gammas[0]}"
    return row, Group(summary(title, result, conditions, _best_line(row)), show_steps(result))


def grid_rows(
    alphas: Sequence[float],
    gammas: Sequence[int],
    conditions: Conditions,
    max_gamma: int = closed_form.LONGEST,
) -> list[dict[str, Any]]:
    """One row per (α, γ), α by α: what `--json` prints and `grid_table` shows."""
    rows = []
    with progress(len(alphas) * len(gammas) * conditions.rounds) as advance:
        for alpha, gamma in product(alphas, gammas):
            result = compare_chain(alpha, gamma, conditions, advance)
            rows.append(_row(alpha, gamma, result, conditions, max_gamma))
    return rows


def _row(alpha: float, gamma: int, result: Comparison, conditions: Conditions, max_gamma: int) -> dict[str, Any]:
    costs = (conditions.draft_cost, conditions.verify_cost)
    best = closed_form.best_gamma(alpha, *costs, max_gamma)
    return {
        "alpha": alpha,
        "gamma": gamma,
        **asdict(conditions),
        **_numbers(result),
        "accepted_drafts": closed_form.accepted_drafts(alpha, gamma),
        "best_gamma": best,
        "best_speedup": closed_form.speedup(alpha, best, *costs),
        "max_gamma": max_gamma,
    }


def _tree(widths: str | None, ranks: str | None, conditions: Conditions) -> tuple[dict[str, Any], RenderableType]:
    if widths is None or ranks is None:
        raise ValueError("--tree and --ranks go together: give both, as in --tree 3,2,1 --ranks 0.6,0.2,0.1")
    levels = parse_list("--tree", widths, int)
    if sum(math.prod(levels[:depth]) for depth in range(len(levels) + 1)) > LARGEST_TREE:
        raise ValueError(f"--tree {widths} has more than {LARGEST_TREE} nodes: give smaller widths")
    acceptance = checks.rank_acceptance("--ranks", parse_list("--ranks", ranks, float))
    shape = cartesian(levels)
    with progress(conditions.rounds) as advance:
        result = compare_tree(shape, acceptance, conditions, advance)
    chain = closed_form.expected_tokens(acceptance[0], shape.depth)
    answer = {
        "tree": levels,
        "ranks": list(acceptance),
        "nodes": shape.size,
        "depth": shape.depth,
        **asdict(conditions),
        **_numbers(result),
        "chain_tokens": chain,
    }
    note = ("first child only", f"{chain:.4f} tokens per pass: a chain of the same depth")
    title = f"tree {widths}: {shape.size - 1} drafts, {shape.depth} deep"
    return answer, Group(summary(title, result, conditions, note), show_steps(result))


def _numbers(result: Comparison) -> dict[str, Any]:
    counts = enumerate(result.simulation.histogram)
    return {
        "expected_tokens": result.expected_tokens,
        "simulated_tokens": result.simulation.mean,
        "standard_error": result.simulation.standard_error,
        "speedup": result.speedup,
        "simulated_speedup": result.simulated_speedup,
        "histogram": {str(tokens): count for tokens, count in counts if tokens},
    }


def _best_line(row: dict[str, Any]) -> tuple[str, str]:
    gamma, speedup = row["best_gamma"], row["best_speedup"]
    if gamma == 0:
        return "best γ", "0: do not speculate, drafting costs more than it saves"
    last = ", the longest tried" if gamma == row["max_gamma"] else ""
    return "best γ", f"{gamma}{last}, for {speedup:.2f}×"


def summary(title: str, result: Comparison, conditions: Conditions, note: tuple[str, str]) -> Panel:
    simulation = result.simulation
    off = "" if result.deviation is None else f", off by {abs(result.deviation):.1f} standard errors"
    costs = f"a draft step costs {conditions.draft_cost:g} target passes"
    if conditions.verify_cost != 1.0:
        costs += f", checking {conditions.verify_cost:g}"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("closed form", f"[bold]{result.expected_tokens:.4f}[/] tokens per target pass")
    steps = f"{simulation.rounds:,} steps{off}"
    table.add_row("simulated", f"[bold]{simulation.mean:.4f}[/] ± {simulation.standard_error:.4f} ({steps})")
    colour = "green" if result.speedup > 1.0 else "yellow"
    table.add_row("speedup", f"[bold {colour}]{result.speedup:.2f}×[/] plain decoding ({costs})")
    table.add_row(*note)
    return Panel(table, title=f"[bold]{title}[/]", title_align="left", border_style="cyan", box=box.ROUNDED)


def show_steps(result: Comparison) -> RenderableType:
    """The first steps as they went and how all of them ended, side by side where the drafts are short."""
    if result.depth > 8:
        return Group(timeline(result), Text(), histogram(result))
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(timeline(result), histogram(result))
    return side_by_side


def timeline(result: Comparison, steps: int = 8, widest: int = 32) -> RenderableType:
    """One line per target pass. Shapes tell the outcomes apart where there is no colour."""
    text = Text("The first passes\n", style="bold")
    shown = result.simulation.opening[:steps]
    for step, tokens in enumerate(shown, start=1):
        accepted, unused = tokens - 1, result.depth - tokens
        text.append(f"{step:>3}  ", style="dim")
        text.append(ACCEPTED[0] * min(accepted, widest) + "…" * (accepted > widest), style=ACCEPTED[1])
        text.append(*(BONUS if accepted == result.depth else CORRECTED))
        text.append(UNUSED[0] * min(unused, widest), style=UNUSED[1])
        text.append(" " * max(0, min(result.depth, widest) + 1 - max(tokens, result.depth)))
        text.append(f"  {tokens} token{'s' * (tokens > 1)}\n", style="not bold")
    text.append(f"{len(shown)} passes wrote {sum(shown)} tokens\n", style="not bold dim")
    legend = ((ACCEPTED, " accepted  "), (CORRECTED, " corrected\n"), (BONUS, " bonus     "), (UNUSED, " dropped"))
    for (sign, style), meaning in legend:
        text.append(sign, style=style).append(meaning, style="not bold dim")
    return text


def histogram(result: Comparison, bars: int = 12, width: int = 16) -> RenderableType:
    """Tokens per step, simulated beside the closed form; what lies beyond the last bar is added to it."""
    seen = [count / result.simulation.rounds for count in result.simulation.histogram[1:]]
    theory = list(result.distribution[1:])
    if more := len(seen) > bars:
        seen, theory = ([*shares[: bars - 1], sum(shares[bars - 1 :])] for shares in (seen, theory))
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("tokens", justify="right")
    table.add_column("steps")
    table.add_column("simulated", justify="right")
    table.add_column("theory", justify="right", style="dim")
    for tokens, (share, expected) in enumerate(zip(seen, theory, strict=True), start=1):
        label = f"{tokens}+" if more and tokens == bars else f"{tokens}"
        bar = "█" * round(width * share / max(seen)) or "▏" * (share > 0)
        table.add_row(label, Text(bar, style="cyan"), f"{share:.1%}", f"{expected:.1%}")
    return table


def grid_table(rows: Sequence[dict[str, Any]], draft_cost: float) -> Table:
    """Speedup, and tokens per pass below it, over α and γ; the best of each α is starred."""
    gammas = list(dict.fromkeys(row["gamma"] for row in rows))
    table = Table(
        title=f"Speedup, and tokens per pass below it (draft cost {draft_cost:g})",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("α", justify="right", style="bold cyan", no_wrap=True)
    for gamma in gammas:
        table.add_column(f"γ = {gamma}", justify="right", no_wrap=True)
    table.add_column("best γ", justify="right", style="bold", no_wrap=True)
    for alpha in dict.fromkeys(row["alpha"] for row in rows):
        line = [row for row in rows if row["alpha"] == alpha]
        top = max(1.0, *(row["speedup"] for row in line))
        cells = []
        for row in line:
            star, style = ("★ ", "bold green") if row["speedup"] == top > 1.0 else ("", "")
            cell = Text(f"{star}{row['speedup']:.2f}×", style=style)
            cells.append(cell.append(f"\n{row['expected_tokens']:.2f}", style="not bold dim"))
        best = Text(f"{line[0]['best_gamma']}\n").append(f"{line[0]['best_speedup']:.2f}×", style="dim")
        table.add_row(f"{alpha:g}", *cells, best)
    return table
