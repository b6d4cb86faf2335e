"""Between host and device without waiting: PyTorch's plain ways stop until everything queued before is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Row = Sequence[int] | Sequence[float]
Numbers = Row | Sequence[Row] | Sequence[Sequence[Row]]


def to_device(values: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of `values`. Memory that is not pinned is copied aside at once, so the host goes on."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


def event(*, timing: bool = False) -> torch.cuda.Event:
    made: torch.cuda.Event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    return made


class Homeward:
    """Numbers on their way to the host, where somebody will ask for them later."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = event()
            self._arrived.record()

    def here(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._numbers
