"""One process, or several that `torchrun` started and that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

PATIENCE = timedelta(days=2)
"""The first process answers the prompts and measures, while the others wait for it."""


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Each value summed over all processes."""
        if self.count == 1:
            return dict(values)
        summed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
        distributed.all_reduce(summed)
        return dict(zip(values, summed.tolist(), strict=True))

    def from_first(self, value: float, device: torch.device) -> float:
        """What the first process says, which the others wait for."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=device)
        distributed.broadcast(told, 0)
        return float(told)


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """All processes of this run, by the variables that `torchrun` sets."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), count)
    finally:
        distributed.destroy_process_group()
