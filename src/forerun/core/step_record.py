"""What happened in one step, as one JSON line: what traces, plots and pictures are made from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class SequenceRecord:
    """One sequence's part of a step."""

    request: int
    index: int  # which of the request's n texts
    position: int  # of the root
    prompt_rows: int  # rows of the text itself that were read before the root
    tokens: list[int]  # of the tree's nodes, the root first; empty while a prompt is being read
    parents: list[int]
    rule: str
    drawing: str
    accepted: list[int]  # nodes, in order
    committed: list[int]  # tokens, after any cut
    kinds: list[str]
    finish_reason: str | None
    silent: int  # rows behind the tree that could not be accepted
    confidences: list[float] | None = None
    """For each node the chance that its drafter gave its token, given that its parent is accepted; 1 for the root. The
    product along a path is the drafter's chance of the whole path. None where the drafter knows no chances."""


@dataclass(frozen=True)
class StepRecord:
    step: int
    rows: int  # of the target's pass
    cache_used: float  # share of blocks
    seconds: dict[str, float]  # draft, target, verify, rest
    sequences: list[SequenceRecord]

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)
