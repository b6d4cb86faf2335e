"""What a number must be before an equation may use it. Each refusal says what to give instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

# Acceptances measured as frequencies may add up to a hair more than 1.
ROUNDING = 1e-9


def number(name: str, value: object) -> float:
    """A finite real number. True and False are not numbers here: in JSON they are a slip."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}: give a number")
    try:
        checked = float(value)
    except OverflowError:
        checked = math.inf  # a whole number of hundreds of digits, which JSON may hold
    if not math.isfinite(checked):
        raise ValueError(f"{name} is {checked}: give a finite number")
    return checked


def probability(name: str, value: object) -> float:
    checked = number(name, value)
    if not 0.0 <= checked <= 1.0:
        raise ValueError(f"{name} is {checked:g}: give a probability between 0 and 1")
    return checked


def non_negative(name: str, value: object) -> float:
    checked = number(name, value)
    if checked < 0.0:
        raise ValueError(f"{name} is {checked:g}: give 0 or more")
    return checked


def positive(name: str, value: object) -> float:
    checked = number(name, value)
    if checked <= 0.0:
        raise ValueError(f"{name} is {checked:g}: give a number above 0")
    return checked


def whole(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}: give a whole number")
    checked = int(value)
    if checked < least:
        raise ValueError(f"{name} is {checked}: give {least} or more")
    if most is not None and checked > most:
        raise ValueError(f"{name} is {checked}: give {most} or less")
    return checked


def rank_acceptance(name: str, values: Sequence[object]) -> tuple[float, ...]:
    """a_b, the probability that the b-th child is the one accepted. Only one can be, so Σ a_b ≤ 1."""
    if not values:
        raise ValueError(f"{name} is empty: give the acceptance of at least the first child")
    checked = tuple(probability(f"{name}[{rank}]", value) for rank, value in enumerate(values))
    if (total := math.fsum(checked)) > 1.0 + ROUNDING:
        raise ValueError(f"{name} adds up to {total:g}: only one child is accepted, so give shares of 1 or less in all")
    return checked
