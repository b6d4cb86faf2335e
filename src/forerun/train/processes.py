"""One process, or several that `torchrun` started and that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn

PATIENCE = timedelta(days=2)
"""The first process answers the prompts and measures, while the others wait for it."""


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Values [N] and a count, each summed over all processes; both stay on the device."""
        whole = torch.cat([values, torch.full((1,), count, dtype=values.dtype, device=values.device)])
        if self.count > 1:
            distributed.all_reduce(whole)
        return whole[:-1], whole[-1].clamp_min(1)

    def sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Of all processes, in place."""
        if self.count == 1:
            return
        for weight in weights:
            if weight.grad is None:  # nothing of this process's part came by it
                weight.grad = torch.zeros_like(weight)
            distributed.all_reduce(weight.grad)

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
