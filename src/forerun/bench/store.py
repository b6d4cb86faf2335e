"""Results in a file that is whole at any time: after each cell it holds everything that was measured so far.

A run that was interrupted goes on from it, if it is the same run: the same prompts, settings, code and machine. The
round that it had begun is measured anew: some methods draft from what they saw earlier in a round, and what is compared
should be of one hour. So are methods with an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.bench.cases import Place
from forerun.bench.contest import Contest
from forerun.bench.measures import Cell
from forerun.bench.stored import read_cells

FORMAT = 2
OFTEN = 2.0
"""Seconds between two writings: small cells do not wait for the file each time."""
SAME = ("forerun", "python", "torch", "cpu", "threads", "device", "peers", "arguments")
"""What of the provenance must not have changed when a run goes on; the sources neither, nor any weights."""


@dataclass
class Store:
    path: Path | None
    provenance: dict[str, Any]
    rows_of: Callable[[Sequence[Cell]], list[dict[str, Any]]]
    write: Callable[[Path, bytes], None]
    cells: list[Cell] = field(default_factory=list)
    _written: float = 0.0

    @property
    def done(self) -> set[Place]:
        return {cell.place for cell in self.cells}

    def keep(self, cell: Cell) -> None:
        self.cells.append(cell)
        if time.monotonic() - self._written > OFTEN:
            self.save(complete=False)

    def as_dict(self, *, complete: bool) -> dict[str, Any]:
        rows = self.rows_of(self.cells)
        cells = [cell.as_dict() for cell in self.cells]
        return {
            "format": FORMAT,
            "complete": complete,
            "rows": rows,
            "provenance": self.provenance,
            "cells": cells,
        }

    def save(self, *, complete: bool) -> None:
        if self.path is not None:
            self.write(self.path, (json.dumps(self.as_dict(complete=complete), indent=1) + "\n").encode())
        self._written = time.monotonic()


def read_result(path: Path) -> dict[str, Any]:
    """A result file; refused where it is none."""
    data = _result(path)
    if data is None:
        raise ValueError(f"{path} is not a result of forerun bench: name another file")
    return data


def _result(path: Path) -> dict[str, Any] | None:
    try:
        data: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and {"rows", "provenance"} <= data.keys() else None


def earlier_cells(path: Path, provenance: dict[str, Any], contest: Contest) -> list[Cell]:
    """Those of an interrupted run that this one goes on with."""
    data = read_result(path)
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} was written by another version of forerun bench: measure again, into another file")
    damaged = ValueError(f"{path} is damaged: measure again, into another file")
    before, plan = data["provenance"], contest.plan()
    if not isinstance(before, dict) or not {*SAME, "git"} <= before.keys():
        raise damaged
    if not isinstance(before["arguments"], dict) or not isinstance(before.get("weights", {}), dict):
        raise damaged
    _refuse_other_runs(path, before, provenance)
    try:
        cells = read_cells(data.get("cells"), contest)
    except ValueError:
        raise damaged from None
    there = {cell.place for cell in cells}
    begun = {(place.setting, place.round) for place in plan if place not in there}
    failed = {(cell.place.setting, cell.place.round, cell.place.case) for cell in cells if cell.error is not None}
    return [
        cell
        for cell in cells
        if (cell.place.setting, cell.place.round) not in begun
        and (cell.place.setting, cell.place.round, cell.place.case) not in failed
    ]


def _refuse_other_runs(path: Path, before: dict[str, Any], provenance: dict[str, Any]) -> None:
    changed = [name for name in SAME if before[name] != provenance[name]]
    if "arguments" in changed:
        now = provenance["arguments"]
        keys = [key for key in {**before["arguments"], **now} if before["arguments"].get(key) != now.get(key)]
        told = ", ".join(f"{key} {before['arguments'].get(key)!r}, not {now.get(key)!r}" for key in keys)
        raise ValueError(f"{path} was measured with {told}: use the same options, or another file")
    if before["git"] != provenance["git"]:
        changed.append("commit or changes of it")
    if changed:
        raise ValueError(f"{path} was measured with another {', '.join(changed)}: measure again, into another file")
    known = before.get("weights", {})  # files were once written without
    others = [name for name, own in provenance.get("weights", {}).items() if known.get(name, own) != own]
    if others:
        raise ValueError(
            f"{path} was measured with other weights of {', '.join(others)} than are there now: measure again, into "
            "another file"
        )


def refuse_overwriting(path: Path) -> None:
    """An interrupted run is not overwritten by mistake, nor what is no result."""
    if not path.is_file() or not path.stat().st_size:
        return
    data = _result(path)
    if data is None:
        raise ValueError(f"{path} exists and is not a result of forerun bench: name another file, or remove it")
    if not data.get("complete", True):
        raise ValueError(f"{path} holds a run that was interrupted: add --resume to go on with it, or remove the file")
