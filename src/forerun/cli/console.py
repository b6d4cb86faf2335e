"""Where the commands print: tables on standard output, a progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

NARROWEST = 80
"""Every table fits in this. In a narrower terminal lines wrap, which is ugly, but no column is lost."""


def output() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    return console


def print_whole(console: Console, *parts: RenderableType) -> None:
    """Tables, which may have as many columns as the user asked for, as wide as they need to be."""
    for part in parts:
        if isinstance(part, Table):
            unbounded = console.options.update(max_width=100_000)
            console.width = max(console.width, Measurement.get(console, unbounded, part).maximum)
        console.print(part)


@contextmanager
def progress(rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, gone when done; none where nobody watches."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Simulating", total=rounds)
        yield lambda done: bar.update(task, advance=done)


@contextmanager
def working(*, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """The same for work that says what it does, how much of it is done, and of how much."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total or None)
