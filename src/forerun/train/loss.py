"""What a method is to the loop that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from forerun.train.texts import TextBatch


@dataclass(frozen=True)
class Loss:
    total: Tensor
    """Summed over places."""
    count: int
    """Of how many places."""
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    """What else to tell, summed likewise."""


class Learner(Protocol):
    @property
    def module(self) -> nn.Module:
        """What learns."""
        ...

    def loss(self, batch: TextBatch) -> Loss: ...


@runtime_checkable
class Steady(Protocol):
    """A learner that may say that it makes the same launches for every batch of a shape, and asks the host for nothing,
    so that its steps can be captured."""

    @property
    def steady(self) -> bool: ...
