"""Prompts to train with: JSON lines with `turns`, or plain text with a prompt on each line."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    id: str
    turns: tuple[str, ...]
    """What the user says; each is answered before the next is said."""
    category: str = ""

    @property
    def key(self) -> str:
        """Tells it from others, also those of other files that have the same id."""
        return f"{self.id} {hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:12]}"


def read_prompts(path: Path) -> list[Prompt]:
    """JSON if the file begins with a brace. In plain text empty lines are skipped."""
    try:
        # Not `splitlines`: a prompt may have characters that Python takes for the end of a line, and JSON does not.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8: name a file of JSON lines or of plain text") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} has no prompts: give JSON lines with turns, or plain text with one on each line")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Prompt(f"line {number}", (line.strip(),)) for number, line in numbered]
    prompts = [_read(line, f"line {number} of {path}", number) for number, line in numbered]
    known: set[str] = set()
    for prompt in prompts:
        if prompt.id in known:
            raise ValueError(f"{path} has two prompts with the id {prompt.id!r}: give each its own, or none an id")
        known.add(prompt.id)
    return prompts


def _read(line: str, where: str, number: int) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}): each line must be one object") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has no turns: each line needs a list of texts under 'turns'")
    number_or_name = entry.get("id", entry.get("question_id", f"line {number}"))
    return Prompt(str(number_or_name), tuple(turns), str(entry.get("category", "")))


def read_emphasis(given: str) -> dict[str, int]:
    """ "rag=3,summarization=2": how often the answers of a category are learned where others are learned once."""
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in given.split(","))):
        name, _, times = part.partition("=")
        if not name or not times.isdecimal() or not 0 <= int(times) <= 100:
            raise ValueError(f"--emphasis has {part!r}: give categories with whole numbers up to 100, as rag=3")
        found[name] = int(times)
    return found


def emphasised(prompts: Sequence[Prompt], emphasis: Mapping[str, int]) -> list[Prompt]:
    """Each as often as its category counts."""
    unknown = emphasis.keys() - {prompt.category for prompt in prompts}
    if unknown:
        known = sorted({prompt.category for prompt in prompts} - {""})
        raise ValueError(
            f"--emphasis names {', '.join(sorted(unknown))}, of which there are no prompts: "
            + (f"they have the categories {', '.join(known)}" if known else "they have no categories")
        )
    return [prompt for prompt in prompts for _ in range(emphasis.get(prompt.category, 1))]


def hold_back(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Those to learn from, and `count` to measure with, or half of them where there are not twice as many. The same
    for the same seed, and each in the order of the file."""
    if len(prompts) < 2:
        raise ValueError("there is one prompt: give at least two, since some are held back to measure with")
    chosen = set(random.Random(seed).sample(range(len(prompts)), min(count, len(prompts) // 2)))
    learned = [prompt for index, prompt in enumerate(prompts) if index not in chosen]
    return learned, [prompts[index] for index in sorted(chosen)]
