"""Writes the tables of README.md and docs/ from the files under results/, so that no figure is typed.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `--check` changes nothing and fails if one is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    cards,
    certificates,
    confidence,
    controller_table,
    headlines,
    plan_table,
    prediction_table,
    serve_tables,
)
from benchmarks.kept import load, that_ran

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/results.md", "docs/log.md")

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Categories beside those of conversations."""


def verification(name: str) -> str:
    result = load(name)
    lines = [
        "| rule | drafts | batched ms | reference ms | ratio | MB read | MB needed | read/needed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['rule']} | {row['shape']} | {row['batched_ms']:.1f} | {row['reference_ms']:.0f} | "
            f"{row['ratio']:.0f}× | {row['megabytes_read']:.0f} | {row['megabytes_needed']:.0f} | "
            f"{row['read_over_needed']:.1f} |"
        )
    return "\n".join([*lines, "", footnote(result)])


RULE_LABELS = {
    "chain_rejection": "chain: rejection",
    "block": "chain: **block verification**",
    "gumbel_1": "chain: Gumbel coupling (same seed, same text)",
    "recursive_iid": "tree, i.i.d.: recursive rejection",
    "k_seq": "tree, i.i.d.: K-SEQ",
    "recursive_without_replacement": "tree, without replacement: recursive rejection",
    "traversal": "tree, without replacement: **traversal**",
    "recursive_fixed": "tree, top-2: recursive rejection",
    "sample_match": "tree, top-2: sample and match",
    "gumbel_2": "tree, coupled: **Gumbel coupling** (same seed, same text)",
}


def rules() -> str:
    """Tokens per step by rule, one column per distance."""
    result = load("rules")
    levels = result["levels"]
    lines = [
        "| tokens per step, TV(p, q) = | " + " | ".join(f"{level['distance']:g}" for level in levels) + " |",
        "|---|" + "---:|" * len(levels),
    ]
    for place, label in enumerate(RULE_LABELS):
        found = [level["rules"][place] for level in levels]
        assert all(entry["label"] == label for entry in found), label
        cells = [f"{entry['tokens']['value']:.2f}" for entry in found]
        lines.append(f"| {RULE_LABELS[label]} | " + " | ".join(cells) + " |")
    for place, gain in enumerate(levels[0]["gains"]):
        cells = []
        for level in levels:
            found_gain = level["gains"][place]
            cells.append(f"{found_gain['tokens']['value']:+.2f} ± {found_gain['tokens']['error']:.2f}")
        lines.append(f"| *{gain['better']} over {gain['than']}* | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", footnote(result)])


