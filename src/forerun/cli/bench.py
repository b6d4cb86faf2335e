"""`forerun bench`: drafters side by side on a set of prompts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forerun.cli.console import output, print_whole
from forerun.cli.files import check_writable, write_whole
from forerun.cli.model_options import loading
from forerun.cli.simulate import parse_list

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.bench.contest import Contest, Contestant, Method
    from forerun.engine.loaded import LoadedModel


def bench(
    *,
    prompts: Annotated[Path, typer.Option(help="JSON lines with question_id, category and turns, as Spec-Bench has.")],
    drafters: Annotated[
        str, typer.Option(help="Names with commas; also transformers and transformers-lookup.")
    ] = "none,ngram",
    drafter_option: Annotated[
        list[str],
        typer.Option(help="An option of one of the drafters; may be given again.", metavar="DRAFTER.KEY=VALUE"),
    ] = [],  # noqa: B006  # typer copies it
    model: Annotated[str, typer.Option(help="As for generate.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto")] = None,
    per_category: Annotated[int | None, typer.Option(help="So many prompts of each category.")] = None,
    limit: Annotated[int | None, typer.Option(help="So many prompts in all.")] = None,
    turns: Annotated[int | None, typer.Option(help="So many turns of each conversation.", show_default="all")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1",
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token, 1 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens with this much probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text, whatever drafts.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    repeat: Annotated[int, typer.Option(help="Rounds; figures are medians.")] = 3,
    peer_rounds: Annotated[
        int | None, typer.Option(help="transformers takes part in so many rounds only.", show_default="all")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Drafters side by side: tokens per second, tokens per pass, speedup over plain decoding, and whether the text is
    the same. Methods take turns on the same prompts; figures are medians over rounds.

    [bold]Examples[/]

    Two drafters:  [green]forerun bench --prompts questions.jsonl --drafters none,ngram --per-category 5[/]

    In batches, sampled:  [green]forerun bench --prompts questions.jsonl --batch 1,8 --temperature 0.8 --seed 1[/]

    Against transformers:  [green]forerun bench --prompts questions.jsonl --drafters transformers,none,ngram[/]
    """
    batches = parse_list("--batch", batch, int)
    if min(batches) < 1 or repeat < 1 or (peer_rounds is not None and peer_rounds < 1):
        raise ValueError("--batch, --repeat and --peer-rounds must be at least 1")
    if json_file is not None:
        check_writable(json_file)
    names = list(dict.fromkeys(name.strip() for name in drafters.split(",") if name.strip()))
    options = _options(names, drafter_option)
    from forerun.bench.questions import read_questions
    from forerun.core.params import SamplingParams

    questions = read_questions(prompts, per_category=per_category, limit=limit, turns=turns)
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    with loading(f"Loading {model}") as told:
        from forerun.bench.contest import Contest
        from forerun.bench.provenance import provenance
        from forerun.engine.loaded import LoadedModel

        loaded = LoadedModel.load(model, dtype=dtype, device=device, progress=told)
    contest = Contest(questions, _methods(names, options, loaded, dtype, peer_rounds), params, batches, repeat)
    arguments = {"drafters": names, "options": options, "model": model, "dtype": dtype, "questions": len(questions)}
    arguments |= {"max_tokens": max_tokens, "turns": turns, "repeat": repeat, "top_p": top_p, "seed": seed}
    arguments |= {"temperature": temperature, "batch": batches, "per_category": per_category, "limit": limit}
    origin = provenance(arguments | {"peer_rounds": peer_rounds})  # of what is loaded now
    rows = _run(contest)
    console = output()
    for size in batches:
        print_whole(console, _table([row for row in rows if row["batch"] == size], size))
    if json_file is not None:
        write_whole(json_file, (json.dumps({"rows": rows, "provenance": origin}, indent=1) + "\n").encode())


def _options(names: list[str], given: list[str]) -> dict[str, dict[str, str]]:
    """Checked before a model is loaded."""
    from forerun.bench.peers import PEERS
    from forerun.drafters.find import read_options

    options: dict[str, dict[str, str]] = {name: {} for name in names}
    for text in given:
        key, equals, value = text.partition("=")
        drafter, dot, option = key.rpartition(".")
        if not (equals and dot and option):
            raise ValueError(f"--drafter-option is {text!r}: write it as DRAFTER.KEY=VALUE")
        if drafter not in options:
            raise ValueError(f"--drafter-option names {drafter!r}, which is not among --drafters {','.join(names)}")
        options[drafter][option] = value
    for name in names:
        if name not in PEERS:
            read_options(name, options[name])
    return options


def _methods(
    names: list[str], options: dict[str, dict[str, str]], model: LoadedModel, dtype: str, peer_rounds: int | None
) -> list[Method]:
    from forerun.bench.contest import Forerun, Method
    from forerun.bench.peers import PEERS, Transformers
    from forerun.engine.llm import LLM
    from forerun.models.precision import parse_dtype

    def start(name: str, batch: int) -> Contestant:
        return Forerun(LLM(model, name, drafter_options=options[name], max_batch=batch))

    methods = []
    for name in names:
        if name in PEERS:
            assert model.folder is not None
            precision = parse_dtype(dtype, model.target.device)
            peer = Transformers.load(model.folder, model.tokenizer, precision, PEERS[name])
            methods.append(Method(name, partial(_same, peer), batches=False, rounds=peer_rounds))
        else:
            methods.append(Method(name, partial(start, name)))
    return methods


def _same(contestant: Contestant, batch: int) -> Contestant:
    return contestant


def _run(contest: Contest) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Measuring", total=contest.rounds())
        return contest.run(lambda done: bar.update(task, advance=1, description=done))


def _table(rows: list[dict[str, Any]], batch: int) -> Table:
    """A line per method, the speedup in each category."""
    categories = [
        row["category"] for row in rows if row["drafter"] == rows[0]["drafter"] and row["category"] != "overall"
    ]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=f"batch {batch}", title_justify="left")
    for title in ("drafter", "tokens/s", "tokens/pass", "speedup", "identical", *categories):
        table.add_column(title, justify="left" if title == "drafter" else "right", no_wrap=True)
    for row in rows:
        if row["category"] != "overall":
            continue
        own = {each["category"]: each for each in rows if each["drafter"] == row["drafter"]}
        same = "" if row["identical_to_plain"] is None else f"{row['identical']}/{row['answers']}"
        table.add_row(
            row["drafter"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_pass']:.2f}",
            _times(row["speedup"]),
            same,
            *(_times(own[category]["speedup"]) for category in categories),
        )
    return table


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"
