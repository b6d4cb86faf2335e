"""`forerun calibrate`: finds out, once for a model, what a drafter should know about it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.cli.console import output, working
from forerun.cli.input import read_text
from forerun.cli.model_options import DTYPES, loading

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.drafters.layer_search import Progress
    from forerun.engine.loaded import LoadedModel

calibrate = typer.Typer(
    name="calibrate",
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Find out, once for a model, what a drafter should know about it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Explain in three steps how to plant a tree.",
    "What is 17 times 23? Show how you get there.",
    "Translate into French: The train leaves at nine in the morning.",
    "List five things to take on a hike in the mountains.",
    "Summarise what the French Revolution was about.",
)
ANSWER = 64
"""Tokens of each answer."""
PIECE, PIECES = 256, 8
"""A text is taken in so many tokens at a time, and so many times, from all over it."""
PREFACE = 16
"""The first tokens of a piece do not count: there a model knows too little."""


@calibrate.callback()
def about() -> None:
    """Find out, once for a model, what a drafter should know about it."""


@calibrate.command(name="layer_skip")
def layer_skip(
    *,
    model: Annotated[
        str, typer.Option(help="A built-in name, a folder, a GGUF file or a Hugging Face id.")
    ] = "smollm2-135m",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text of the kind that will be written; - for standard input.",
            show_default="what the model answers to eight prompts",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Which layers of a model draft best for it, and whether that pays.

    The drafter layer_skip uses what was found, for this model in this number format, from then on. It takes a minute or
    two for a small model. Calibrate again on another machine, or after changing how the model runs: times are measured.

    [bold]Examples[/]

    Find out:  [green]forerun calibrate layer_skip --model smollm2-135m[/]

    Then use it:  [green]forerun generate --drafter layer_skip "Why is the sky blue?"[/]
    """
    given = None if text is None else read_text(text)
    start = time.perf_counter()
    with loading(f"Loading {model}") as told:
        from forerun.drafters.layer_choice import save, write_layers
        from forerun.drafters.layer_search import calibrate as search
        from forerun.engine.loaded import LoadedModel
        from forerun.models.store import Store
        from forerun.models.transformer import Transformer

        loaded = LoadedModel.load(model, dtype=dtype, device=device, offline=offline, progress=told)
    if not isinstance(loaded.target, Transformer):
        raise ValueError(
            f"{model} runs through an adapter, which cannot skip layers: choose another drafter, such as ngram"
        )
    with working() as tell:
        texts = _answers(loaded, tell) if given is None else _pieces(loaded, given, text)
        choice = search(loaded.target, texts, tell)
    count = len(loaded.target.config.layers)
    path = save(choice, loaded.target, Store.default(), name=model, of_layers=count)
    seconds = time.perf_counter() - start
    if as_json:
        answer = {
            "model": model,
            "layers": list(choice.layers),
            "of_layers": count,
            "acceptance": choice.acceptance,
            "level_cost": choice.level_cost,
            "row_costs": choice.row_costs,
            "speedup": choice.speedup,
            "pays": choice.pays,
            "file": str(path),
            "seconds": seconds,
        }
        typer.echo(json.dumps(answer, indent=2))
        return
    console = output()
    console.print(
        Text.assemble(
            (model, "bold cyan"),
            f": {len(choice.layers)} of {count} layers draft, {write_layers(choice.layers)}. ",
            f"They guess {choice.acceptance:.0%} of tokens, and a guess costs {choice.level_cost:.2f} of a pass.",
        ),
        soft_wrap=True,
    )
    if choice.pays:
        verdict = f"Expect text {choice.speedup:.2f} times as fast as without drafts."
    else:
        verdict = "That does not pay: the drafter layer_skip will nearly always decode plainly. Choose another one."
    console.print(Text(f"{verdict} Kept in {path}, after {seconds:.0f} s."), soft_wrap=True)


def _answers(loaded: LoadedModel, tell: Progress) -> list[tuple[list[int], int]]:
    from forerun.engine.prompts import to_tokens
    from forerun.train.calibrate import answers

    tell("Answering prompts", 0, len(PROMPTS))
    return answers(loaded, [to_tokens(prompt, loaded.tokenizer, chat=None) for prompt in PROMPTS], ANSWER, tell)


def _pieces(loaded: LoadedModel, text: str, name: Path | None) -> list[tuple[list[int], int]]:
    tokens = loaded.tokenizer.encode(text, special=False)
    if len(tokens) < 4 * PREFACE:
        raise ValueError(f"{name} has {len(tokens)} tokens: give a text of at least some hundred words")
    size = min(PIECE, loaded.target.context_length - 32)
    starts = range(0, len(tokens), size)
    count = min(PIECES, len(starts))
    chosen = [starts[len(starts) * part // count] for part in range(count)]
    pieces = [tokens[start : start + size] for start in chosen]
    return [(piece, PREFACE) for piece in pieces if len(piece) > 2 * PREFACE]
