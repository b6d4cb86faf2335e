"""What the engine asks of a model: one pass over packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.models.batch import Batch, TextEnds
from forerun.models.storage import Storage


@dataclass(frozen=True)
class Output:
    logits: Tensor  # [W, V] of the wanted rows
    features: dict[int, Tensor] = field(default_factory=dict)
    """[R, H] for each asked-for layer: the hidden states after that many layers, before the final norm."""
    likeliest: Tensor | None = None
    """[W] the token of each row's largest logit, the first of equals, where the pass finds it on the way; -1 where the
    logits are not all numbers."""
    peaks: Tensor | None = None
    """[W, V / B] the largest of each B logits of a row, in order, where the pass finds them on the way."""


class TargetModel(Protocol):
    """Our own transformer, or an adapter around another one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def eos(self) -> frozenset[int]: ...

    @property
    def branches(self) -> bool:
        """Whether it can check trees; otherwise only chains."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format it computes in, whatever its storage holds."""
        ...

    def new_storage(self, slots: int) -> Storage: ...

    def forward_rows(self, batch: Batch, storage: Storage, layers: Sequence[int] = ()) -> Output: ...

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        """Called once for a new sequence: the tokens its text starts from. The prompt itself, unless an encoder reads
        the prompt; then the decoder's first token."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence is over: drop whatever `begin` kept for it."""
        ...


@runtime_checkable
class WritesAhead(Protocol):
    """A model that can write several tokens on its device before the host looks at any."""

    @property
    def writes_ahead(self) -> bool:
        """Whether it can here and now."""
        ...

    def write_ahead(
        self,
        ends: TextEnds,
        storage: Storage,
        count: int,
        choose: Callable[[Tensor, int], Tensor] | None = None,
        layers: Sequence[int] = (),
        top: int = 0,
    ) -> Written:
        """The next tokens of S texts that have slots for `count`: the likeliest, or what `choose` makes of the logits
        [S, V] at each step; with the states of some layers and the `top` likeliest of each step."""
        ...


@dataclass(frozen=True)
class Written:
    tokens: Tensor  # [count, S]; -1 where the logits are broken
    features: dict[int, Tensor] = field(default_factory=dict)
    """For each layer asked for, [S · count, H]: the states at the tokens that were read, text by text."""
    top: Tensor | None = None
    """[S, count, top]: the tokens that were likeliest at each step, the likeliest first."""
