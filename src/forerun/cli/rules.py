"""`forerun rules`: the verification rules there are, and how many tokens each commits per step."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output, progress
from forerun.cli.files import check_writable, write_whole
from forerun.cli.simulate import parse_list

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.bench.rules import Gain, Level, Mean, Measurement
    from forerun.verify.rule import VerificationRule

LABELS = {"gumbel_1": "gumbel, 1 candidate", "gumbel_2": "gumbel, 2 candidates"}
DRAFTS = {
    "sampled": "sampled from q",
    "without_replacement": "without replacement",
    "top": "the likeliest under q",
    "coupled": "coupled to the target",
}
GAINS = {
    "block": "block over\nchain rejection",
    "traversal": "traversal over\nrecursive rejection",
    "gumbel_2": "2 coupled over\n2 fixed candidates",
}


def rules(
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Count tokens per step on synthetic laws.")] = False,
    distance: Annotated[
        str | None,
        typer.Option(help="Total variation of p and q; several with commas.", show_default="0.1,0.2,0.33,0.5"),
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the laws.", show_default="2000")] = None,
    samples: Annotated[int | None, typer.Option(help="Steps per rule and distance.", show_default="4000")] = None,
    depth: Annotated[int | None, typer.Option(help="Drafts along a path.", show_default="4")] = None,
    spread: Annotated[
        float | None, typer.Option(help="Standard deviation of p's logits: less is wider.", show_default="3")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same result.", show_default="0")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON, and what it was made with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """The verification rules: what each is for, whether it is lossless, and how many tokens it commits per step.

    [bold]Examples[/]

    All rules:  [green]forerun rules[/]

    Tokens per step, in under a minute:  [green]forerun rules --measure[/]

    Laws that are closer, and a file:  [green]forerun rules --measure --distance 0.05,0.1 --out rules.json[/]
    """
    numbers = {"vocabulary": vocabulary, "samples": samples, "depth": depth, "spread": spread, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    console = output()
    if not measure:
        alone = {**given, "distance": distance, "out": out}
        if wrong := [name for name, value in alone.items() if value is not None]:
            raise ValueError(f"--{wrong[0]} is about measuring: add --measure, or leave it out")
        _list(console, as_json)
        return
    if distance is not None:
        given["distances"] = tuple(sorted(set(parse_list("--distance", distance, float))))
    measurement = _measure(given, out)
    from forerun.bench.provenance import provenance

    answer = {**measurement.as_dict(), "provenance": provenance(asdict(measurement.settings))}
    text = json.dumps(answer, indent=2, allow_nan=False)
    if out is not None:
        write_whole(out, f"{text}\n".encode())
    if as_json:
        typer.echo(text)
        return
    console.print(show(measurement, console.width))
    if out is not None:
        console.print(Text.assemble("Written: ", (str(out), "bold cyan")))


def _measure(given: dict[str, Any], out: Path | None) -> Measurement:
    from forerun.bench.rules import Settings, measure

    settings = Settings(**given)
    if out is not None:
        check_writable(out)
    with progress(settings.samples * len(settings.distances)) as advance:
        return measure(settings, advance)


# --- the list -----------------------------------------------------------------------------------------------


def _list(console: Console, as_json: bool) -> None:
    from forerun.verify.rule import all_rules

    known = list(all_rules().values())
    if as_json:
        typer.echo(json.dumps([_as_dict(rule) for rule in known], indent=2))
    else:
        console.print(listing(known))


def _as_dict(rule: VerificationRule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "summary": rule.summary,
        "drawings": sorted(drawing.value for drawing in rule.drawings),
        "chain_only": rule.chain_only,
        "greedy_only": rule.greedy_only,
        "lossless": rule.lossless,
    }


def listing(known: list[VerificationRule]) -> Text:
    """Two lines per rule, as wide as a terminal at least is."""
    text = Text(no_wrap=True)
    text.append(f"{'rule':<30} {'lossless':<9} for drafts that are\n", style="bold")
    text.append("─" * 78 + "\n", style="dim")
    for rule in known:
        text.append(f"{rule.name:<30} ", style="bold cyan")
        text.append(f"{'yes':<9} " if rule.lossless else f"{'NO':<9} ", style="green" if rule.lossless else "bold red")
        text.append(f"{_drafts(rule)}\n")
        text.append(f"  {rule.summary}\n", style="dim")
    text.rstrip()
    return text


def _drafts(rule: VerificationRule) -> str:
    from forerun.core.drawing import Drawing

    if rule.drawings == frozenset(Drawing):
        what = "of any kind"
    elif rule.drawings == frozenset(drawing for drawing in Drawing if drawing.sampled):
        what = "sampled"
    else:
        what = " or ".join(sorted(drawing.value.replace("_", " ") for drawing in rule.drawings))
    what += ", a chain" * rule.chain_only
    return what + ", at temperature 0" * rule.greedy_only


# --- the measurement ------------------------------------------------------------------------------------------


def show(measurement: Measurement, width: int = 80) -> RenderableType:
    settings, levels = measurement.settings, measurement.levels
    across = max(1, (width - 32) // 12)  # as many distances as fit beside the names
    parts: list[RenderableType] = []
    for start in range(0, len(levels), across):
        parts += [tokens_table(measurement, levels[start : start + across]), Text()]
    laws = (
        f"{settings.samples:,} steps each, ± one standard error. TV is the total variation between p and q, measured: "
        f"p is the softmax of {settings.vocabulary:,} normal logits of deviation {settings.spread:g}, q that of the "
        "same logits with noise, and every node has laws of its own."
    )
    marks = (
        "✓ is a gain of more than 3 standard errors. Differences are paired: the same laws and seeds, "
        "and in the first two columns the same drafts."
    )
    match = "Coupled: the first under q in the race that picks the target's token. Fixed: the likeliest under q."
    parts += [Text(laws, style="dim"), Text(), gains_table(measurement), Text(), Text(marks, style="dim"), Text()]
    return Group(*parts, root_table(measurement), Text(), Text(match, style="dim"))


def tokens_table(measurement: Measurement, levels: tuple[Level, ...]) -> RenderableType:
    """Rules by distance, grouped by what they verify; the best of each distance stands out."""
    depth, rows = measurement.settings.depth, levels[0].rules
    tree, nodes = "·".join(map(str, measurement.settings.widths)), max(row.nodes for row in rows)
    title = f"Tokens per step: chains of {depth} ({depth + 1} rows), trees {tree} ({nodes} rows)"
    table = _table()
    table.add_column("", no_wrap=True)
    for level in levels:
        table.add_column(f"TV {level.total_variation.value:.2f}", justify="right", no_wrap=True)
    best = [max(row.tokens.value for row in level.rules) for level in levels]
    for (chain, drafts), group in groupby(rows, key=lambda row: (row.nodes == depth + 1, row.drafts)):
        table.add_row(Text(f"{'chain' if chain else 'tree'}, {DRAFTS[drafts]}", style="cyan"))
        for row in group:
            means = [level.tokens(row.label) for level in levels]
            cells = [_tokens(mean, best=mean.value == top) for mean, top in zip(means, best, strict=True)]
            table.add_row(Text(f" {LABELS.get(row.label, row.label)}"), *cells)
    return Group(Text(title, style="bold"), table)


def gains_table(measurement: Measurement) -> RenderableType:
    table = _table()
    table.add_column("TV", style="cyan")
    for gain in measurement.levels[0].gains:
        table.add_column(GAINS[gain.better], justify="right", no_wrap=True, min_width=23)
    for level in measurement.levels:
        table.add_row(f"{level.total_variation.value:.2f}", *map(_gain, level.gains))
    return Group(Text("How many tokens more", style="bold"), table)


def root_table(measurement: Measurement) -> RenderableType:
    title = "How often the target's first token is among 1, 2 or 4 candidates"
    table = _table()
    table.add_column("TV", style="cyan")
    table.add_column("1 − TV", justify="right", no_wrap=True)
    counts = [match.candidates for match in measurement.levels[0].root]
    for kind in ("coupled", "fixed"):
        for place, count in enumerate(counts):
            table.add_column(f"{count}" if place else f"{kind}: {count}", justify="right", no_wrap=True)
    for level in measurement.levels:
        variation = level.total_variation.value
        figures = [*(match.coupled.value for match in level.root), *(match.fixed.value for match in level.root)]
        table.add_row(*(f"{figure:.2f}" for figure in (variation, 1 - variation, *figures)))
    return Group(Text(title, style="bold"), table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)


def _tokens(mean: Mean, *, best: bool) -> Text:
    return Text(f"{mean.value:.2f}", style="bold green" if best else "").append(
        f" ±{mean.error:.2f}", style="not bold dim"
    )


def _gain(gain: Gain) -> Text:
    text = Text("✓ " if gain.significant else "", style="green")
    text.append(f"{gain.tokens.value:+.2f}", style="bold" if gain.significant else "")
    text.append(f" ±{gain.tokens.error:.2f}", style="not bold dim")
    return text.append(f" {gain.relative:+5.0%}")
