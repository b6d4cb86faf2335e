"""Texts to learn from: what was asked, and what the target answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from forerun.core.noise import Purpose, key_at


@dataclass(frozen=True, eq=False)
class Text:
    """Millions of tokens are kept, so they are in arrays."""

    tokens: NDArray[Any]
    """Prompt, then answer."""
    asked: int
    """How many of them are the prompt."""

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Text:
        return cls(np.array([*prompt, *answer], np.int32), len(prompt))

    @property
    def prompt(self) -> NDArray[Any]:
        return self.tokens[: self.asked]

    @property
    def answer(self) -> NDArray[Any]:
        return self.tokens[self.asked :]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Room:
    """A shape that batches are padded to."""

    texts: int
    length: int
    laws: int


@dataclass(frozen=True)
class TextBatch:
    """Texts side by side, padded at their end, where under a causal mask nothing that counts can see it.

    What is learned are laws of the target: the law at place i of a text is that of its token i + 1. Which places these
    are is made out on the host, since a device that is asked for it would have to be waited for."""

    tokens: Tensor  # [B, L]
    text: Tensor  # [W] for each law that is learned, its text
    place: Tensor  # [W] and its place there
    spans: tuple[tuple[int, int], ...]  # for each text the first place that is learned, and the one behind the last
    seed: int
    numbers: tuple[int, ...]  # of the texts within the step, whichever process learns from them
    counted: Tensor | None = None  # [W] 1.0 for those that count, 0.0 for padding; None where all do

    @classmethod
    def pack(
        cls,
        texts: Sequence[Text],
        device: torch.device | str = "cpu",
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> TextBatch:
        tokens = np.zeros((len(texts), max(len(text) for text in texts)), np.int64)
        spans = tuple((max(text.asked, 1) - 1, max(len(text) - 1, 0)) for text in texts)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text.tokens
        counts = [max(0, end - start) for start, end in spans]
        chosen = np.repeat(np.arange(len(texts)), counts)
        place = np.concatenate([np.arange(start, end) for start, end in spans])
        numbers = tuple(range(len(texts)) if numbers is None else numbers)
        batch = cls(torch.from_numpy(tokens), torch.from_numpy(chosen), torch.from_numpy(place), spans, seed, numbers)
        return batch.on(torch.device(device))

    def padded(self, room: Room) -> Self:
        """With texts, tokens and laws of which nothing is learned, as many as there is room for."""
        texts, length = self.tokens.shape
        more = room.laws - self.place.shape[0]
        return replace(
            self,
            tokens=functional.pad(self.tokens, (0, room.length - length, 0, room.texts - texts)),
            text=functional.pad(self.text, (0, more)),
            place=functional.pad(self.place, (0, more)),
            counted=functional.pad(torch.ones(self.place.shape[0], device=self.place.device), (0, more)),
        )

    def take(self, other: TextBatch) -> None:
        """What another batch of the same shape has."""
        for field in fields(self):
            own, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(own, Tensor):
                own.copy_(theirs, non_blocking=True)

    def keys(self) -> list[int]:
        """Of whatever a loss draws by chance for each text: the same in one process and in many."""
        return [key_at(self.seed, number, Purpose.DRAFT) for number in self.numbers]

    def on(self, device: torch.device) -> Self:
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = (value.pin_memory() if device.type == "cuda" else value).to(
                    device, non_blocking=True
                )
        return replace(self, **moved)

    @property
    def laws(self) -> int:
        """How many are learned."""
        return sum(max(0, end - start) for start, end in self.spans)

    @property
    def labels(self) -> Tensor:
        """[W] the tokens that were written there."""
        return self.tokens[self.text, self.place + 1]

    def at(self, states: Tensor, back: int = 0) -> Tensor:
        """states [B, L, …] → [W, …]: those at the places, or so many rows before; of those before a text's beginning,
        the first."""
        # By one index: the gradient of two is found by sorting them.
        rows = self.text * states.shape[1] + (self.place - back).clamp_min(0)
        return states.flatten(0, 1).index_select(0, rows)

    def reached(self, ahead: int) -> Tensor:
        """[W, K] 1.0 where a text has begun k + 1 rows before the place, and 0.0 elsewhere."""
        back = torch.arange(1, ahead + 1, device=self.place.device)
        begun = (self.place[:, None] >= back).float()
        return begun if self.counted is None else begun * self.counted[:, None]
