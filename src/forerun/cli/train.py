"""`forerun train`: makes a drafter that learns from the target's own answers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output, working
from forerun.cli.model_options import loading, takes
from forerun.cli.train_options import ShapeOptions, TrainOptions

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.engine.loaded import LoadedModel
    from forerun.train.answers import AnswerOptions
    from forerun.train.estimate import Estimate
    from forerun.train.loop import News
    from forerun.train.prompts import Prompt

Told = Callable[[str, int, int], None]


@takes(shape=ShapeOptions, options=TrainOptions)
def train(
    method: Annotated[
        str,
        typer.Argument(
            help="What to train: blockwise, draft, eagle, eagle3, medusa, mtp or parallel; or answers, to make only "
            "those.",
            metavar="METHOD",
        ),
    ],
    *,
    target: Annotated[
        str, typer.Option(help="Whom to draft for: a built-in name, a folder, a GGUF file or a Hugging Face id.")
    ] = "smollm2-135m",
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with turns, or plain text with a prompt on each line.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder to make, or the file of answers; it must not exist yet.",
            show_default="METHOD-TARGET in the current folder, as eagle3-smollm2-135m",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Answers that were made for this target, to learn from instead of asking.", show_default=False
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="draft: a draft model trained before, of which this one learns what it misses; may be given again.",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(help="A drafter of the same method, whose weights are the first ones.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it takes and how much memory.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    shape: ShapeOptions,
    options: TrainOptions,
) -> None:
    """Train a drafter on what the target itself answers to prompts.

    The target answers the prompts; then the drafter learns to foresee the answers. As it learns, it is measured by what
    counts: tokens per pass of the target, on prompts that were held back. The best weights are kept. Answers and
    checkpoints lie in OUT.training, and --resume goes on from there.

    METHOD draft makes a transformer with few layers, which begin as some of the target's own, for the drafter
    draft_model; where it can, it reads and speaks with the target's own matrices. eagle, eagle3 and mtp are a layer
    that foresees the target's states; blockwise and medusa are heads on its last state; parallel is a few embeddings
    that the target reads in place of tokens not known yet.

    [bold]Examples[/]

    How long will it take?  [green]forerun train eagle3 --prompts prompts.jsonl --dry-run[/]

    Train:  [green]forerun train draft --target smollm2-135m --prompts prompts.jsonl --out small[/]

    In two processes:  [green]torchrun --nproc-per-node 2 -m forerun.cli.main train draft --prompts …[/]

    Then draft with it:  [green]forerun generate --drafter small "Why is the sky blue?"[/]

    Heads, and a new model below them:  [green]forerun train medusa --backbone --prompts prompts.jsonl --out both[/]

    Answers for several runs:  [green]forerun train answers --prompts prompts.jsonl --times 3 --out told[/]

    Go on with one:  [green]forerun train eagle3 --prompts prompts.jsonl --begin head --out better[/]

    Learn from them:  [green]forerun train eagle3 --prompts prompts.jsonl --answers told --out head[/]
    """
    first = int(os.environ.get("RANK", "0")) == 0
    out = out or _default_out(method, target)
    with loading(f"Loading {target}") as told:
        from forerun.bench.provenance import provenance
        from forerun.engine.loaded import LoadedModel, find_device
        from forerun.train.estimate import estimate
        from forerun.train.processes import joined
        from forerun.train.prompts import read_prompts
        from forerun.train.run import Run, check_out, target_of, work_folder

        only_answers = method == "answers"
        if beside and method != "draft":
            raise ValueError("--beside is for drafts that are drawn side by side: leave it out, or train a draft")
        if only_answers:
            _check_answers(shape, out, answers or begin, resume, dry_run)
        else:
            settings = options.settings(method, shape)
            if first and not dry_run:
                check_out(out, resume)
        asked = read_prompts(prompts)
        place = find_device(_own_device(device))
        # On a CPU in float32: there matrices in bfloat16 are laid out in a way that only inference reads.
        dtype = "bfloat16" if place.type == "cuda" else "float32"
        loaded = LoadedModel.load(target, dtype=dtype, device=str(place), offline=offline, progress=told)
    name = Path(target).name if Path(target).exists() else target  # paths are nobody's business
    if only_answers:
        target_of(loaded, name)
        if first:
            with working() as tell:
                _make_answers(loaded, asked, out, options.asking(), tell, as_json)
        return
    work = work_folder(out)
    with joined(place) as processes:
        with working(shown=first):
            run = Run(loaded, name, asked, settings, processes, beside or (), begin)
        if first and not (dry_run or as_json):
            output().print(Text(f"The drafter will be in {out}, and the run is in {work}."), soft_wrap=True)
        with working(shown=first) as tell:
            if dry_run:
                tell("Trying a small part", 0, 0)
                expected = estimate(run, None if answers is None else run.texts(answers))
            else:
                about = provenance({"method": method, "target": name, "prompts": prompts.name}, str(place))
                made = run.train(out, work, about, tell, lambda news: tell(_line(news), news.step, news.steps), answers)
    if not first:
        return
    if dry_run:
        _print_estimate(out, expected, as_json)
    else:
        _print_result(out, made, as_json)


def _default_out(method: str, target: str) -> Path:
    """Here, and named after both, with nothing in the name that a shell or a file system would mind."""
    name = Path(os.path.abspath(target)).name.removesuffix(".gguf")
    return Path(re.sub(r"[^\w.+-]+", "-", f"{method}-{name or 'model'}").strip("-."))


def _check_answers(shape: ShapeOptions, out: Path, answers: Path | None, resume: bool, dry_run: bool) -> None:
    if shape.given() or answers is not None or dry_run:
        raise ValueError("`forerun train answers` only makes answers: leave out --answers, --begin, --dry-run and what "
                         "shapes a drafter")  # fmt: skip
    if out.exists() and not resume:
        raise ValueError(f"{out} exists: add to it with --resume, delete it, or choose another --out")
    if resume and not out.exists():
        raise ValueError(f"there is no {out}, so there is nothing to go on with: leave --resume out")


def _make_answers(
    loaded: LoadedModel, asked: list[Prompt], out: Path, options: AnswerOptions, tell: Told, as_json: bool
) -> None:
    from forerun.train.answers import answer_prompts, read_answers

    answer_prompts(loaded, asked, out, options, tell)
    texts = read_answers(out, asked)
    made = {
        "file": str(out),
        "prompts": len(asked),
        "texts": len(texts),
        "answer_tokens": sum(len(text.answer) for text in texts),
        "bytes": out.stat().st_size,
    }
    if as_json:
        typer.echo(json.dumps(made, indent=2))
        return
    line = f" has {made['answer_tokens']:,} tokens in {len(texts):,} answers, {out.stat().st_size / 1e6:,.1f} MB"
    output().print(Text.assemble((str(out), "bold cyan"), line), soft_wrap=True)


def _own_device(name: str | None) -> str | None:
    """Each process that `torchrun` started has a graphics card of its own."""
    import torch

    own = os.environ.get("LOCAL_RANK")
    return f"cuda:{own}" if own is not None and name in (None, "cuda") and torch.cuda.is_available() else name


def _line(news: News) -> str:
    minutes = news.seconds_left / 60
    left = f"{news.seconds_left:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
    return f"Loss {news.loss:.3f}, {news.measure:.2f} tokens per pass (best {news.best:.2f}), {left} left"


def _print_estimate(out: Path, expected: Estimate, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"folder": str(out), **asdict(expected)}, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "folder": str(out),
        "prompts": f"{expected.prompts:,} to learn from, {expected.held_back:,} held back",
        "answers": f"{expected.texts:,}, at most {expected.answer_tokens:,} tokens, {expected.answer_seconds:,.0f} s",
        "learning": f"{expected.weights / 1e6:,.1f} million weights",
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
        f" is written. It drafts {figures['after']:.2f} tokens per pass on {data['held_back']} prompts that were held "
        f"back, {figures['before']:.2f} before training: {made['steps']:,} steps on {data['answer_tokens']:,} tokens "
        f"of {data['texts']:,} answers. The last session took {made['last_session_seconds']:.0f} s."
    )
    output().print(Text.assemble((str(out), "bold cyan"), line), soft_wrap=True)
    if "backbone" in made:
        _print_backbone(out, made)


def _print_backbone(out: Path, made: dict[str, Any]) -> None:
    """Whoever uses it has to know that he does not use the original."""
    about = made["backbone"]
    distance, folder = about["distance"], out / "backbone"
    line = (
        f" is a new model and no longer {about['original']['name']}: its text is not the original's. On what that "
        f"says to the prompts held back, another token is the likeliest at {distance['greedy_differs']:.1%} of "
        f"{distance['places']:,} places, and the laws are {distance['mean_kl']:.4f} nats apart. The heads draft only "
        f"for it: --model {folder} --drafter {out}"
    )
    output().print(Text.assemble((str(folder), "bold yellow"), line), soft_wrap=True)
