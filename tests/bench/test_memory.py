"""Memory that several methods hold at once, told apart."""

from __future__ import annotations

from contextlib import suppress

import torch

from forerun.bench.memory import Ledger


class Told(Ledger):
    """A process whose memory is what the test says."""

    now = 100
    most = 100

    def _reset(self) -> int:
        self.most = self.now
        return self.now

    def _read(self) -> tuple[int, int]:
        return self.now, self.most

    def take(self, much: int, *, for_a_moment: int = 0) -> None:
        self.now += much
        self.most = max(self.most, self.now + for_a_moment)


def test_a_peak_is_that_of_the_method_alone() -> None:
    ledger = Told(torch.device("cpu"))
    with ledger.at_work("a"):
        ledger.take(50)
    with ledger.at_work("b"):
        ledger.take(20, for_a_moment=5)
    assert ledger.peak("a") == 150
    assert ledger.peak("b") == 125
    with suppress(RuntimeError), ledger.at_work("b"):
        ledger.take(10)
        raise RuntimeError
    with ledger.at_work("a"):
        ledger.take(0, for_a_moment=7)
    assert ledger.peak("a") == 157
    assert ledger.peak("b") == 130
    with ledger.at_work("a"):
        ledger.take(-50)
    ledger.begin("a")
    assert ledger.peak("a") is None
    with ledger.at_work("a"):
        ledger.take(30)
    assert ledger.peak("a") == 130


def test_the_process_has_some_memory() -> None:
    ledger = Ledger(torch.device("cpu"))
    with ledger.at_work("x"):
        held = torch.ones(1 << 20)
    assert held.sum() > 0
    assert (ledger.peak("x") or 0) > held.nbytes
