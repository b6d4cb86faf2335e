"""A step of heads that need no pass below the root: what they say about a depth is the same for all its nodes."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from forerun.core.transfer import to_device
from forerun.drafters.level_run import Rows


class SideRun:
    """A `LevelRun` over logits that are all there already."""

    writes_ahead = False

    def __init__(self, logits: Tensor | None, takes_part: Many[bool], device: torch.device, ids: Tensor | None) -> None:
        """logits [B', K, Vd] of those who take part, by depth."""
        self.device, self.ids = device, ids
        self.takes_part = list(takes_part)
        self._logits = logits
        self._depth = 0
        places = iter(range(len(self.takes_part)))
        self._place = [next(places) if part else -1 for part in self.takes_part]

    @property
    def vocabulary(self) -> int:
        return 0 if self._logits is None else self._logits.shape[2]

    def roots(self) -> Rows:
        return self._rows([int(part) for part in self.takes_part])

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        self._depth += 1
        return self._rows(counts)

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        raise NotImplementedError("these heads write nothing ahead")

    def _rows(self, counts: list[int]) -> Rows:
        assert self._logits is not None
        members = [b for b, count in enumerate(counts) for _ in range(count)]
        columns = [place for count in counts for place in range(count)]
        index = to_device([members, columns, [self._place[b] for b in members]], self.device)
        return Rows(counts, index[0], index[1], self._logits[index[2], self._depth])
