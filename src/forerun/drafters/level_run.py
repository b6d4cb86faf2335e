"""What is asked about the nodes of a step's trees, level by level, and what is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.transfer import to_device
from forerun.models.target import Output


@dataclass(frozen=True)
class Rows:
    """What a pass says about the nodes of one level: R rows of all sequences, in the order of sequences and nodes."""

    counts: list[int]  # rows of each sequence, 0 where it sits out
    sequence: Tensor  # [R] place in the batch
    column: Tensor  # [R] place among the level's nodes
    logits: Tensor  # [R, V]
    likeliest: Tensor | None = None  # [R] where the pass finds it on the way

    @classmethod
    def of(cls, counts: list[int], output: Output) -> Rows:
        sequence = [b for b, count in enumerate(counts) for _ in range(count)]
        column = [place for count in counts for place in range(count)]
        index = to_device([sequence, column], output.logits.device)
        return cls(counts, index[0], index[1], output.logits, output.likeliest)


class LevelRun(Protocol):
    """What is asked about one step's trees: first `roots`, then `level` for each depth whose nodes get children."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int:
        """Columns of its logits."""
        ...

    @property
    def ids(self) -> Tensor | None:
        """[columns] int64, the target's id of each column, ascending; None where columns are ids."""
        ...

    @property
    def takes_part(self) -> list[bool]:
        """By sequence. Who does not gets no drafts."""
        ...

    def roots(self) -> Rows:
        """A row for the root of each sequence that takes part. `likeliest`, where it is given, names columns."""
        ...

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        """A row for each of the first `counts[b]` nodes of sequence b. Tokens and parents [B, F]: ids of the target,
        and numbers of earlier nodes of this run, which counts the columns of all its levels; -1 is the root."""
        ...

    @property
    def writes_ahead(self) -> bool:
        """Whether `chain` can be asked, here and now; then `roots` gives `likeliest`."""
        ...

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        """[B, count] the likeliest tokens that follow tokens [B, 1], of all sequences; both are ids of the target."""
        ...
