"""What a number must be before an equation may use it. Each refusal says what to give instead."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real

# Acceptances measured as frequencies may add up to a hair more than 1.
ROUNDING = 1e-9


class _Brief(reprlib.Repr):
    """`repr` that is short whatever it is given: Python refuses to write out a number of 5,000 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = 40

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of about {round(x.bit_length() * math.log10(2))} digits"


def briefly(value: object) -> str:
    """A value as a refusal quotes it: one line, no control characters, never much longer than that."""
    text = _Brief().repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: object) -> float:
    """A finite real number. True and False are not numbers here: in JSON they are a slip."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {briefly(value)}: give a number")
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
        raise ValueError(f"{name} is {briefly(value)}: give a whole number")
    checked = int(value)
    if checked < least:
        raise ValueError(f"{name} is {briefly(checked)}: give {least} or more")
    if most is not None and checked > most:
        raise ValueError(f"{name} is {briefly(checked)}: give {most} or less")
    return checked


def rank_acceptance(name: str, values: Sequence[object]) -> tuple[float, ...]:
    """a_b, the probability that the b-th child is the one accepted. Only one can be, so Σ a_b ≤ 1."""
    if not values:
        raise ValueError(f"{name} is empty: give the acceptance of at least the first child")
    checked = tuple(probability(f"{name}[{rank}]", value) for rank, value in enumerate(values))
    if (total := math.fsum(checked)) > 1.0 + ROUNDING:
        raise ValueError(f"{name} adds up to {total:g}: only one child is accepted, so give shares of 1 or less in all")
    return checked
