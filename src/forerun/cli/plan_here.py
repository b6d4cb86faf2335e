"""The part of `forerun plan` that measures on this machine: what it runs, shows and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from forerun.bench.cases import PLAIN, shown
from forerun.cli.bench_options import Grid
from forerun.cli.bench_tables import megabytes
from forerun.cli.console import output, print_whole
from forerun.cli.files import check_writable, write_whole
from forerun.cli.model_options import loading
from forerun.cli.simulate import parse_list

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.bench.plan_run import Plan, Recommendation
    from forerun.bench.questions import Question
    from forerun.engine.loaded import LoadedModel

MOST_AT_ONCE = 256
BAR = 0.10
"""Of what was measured: how near a prediction shall be."""


@dataclass(frozen=True)
class Asked:
    """What a user asks of this machine."""

    target: str
    drafters: str | None
    drafter_option: list[str]
    prompts: Path | None
    concurrency: str
    limit: int | None
    max_tokens: int
    temperature: float
    check: bool
    dtype: str
    device: str | None
    file: Path | None
    """Where all figures are written."""
    as_json: bool


def plan_here(asked: Asked) -> None:
    batches = list(dict.fromkeys(parse_list("--concurrency", asked.concurrency, int)))
    if not all(1 <= batch <= MOST_AT_ONCE for batch in batches):
        raise ValueError(f"--concurrency is {asked.concurrency!r}: give numbers from 1 to {MOST_AT_ONCE}")
    if asked.max_tokens < 8:
        raise ValueError(f"--max-tokens is {asked.max_tokens}: give at least 8, or nothing can be learnt of drafts")
    if asked.file is not None:
        check_writable(asked.file)
    questions = _prompts(asked)
    if asked.drafters is not None:
        _grid(asked, asked.drafters)  # a typing mistake is told before a model is loaded
    with loading(f"Loading {asked.target}") as told:
        from forerun.bench.plan_run import Planner
        from forerun.bench.provenance import provenance
        from forerun.core.params import SamplingParams
        from forerun.engine.loaded import LoadedModel, precision_of

        loaded = LoadedModel.load(asked.target, dtype=asked.dtype, device=asked.device, progress=told)
    grid = _grid(asked, asked.drafters or ",".join(Planner.drafters(loaded)))
    names = {name: given for name, given in grid.given.items() if name != PLAIN}
    seed = 0 if asked.temperature else None  # with a seed texts are the same whatever drafts them
    params = SamplingParams(temperature=asked.temperature, max_tokens=asked.max_tokens, seed=seed)
    planner = Planner(loaded, names, grid.options, questions, params, sorted(batches), asked.check)
    with _progress(planner.parts) as (begin, tell):
        made = planner.run(begin, tell)
    arguments = {
        "target": shown(asked.target),
        "drafters": list(names),
        "options": grid.arguments()["options"],
        "prompts": asked.prompts.name if asked.prompts else "built-in",
        "texts": len(questions),
        "concurrency": sorted(batches),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "check": asked.check,
        "dtype": asked.dtype,
        "precision": precision_of(loaded.target),
    }
    answer = made.as_dict() | {"provenance": provenance(arguments, str(loaded.target.device))}
    _tell(asked, made, answer, len(questions), _where(loaded))


def _prompts(asked: Asked) -> list[Question]:
    """Every turn is a prompt of its own."""
    from forerun.bench.questions import BUILT_IN, Question, read_questions

    found = read_questions(asked.prompts or BUILT_IN)
    each = [
        Question(f"{question.id}.{number}", question.category, (turn,))
        for question in found
        for number, turn in enumerate(question.turns, 1)
    ]
    if asked.limit is not None and asked.limit < 1:
        raise ValueError(f"--limit is {asked.limit}: it must be at least 1")
    return each[: asked.limit]


def _grid(asked: Asked, drafters: str) -> Grid:
    from forerun.bench.peers import PEERS

    grid = Grid.read(drafters, None, asked.drafter_option, "strongest", "own", "1", "0", None)
    peers = [name for name in grid.given if name in PEERS]
    if peers:
        raise ValueError(f"{peers[0]} is no drafter of ours: compare with it by `forerun bench --peers {peers[0]}`")
    if set(grid.given) == {PLAIN}:
        raise ValueError("there is no drafter to plan with: name some with --drafters, as in ngram,suffix")
    return grid


def _where(model: LoadedModel) -> str:
    import torch

    device = model.target.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


@contextmanager
def _progress(parts: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A bar on stderr, gone when done; none where nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Planning", total=parts, completed=-1, doing="")

        def begin(part: str) -> None:
            bar.update(task, advance=1, description=part, doing="")

        yield begin, lambda doing: bar.update(task, doing=doing)


# --- telling ---------------------------------------------------------------------------------------------------


def _tell(asked: Asked, made: Plan, answer: dict[str, Any], texts: int, where: str) -> None:
    text = json.dumps(answer, indent=1, allow_nan=False)
    if asked.file is not None:
        write_whole(asked.file, f"{text}\n".encode())
    if asked.as_json and asked.file is None:
        typer.echo(text)
    else:
        console = output()
        console.print(Text(f"{shown(asked.target)} on {where}; {texts} prompts, {asked.max_tokens} tokens each"))
        print_whole(console, _target(answer["target"]), _drafters(answer["drafters"]))
        for each in made.recommendations:
            console.print(_recommendation(each))
        console.print(Text(answer["how"], style="dim"))
        if asked.file is not None:
            console.print(Text.assemble("Written: ", (str(asked.file), "bold cyan")))
    most = max((each.batch for each in made.recommendations), default=0)
    errors = Console(stderr=True, soft_wrap=True)
    if asked.check and texts < most:
        errors.print(
            f"{most} at once are filled by asking {texts} prompts again, which drafters may remember: give more."
        )
    failed = [f"{batch} at once: {error}" for batch, error in made.errors.items()]
    failed += [f"{each.drafter}: {each.error}" for each in made.drafters if each.error]
    failed += [
        f"{each.candidate.label}: {each.error}" for r in made.recommendations for each in r.checked if each.error
    ]
    for line in dict.fromkeys(failed):
        errors.print(Text(line, style="red"))
    if failed:
        raise typer.Exit(1)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _target(target: dict[str, Any]) -> Table:
    rows = sorted({count for each in target["passes"] for count in each["rows"]})
    memory = "" if target["peak_bytes"] is None else f"; at most {megabytes(target['peak_bytes'])}"
    table = _table(f"a step in ms, by rows of a text{memory}", "at once", *map(str, rows))
    for each in target["passes"]:
        known = dict(zip(each["rows"], each["step_ms"], strict=True))
        table.add_row(str(each["batch"]), *(f"{known[count]:.1f}" if count in known else "" for count in rows))
    return table


def _drafters(drafters: list[dict[str, Any]]) -> Table:
    sizes = sorted({each["size"] for own in drafters for each in own["sizes"]})
    batches = sorted({int(batch) for own in drafters for each in own["sizes"] for batch in each["draft_ms"]})
    table = _table(
        "tokens per pass, by the most that is drafted; drafting the most of it in ms",
        "drafter",
        *(f"≤{size}" for size in sizes),
        *(f"{batch} at once" for batch in batches),
        "memory",
    )
    for own in drafters:
        known = {each["size"]: each["tokens_per_pass"] for each in own["sizes"]}
        last = own["sizes"][-1]["draft_ms"] if own["sizes"] else {}
        name = " ".join([own["drafter"], *(f"{key}={value}" for key, value in own["options"].items())])
        table.add_row(
            Text(name),
            *(f"{known[size]:.2f}" if size in known else "" for size in sizes),
            *(f"{last[str(batch)]:.1f}" if str(batch) in last else "" for batch in batches),
            "" if own["peak_bytes"] is None else megabytes(own["peak_bytes"]),
        )
    return table


def _recommendation(made: Recommendation) -> RenderableType:
    colour = "green" if made.speculate else "yellow"
    table = _table("", "method", "tokens/pass", "ms/step", "gain", "interval")
    table.title = None
    for each in made.ranked[:6]:
        table.add_row(
            Text(each.candidate.label),
            f"{each.tokens_per_pass:.2f}",
            f"{1000 * each.step_seconds:.1f}",
            f"{each.gain:.2f}×",
            f"{each.low:.2f}–{each.high:.2f}",
        )
    parts: list[RenderableType] = [table, *(Text(line) for line in _checks(made))]
    parts.append(Text(made.advice, style=f"bold {colour}"))
    if made.use is not None:
        parts.append(Text(made.use, style="cyan"))
    title = f"[bold]{made.batch} at once[/]"
    return Panel(Group(*parts), title=title, title_align="left", border_style=colour)


def _checks(made: Recommendation) -> Iterator[str]:
    for each in made.checked:
        if each.measured is None or each.off is None:
            yield f"bench, {each.candidate.label}: {each.error}"
            continue
        near = "" if abs(each.off) <= BAR else f", more than {BAR:.0%} away"
        yield (
            f"bench, {each.texts} texts: {each.candidate.label} predicted {each.predicted:.2f}×, measured "
            f"{each.measured:.2f}× ({each.low:.2f}–{each.high:.2f}){near}"
        )
