"""`forerun calibrate trained`: how right a trained drafter is, and which tree writes fastest here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.calibrate import PROMPTS
from forerun.cli.confidence_picture import draw_confidence, way_of_choosing
from forerun.cli.console import output, working
from forerun.cli.files import check_writable, write_whole
from forerun.cli.model_options import DTYPES, loading
from forerun.theory.plot import picture_format


def trained(
    drafter: Annotated[str, typer.Argument(help="eagle3, medusa, draft_model, …, or the folder of a trained drafter.")],
    *,
    model: Annotated[
        str, typer.Option(help="A built-in name, a folder, a GGUF file or a Hugging Face id.")
    ] = "smollm2-135m",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with turns, or plain text with a prompt on each line.", show_default="eight of our own"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to use, at most.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer.")] = 96,
    tree: Annotated[
        list[str], typer.Option(help="Time this tree; may be given again.", show_default="some of each size")
    ] = [],  # noqa: B006  # typer copies it
    keep_tree: Annotated[
        bool, typer.Option("--keep-tree", help="Time no trees: the one that was found before stays.")
    ] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw confidence against acceptance to this .png, .svg or .pdf.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """How right a trained drafter is, whether it knows, and which tree writes fastest on this kind of device.

    What is found goes into the drafter's folder, and the drafter uses it from then on: accuracies by depth and rank
    for static trees, how far its confidences can be trusted, and the tree. For parallel
    only the accuracies are used, and no trees are tried: it makes its own from them.

    [bold]Examples[/]

    The one that comes with Forerun:  [green]forerun calibrate trained eagle3[/]

    Your own, on your prompts:  [green]forerun calibrate trained my-eagle --model my-model --prompts prompts.jsonl[/]

    A picture:  [green]forerun calibrate trained eagle3 --plot confidence.svg[/]
    """
    start = time.perf_counter()
    if keep_tree and tree:
        raise ValueError("--keep-tree and --tree exclude each other: leave one of them out")
    if plot_file is not None:
        kind = picture_format(plot_file)
        check_writable(plot_file)
    with loading(f"Loading {model}") as told:
        from forerun.drafters.find import resolve
        from forerun.drafters.tree_spec import TreeSpec
        from forerun.engine.loaded import LoadedModel
        from forerun.engine.prompts import to_tokens
        from forerun.train.calibrate import calibrate as find_out
        from forerun.train.prompts import read_prompts

        for each in tree:
            TreeSpec.parse(each)
        method, options = resolve(drafter)
        asked = list(PROMPTS) if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
        loaded = LoadedModel.load(model, dtype=dtype, device=device, offline=offline, progress=told)
    tokens = [to_tokens(text, loaded.tokenizer, chat=None) for text in asked[:limit]]
    room = loaded.target.context_length - max_tokens
    fitting = [own for own in tokens if len(own) < room]
    if not fitting:
        raise ValueError("the prompts are all too long to be answered: give some shorter ones")
    with working() as tell:
        found = find_out(
            loaded,
            method,
            str(options.get("path") or options.get("model", "")),
            fitting,
            max_tokens=max_tokens,
            trees=[] if keep_tree else tree or None,
            tell=tell,
        )
    if plot_file is not None:
        write_whole(plot_file, draw_confidence(kind, drafter, found))
        found["plot"] = str(plot_file)
    if as_json:
        typer.echo(json.dumps({"drafter": drafter, "seconds": time.perf_counter() - start, **found}, indent=2))
        return
    _print(drafter, found, time.perf_counter() - start)


def _print(drafter: str, found: dict[str, Any], seconds: float) -> None:
    console = output()
    first, ranks = [row[0] for row in found["accuracies"]], len(found["accuracies"][0])
    console.print(
        Text.assemble(
            (drafter, "bold cyan"),
            f": its first candidate is right {', '.join(f'{a:.0%}' for a in first)} of the time, 1 to {len(first)} ",
            f"tokens ahead; one of {ranks} {', '.join(f'{sum(row):.0%}' for row in found['accuracies'])}.",
        ),
        soft_wrap=True,
    )
    console.print(f"Confidence against acceptance, for the {ranks} best candidates of a place:")
    for way, bins in found["confidence"].items():
        _print_confidence(way_of_choosing(way, found), bins)
    if found["timed"]:
        _print_trees(found)
    if "plot" in found:
        console.print(Text(f"Picture: {found['plot']}", style="dim"), soft_wrap=True)
    console.print(Text(f"Kept in {found['folder']}, after {seconds:.0f} s."), soft_wrap=True)


def _print_confidence(title: str, bins: list[dict[str, float]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("from", "to", "candidates", "confidence", "acceptance"):
        table.add_column(name, justify="right")
    for row in bins:
        edges = (f"{row['from']:.1f}", f"{row['to']:.1f}")
        table.add_row(*edges, f"{row['candidates']:,}", f"{row['confidence']:.3f}", f"{row['acceptance']:.3f}")
    output().print(table)


def _print_trees(found: dict[str, Any]) -> None:
    times = Table(title="Trees", title_justify="left", box=None, pad_edge=False)
    for title in ("tree", "tokens/s", "tokens/pass"):
        times.add_column(title, justify="left" if title == "tree" else "right")
    best = max(found["timed"], key=lambda row: row["tokens_per_second"])
    for row in found["timed"]:
        style = "bold green" if row is best else ""
        speed, per_pass = f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_pass']:.2f}"
        times.add_row(row["tree"], speed, per_pass, style=style)
    output().print(times)
