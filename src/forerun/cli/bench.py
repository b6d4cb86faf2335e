"""`forerun bench`: the referee. Methods side by side on a set of prompts, in a table, a file and a report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from forerun.bench.cases import Case, Setting, shown
from forerun.cli.bench_options import Grid
from forerun.cli.bench_tables import show
from forerun.cli.files import check_writable, write_whole
from forerun.cli.model_options import DTYPES, loading

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.bench.contest import Contest
    from forerun.bench.contestants import Contestant
    from forerun.bench.store import Store
    from forerun.engine.loaded import LoadedModel

INTERRUPTED = 130
WHAT, LOAD, HOW, OUT = "What is compared", "Load", "How it is measured", "Results"


def bench(
    *,
    drafters: Annotated[
        str,
        typer.Option(help="Names or folders, with commas. Plain decoding (none) always runs.", rich_help_panel=WHAT),
    ] = "none,ngram",
    drafter_option: Annotated[
        list[str],
        typer.Option(
            help="An option of one of the drafters or peers; may be given again.",
            metavar="DRAFTER.KEY=VALUE",
            rich_help_panel=WHAT,
        ),
    ] = [],  # noqa: B006  # typer copies it
    rules: Annotated[
        str, typer.Option(help="Verification rules, with commas; see `forerun rules`.", rich_help_panel=WHAT)
    ] = "strongest",
    trees: Annotated[
        str,
        typer.Option(
            help='Trees, with semicolons: "own;5;3,2,1;dynamic:8,5,40". For drafters that have one.',
            rich_help_panel=WHAT,
        ),
    ] = "own",
    adaptive: Annotated[
        str,
        typer.Option(
            help="Whether the engine chooses how much is drafted, by what has paid so far: off, on, or both.",
            rich_help_panel=WHAT,
        ),
    ] = "off",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Other systems in the same run: all, or some of transformers, transformers-lookup, "
            "transformers-assistant, vllm, vllm-lookup, openvino, openvino-lookup.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="As for generate.", rich_help_panel=WHAT)] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help=DTYPES, rich_help_panel=WHAT)] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto", rich_help_panel=WHAT)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with question_id, category and turns, as Spec-Bench has, or a text with a prompt in each "
            "line.",
            show_default="a small set of 26",
            rich_help_panel=LOAD,
        ),
    ] = None,
    per_category: Annotated[
        int | None, typer.Option(help="So many prompts of each category.", rich_help_panel=LOAD)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many prompts in all.", rich_help_panel=LOAD)] = None,
    turns: Annotated[
        int | None, typer.Option(help="So many turns of each conversation.", show_default="all", rich_help_panel=LOAD)
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.", rich_help_panel=LOAD)] = "1",
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Besides closed batches: requests a second, at random (Poisson) times; rates with commas.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    temperatures: Annotated[
        str,
        typer.Option(
            "--temperatures",
            "--temperature",
            help="With commas; 0 takes the most likely token, 1 samples.",
            rich_help_panel=LOAD,
        ),
    ] = "0",
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens with this much probability.", rich_help_panel=LOAD)
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text, whatever drafts.", rich_help_panel=LOAD)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.", rich_help_panel=LOAD)] = 128,
    repeat: Annotated[int, typer.Option(help="Rounds; figures are medians.", rich_help_panel=HOW)] = 3,
    peer_rounds: Annotated[
        int | None,
        typer.Option(help="Peers take part in so many rounds only.", show_default="all", rich_help_panel=HOW),
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Tokens that each method writes before it is measured.", rich_help_panel=HOW)
    ] = 16,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", rich_help_panel=OUT)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write tables and plots to this .html, one page.", rich_help_panel=OUT)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the interrupted run in the --json file, from the round that it had begun.",
            rich_help_panel=OUT,
        ),
    ] = False,
) -> None:
    """Methods side by side: speed, time to first token, tokens per pass, acceptance, memory, speedup over plain
    decoding with what theory predicts beside it, and whether the text is the same. Methods take turns on the same
    prompts; figures are medians over rounds. A method that fails is a row with its error.

    [bold]Examples[/]

    Two drafters:  [green]forerun bench --drafters ngram,suffix[/]

    The whole grid:  [green]forerun bench --drafters eagle3 --trees "5;dynamic:8,5,40" --rules strongest,gumbel
    --batch 1,8,32 --temperatures 0,1 --seed 1 --json run.json --report run.html[/]

    Go on with it after Ctrl-C:  [green]the same command with --resume[/]

    Against others:  [green]forerun bench --peers transformers,transformers-lookup --prompts questions.jsonl[/]

    As a server sees it:  [green]forerun bench --batch 8 --arrivals 0.5,2 --max-tokens 64[/]

    Whole trees, and as much as has paid so far:  [green]forerun bench --drafters suffix --adaptive both --batch 1,8[/]
    """
    grid = Grid.read(drafters, peers, drafter_option, rules, trees, batch, temperatures, arrivals, adaptive)
    if repeat < 1 or (peer_rounds is not None and peer_rounds < 1) or warm_up < 0:
        raise ValueError("--repeat and --peer-rounds must be at least 1, --warm-up at least 0")
    if resume and json_file is None:
        raise ValueError("--resume needs the file of the interrupted run: name it with --json")
    _refuse_same_file(prompts, json_file, report)
    for file in (json_file, report):
        if file is not None:
            check_writable(file)
    from forerun.bench.questions import BUILT_IN, read_questions
    from forerun.bench.store import refuse_overwriting
    from forerun.core.params import SamplingParams

    if json_file is not None and not resume:
        refuse_overwriting(json_file)
    questions = read_questions(prompts or BUILT_IN, per_category=per_category, limit=limit, turns=turns)
    params = SamplingParams(top_p=top_p, seed=seed, max_tokens=max_tokens)
    with loading(f"Loading {model}") as told:
        from forerun.bench.contest import Contest
        from forerun.bench.contestants import room_for
        from forerun.engine.loaded import LoadedModel, precision_of

        loaded = LoadedModel.load(model, dtype=dtype, device=device, progress=told)
    contest = Contest(
        questions,
        grid.cases,
        grid.settings,
        _starter(grid, loaded, dtype, room_for(questions, loaded.tokenizer, max_tokens)),
        params,
        repeat,
        rounds=lambda case: peer_rounds if grid.is_peer(case) else None,
        ends=loaded.tokenizer.eos | loaded.target.eos,
        warm_up=warm_up,
        device=loaded.target.device,
        seed=seed or 0,
    )
    arguments = grid.arguments() | {"model": shown(model), "dtype": dtype, "max_tokens": max_tokens}
    arguments |= {"prompts": prompts.name if prompts else "built-in", "questions": len(questions), "turns": turns}
    arguments |= {"per_category": per_category, "limit": limit, "repeat": repeat, "peer_rounds": peer_rounds}
    arguments |= {"top_p": top_p, "seed": seed, "warm_up": warm_up, "prompts_digest": _digest(questions)}
    arguments["precision"] = precision_of(loaded.target)
    store = _store(contest, json_file, arguments, grid, _weights(grid, loaded), resume=resume)
    complete = _run(contest, store)
    _finish(store, report, complete=complete)


def _refuse_same_file(*files: Path | None) -> None:
    """A result must not take the place of the prompts, nor the page that of the result."""
    paths = [os.path.realpath(file) for file in files if file is not None]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is named twice: --prompts, --json and --report must be different files")


def _starter(grid: Grid, model: LoadedModel, dtype: str, room: int) -> Callable[[Case, Setting], Contestant]:
    """`room`: tokens of a conversation."""
    from forerun.bench.contestants import Forerun
    from forerun.bench.peers import Peers
    from forerun.engine.llm import LLM
    from forerun.engine.loaded import default_slots
    from forerun.models.precision import parse_dtype

    device = model.target.device
    others = Peers(model.folder, model.tokenizer, parse_dtype(dtype, device), device, grid.options)

    def start(case: Case, setting: Setting) -> Contestant:
        if grid.is_peer(case):
            return others.start(case.drafter, setting)
        return Forerun(
            LLM(
                model,
                grid.given[case.drafter],
                drafter_options=grid.options[case.drafter],
                tree=case.tree or None,
                rule=case.rule or None,
                max_batch=setting.batch,
                cache_tokens=min(default_slots(model.target, setting.batch), setting.batch * room),
                adaptive=case.adaptive,
            )
        )

    return start


def _weights(grid: Grid, model: LoadedModel) -> dict[str, str]:
    """Digests, as far as there are weights."""
    from forerun.engine.weights import drafter_digest, model_digest, named_digest

    found = {"the model": model_digest(model)}
    for name, given in grid.given.items():
        own = grid.options[name]
        if name in grid.peers:
            found[name] = named_digest([own["model"]] if "model" in own else [])
        else:
            found[name] = drafter_digest(given, own, model.target)
    return {name: digest for name, digest in found.items() if digest is not None}


def _store(
    contest: Contest, file: Path | None, arguments: dict[str, Any], grid: Grid, weights: dict[str, str], *, resume: bool
) -> Store:
    from forerun.bench.peers import versions
    from forerun.bench.provenance import provenance
    from forerun.bench.rows import make_rows
    from forerun.bench.store import Store, earlier_cells

    origin = provenance(arguments, str(contest.device)) | {"peers": versions(grid.peers), "weights": weights}
    seeded = contest.params.seed is not None
    store = Store(
        file,
        origin,
        lambda cells: make_rows(cells, contest.cases, contest.settings, contest.categories, seeded=seeded),
        write_whole,
    )
    if resume and file is not None:
        store.cells += earlier_cells(file, origin, contest)
    return store


def _run(contest: Contest, store: Store) -> bool:
    """Whether all of it was measured; Ctrl-C keeps what there is."""
    console = Console(stderr=True)
    most = max(setting.batch for setting in contest.settings)
    if most > len(contest.questions):
        console.print(
            f"Batches of {most} are not filled by {len(contest.questions)} prompts: give more with --prompts."
        )
    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        done = store.done
        task = bar.add_task("Measuring", total=len(contest.plan()), completed=len(done))

        def keep(cell: Any) -> None:
            store.keep(cell)
            bar.update(task, advance=1, description=f"{cell.place.case.label}, {cell.place.pool}")

        try:
            contest.run(keep, done)
        except KeyboardInterrupt:
            return False
    return True


def _finish(store: Store, report: Path | None, *, complete: bool) -> None:
    store.save(complete=complete)
    result = store.as_dict(complete=complete)
    show(result["rows"])
    if report is not None:
        from forerun.bench.report import render

        write_whole(report, render(result).encode())
    console = Console(stderr=True, soft_wrap=True)
    if not complete:
        kept = f"{store.path} has what was measured; the same command with --resume goes on."
        told = "Figures above are of what was measured." if store.path is None else kept
        console.print(Text(f"Interrupted. {told}"))
        raise typer.Exit(INTERRUPTED)
    failed = list(dict.fromkeys(row["method"] for row in result["rows"] if row["error"]))
    if failed:
        console.print(Text(f"Failed, with the reason in the row: {', '.join(failed)}."))
        raise typer.Exit(1)


def _digest(questions: list[Any]) -> str:
    import hashlib

    return hashlib.blake2b(repr(questions).encode(), digest_size=6).hexdigest()
