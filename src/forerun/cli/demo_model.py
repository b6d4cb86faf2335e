"""The part of `forerun demo` that runs a model: three prompts, each answered plainly and with drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forerun.cli.model_options import loading
from forerun.cli.statistics import COLORS, Duel, duel_table, legend, speed

if TYPE_CHECKING:
    from forerun.core.params import SamplingParams
    from forerun.engine.completion import Completion
    from forerun.engine.llm import LLM
    from forerun.engine.loaded import LoadedModel

WAYS = {
    "eagle3": "a small network that was trained to foresee what this model writes.",
    "ngram": "which looks up what followed the last words when they stood in the text before.",
}
"""Drafters, the first that there is for the model, and what the demo says of them."""
MAX_TOKENS = 96
STORY = (
    "The lighthouse stood at the end of the rocky coast, and every evening the old keeper climbed the stairs to light "
    "the lamp. Ships far out at sea watched for its beam, because the rocks below had sunk many a vessel."
)


@dataclass(frozen=True)
class Task:
    name: str
    prompt: str
    told: str
    """How the demo puts it."""


# Lookup of earlier text gains most where the answer quotes; a trained drafter gains in free text too.
TASKS = (
    Task(
        "quote",
        f"Repeat this text word for word:\n\n{STORY}",
        "Repeat this text word for word: The lighthouse stood at the end of ...",
    ),
    Task("code", "Write a Python class Stack with the methods push, pop, peek and is_empty.", ""),
    Task("question", "Why is the sky blue?", ""),
)


def three_answers(console: Console, model: str) -> None:
    """One after the other, the plain answer first, on a model that is warm."""
    from forerun.core.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with loading(f"Loading {model}") as told:
        from forerun.engine.loaded import LoadedModel

        drafter, drafted = _first(LoadedModel.load(model, progress=told))
    console.print(f"The same model twice: plainly, and with the drafter {drafter},\n{WAYS[drafter]}")
    duels = []
    with drafted, drafted.with_drafter("none", max_batch=1) as plain:
        drafted.generate(TASKS[-1].prompt, SamplingParams(max_tokens=2))  # the first pass prepares the model
        for task in TASKS:
            console.print()
            console.print(Text(f"› {task.told or task.prompt}", style="bold"))
            duels.append(_answer(console, plain, drafted, drafter, task.prompt, params))
    console.print()
    console.print(legend())
    table = duel_table("prompt")
    for task, duel in zip(TASKS, duels, strict=True):
        for number, row in enumerate(duel.rows()):
            table.add_row(task.name if number == 0 else "", *row)
    console.print()
    console.print(table)


def _first(model: LoadedModel) -> tuple[str, LLM]:
    """The first drafter of those that this model has; the last one any model has."""
    from forerun.engine.llm import LLM

    *trained, last = WAYS
    for name in trained:
        try:
            return name, LLM(model, name, max_batch=1)
        except ValueError:  # there is none for it
            continue
    return last, LLM(model, last, max_batch=1)


def _answer(console: Console, plain: LLM, drafted: LLM, drafter: str, prompt: str, params: SamplingParams) -> Duel:
    """Left the plain answer, right the drafted one, while they are written."""
    left, right = _Side("plain"), _Side(drafter)
    with Live(console=console, refresh_per_second=8, vertical_overflow="visible") as live:
        for side, llm in ((left, plain), (right, drafted)):
            writing = llm.start(prompt, params)
            for piece in writing.pieces():
                for text, kind in piece.spans:
                    side.text.append(text, style=COLORS[kind] if side is right else "")
                live.update(_beside(left, right))
            side.done = writing.completion()
            live.update(_beside(left, right))
    assert left.done is not None
    assert right.done is not None
    return Duel(drafter, left.done, right.done)


class _Side:
    def __init__(self, name: str) -> None:
        self.name = name
        self.text = Text()
        self.done: Completion | None = None

    def shown(self) -> RenderableType:
        if self.done is None:
            return self.text
        stats = self.done.stats
        figures = f"{stats.total_seconds:.1f} s, {stats.target_passes} passes, {speed(stats):.1f} tokens/s"
        return Group(self.text, Text(figures, style="dim"))


def _beside(left: _Side, right: _Side) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=True)
    for side in (left, right):
        table.add_column(side.name, ratio=1, overflow="fold")
    table.add_row(left.shown(), right.shown())
    return table
