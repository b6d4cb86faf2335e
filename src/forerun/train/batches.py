"""Which texts a step takes: a function of its number, so that a run that was interrupted goes on as it would have.

Texts come in an order by chance, all of them and then again in another order. Of so many in a row those of like length
are put together, so that little of a batch is padding, and the batches are taken in an order by chance again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

POOL = 64
"""Batches whose texts are sorted by length together."""


class Batches:
    def __init__(self, lengths: Sequence[int], texts: int, tokens: int = 0, seed: int = 0) -> None:
        """`texts` in a batch; with `tokens`, instead as many as have no more tokens together, the padding counted."""
        self.lengths = np.asarray(lengths)
        self.texts, self.tokens, self.seed = texts, tokens, seed
        per_batch = texts if not tokens else max(1, tokens // max(1, int(self.lengths.mean())))
        # Not more than there are texts: one that comes twice would lie beside itself.
        self.pool_size = per_batch * max(1, min(POOL, len(self.lengths) // per_batch))
        self._rewind()

    def _rewind(self) -> None:
        self._pools = 0
        self._first = 0  # the step of the first batch below
        self._batches: list[list[int]] = []
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def at(self, step: int) -> list[int]:
        """The texts of a step, counted from 0."""
        if step < self._first:
            self._rewind()
        while step >= self._first + len(self._batches):
            self._first += len(self._batches)
            self._batches = self._pool(self._pools)
            self._pools += 1
        return self._batches[step - self._first]

    def _pool(self, number: int) -> list[list[int]]:
        taken = self._stream(number * self.pool_size, (number + 1) * self.pool_size)
        taken = taken[np.argsort(self.lengths[taken], kind="stable")]
        batches = self._cut(taken)
        order = np.random.default_rng([self.seed, 1, number]).permutation(len(batches))
        return [batches[index] for index in order]

    def _cut(self, sorted_by_length: NDArray[np.int64]) -> list[list[int]]:
        if not self.tokens:
            whole: list[list[int]] = sorted_by_length.reshape(-1, self.texts).tolist()
            return whole
        batches: list[list[int]] = [[]]
        for index in sorted_by_length.tolist():
            if batches[-1] and (len(batches[-1]) + 1) * int(self.lengths[index]) > self.tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _stream(self, start: int, end: int) -> NDArray[np.int64]:
        """All texts in an order by chance, then again in another order, and so on: a part of that."""
        count = len(self.lengths)
        parts = []
        while start < end:
            epoch, offset = divmod(start, count)
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = epoch, np.random.default_rng([self.seed, 0, epoch]).permutation(count)
            parts.append(self._epoch[1][offset : offset + end - start])
            start += len(parts[-1])
        return np.concatenate(parts)
