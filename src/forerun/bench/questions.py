"""Prompts to measure with: a file of them, or the small set that was written for this project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.bench.cases import ALL
from forerun.engine.prompt_files import read_entries


@dataclass(frozen=True)
class Question:
    id: str
    category: str
    turns: tuple[str, ...]
    """What the user says; each is answered before the next is said."""


BUILT_IN = Path(__file__).with_name("prompts.jsonl")


def read_questions(
    path: Path = BUILT_IN, *, per_category: int | None = None, limit: int | None = None, turns: int | None = None
) -> list[Question]:
    """The first `per_category` of each category, and at most `limit`, in the order of the file; of each the first
    `turns`."""
    for name, value in (("--per-category", per_category), ("--limit", limit), ("--turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    found: list[Question] = []
    counts: dict[str, int] = {}
    for entry in read_entries(path):
        category = entry.category or "all"
        if category == ALL:
            where = f"line {entry.line} of {path}"
            raise ValueError(f"{where} has the category {ALL!r}, which stands for all of them together: rename it")
        counts[category] = counts.get(category, 0) + 1
        if per_category is None or counts[category] <= per_category:
            found.append(Question(entry.name or str(entry.line), category, entry.turns[:turns]))
    return found[:limit]
