"""`forerun generate`: a text from a prompt, while it is written, and what speculation gained."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.files import check_writable
from forerun.cli.input import read_text
from forerun.cli.model_options import ModelOptions, SamplingOptions, takes
from forerun.cli.statistics import Duel, panel
from forerun.cli.streaming import end_line, print_piece

if TYPE_CHECKING:
    from forerun.core.params import SamplingParams
    from forerun.engine.completion import Completion, Piece
    from forerun.engine.llm import LLM
    from forerun.engine.prompts import Prompt


@takes(model=ModelOptions, sampling=SamplingOptions)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt, or - for standard input.", show_default=False)
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the text itself: no chat template.")] = False,
    n: Annotated[int, typer.Option(help="How many texts to write.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Log probabilities, and those of so many likeliest tokens.")
    ] = None,
    color: Annotated[bool, typer.Option("--color", help="Colour accepted, corrected and bonus tokens.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too: speedup, and same text?")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write one JSON line per step to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Write a text. It streams to standard output; the statistics follow on standard error.

    With a draft the text is the model's own all the same: token for token at temperature 0 or with a seed, and in its
    law otherwise. A --rule that you name may promise less, see `forerun rules`.

    [bold]Examples[/]

    A question:  [green]forerun generate "Why is the sky blue?"[/]

    What speculation does:  [green]forerun generate --drafter ngram --color --compare "Say abc nine times."[/]

    A file, sampled, the same each time:  [green]forerun generate --file letter.txt --temperature 0.8 --seed 7[/]

    For a script:  [green]echo "Name a colour." | forerun generate - --max-tokens 20 --json[/]
    """
    asked = _prompt(prompt, file, system, raw)
    params = sampling.params(n=n, logprobs=logprobs)
    if trace is not None:
        check_writable(trace)
    with model.open(trace=trace) as llm:
        if compare:
            _warm_up(llm, traced=trace is not None)
        written = _collect(llm, asked, params, raw) if as_json else _show(llm, asked, params, raw, color)
        duel = _duel(llm, model, asked, params, raw, written) if compare else None
        decode = llm.model.tokenizer.decode
    if as_json:
        named = {"model": model.model, "drafter": model.drafter_name, "lossless": model.lossless}
        answer = {**named, **written.as_dict()}
        if duel is not None:
            answer["compare"] = duel.as_dict()
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    console = Console(stderr=True, highlight=False)
    for choice in written.choices:
        title = f"{model.model}, {model.drafter_name}" + (f", text {choice.index + 1}" if n > 1 else "")
        console.print(panel(choice.stats, title=title, ended_by=choice.finish_reason, colored=color))
    if not model.lossless:
        console.print(f"{model.rule} is lossy: sampled text does not have the model's law.", style="yellow")
    if duel is not None:
        console.print(duel.table())
        if not duel.identical:
            console.print(_where_they_part(duel, model.rule, params, decode))


def _prompt(prompt: str | None, file: Path | None, system: str | None, raw: bool) -> Prompt:
    if (prompt is None) == (file is None):
        raise ValueError("give one prompt: a text, - for standard input, or --file FILE")
    text = read_text(file) if file is not None else read_text("-") if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty: say something")
    if system is None:
        return text
    if raw:
        raise ValueError("--system is part of a chat and --raw leaves the chat out: drop one of them")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _warm_up(llm: LLM, *, traced: bool) -> None:
    """The first pass prepares the model; neither side of a comparison should pay for it. It is no part of a trace."""
    from forerun.core.params import SamplingParams

    with llm.with_drafter("none") if traced else nullcontext(llm) as warm:
        warm.generate([next(iter(llm.model.target.eos), 0)], SamplingParams(max_tokens=2, ignore_eos=True))


def _collect(llm: LLM, asked: Prompt, params: SamplingParams, raw: bool) -> Completion:
    return llm.generate(asked, params, chat=False if raw else None)


def _duel(llm: LLM, model: ModelOptions, asked: Prompt, params: SamplingParams, raw: bool, written: Completion) -> Duel:
    with Console(stderr=True).status("Decoding plainly"), llm.with_drafter("none") as plain:
        return Duel(model.drafter_name, _collect(plain, asked, params, raw), written)


def _show(llm: LLM, asked: Prompt, params: SamplingParams, raw: bool, color: bool) -> Completion:
    """Streams the first text; the others, which are written at the same time, follow when it is whole."""
    writing = llm.start(asked, params, chat=False if raw else None)
    waiting: dict[int, list[Piece]] = {index: [] for index in range(1, params.n)}
    for piece in writing.pieces():
        if piece.index:
            waiting[piece.index].append(piece)
        else:
            print_piece(piece, color=color)
    end_line()
    for index, pieces in waiting.items():
        sys.stdout.write(f"\n--- text {index + 1} of {params.n}\n")
        for piece in pieces:
            print_piece(piece, color=color)
        end_line()
    written = writing.completion()
    if params.logprobs is not None:
        _print_logprobs(written, llm)
    return written


def _print_logprobs(written: Completion, llm: LLM) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("token", "log probability", "likeliest"):
        table.add_column(title, overflow="fold")
    for choice in written.choices:
        for each in choice.logprobs or []:
            top = "  ".join(f"{llm.model.tokenizer.decode([token])!r} {value:.2f}" for token, value in each.top)
            table.add_row(Text(repr(llm.model.tokenizer.decode([each.token]))), f"{each.logprob:.3f}", Text(top))
    Console(highlight=False).print(table)


def _where_they_part(duel: Duel, rule: str | None, params: SamplingParams, decode: Any) -> Text:
    if not params.greedy and params.seed is None:
        return Text(
            "Sampled without a seed, so the texts differ by chance: add --seed to compare them.", style="yellow"
        )
    if not params.greedy and rule not in {None, "gumbel"}:
        return Text(
            f"At best {rule} keeps the law of the text and not the text of a seed: leave --rule out to compare texts.",
            style="yellow",
        )
    place = duel.parts_at
    assert place is not None
    for ours, theirs in zip(duel.speculative.choices, duel.plain.choices, strict=True):
        a, b = ours.token_ids, theirs.token_ids
        if a[: place + 1] != b[: place + 1]:
            before = decode(a[max(0, place - 8) : place])
            sides = f"{decode(b[place : place + 4])!r} plainly, {decode(a[place : place + 4])!r} with drafts"
            return Text(
                f"The texts part at token {place}, after {before!r}: {sides}. In rounded arithmetic two tokens can be "
                f"equally likely; --dtype float32 tells such ties from errors.",
                style="yellow",
            )
    raise AssertionError("texts that differ must differ somewhere")
