"""Files of prompts: JSON lines with `turns`, as Spec-Bench has them, or plain text with a prompt in each line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    line: int
    name: str | None
    """`question_id` or `id`."""
    category: str | None
    turns: tuple[str, ...]
    """What the user says; each is answered before the next is said."""


def read_entries(path: Path) -> list[Entry]:
    """JSON by the file's name, or if it begins with a brace. Empty lines are skipped."""
    try:
        # Not `splitlines`: a prompt may have characters that Python takes for the end of a line, and JSON does not.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8: name a file of JSON lines, or of plain text") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} has no prompts: give JSON lines with turns, or plain text with one on each line")
    if path.suffix in {".jsonl", ".json"} or numbered[0][1].startswith("{"):
        return [_read(number, line, f"line {number} of {path}") for number, line in numbered]
    return [Entry(number, None, None, (line,)) for number, line in numbered]


def _read(number: int, line: str, where: str) -> Entry:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}): each line must be one object") from None
    except ValueError:  # Python reads no whole number with thousands of digits
        raise ValueError(f"{where} has a number with too many digits: write it as a text, in quotes") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: each line must be one object with a list of texts") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has no turns: each line needs a list of texts under 'turns'")
    name, category = entry.get("question_id", entry.get("id")), entry.get("category")
    try:
        "".join([*turns, str(name), str(category)]).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where} has half a character, \\ud800 to \\udfff without its partner: write it out"
        ) from None
    return Entry(number, None if name is None else str(name), str(category) if category else None, tuple(turns))
