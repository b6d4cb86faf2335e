"""What was measured, as it is kept under results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
Result = dict[str, Any]


def load(name: str) -> Result:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"results/{name}.json is missing: docs/log.md says which command makes it")
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def that_ran(rows: list[Result]) -> list[Result]:
    return [row for row in rows if "error" not in row]
