"""Requests that come in at random times."""

from __future__ import annotations

import pytest

from forerun.bench.arrivals import arrival_times, at_their_times


def test_arrivals_are_in_order_and_follow_from_the_seed() -> None:
    times = arrival_times(500, 4.0, seed=3)
    assert times == sorted(times) == arrival_times(500, 4.0, seed=3)
    assert times != arrival_times(500, 4.0, seed=4)
    assert times[0] == 0
    assert 499 / times[-1] == pytest.approx(4.0, rel=0.15)  # the rate, within three standard errors
    assert arrival_times(500, 8.0, seed=3)[-1] == pytest.approx(times[-1] / 2)
    with pytest.raises(ValueError, match="above 0"):
        arrival_times(3, 0.0, seed=1)


def test_each_begins_at_its_time() -> None:
    slept: list[float] = []
    begun = at_their_times([0.0, 100.0, 300.0], lambda number: number, slept.append)
    assert [number for number, _ in begun] == [0, 1, 2]
    assert [round(came - begun[0][1]) for _, came in begun] == [0, 100, 300]
    assert [round(seconds) for seconds in slept[-2:]] == [100, 300]
