"""Traces for tests of the page: a real one of a tiny model, and one written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.core.params import SamplingParams
from forerun.core.step_record import SequenceRecord, StepRecord
from forerun.engine.llm import LLM
from tests.tiny_folder import save_tiny_model


def real_trace(folder: Path) -> Path:
    """What `forerun generate --trace` writes: two prompts of a model that soon repeats itself."""
    path = folder / "run.jsonl"
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LLM(str(save_tiny_model(folder / "model")), drafter="suffix", trace=path) as llm:
        llm.generate(["the the the the", "abcabcabc"], params)
    return path


def records(path: Path, request: int) -> list[dict[str, Any]]:
    """One request's part of the steps that wrote something, as the page numbers them."""
    steps = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    parts = [part for step in steps for part in step["sequences"] if part["request"] == request]
    return [part for part in parts if part["committed"]]


def step_line(**changes: Any) -> str:
    """One step: a tree with a fork, of which one branch was followed and corrected."""
    part: dict[str, Any] = {
        "request": 0,
        "index": 0,
        "position": 7,
        "prompt_rows": 0,
        "tokens": [5, 11, 12, 13, 14],
        "parents": [-1, 0, 0, 1, 2],
        "rule": "greedy",
        "drawing": "fixed",
        "accepted": [1],
        "committed": [11, 20],
        "kinds": ["accepted", "corrected"],
        "finish_reason": None,
        "silent": 0,
    }
    extra = {name: changes.pop(name) for name in list(changes) if name not in part}
    spent = {"draft": 0.001, "target": 0.02, "verify": 0.001, "rest": 0.0}
    line = StepRecord(0, 5, 0.1, spent, [SequenceRecord(**(part | changes))]).as_json()
    step = json.loads(line)
    step["sequences"][0] |= extra
    return json.dumps(step)
