"""What the penalties of running requests have to look at, kept up to date instead of counted anew in every step.

Engine and drafters each keep one: p and q must see the same text.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.law import Context
from forerun.core.sequence import Sequence


@dataclass
class _Counts:
    prompt: Tensor  # [V] bool
    output: Tensor  # [V] int64
    counted: int = 0  # so many output tokens are in `output`


class History:
    """Remembers requests with penalties only; the others cost nothing."""

    def __init__(self, vocabulary: int, device: torch.device | str = "cpu") -> None:
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self._counts: dict[int, _Counts] = {}
        self._nothing = _Counts(
            torch.zeros(vocabulary, dtype=torch.bool, device=device),
            torch.zeros(vocabulary, dtype=torch.int64, device=device),
        )

    def context(self, sequences: Many[Sequence], row_sequence: Tensor, paths: Tensor) -> Context | None:
        """The context of R rows: `row_sequence` [R] are places in `sequences`, `paths` [R, D] the drafted tokens
        between the root and each row's node, padded with -1. None where no request penalises."""
        places: list[int] = []
        counts = [self._nothing]
        for sequence in sequences:
            if sequence.params.penalises:
                places.append(len(counts))
                counts.append(self._up_to_date(sequence))
            else:
                places.append(0)
        if len(counts) == 1:
            return None
        return Context(
            prompt=torch.stack([item.prompt for item in counts]),
            output=torch.stack([item.output for item in counts]),
            sequence=torch.tensor(places, device=self.device)[row_sequence],
            path=paths,
        )

    def forget(self, sequence: Sequence) -> None:
        self._counts.pop(sequence.id, None)

    def _up_to_date(self, sequence: Sequence) -> _Counts:
        counts = self._counts.get(sequence.id)
        if counts is None:
            seen = self._nothing.prompt.index_fill(0, self._index(sequence.prompt, "prompt"), True)
            counts = self._counts[sequence.id] = _Counts(seen, self._nothing.output)
        if counts.counted < len(sequence.output):
            new = self._index(sequence.output[counts.counted :], "output")
            counts.output = counts.output.index_add(0, new, torch.ones_like(new))
            counts.counted = len(sequence.output)
        return counts

    def _index(self, tokens: list[int], name: str) -> Tensor:
        strays = [token for token in tokens if not 0 <= token < self.vocabulary]
        if strays:
            raise ValueError(
                f"{name} token {strays[0]} is outside the vocabulary of {self.vocabulary}: "
                f"encode the text with the target's own tokenizer"
            )
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)
