"""A run that is interrupted keeps what it measured, and goes on from there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.cases import Place, Setting
from forerun.bench.contest import Contest
from forerun.bench.measures import Cell
from forerun.bench.store import Store, earlier_cells, read_result, refuse_overwriting
from forerun.bench.stored import read_cell
from forerun.engine.statistics import PHASES
from tests.bench.scripted import Scripted, contest_of, rows_of, run

ORIGIN: dict[str, Any] = {
    "forerun": "1",
    "python": "3.11",
    "torch": "2",
    "cpu": "a",
    "threads": 1,
    "device": "cpu",
    "peers": {"transformers": "5"},
    "arguments": {"seed": 1, "repeat": 2},
    "weights": {"the model": "1", "mine": "2"},
    "git": {"commit": "c", "dirty": False},
}


def stored(contest: Contest, path: Path | None = None, origin: dict[str, Any] = ORIGIN) -> Store:
    return Store(path, origin, rows_of(contest), _write)


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


@dataclass
class Stopping:
    """Ctrl-C after so many cells."""

    store: Store
    left: int

    def __call__(self, cell: Cell) -> None:
        self.store.keep(cell)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def methods() -> dict[str, Scripted]:
    return {"none": Scripted(20), "a": Scripted(40, per_pass=2), "broken": Scripted(fails_on="t")}


@pytest.mark.parametrize("stop", [1, 4, 7, 13])
def test_resuming_measures_what_is_missing_and_nothing_else(tmp_path: Path, stop: int) -> None:
    file = tmp_path / "run.json"
    settings = (Setting(), Setting(4))
    whole, _ = contest_of(methods(), *settings)
    expected = rows_of(whole)(run(whole))
    first, _ = contest_of(methods(), *settings)
    begun = stored(first, file)
    with pytest.raises(KeyboardInterrupt):
        first.run(Stopping(begun, stop))
    begun.save(complete=False)
    assert read_result(file)["complete"] is False
    with pytest.raises(ValueError, match="add --resume"):
        refuse_overwriting(file)

    again, _ = contest_of(methods(), *settings)
    store = stored(again, file)
    store.cells += earlier_cells(file, ORIGIN, again)
    measured: list[Place] = []

    def keep(cell: Cell) -> None:
        measured.append(cell.place)
        store.keep(cell)

    before = store.done
    again.run(keep, before)
    assert not before & set(measured)
    assert store.done == set(again.plan())
    assert len(store.cells) == len(again.plan())
    rounds = {(place.setting, place.round) for place in again.plan() if place not in begun.done}
    kept = [cell for cell in begun.cells if (cell.place.setting, cell.place.round) not in rounds]
    assert before == {cell.place for cell in kept if cell.place.case.drafter != "broken"}  # it is tried again
    store.save(complete=True)
    refuse_overwriting(file)
    found = read_result(file)["rows"]
    for row in [*found, *expected]:
        row.pop("peak_bytes")
    assert found == json.loads(json.dumps(expected))


def test_cells_survive_the_file() -> None:
    contest, _ = contest_of(methods(), Setting(), Setting(2, 0.5, 9.0))
    for cell in run(contest):
        assert read_cell(json.loads(json.dumps(cell.as_dict()))) == cell


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": {"seed": 2, "repeat": 2}}, "seed 1, not 2"),
        ({"threads": 4}, "another threads"),
        ({"torch": "3", "peers": {}}, "another torch, peers"),
        ({"weights": {"the model": "1", "mine": "3"}}, "other weights of mine than are there now"),
        ({"git": {"commit": "d", "dirty": False}}, "another commit"),
        ({"git": {"commit": "c", "dirty": True, "changes": "1"}}, "another commit or changes of it"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of(methods())
    stored(contest, file).save(complete=False)
    assert earlier_cells(file, ORIGIN, contest) == []
    with pytest.raises(ValueError, match=words):
        earlier_cells(file, ORIGIN | change, contest)


def test_a_file_from_before_weights_were_told_apart_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of(methods())
    stored(contest, file, {name: value for name, value in ORIGIN.items() if name != "weights"}).save(complete=False)
    assert earlier_cells(file, ORIGIN, contest) == []


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    contest, _ = contest_of(methods())
    refuse_overwriting(file)
    for content in ("", "[]", "{}", "my notes", "[" * 100_000):
        file.write_text(content)
        with pytest.raises(ValueError, match="not a result"):
            earlier_cells(file, ORIGIN, contest)
        if not content:  # there is nothing in it to lose
            refuse_overwriting(file)
            continue
        with pytest.raises(ValueError, match="not a result of forerun bench: name another file, or remove it"):
            refuse_overwriting(file)
    file.write_text('{"rows": [], "provenance": {}}')
    refuse_overwriting(file)
    with pytest.raises(ValueError, match="another version"):
        earlier_cells(file, ORIGIN, contest)


def damaged(file: Path, contest: Contest) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is damaged: measure again, into another file$"):
        earlier_cells(file, ORIGIN, contest)


@pytest.mark.parametrize(
    "harm",
    [
        {"cells": [{"case": 1}]},
        {"cells": None},
        {"provenance": {}},
        {"provenance": [1]},
        {"provenance": ORIGIN | {"arguments": 1}},
        {"provenance": ORIGIN | {"weights": ["1"]}},
    ],
)
def test_a_damaged_file_is_told_in_a_sentence(tmp_path: Path, harm: dict[str, Any]) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of(methods())
    stored(contest, file).save(complete=False)
    file.write_text(json.dumps(json.loads(file.read_text()) | harm))
    damaged(file, contest)


GONE = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *[("work seconds", value) for value in (0, -1.5, "fast", None, True, float("nan"), 10**400, GONE)],
        *[("work phases", value) for value in ({"draft": 1}, {"draft": "much"}, None)],
        ("peak_bytes", "large"),
        ("error", 1),
        ("case drafter", "another"),
        ("setting batch", 0),
        ("round", 9),
        ("pool", "chat"),
        ("sums", {}),
        ("sums", GONE),
        *[("sums math tokens", value) for value in (0, "12", 1.5, GONE)],
        *[("sums math request_seconds", value) for value in ([], [0, 0], [-1, 2], ["a"])],
        *[("sums math texts", value) for value in ([], ["a"], [1, 2])],
        *[("sums math phases", value) for value in ({}, dict.fromkeys(PHASES, 0))],
        ("sums math offered_by_depth", [1]),
        ("sums math accepted_by_depth", [1, 2]),
    ],
)
def test_figures_that_cannot_have_been_measured_are_refused(tmp_path: Path, place: str, value: object) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of({"none": Scripted(20)})
    store = stored(contest, file)
    contest.run(store.keep)
    store.save(complete=False)
    assert earlier_cells(file, ORIGIN, contest) == store.cells
    data = json.loads(file.read_text())
    *way, last = place.split()
    part = data["cells"][0]
    for name in way:
        part = part[name]
    if value is GONE:
        del part[last]
    else:
        part[last] = value
    file.write_text(json.dumps(data))
    damaged(file, contest)


@pytest.mark.parametrize(
    ("offered", "accepted"), [([3, 0], [2, 0]), ([2, 2], [3, 2]), ([90, 2], [90, 2]), ([9, 9], [2, 3]), ([1], [1, 1])]
)
def test_depths_fit_together(tmp_path: Path, offered: list[int], accepted: list[int]) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of({"none": Scripted(20), "a": Scripted(40, per_pass=5)})
    store = stored(contest, file)
    contest.run(store.keep)
    sums = store.cells[1].sums["math"]
    sums.offered_by_depth, sums.accepted_by_depth = [4, 4], [4, 3]
    store.save(complete=False)
    assert earlier_cells(file, ORIGIN, contest) == store.cells
    data = json.loads(file.read_text())
    data["cells"][1]["sums"]["math"] |= {"offered_by_depth": offered, "accepted_by_depth": accepted}
    file.write_text(json.dumps(data))
    damaged(file, contest)


def test_a_cell_is_not_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    contest, _ = contest_of({"none": Scripted(20)})
    store = stored(contest, file)
    contest.run(store.keep)
    store.cells.append(store.cells[0])
    store.save(complete=False)
    damaged(file, contest)


def test_damage_is_told_whatever_the_file_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name is in the words with which a setting refuses."""
    monkeypatch.chdir(tmp_path)
    file = Path("batch")
    contest, _ = contest_of({"none": Scripted(20)})
    store = stored(contest, file)
    contest.run(store.keep)
    store.save(complete=False)
    file.write_text(file.read_text().replace('"batch": 1', '"batch": 0'))
    damaged(file, contest)
