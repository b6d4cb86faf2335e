"""The short tables at the top of README.md: what speculation gains, and how much of what is drafted is right."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import cards
from benchmarks.kept import Result, load, that_ran

HEADS = "device-8b-heads"
CORES = {
    "two cores of a Xeon with AMX, 135M": ("trained-cpu-sharp-0", "trained-cpu-sharp-1"),
    "two cores of a Xeon without, 135M in float32": ("trained-folded-wide", "trained-folded-wide-sampled"),
    "two cores of an EPYC, 135M in 4 bits, rows in 16": ("trained-rounded", "trained-rounded-sampled"),
}
ALONE = ("trained-alone-medusa", "trained-alone-eagle", "trained-alone-trees", "trained-alone")

Footnote = Callable[[Result], str]


def heads_by_batch() -> dict[int, list[Result]]:
    found: dict[int, list[Result]] = {}
    for row in that_ran(load(HEADS)["heads"]):
        found.setdefault(int(row["batch"]), []).append(row)
    return found


def gains(footnote: Footnote) -> str:
    """The best drafter by its tokens/s, with a fixed tree, beside plain decoding."""
    lines = [
        "| | texts at once | plain, tokens/s | drafter | tokens/s | gain | at temperature 1, with a seed |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for batch, rows in heads_by_batch().items():
        lines.append(_line("an H200, the shape of an 8B model", batch, rows, "drafter"))
    cores = {where: [load(name) for name in names] for where, names in CORES.items()}
    for where, results in cores.items():
        whole = [row for each in results for row in each["rows"] if row["category"] == "overall"]
        lines.append(_line(where, 1, whole, "method"))
    notes = [footnote(each) for each in (load(HEADS), *(each for results in cores.values() for each in results))]
    return "\n".join([*lines, "", *dict.fromkeys(notes)])


def _line(where: str, batch: int, rows: list[Result], named: str) -> str:
    greedy = [row for row in rows if row["temperature"] == 0 and not row[named].endswith("adaptive")]
    plain = next(row for row in greedy if row[named] == "none")
    best = max(greedy, key=lambda row: float(row["tokens_per_second"]))
    sampled = max(row["speedup"] for row in rows if row["temperature"] == 1)
    return (
        f"| {where} | {batch} | {plain['tokens_per_second']:,.0f} | {best[named]} | {best['tokens_per_second']:,.0f} | "
        f"**{best['speedup']:.2f}×** | {sampled:.2f}× |"
    )


def drafts(footnote: Footnote) -> str:
    """Tokens per pass on all questions, one at a time: the best tree of each drafter."""
    found: dict[str, Result] = {}
    results = [load(name) for name in ALONE]
    for row in (row for result in results for row in that_ran(result["rows"])):
        method = row["label"].partition(" ")[0]
        if row["category"] == "overall" and row["temperature"] == 0:
            found[method] = max(found.get(method, row), row, key=lambda each: float(each["tokens_per_pass"]))
    lines = ["| drafter | tree | tokens per pass |", "|---|---|---:|"]
    for method, row in sorted(found.items(), key=lambda item: -float(item[1]["tokens_per_pass"])):
        tree = row["label"].partition(" ")[2]
        lines.append(f"| {cards.NAMES.get(method, method)} | {tree} | {row['tokens_per_pass']:.2f} |")
    return "\n".join([*lines, "", *dict.fromkeys(map(footnote, results))])
