"""Nodes of trees in plain numbers, as the pass in C takes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forerun.models.native.reading import ListedRows


class ReadNodes:
    """The nodes of one text that were read."""

    def __init__(self, slots: NDArray[np.int64], length: int) -> None:
        self.slots, self.length = slots, length
        self.paths: list[list[int]] = []  # of each node: the places of its ancestors among the text's keys, and its own
        self.states: list[int] = []  # of each node: where its state is among those of the run

    def read(self, above: list[int], rows: ListedRows, states: int) -> None:
        """List nodes below `above` as rows; `states` are there before theirs."""
        first = self.length + len(self.paths)
        start = len(rows.positions)
        for place, parent in enumerate(above):
            path = [*(self.paths[parent] if parent >= 0 else ()), first + place]
            self.paths.append(path)
            self.states.append(states + start + place)
            rows.positions.append(self.length - 1 + len(path))
            rows.tail += path
            rows.tail_start.append(len(rows.tail))
        end = first + len(above)
        rows.prefix += [self.length] * len(above)
        rows.slots.append(self.slots[first:end])
        rows.keys.append(self.slots[:end])
        rows.first_row.append(len(rows.positions))
        rows.first_key.append(rows.first_key[-1] + end)
