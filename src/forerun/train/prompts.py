"""Prompts to train with."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.engine.prompt_files import read_entries


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
    prompts = [
        Prompt(f"line {entry.line}" if entry.name is None else entry.name, entry.turns, entry.category or "")
        for entry in read_entries(path)
    ]
    known: set[str] = set()
    for prompt in prompts:
        if prompt.id in known:
            raise ValueError(f"{path} has two prompts with the id {prompt.id!r}: give each its own, or none an id")
        known.add(prompt.id)
    return prompts


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
