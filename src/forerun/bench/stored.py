"""Cells out of a result file, which may have been changed by hand: what could not have been measured is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from forerun.bench.cases import PLAIN, Place
from forerun.bench.contest import Contest
from forerun.bench.measures import Cell, Sums
from forerun.engine.statistics import PHASES

MOST = 1e15
"""No count, size or time is larger."""


def read_cells(data: Any, contest: Contest) -> list[Cell]:
    """Those of `contest` that were written down; `ValueError` where some cannot be its own."""
    if not isinstance(data, list):
        raise ValueError("cells are a list")
    cells = [read_cell(each) for each in data]
    places = {cell.place for cell in cells}
    if len(places) < len(cells) or not places <= set(contest.plan()):
        raise ValueError("a place that is not in the plan, or twice")
    for cell in cells:
        _check(cell, contest.answers(cell.place))
    return cells


def read_cell(data: Any) -> Cell:
    """What `Cell.as_dict` made; `ValueError` where a value is missing, or of another kind."""
    if not isinstance(data, dict):
        raise ValueError("a cell is an object")
    names = {field.name for field in fields(Place)}
    place = {name: value for name, value in data.items() if name in names}
    rest = {name: value for name, value in data.items() if name not in names}
    cell: Cell = _read(Cell, {"place": place, **rest})
    return cell


def _check(cell: Cell, answers: Mapping[str, int]) -> None:
    """That rows can be made of it, where there are so many `answers` in each category."""
    if cell.error is not None:
        return
    told = {category: len(own.texts) for category, own in cell.sums.items()}
    phases = cell.work.phases.keys()
    if told != answers or cell.work.seconds <= 0 or (phases and phases != set(PHASES)):
        raise ValueError("the work is not that of the questions")
    for own in cell.sums.values():
        _check_sums(own, silent=cell.place.case.drafter != PLAIN)


def _check_sums(own: Sums, *, silent: bool) -> None:
    """`silent`: whether it may have written nothing; plain decoding, which others are compared with, may not."""
    if sum(own.request_seconds) <= 0 or not (own.tokens or silent):
        raise ValueError("no time or no tokens")
    if not own.phases.keys() == own.prompt_phases.keys() == set(PHASES):
        raise ValueError("other phases")
    if any(own.prompt_phases[name] > own.phases[name] for name in PHASES):
        raise ValueError("a part that is longer than the whole")
    offered, accepted = own.offered_by_depth, own.accepted_by_depth
    if len(offered) != len(accepted) or any(a > o or not o for a, o in zip(accepted, offered, strict=True)):
        raise ValueError("more accepted than offered")
    if any(after > before for before, after in pairwise([own.passes, *accepted])):
        raise ValueError("more accepted behind a refusal")


def _read(kind: Any, value: Any) -> Any:
    """`value`, out of JSON, as the type `kind` of a field."""
    inside = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if isinstance(value, dict) and value.keys() == hints.keys():
            return kind(**{name: _read(hints[name], each) for name, each in value.items()})
    elif get_origin(kind) is UnionType:  # or nothing
        return None if value is None else _read(inside[0], value)
    elif get_origin(kind) is list:
        if isinstance(value, list):
            return [_read(inside[0], each) for each in value]
    elif get_origin(kind) is dict:
        if isinstance(value, dict):
            return {key: _read(inside[1], each) for key, each in value.items()}
    elif kind in (int, float):
        if isinstance(value, int | kind) and not isinstance(value, bool) and 0 <= value <= MOST:
            return value
    elif isinstance(value, kind):
        return value
    raise ValueError(f"{value!r} in place of {kind}")
