"""What the core knows of a grammar: where a text stands in it, which tokens may follow, and how to go on and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # settings are read without PyTorch
    from torch import Tensor


class GrammarState(Protocol):
    """Where a text stands. What follows depends on the tokens taken alone, not on how often it went on and back."""

    def take(self, token: int) -> bool:
        """One token on; False, and it stays where it is, where the grammar does not allow the token."""
        ...

    def back(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def allowed(self, width: int) -> Tensor:
        """[width] bool, on the host: the tokens of text that may come next. End-of-text tokens are not among them."""
        ...

    def forced(self) -> list[int]:
        """What must come next, as far as it is known; mostly nothing."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the text so far is whole."""
        ...

    @property
    def must_end(self) -> bool:
        """Whether nothing can follow."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """What a text must look like. It never changes, and any number of texts may share it."""

    def start(self) -> GrammarState:
        """A state of its own, before the first token."""
        ...
