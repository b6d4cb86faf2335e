"""What a target pass costs as it gets more rows: measured points, and straight lines between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from forerun.theory import checks


@dataclass(frozen=True)
class PassCosts:
    """`costs[i]` is the cost of a pass with `rows[i]` rows per sequence, in any unit of time.

    One row is plain decoding, which every gain is measured against, so it must be among them.
    """

    rows: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.costs):
            raise ValueError(f"{len(self.rows)} row counts but {len(self.costs)} costs: give one cost per row count")
        for place, (rows, cost) in enumerate(zip(self.rows, self.costs, strict=True)):
            checks.whole(f"rows[{place}]", rows, least=1)
            checks.positive(f"the cost of {rows} rows", cost)
        if not self.rows or self.rows[0] != 1:
            raise ValueError("the cost of 1 row is missing: measure plain decoding and put it first")
        if any(late <= early for early, late in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(
                f"row counts {checks.briefly(list(self.rows))} do not increase: sort them and drop repeats"
            )

    @classmethod
    def in_target_passes(cls, cost_by_rows: Mapping[int, float]) -> PassCosts:
        """Costs in units of a one-row pass, which therefore costs 1 whether it is listed or not."""
        for count in cost_by_rows:
            checks.whole("a row count", count, least=1)
        costs = {1: 1.0, **cost_by_rows}
        if abs(costs[1] - 1.0) > checks.ROUNDING:
            raise ValueError(f"the cost of 1 row is {costs[1]:g}: divide all costs by it, they count target passes")
        rows = tuple(sorted(costs))
        return cls(rows, tuple(costs[count] for count in rows))

    @property
    def most_rows(self) -> int:
        return self.rows[-1]

    @property
    def one_row(self) -> float:
        return self.costs[0]

    def at(self, rows: int) -> float:
        """Linear between measured counts, and never falling.

        A pass with more rows does no less work, so where a larger count measured faster that is noise: the
        running maximum keeps it from looking like a gain. Beyond the largest count nothing is known.
        """
        checks.whole("rows", rows, least=1)
        if rows > self.most_rows:
            raise ValueError(f"no pass with {rows} rows was measured: measure one, or stay within {self.most_rows}")
        return float(np.interp(rows, *self._points))

    @cached_property
    def _points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Row counts and the running maximum of the costs: made once, asked for hundreds of times."""
        return np.asarray(self.rows, dtype=np.float64), np.maximum.accumulate(np.asarray(self.costs))
