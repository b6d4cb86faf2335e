"""When requests come in: a Poisson process, the same for every method, since it is drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start, in order; `rate` requests a second on average. The first is there at once."""
    if rate <= 0:
        raise ValueError(f"arrivals at a rate of {rate:g} a second: give a number above 0")
    generator = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + generator.expovariate(rate))
    return times[:count]


def at_their_times(
    times: Sequence[float], begin: Callable[[int], Item], sleep: Callable[[float], None] = time.sleep
) -> list[tuple[Item, float]]:
    """Begins each at its time, and gives what began and when it should have: who comes late has waited already."""
    started = time.perf_counter()
    begun = []
    for number, seconds in enumerate(times):
        if (left := started + seconds - time.perf_counter()) > 0:
            sleep(left)
        begun.append((begin(number), started + seconds))
    return begun
