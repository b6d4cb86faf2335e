"""`forerun train`: makes a drafter that learns from the target's own answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output
from forerun.cli.model_options import loading, takes

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.train.estimate import Estimate
    from forerun.train.loop import News
    from forerun.train.run import Settings

METHODS = ("draft",)
LEARNING, DATA = "Learning", "Answers to learn from"

Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TrainOptions:
    """How much is asked and learned, and what the drafter looks like."""

    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft model.", rich_help_panel=LEARNING)] = 2
    hidden: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Its width; with another than the target's it begins as noise.",
            show_default="the target's",
            rich_help_panel=LEARNING,
        ),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, at most.", rich_help_panel=LEARNING)] = 2000
    batch: Annotated[
        int, typer.Option(min=1, help="Texts in a step, of all processes together.", rich_help_panel=LEARNING)
    ] = 16
    learning_rate: Annotated[
        float, typer.Option(help="The highest: it rises at first, then falls to nothing.", rich_help_panel=LEARNING)
    ] = 3e-4
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between two measurements.",
            show_default="a tenth of the steps",
            rich_help_panel=LEARNING,
        ),
    ] = None
    patience: Annotated[
        int,
        typer.Option(min=1, help="Measurements without a better one before it ends early.", rich_help_panel=LEARNING),
    ] = 5
    seed: Annotated[int, typer.Option(min=0, help="Of answers, order and first weights.", rich_help_panel=LEARNING)] = 0
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.", rich_help_panel=DATA)] = 256
    sampled: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="The share of prompts answered at temperature 1; the others are answered greedily.",
            rich_help_panel=DATA,
        ),
    ] = 0.5
    held_back: Annotated[
        int, typer.Option(min=1, help="Prompts to measure with and not to learn from.", rich_help_panel=DATA)
    ] = 32

    def settings(self) -> Settings:
        from forerun.train.answers import AnswerOptions
        from forerun.train.loop import LoopOptions
        from forerun.train.run import Settings
        from forerun.train.student import StudentShape

        if not 0 < self.learning_rate < 1:
            raise ValueError(f"--learning-rate is {self.learning_rate:g}: give a number above 0 and below 1, as 3e-4")
        return Settings(
            shape=StudentShape(self.layers, self.hidden),
            answers=AnswerOptions(max_tokens=self.max_tokens, sampled=self.sampled, seed=self.seed),
            loop=LoopOptions(
                steps=self.steps,
                batch=self.batch,
                learning_rate=self.learning_rate,
                every=self.every or max(1, self.steps // 10),
                patience=self.patience,
                seed=self.seed,
            ),
            held_back=self.held_back,
        )


@takes(options=TrainOptions)
def train(
    method: Annotated[str, typer.Argument(help="What to train: draft, a small model that drafts.", metavar="METHOD")],
    *,
    target: Annotated[
        str, typer.Option(help="Whom to draft for: a built-in name, a folder, a GGUF file or a Hugging Face id.")
    ] = "smollm2-135m",
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with turns, or plain text with a prompt on each line.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to make; it must not exist yet.", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it takes and how much memory.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    options: TrainOptions,
) -> None:
    """Train a drafter on what the target itself answers to prompts.

    The target answers the prompts; then the drafter learns to foresee the answers. As it learns, it is measured by what
    counts: tokens per pass of the target, on prompts that were held back. The best weights are kept. Answers and
    checkpoints lie in OUT.training, and --resume goes on from there.

    METHOD draft makes a transformer with few layers, which begin as some of the target's own, for the drafter
    draft_model.

    [bold]Examples[/]

    How long will it take?  [green]forerun train draft --prompts prompts.jsonl --out small --dry-run[/]

    Train:  [green]forerun train draft --target smollm2-135m --prompts prompts.jsonl --out small[/]

    In two processes:  [green]torchrun --nproc-per-node 2 -m forerun.cli.main train draft --prompts …[/]

    Then draft with it:  [green]forerun generate --drafter draft_model --draft-model small "Why is the sky blue?"[/]
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r} to train: use one of {', '.join(METHODS)}")
    first = int(os.environ.get("RANK", "0")) == 0
    with loading(f"Loading {target}") as told:
        from forerun.bench.provenance import provenance
        from forerun.engine.loaded import LoadedModel, find_device
        from forerun.train.estimate import estimate
        from forerun.train.processes import joined
        from forerun.train.prompts import read_prompts
        from forerun.train.run import DraftRun, check_out, work_folder

        settings = options.settings()
        if first and not dry_run:
            check_out(out, resume)
        asked = read_prompts(prompts)
        place = find_device(_own_device(device))
        # On a CPU in float32: there matrices in bfloat16 are laid out in a way that only inference reads.
        dtype = "bfloat16" if place.type == "cuda" else "float32"
        loaded = LoadedModel.load(target, dtype=dtype, device=str(place), offline=offline, progress=told)
    name = Path(target).name if Path(target).exists() else target  # paths are nobody's business
    with joined(place) as processes, _progress(first) as tell:
        run = DraftRun(loaded, name, asked, settings, processes)
        if dry_run:
            tell("Trying a small part", 0, 0)
            expected = estimate(run)
        else:
            about = provenance({"method": method, "target": name, "prompts": prompts.name}, str(place))
            made = run.train(out, work_folder(out), about, tell, lambda news: tell(_line(news), news.step, news.steps))
    if not first:
        return
    if dry_run:
        _print_estimate(expected, as_json)
    else:
        _print_result(out, made, as_json)


def _own_device(name: str | None) -> str | None:
    """Each process that `torchrun` started has a graphics card of its own."""
    import torch

    own = os.environ.get("LOCAL_RANK")
    return f"cuda:{own}" if own is not None and name in (None, "cuda") and torch.cuda.is_available() else name


def _line(news: News) -> str:
    minutes = news.seconds_left / 60
    left = f"{news.seconds_left:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
    return f"Loss {news.loss:.3f}, {news.measure:.2f} tokens per pass (best {news.best:.2f}), {left} left"


def _print_estimate(expected: Estimate, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(expected), indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "prompts": f"{expected.prompts:,} to learn from, {expected.held_back:,} held back",
        "answers": f"{expected.texts:,}, at most {expected.answer_tokens:,} tokens, {expected.answer_seconds:,.0f} s",
        "student": f"{expected.weights / 1e6:,.1f} million weights",
        "steps": f"{expected.steps:,} of {expected.step_seconds:.2f} s",
        "measurements": f"{expected.measures:,} of {expected.measure_seconds:.1f} s",
        "memory": f"{expected.memory_bytes / 1e9:.1f} GB",
        "time": f"{expected.seconds / 60:,.1f} min at most",
    }
    for label, value in rows.items():
        table.add_row(label, Text(value))
    output().print(table)


def _print_result(out: Path, made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"folder": str(out), **made}, indent=2))
        return
    figures, data = made["tokens_per_pass"], made["data"]
    line = (
        f" drafts {figures['after']:.2f} tokens per pass on {data['held_back']} prompts that were held back, "
        f"{figures['before']:.2f} before training: {made['steps']:,} steps on {data['answer_tokens']:,} tokens of "
        f"{data['texts']:,} answers. The last session took {made['last_session_seconds']:.0f} s."
    )
    output().print(Text.assemble((str(out), "bold cyan"), line), soft_wrap=True)


@contextmanager
def _progress(shown: bool) -> Iterator[Told]:
    """A bar on stderr, gone when done; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bars:
        task = bars.add_task("", total=None)
        yield lambda doing, done, total: bars.update(task, description=doing, completed=done, total=total or None)
