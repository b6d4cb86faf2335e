"""What is told of each text that a device drafts for by itself."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.transfer import to_device
from forerun.drafters.drafter import Budget
from forerun.kernels.walk import Walked

TABLE = ("tokens", "positions", "depths", "nodes", "seeds", "raced")
"""Its root, how deep its tree may get and how many nodes it may have, its noise."""


class Told:
    """A column [B] for each of these. The host brings them once; what a round takes moves them on."""

    def __init__(self, texts: int, device: torch.device) -> None:
        self._table = torch.zeros(len(TABLE), texts, dtype=torch.int64, device=device)
        self._columns = dict(zip(TABLE, self._table.unbind(), strict=True))
        self.heat = torch.ones(texts, device=device)

    def __getitem__(self, column: str) -> Tensor:
        return self._columns[column]

    def bring(self, sequences: Many[Sequence], budgets: Many[Budget]) -> None:
        """Behind them there is nobody."""
        rows = [
            [
                *(s.tokens[-1], s.position, min(budget.depth, budget.nodes), budget.nodes),
                *(s.seed, int(s.coupled and not s.params.greedy)),
            ]
            for s, budget in zip(sequences, budgets, strict=True)
        ]
        rows += [[0] * len(TABLE)] * (self._table.shape[1] - len(rows))
        self._table.copy_(to_device(rows, self._table.device).T)
        if races(sequences):
            heats = [s.params.temperature or 1.0 for s in sequences]
            self.heat[: len(heats)].copy_(to_device(heats, self.heat.device, self.heat.dtype))

    def go_on(self, walked: Walked) -> None:
        """Behind what was taken."""
        last = (walked.counts - 1).clamp_min(0)[:, None]
        self["tokens"].copy_(walked.tokens.clamp_min(0).gather(1, last)[:, 0])
        self["positions"].add_(walked.counts)


def races(sequences: Many[Sequence]) -> bool:
    """Whether any text has noise."""
    return any(sequence.coupled and not sequence.params.greedy for sequence in sequences)
