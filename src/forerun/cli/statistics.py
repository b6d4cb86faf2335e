"""How the commands show what decoding cost and what speculation gained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli.simulate import ACCEPTED, BONUS, CORRECTED

if TYPE_CHECKING:
    from forerun.engine.completion import Completion
    from forerun.engine.statistics import Statistics

COLORS = {"accepted": ACCEPTED[1], "corrected": CORRECTED[1], "bonus": BONUS[1]}
PHASE_COLORS = {"target": "cyan", "draft": "magenta", "verify": "yellow", "rest": "dim"}
BAR, DEEPEST = 24, 8


def speed(stats: Statistics) -> float:
    """Tokens per second, the reading of the prompt included."""
    return stats.tokens / stats.total_seconds if stats.total_seconds else 0.0


def line(stats: Statistics) -> str:
    return (
        f"{stats.tokens} tokens in {stats.target_passes} passes, {stats.tokens_per_pass:.2f} per pass; "
        f"{stats.total_seconds:.2f} s, {speed(stats):.1f} tokens/s"
    )


def legend() -> Text:
    signs = (("accepted", ACCEPTED), ("corrected", CORRECTED), ("bonus", BONUS))
    parts = [Text(f"{sign} {name}", style=style) for name, (sign, style) in signs]
    return Text("  ").join(parts)


def panel(stats: Statistics, *, title: str, ended_by: str | None = None, colored: bool = False) -> RenderableType:
    """What one text cost: the figures, acceptance by depth, and where the time went."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{stats.tokens}", "bold"), " tokens from ",
            (f"{stats.target_passes}", "bold"), " target passes: ",
            (f"{stats.tokens_per_pass:.2f}", "bold green"), " tokens per pass",
        ),
        Text.assemble(
            (f"{speed(stats):.1f}", "bold"), f" tokens/s over {stats.total_seconds:.2f} s; ",
f"prompt of {stats.prompt_tokens}" + (f"; ended by {ended_by}" if ended_by else ""),
        ),
    ]  # fmt: skip
    if stats.drafted:
        share = f"{stats.accepted} of {stats.drafted} drafted tokens accepted"
        parts.append(Text(f"{share}, {stats.rows_wasted} of {stats.rows} rows wasted"))
        parts.append(_depths(stats.acceptance_by_depth))
    stepped_back = f"; stepped back {stats.preemptions} times" if stats.preemptions else ""
    parts.append(Text(f"at most {stats.cache_peak:.0%} of the cache in use{stepped_back}"))
    parts.append(_times(stats))
    if colored:
        parts.append(legend())
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", border_style="cyan", expand=False)


def _depths(acceptance: list[float]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for depth, share in enumerate(acceptance[:DEEPEST], start=1):
        title = "accepted at depth" if depth == 1 else ""
        bar = "█" * round(share * BAR)
        table.add_row(title, str(depth), Text(bar.ljust(BAR, "·"), style="green"), f"{share:.2f}")
    if len(acceptance) > DEEPEST:
        table.add_row("", "…", f"and {len(acceptance) - DEEPEST} deeper", "")
    return table


def _times(stats: Statistics) -> Text:
    total = stats.total_seconds or 1.0
    text = Text("time ")
    for name, color in PHASE_COLORS.items():
        text.append("█" * round(stats.seconds[name] / total * BAR), style=color)
    for name, color in PHASE_COLORS.items():
        text.append(f"  {name} {stats.seconds[name] / total:.0%}", style=color)
    return text


@dataclass(frozen=True)
class Duel:
    """The same prompt with and without drafts."""

    drafter: str
    plain: Completion
    speculative: Completion

    @property
    def speedup(self) -> float:
        """Of tokens per second, so that texts of different length compare."""
        return speed(self.speculative.stats) / speed(self.plain.stats) if speed(self.plain.stats) else 0.0

    @property
    def parts_at(self) -> int | None:
        """The first place at which any of the texts differ; None if all are the same, token for token."""
        places = []
        for ours, theirs in zip(self.speculative.choices, self.plain.choices, strict=True):
            a, b = ours.token_ids, theirs.token_ids
            if a != b:
                places.append(
                    next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                )
        return min(places, default=None)

    @property
    def identical(self) -> bool:
        return self.parts_at is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup,
            "identical": self.identical,
            "parts_at": self.parts_at,
            "plain": self.plain.as_dict(),
        }

    def table(self) -> Table:
        table = duel_table()
        for row in self.rows():
            table.add_row(*row)
        return table

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        same = "yes" if self.identical else f"until token {self.parts_at}"
        return [
            _row("plain", self.plain.stats, "1.00×", ""),
            _row(self.drafter, self.speculative.stats, f"{self.speedup:.2f}×", same),
        ]


def duel_table(*first: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in first:
        table.add_column(title)
    table.add_column("decoding")
    for title in ("tokens/s", "tokens per pass", "speedup"):
        table.add_column(title, justify="right")
    table.add_column("identical")
    return table


def _row(name: str, stats: Statistics, speedup: str, same: str) -> tuple[str, str, str, str, str]:
    return name, f"{speed(stats):.1f}", f"{stats.tokens_per_pass:.2f}", speedup, same
