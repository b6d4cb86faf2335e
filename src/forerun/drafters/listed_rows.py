"""Rows of trees in plain numbers, as the pass in C takes them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.models.native import amx


class ListedRows:
    """Rows of a pass in C, as they are listed."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.prefix: list[int] = []
        self.tail: list[int] = []
        self.tail_start = [0]
        self.first_row, self.first_key = [0], [0]
        self.slots: list[NDArray[np.int64]] = []
        self.keys: list[NDArray[np.int64]] = []

    def reading(self) -> amx.Reading:
        rows = len(self.positions)
        most = max(end - start for start, end in pairwise(self.first_key))
        seen = amx.Seen(
            torch.tensor(self.first_row),
            torch.tensor(self.first_key),
            torch.from_numpy(np.concatenate(self.keys)),
            torch.tensor(self.prefix, dtype=torch.int32),
            torch.tensor(self.tail_start, dtype=torch.int32),
            torch.tensor(self.tail, dtype=torch.int32),
            most,
        )
        slots = torch.from_numpy(np.concatenate(self.slots))
        return amx.Reading(torch.tensor(self.positions), slots, torch.arange(rows), seen)


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
