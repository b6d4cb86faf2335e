"""`forerun demo`: speculative decoding at work, and what there is to know about it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output, progress
from forerun.cli.files import write_whole
from forerun.cli.plan import EXAMPLE
from forerun.cli.plan import show as show_plan
from forerun.cli.simulate import FAMILY, grid_rows, grid_table, show_steps
from forerun.theory import plot
from forerun.theory.comparison import Conditions, compare_chain
from forerun.theory.measurements import Measurements
from forerun.theory.planner import recommend
from forerun.trees.optimal import best_shape

# (α, γ, tokens per pass as worked out by hand from (1 − α^{γ+1})/(1 − α))
CHECKS = (
    (0.5, 4, "1.9375"),
    (0.7, 1, "1.7000"),
    (0.7, 4, "2.7731"),
    (0.7, 5, "2.9412"),
    (0.7, 6, "3.0588"),
    (0.9, 4, "4.0951"),
    (0.95, 8, "7.3950"),
)


@dataclass(frozen=True)
class Stage:
    """What a section of the demo may use: where to print, where to leave files, and a model's name."""

    console: Console
    folder: Path
    model: str


def at_work(stage: Stage) -> None:
    from forerun.cli.demo_model import three_answers

    three_answers(stage.console, stage.model)


def what_it_is(stage: Stage) -> None:
    stage.console.print(
        "A large model writes one token per pass, and a pass mostly waits for memory.\n"
        "A cheap drafter guesses a few tokens ahead; [bold]one[/] pass checks all of them.\n"
        "Right guesses stay, the first wrong one is corrected: same law, fewer passes."
    )


def a_few_passes(stage: Stage) -> None:
    stage.console.print("Four guesses per pass, each right with chance 0.7:\n")
    stage.console.print(show_steps(compare_chain(0.7, 4, Conditions())))


def theory_and_simulation(stage: Stage) -> None:
    """Each simulated mean should lie within about three standard errors of the closed form."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("α", "γ", "by hand", "closed form", "simulated", "off by", "speedup"):
        table.add_column(title, justify="right", no_wrap=True)
    for alpha, gamma, by_hand in CHECKS:
        result = compare_chain(alpha, gamma, Conditions(seed=1))
        table.add_row(
            f"{alpha:g}",
            f"{gamma}",
            by_hand,
            f"[bold]{result.expected_tokens:.4f}[/]",
            f"{result.simulation.mean:.4f} ± {result.simulation.standard_error:.4f}",
            f"{result.deviation:+.1f} s.e." if result.deviation is not None else "",
            f"{result.speedup:.2f}×",
        )
    stage.console.print("Tokens per target pass, E = (1 − α^(γ+1)) / (1 − α); draft cost 0.1.")
    stage.console.print(table)


def how_far_to_draft(stage: Stage) -> None:
    rows = grid_rows([0.5, 0.7, 0.8, 0.9], [1, 2, 4, 8, 12], Conditions(rounds=10_000))
    stage.console.print(grid_table(rows, draft_cost=0.1))
    picture = stage.folder / "speedup.png"
    try:
        write_whole(picture, plot.draw_speedup("png", FAMILY, draft_cost=0.1))
    except plot.NoMatplotlibError as error:
        stage.console.print(Text(f"No picture: {error}", style="yellow"))
    else:
        stage.console.print(Text.assemble("The same as a picture: ", (str(picture), "bold cyan")))


def which_rule(stage: Stage) -> None:
    from forerun.bench.rules import Settings, measure  # loads torch
    from forerun.cli.rules import gains_table, tokens_table

    settings = Settings(distances=(0.2, 0.4), vocabulary=500, samples=800)
    with progress(settings.samples * len(settings.distances)) as advance:
        measurement = measure(settings, advance)
    stage.console.print(
        "All of these keep the target's law; they differ in how much they accept.\n"
        "Made-up laws of 500 tokens; TV is how far the drafter's are from the target's.\n"
    )
    stage.console.print(tokens_table(measurement, measurement.levels))
    stage.console.print()
    stage.console.print(gains_table(measurement))
    stage.console.print(
        "\n✓: by more than 3 standard errors. Judging a whole chain or tree beats judging\n"
        "token by token; candidates ranked with the target's own noise beat the likeliest\n"
        "ones by far. In full: [green]forerun rules --measure[/]"
    )


def a_plan(stage: Stage) -> None:
    stage.console.print("From measured times and acceptances, what to use (figures of `plan --example`):\n")
    for recommendation in recommend(Measurements.from_dict(EXAMPLE), best_shape):
        stage.console.print(show_plan(recommendation, alternatives=3))


# A further section is one line here: its title, and a function of the stage.
SECTIONS: tuple[tuple[str, Callable[[Stage], None]], ...] = (
    ("Three answers, with and without drafts", at_work),
    ("Speculative decoding in three lines", what_it_is),
    ("Eight target passes", a_few_passes),
    ("Theory and simulation agree", theory_and_simulation),
    ("How far ahead to draft", how_far_to_draft),
    ("Which rule accepts more", which_rule),
    ("A plan for a machine", a_plan),
)


def demo(
    *,
    folder: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo"),
    model: Annotated[str, typer.Option(help="Who answers: as for `forerun generate`.")] = "smollm2-135m",
) -> None:
    """Speculative decoding at work: three answers with and without it, then what it gains and how it is planned.

    The first call fetches a small model (92 MB); after that the demo takes one to three minutes.

    [bold]Example[/]

    [green]forerun demo[/]
    """
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(output(), folder, model)
    for number, (title, section) in enumerate(SECTIONS, start=1):
        stage.console.print()
        stage.console.rule(f"[bold]{number}. {title}[/]", align="left", style="cyan")
        stage.console.print()
        section(stage)
    stage.console.print()
    forerun = "forerun" if shutil.which("forerun") else sys.argv[0]
    stage.console.print(
        f"Next: {forerun} chat --drafter ngram, {forerun} generate --help, {forerun} rules", style="green"
    )
