"""One text on its way: what was asked, what is committed, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from forerun.core.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


def never(output: list[int]) -> bool:
    """A text that no string ends."""
    return False


@dataclass(eq=False)
class Sequence:
    """Only committed tokens live here: drafts never do, so nothing has to be taken back."""

    prompt: list[int]
    max_tokens: int
    eos: frozenset[int] = frozenset()
    ends: Callable[[list[int]], bool] = never
    """Whether the output ends here although no EOS came: a stop string, looked for after each token."""
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    id: int = 0
    """Unlike that of any other sequence of the same engine, past or present."""
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    """Of all the noise this text meets; drawn afresh where the request names none."""
    coupled: bool = False
    """Verified by Gumbel coupling: drafts should be the winners of the race with the noise of their position."""
    tokens: list[int] = field(init=False)
    """Prompt and output."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty: speculation starts from a last token, so give at least one")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: it must be at least 1")
        self.tokens = self.prompt + self.output

    @property
    def position(self) -> int:
        """The absolute position of the last committed token, the root of the next tree."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """How many more tokens the text may have."""
        return self.max_tokens - len(self.output)

    def commit(self, tokens: Iterable[int]) -> int:
        """Take a step's tokens up to where the text ends; returns how many were kept.

        An accepted path may run past the end. Plain decoding would have stopped there, so the rest is cut.
        """
        assert self.finish_reason is None, "a finished sequence takes no more tokens"
        before = len(self.output)
        for token in tokens:
            self.output.append(token)
            self.tokens.append(token)
            if token in self.eos or self.ends(self.output):
                self.finish_reason = "stop"
            elif len(self.output) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return len(self.output) - before
