"""Prompts to measure with: JSON lines as Spec-Bench has them (`question_id`, `category`, `turns`), a plain text with a
prompt in each line, or the small set that was written for this project."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.bench.cases import ALL


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
    try:
        # Not `splitlines`: a prompt may have characters that Python takes for the end of a line, and JSON does not.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8: name a file of JSON lines, or of plain text") from None
    plain = _is_plain(path, lines)
    found: list[Question] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        question = Question(str(number), "text", (line.strip(),)) if plain else _read(line, where)
        counts[question.category] = counts.get(question.category, 0) + 1
        if per_category is None or counts[question.category] <= per_category:
            found.append(replace(question, turns=question.turns[:turns]))
    if not found:
        raise ValueError(f"{path} has no questions: it needs JSON lines with question_id, category and turns")
    return found[:limit]


def _is_plain(path: Path, lines: list[str]) -> bool:
    """By its name, else by how it begins."""
    if path.suffix in {".jsonl", ".json"}:
        return False
    return not next((line for line in lines if line.strip()), "").lstrip().startswith("{")


def _read(line: str, where: str) -> Question:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}): each line must be one object") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has no turns: each line needs a list of texts under 'turns'")
    name = str(entry.get("question_id", entry.get("id", where)))
    category = str(entry.get("category") or "all")
    if category == ALL:
        raise ValueError(f"{where} has the category {ALL!r}, which stands for all of them together: rename it")
    return Question(name, category, tuple(turns))
