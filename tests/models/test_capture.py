"""When work is captured. There is no graph here: what is counted is how often it would be asked for."""

from __future__ import annotations

import pytest
import torch

from forerun.models.static import capture
from forerun.models.static.capture import Graphs, Replayed


class Graph:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def replay(self) -> None:
        self.calls.append("replayed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def once(replayed: Replayed[str]) -> None:
        made.append("captured")
        replayed.launch()
        replayed.graph, replayed.result = Graph(made), "result"  # type: ignore[assignment]

    monkeypatch.setattr(Replayed, "_capture_once", once)
    return made


def work(calls: list[str], patience: int, on: bool = True) -> Replayed[str]:
    def launch() -> str:
        calls.append("launched")
        return "result"

    graphs = Graphs(torch.device("cpu"))
    graphs.on = on
    return Replayed(launch, graphs, None, "some work", patience)


def test_at_once(calls: list[str]) -> None:
    own = work(calls, 0)
    assert calls == ["captured", "launched"]
    assert own() == "result"
    assert calls[2:] == ["replayed"]


def test_when_it_comes_again(calls: list[str]) -> None:
    """And whoever times his work learns of it, as long as it is not."""
    own = work(calls, 3)
    told = []
    for _ in range(5):
        before, known = capture.unsettled(), capture.captured()
        assert own() == "result"
        told.append((capture.unsettled() > before, capture.captured() - known))
    assert calls == ["launched", "launched", "captured", "launched", "replayed", "replayed", "replayed"]
    assert told == [(True, 0), (True, 0), (True, 1), (False, 0), (False, 0)]


def test_when_somebody_asks(calls: list[str]) -> None:
    own = work(calls, 3)
    own()
    own.capture()
    own.capture()
    own()
    assert calls == ["launched", "captured", "launched", "replayed"]


def test_never_where_there_are_no_graphs(calls: list[str]) -> None:
    before = capture.unsettled()
    own = work(calls, 2, on=False)
    for _ in range(4):
        own()
    own.capture()
    assert calls == ["launched"] * 4
    assert capture.unsettled() == before
