"""`forerun plan`: which drafter, draft length or tree to use, measured on this machine or from given figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output
from forerun.cli.input import standard_input
from forerun.cli.model_options import DTYPES
from forerun.theory.measurements import Measurements
from forerun.theory.planner import Recommendation, Setting, at_batch, recommend
from forerun.trees.optimal import best_shape

HERE, GIVEN = "Measured here", "From measurements in a file"
CONCURRENCY, MAX_TOKENS = "1,8,32", 48

# Invented, but of the right shape: at batch 1 a pass is bound by memory, so that more rows hardly cost more;
# at batch 32 it is bound by arithmetic.
EXAMPLE: dict[str, Any] = {
    "target": {
        "name": "example target",
        "passes": [
            {"batch": 1, "rows": [1, 2, 4, 8, 16, 32, 64], "ms": [20.0, 20.2, 20.6, 21.4, 23.5, 29.0, 44.0]},
            {"batch": 8, "rows": [1, 2, 4, 8, 16, 32], "ms": [23.0, 25.0, 29.5, 40.0, 68.0, 127.0]},
            {"batch": 32, "rows": [1, 2, 4, 8, 16], "ms": [40.0, 68.0, 126.0, 247.0, 490.0]},
        ],
    },
    "drafters": [
        {
            "name": "small model",
            "kind": "chain",
            "acceptance": {"alpha": 0.75, "samples": 4000},
            "step_ms": {"1": 3.0, "8": 3.4, "32": 5.0},
        },
        {
            "name": "prompt lookup",
            "kind": "chain",
            "acceptance": {"by_depth": [0.38, 0.71, 0.8, 0.84], "samples": 2500},
            "step_ms": 0.0,
            "overhead_ms": 0.2,
        },
        {
            "name": "tree head",
            "kind": "tree",
            "acceptance": {"by_rank": [0.62, 0.14, 0.06, 0.03], "samples": 4000},
            "step_ms": {"1": 1.1, "8": 1.8, "32": 4.5},
            "overhead_ms": 0.3,
            "max_depth": 7,
        },
    ],
}


def plan(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A JSON file of measurements, or - for standard input. With --target, behind --json: the file that "
            "gets all figures.",
            show_default=False,
        ),
    ] = None,
    *,
    target: Annotated[
        str | None, typer.Option(help="Measure this model here; as --model of generate.", rich_help_panel=HERE)
    ] = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Names or folders, with commas; by default ngram, suffix, recycling, combine and what comes with "
            "Forerun for the model.",
            show_default=False,
            rich_help_panel=HERE,
        ),
    ] = None,
    drafter_option: Annotated[
        list[str],
        typer.Option(
            help="An option of one of the drafters; may be given again.",
            metavar="DRAFTER.KEY=VALUE",
            rich_help_panel=HERE,
        ),
    ] = [],  # noqa: B006  # typer copies it
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Yours: JSON lines with turns, or a text with a prompt in each line.",
            show_default="a small set",
            rich_help_panel=HERE,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many prompts.", rich_help_panel=HERE)] = None,
    concurrency: Annotated[
        str, typer.Option(help="Texts that are written at once, with commas.", rich_help_panel=HERE)
    ] = CONCURRENCY,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.", rich_help_panel=HERE)] = MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token, 1 samples.", rich_help_panel=HERE)
    ] = 0.0,
    check: Annotated[
        bool, typer.Option(help="Measure what was predicted by a short bench.", rich_help_panel=HERE)
    ] = True,
    dtype: Annotated[str, typer.Option(help=DTYPES, rich_help_panel=HERE)] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto", rich_help_panel=HERE)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Only this batch size.", show_default="all", rich_help_panel=GIVEN)
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print sample measurements.", rich_help_panel=GIVEN)] = (
        False
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON and nothing else; with --target and a FILE: write it there.")
    ] = False,
) -> None:
    """What should I run? Which drafter, how long a draft or how large a tree, for how many texts at once.

    With --target it is measured here: the time of a step over rows and texts, what drafters take, and how often they
    are right on your prompts. Recommended is what gains most, with an interval for the gain; where that is not clear:
    do not speculate. A short bench follows and has the last word: what it does not confirm is not recommended. Some
    minutes for the default model on two cores; exit code 1 if a drafter failed.

    Without --target the closed forms work on measurements in a file. Nothing is assumed beyond the largest pass that
    was measured. Chains of up to 64 drafts are tried, and trees of up to 256 rows, 16 levels and 16 children of a node
    (fewer rows where many tree drafters, levels and children are asked for at once, so that a plan takes seconds).

    [bold]Examples[/]

    This machine:  [green]forerun plan --target smollm2-135m[/]

    Your prompts and your load, and all figures in a file:  [green]forerun plan --target smollm2-135m --prompts mine.txt
    --drafters ngram,suffix --concurrency 1,16 --json plan.json[/]

    A draft model:  [green]forerun plan --target MODEL --drafters draft_model --drafter-option
    draft_model.model=SMALL[/]

    From figures, a file to start from:  [green]forerun plan --example > measurements.json[/]

    The plan:  [green]forerun plan measurements.json[/]

    One load, for a script:  [green]forerun plan measurements.json --batch 8 --json[/]
    """
    if target is not None:
        if example or batch is not None:
            raise ValueError("--batch and --example belong to measurements in a file: with --target use --concurrency")
        if file is not None and not as_json:
            raise ValueError(f"with --target everything is measured here: leave {file} out, or write --json {file}")
        from forerun.cli.plan_here import Asked, plan_here

        out = None if file is None else Path(file)
        load = (prompts, concurrency, limit, max_tokens, temperature)
        plan_here(Asked(target, drafters, drafter_option, *load, check, dtype, device, out, as_json))
        return
    named = any(each is not None for each in (drafters, prompts, limit, device)) or bool(drafter_option)
    usual = (CONCURRENCY, MAX_TOKENS, 0.0, True, "auto")
    if named or (concurrency, max_tokens, temperature, check, dtype) != usual:
        raise ValueError("there is no model to measure: name it with --target, as in --target smollm2-135m")
    if example:
        typer.echo(json.dumps(EXAMPLE, indent=2))
        return
    if file is None:
        raise ValueError(
            "there are no measurements: measure here with --target MODEL, name a file, or start from `forerun plan "
            "--example`"
        )
    measured = _read(file)
    if batch is not None:
        measured = at_batch(measured, batch)
    with Console(stderr=True).status("Comparing settings"):
        recommendations = recommend(measured, best_shape)
    if as_json:
        answer = {"target": measured.target, "recommendations": [_as_dict(each) for each in recommendations]}
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    console = output()
    for recommendation in recommendations:
        console.print(show(recommendation))


def _read(source: str) -> Measurements:
    data = standard_input() if source == "-" else Path(source).read_bytes()
    try:
        return Measurements.from_json(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not text: give JSON in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _as_dict(recommendation: Recommendation) -> dict[str, Any]:
    return {
        "batch": recommendation.batch,
        "speculate": recommendation.speculate,
        "advice": recommendation.advice,
        "best": _setting(recommendation.best),
        "alternatives": [_setting(each) for each in recommendation.alternatives],
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "drafter": setting.drafter,
        "kind": setting.kind,
        "rows": setting.rows,
        "depth": setting.depth,
        "tokens_per_pass": setting.tokens_per_pass,
        "step_ms": setting.step_ms,
        "speedup": setting.speedup,
        "standard_error": setting.standard_error,
        "parents": list(setting.shape.parents),
    }


def show(recommendation: Recommendation, alternatives: int = 7) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column("drafter", overflow="fold")
    table.add_column("setting", no_wrap=True)
    for title in ("tokens", "ms/step", "speedup"):
        table.add_column(title, justify="right", no_wrap=True)
    for place, setting in enumerate((recommendation.best, *recommendation.alternatives[:alternatives]), 1):
        error = f" ± {setting.standard_error:.3f}" if setting.standard_error else ""
        table.add_row(
            str(place),
            Text(setting.drafter),  # a name is no markup
            setting.what,
            f"{setting.tokens_per_pass:.2f}",
            f"{setting.step_ms:.1f}",
            f"{setting.speedup:.2f}×{error}",
            style="bold green" if place == 1 else "",
        )
    colour = "green" if recommendation.speculate else "yellow"
    return Panel(
        Group(Text(recommendation.advice, style=f"bold {colour}"), table),
        title=f"[bold]Batch size {recommendation.batch}[/]",
        title_align="left",
        border_style=colour,
    )