def identity() -> str:
    """Is the text the target's own: one line per drafter; a part that was not run leaves its cell empty."""
    result = load("identity")
    tables = {
        part: {(row["drafter"], row.get("batch")): row for row in result.get(part, NOT_RUN)["rows"]} for part in PARTS
    }
    lines = [
        "| drafter | greedy, alone | greedy, batch 8 | seeded, batch 8 | bfloat16, alone | bfloat16, batch 8 | "
        "law, p-value | tokens per pass |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for drafter in dict.fromkeys(key[0] for part in PARTS for key in tables[part]):
        law = tables["law"].get((drafter, None))
        alone = tables["greedy"].get((drafter, 1))
        cells = [
            drafter,
            _share(alone),
            _share(tables["greedy"].get((drafter, 8))),
            _share(tables["seeded"].get((drafter, 8))),
            _share(tables["half"].get((drafter, 1))),
            _share(tables["half"].get((drafter, 8))),
            f"{law['uniform_p']:.2f}" if law else "",
            f"{alone['tokens_per_pass']:.2f}" if alone else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    batch = result["batch"]
    lines += [
        "",
        f"Plain decoding in bfloat16, the same eight prompts: {batch['one']:.0f} tokens/s one by one, "
        f"{batch['eight']:.0f} in a batch of eight, {batch['ratio']:.1f}×.",
    ]
    return "\n".join([*lines, "", footnote(result)])


def spec_bench() -> str:
    """Speedups over plain decoding by category, a line per method."""
    result = load("spec-bench-cpu")
    rows = measured(result)
    drafters = list(dict.fromkeys(drafter for drafter, _ in rows))
    categories = [category for drafter, category in rows if drafter == drafters[0] and category != "overall"]
    conversation = [category for category in categories if category not in TASKS]
    columns = [*TASKS, "chat"]
    lines = [
        "| method | tokens/s | tokens per pass | speedup | same text | " + " | ".join(columns) + " |",
        "|---|---:|---:|---:|---:|" + "---:|" * len(columns),
    ]
    for drafter in drafters:
        row = rows[drafter, "overall"]
        cells = [_speedup(rows[drafter, category]) for category in TASKS]
        least = min(rows[drafter, category]["speedup"] for category in conversation)
        most = max(rows[drafter, category]["speedup"] for category in conversation)
        cells.append(f"{least:.2f}–{most:.2f}×")
        same = f"{row['identical']}/{row['answers']}"
        figures = [f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_pass']:.2f}", f"**{row['speedup']:.2f}×**"]
        lines.append("| " + " | ".join([drafter, *figures, same, *cells]) + " |")
    return "\n".join([*lines, "", footnote(result)])


def measured(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By drafter and category; a method that failed somewhere has no line."""
    failed = {row["drafter"] for row in result["rows"] if row.get("error")}
    return {(row["drafter"], row["category"]): row for row in result["rows"] if row["drafter"] not in failed}


def _speedup(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f}× ({row['tokens_per_pass']:.2f})"


def spec_bench_categories() -> str:
    """Tokens per second and per pass in every category."""
    result = load("spec-bench-cpu")
    rows = measured(result)
    drafters = list(dict.fromkeys(drafter for drafter, _ in rows))
    categories = [category for drafter, category in rows if drafter == drafters[0]]
    lines = [
        "| tokens/s (per pass) | " + " | ".join(drafters) + " |",
        "|---|" + "---:|" * len(drafters),
    ]
    for category in categories:
        cells = [rows[drafter, category] for drafter in drafters]
        texts = [f"{cell['tokens_per_second']:.0f} ({cell['tokens_per_pass']:.2f})" for cell in cells]
        lines.append(f"| {category} | " + " | ".join(texts) + " |")
    outside = [rows[drafter, "overall"]["outside_share"] for drafter in drafters]
    shares = [f"{share:.1%}" if share else "" for share in outside]  # a peer does not say
    lines.append("| outside model and drafter | " + " | ".join(shares) + " |")
    return "\n".join([*lines, "", footnote(result)])


def row_cost(first: str, then: str) -> str:
    """A pass by its number of rows, before and after the work on it."""
    before, after = load(first), load(then)
    now = {row["rows"]: row for row in after["rows"]}
    one = now[1]["ms"]
    lines = ["| rows | before, ms | now, ms | now, of one row |", "|---:|---:|---:|---:|"]
    for row in before["rows"]:
        found = now[row["rows"]]["ms"]
        lines.append(f"| {row['rows']} | {row['ms']:.1f} | {found:.1f} | {found / one:.2f} |")
    return "\n".join([*lines, "", footnote(after)])


def device_passes() -> str:
    """Passes on an accelerator beside the time that reading weights and cache takes."""
    lines = [
        "| model | texts | rows each | ms | floor, ms | over the floor | over one row |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ("device-8b", "device-135m"):
        for row in load(name)["passes"]:
            lines.append(
                f"| {row['model']} | {row['texts']} | {row['rows']} | {row['ms']:.2f} | {row['floor_ms']:.2f} | "
                f"{row['over_floor']:.2f}× | {row['over_one_row']:.2f}× |"
            )
    result = load("device-8b")
    speed = f"The floor is at {result['copy_bytes_per_second'] / 1e12:.2f} TB/s, the speed of a copy."
    return "\n".join([*lines, "", speed, "", footnote(result)])


def device_texts() -> str:
    """Drafters on an accelerator, with the shares of a step."""
    result, others = load("device-8b-texts"), load("device-8b")
    lines = [
        "| batch | drafter | tokens/s | tokens per pass | speedup | drafting | target | rest | same text | gap |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in that_ran([*result["texts"], *(row for row in others["batches"] if row["batch"] == 64)]):
        shares = row["shares"]
        rest = shares["verify"] + shares["rest"]
        gaps = [abs(each["gap"]) for each in row["differences"] if each["gap"] is not None]
        lines.append(
            f"| {row['batch']} | {row['drafter']} | {row['tokens_per_second']:.0f} | {row['tokens_per_pass']:.2f} | "
            f"{row['speedup']:.2f}× | {shares['draft']:.1%} | {shares['target']:.1%} | {rest:.1%} | "
            f"{row['identical']}/{row['answers']} | {f'{max(gaps):.2f}' if gaps else ''} |"
        )
    for row in others["peers"]:
        lines.append(f"| 1 | {row['drafter']} | {row['tokens_per_second']:.0f} | | | | | | | |")
    return "\n".join([*lines, "", footnote(result), footnote(others)])


def device_identity() -> str:
    """Whether texts in float32 are plain decoding's, on an accelerator."""
    result = load("device-135m-float32")
    lines = ["| drafter | greedy | sampled with a seed |", "|---|---:|---:|"]
    found: dict[str, list[str]] = {}
    for row in that_ran([*result["texts"], *result["heads"]]):
        if row["drafter"] != "none":
            found.setdefault(row["drafter"], []).append(f"{row['identical']}/{row['answers']}")
    for drafter, cells in found.items():
        lines.append(f"| {drafter} | {cells[0]} | {cells[1] if len(cells) > 1 else ''} |")
    return "\n".join([*lines, "", footnote(result)])


def device_heads() -> str:
    """Trained drafters at the size of an 8B model, by batch and temperature."""
    lines = [
        "| batch | T | drafter | tokens/s | tokens per pass | speedup | between prompts | drafting | target | rest |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (row for rows in headlines.heads_by_batch().values() for row in rows):
        shares = row["shares"]
        rest = shares["verify"] + shares["rest"]
        lines.append(
            f"| {row['batch']} | {row['temperature']:g} | {row['drafter']} | {row['tokens_per_second']:.0f} | "
            f"{row['tokens_per_pass']:.2f} | {row['speedup']:.2f}× | {row['speedup_writing']:.2f}× | "
            f"{shares['draft']:.1%} | {shares['target']:.1%} | {rest:.1%} |"
        )
    return "\n".join([*lines, "", footnote(load(headlines.HEADS))])


def device_throughput() -> str:
    result = load("device-135m")
    lines = ["| writes | batch | tokens/s |", "|---|---:|---:|"]
    for row in result["throughput"]:
        lines.append(f"| {row['method']} | {row['batch']} | {row['tokens_per_second']:,.0f} |")
    return "\n".join([*lines, "", footnote(result)])


PARTS = ("greedy", "seeded", "half", "law")
NOT_RUN: dict[str, list[dict[str, Any]]] = {"rows": []}


def _share(row: dict[str, Any] | None) -> str:
    """How many texts were the same; in bfloat16 also how many of the others parted at a tie."""
    if row is None:
        return ""
    parted = row["prompts"] - row["identical"]
    ties = f" ({row['ties']} of {parted} at ties)" if parted and "ties" in row else ""
    return f"{row['identical']}/{row['prompts']}{ties}"


def footnote(result: dict[str, Any]) -> str:
    p = result["provenance"]
    git = p["git"] or {}
    commit = git.get("commit", "unknown")[:9] + (" with changes" if git.get("dirty") else "")
    threads = f"{p['threads']} thread{'' if p['threads'] == 1 else 's'}"
    processor = p["device"] if p["device"] != "cpu" else f"{p['cpu']}, {threads}"
    stopped = "" if result.get("complete", True) else "; stopped before all was measured"
    return f"<sub>{processor}; torch {p['torch']}; commit {commit}; {p['time'][:10]}{stopped}</sub>"


def trained_cpu(*names: str) -> str:
    """Trained drafters on a CPU, one text at a time, greedy and seeded."""
    results = [load(name) for name in names]
    whole = [row for result in results for row in result["rows"] if row["category"] == "overall"]
    heats = sorted({row["temperature"] for row in whole})
    found = {(row["method"], row["temperature"]): row for row in whole}
    heads = [f"T {heat:g}, tokens/s | tokens per pass | speedup | same text" for heat in heats]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * (4 * len(heats))]
    for method in dict.fromkeys(row["method"] for row in whole):
        cells = [_trained_cell(found.get((method, heat))) for heat in heats]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *dict.fromkeys(map(footnote, results))])


def _trained_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "| | | "
    passes = "" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}"
    return f"{row['tokens_per_second']:.0f} | {passes} | {row['speedup']:.2f}× | {row['identical']}/{row['answers']}"


def trained() -> str:
    """Tokens per pass of the drafters that come with Forerun."""
    parts = []
    for name in cards.FILES:
        result = load(name)
        cells: dict[tuple[str, float], dict[str, float]] = {}
        failed = [row for row in result["rows"] if "error" in row]
        for row in (row for row in result["rows"] if "error" not in row):
            cells.setdefault((row["label"], row["temperature"]), {})[row["category"]] = row["tokens_per_pass"]
        lines = [
            f"| | T | tokens per pass | {' | '.join(TASKS)} | chat |",
            "|---|---:|---:|" + "---:|" * (len(TASKS) + 1),
        ]
        for (label, heat), own in cells.items():
            chat = [value for category, value in own.items() if category not in (*TASKS, "overall")]
            tasks = " | ".join(f"{own[task]:.2f}" for task in TASKS)
            spread = f"{min(chat):.2f}–{max(chat):.2f}"
            lines.append(f"| {label} | {heat:g} | **{own['overall']:.2f}** | {tasks} | {spread} |")
        lines += [f"| {row['label']} | {row['temperature']:g} | failed |" + " |" * (len(TASKS) + 1) for row in failed]
        asked = result["provenance"]["arguments"]
        told = f"{asked['questions']} questions, {'one' if asked['batch'] == 1 else asked['batch']} at a time."
        parts.append("\n".join([*lines, "", f"<sub>{told}</sub> {footnote(result)}"]))
    return "\n\n".join(parts)


def quick_bench() -> str:
    """What `make bench` measured: speedups by batch size, a line per method."""
    result = load("quick-bench")
    whole = [row for row in result["rows"] if row["category"] == "overall"]
    batches = sorted({row["batch"] for row in whole})
    found = {(row["method"], row["batch"]): row for row in whole}
    columns = [f"batch {batch}" for batch in batches]
    lines = [
        "| method | " + " | ".join(f"{column}, tokens/s | speedup | tokens per pass" for column in columns) + " |",
        "|---|" + "---:|" * (3 * len(batches)),
    ]
    for method in dict.fromkeys(row["method"] for row in whole):
        cells = [_quick_cells(found.get((method, batch))) for batch in batches]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", footnote(result)])


def _of(name: str, table: Callable[[dict[str, Any]], str]) -> str:
    result = load(name)
    return f"{table(result)}\n\n{footnote(result)}"


def _quick_cells(row: dict[str, Any] | None) -> str:
    if row is None:
        return "| |"
    if row["speedup"] is None:
        return "failed | |"
    speed = f"{row['speedup']:.2f}× ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
    return f"{row['tokens_per_second']:.0f} | {speed} | {row['tokens_per_pass']:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "certificates": certificates.table,
    "confidence": confidence.table,
    "controller": lambda: controller_table.table(footnote),
    "gains": lambda: headlines.gains(footnote),
    "device-heads": device_heads,
    "device-identity": device_identity,
    "device-passes": device_passes,
    "device-texts": device_texts,
    "device-throughput": device_throughput,
    "identity": identity,
    "plan": lambda: _of("plan-cpu", plan_table.table),
    "prediction": lambda: _of("prediction-cpu", prediction_table.table),
    "quick-bench": quick_bench,
    "row-cost": lambda: row_cost("row-cost-before", "row-cost-cpu"),
    "row-cost-avx2": lambda: row_cost("row-cost-avx2-before", "row-cost-avx2"),
    "row-cost-floats": lambda: row_cost("row-cost-floats-before", "row-cost-floats"),
    "rules": rules,
    "serve-load": lambda: _of("serve-load", serve_tables.load),
    "serve-speed": lambda: _of("serve_speed", serve_tables.speed),
    "spec-bench": spec_bench,
    "spec-bench-categories": spec_bench_categories,
    "structured": lambda: _of("structured", serve_tables.structured),
    "trained": trained,
    "trained-best": lambda: headlines.drafts(footnote),
    "trained-cpu": lambda: trained_cpu("trained-cpu"),
    "row-cost-folded-wide": lambda: row_cost("row-cost-folded-wide-before", "row-cost-folded-wide"),
    "row-cost-folded": lambda: row_cost("row-cost-folded-before", "row-cost-folded"),
    "row-cost-rounded": lambda: row_cost("row-cost-rounded-before", "row-cost-rounded"),
    "trained-folded-wide": lambda: trained_cpu("trained-folded-wide", "trained-folded-wide-sampled"),
    "trained-folded": lambda: trained_cpu("trained-folded", "trained-folded-sampled"),
    "trained-rounded": lambda: trained_cpu("trained-rounded", "trained-rounded-sampled"),
    "trained-avx2": lambda: trained_cpu("trained-avx2", "trained-avx2-sampled"),
    "trained-floats": lambda: trained_cpu("trained-floats", "trained-floats-sampled"),
    "verification-cpu": lambda: verification("verification-cpu"),
    "verification-cuda": lambda: verification("verification-cuda"),
}


def render(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise SystemExit(f"there is no table {name!r}: known are {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a table is not what the results say")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        path = ROOT / page
        before = path.read_text()
        after = render(before)
        if before != after:
            stale.append(page)
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}: run make tables")


if __name__ == "__main__":
    main()
