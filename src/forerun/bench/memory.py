"""How much memory a method needs, though several are in memory at once.

Whatever a method adds while it is at work is booked as its own. The peak of a cell, less what the others hold, is what
the process would have needed with this method alone: model, cache, drafter and all.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


class Ledger:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: Counter[Hashable] = Counter()
        self._peaks: dict[Hashable, int] = {}

    @contextmanager
    def at_work(self, who: Hashable) -> Iterator[None]:
        before = self._reset()
        try:
            yield
        finally:
            now, peak = self._read()
            others = sum(self._held.values()) - self._held[who]
            self._held[who] += now - before
            self._peaks[who] = max(self._peaks.get(who, 0), peak - others)

    def peak(self, who: Hashable) -> int | None:
        """The most so far, in bytes."""
        return self._peaks.get(who)

    def begin(self, who: Hashable) -> None:
        """Its peak is counted anew. What it holds stays its own: a peer keeps its model over rounds."""
        self._peaks.pop(who, None)

    def _reset(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # where that is not possible, the peak is that of the whole process so far
                _CLEAR.write_text(_RESET_PEAK)
        return self._read()[0]

    def _read(self) -> tuple[int, int]:
        """Now, and at most since the reset."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        try:
            fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
            return _kilobytes(fields["VmRSS"]), _kilobytes(fields["VmHWM"])
        except (OSError, KeyError):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return most, most


def _kilobytes(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024
