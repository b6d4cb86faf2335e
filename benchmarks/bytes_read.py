"""Counting bytes: what torch operations read, and what an algorithm has to read at the least."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PICKS = ("gather", "index.Tensor", "index_select", "take", "embedding")
"""Operations that read as much as they give back, wherever in their input it lies."""
_PUTS = ("scatter", "index_put", "index_copy")
"""Operations in place, or on a copy, that read what they write."""


_MAKES = ("empty", "new_", "zeros", "ones", "full", "arange")
"""Operations that take a tensor for its shape and type only."""


class BytesRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that every operation reads from its tensors. Views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or any(word in name for word in _MAKES):
            return result
        tensors = [item for item in _flat([args, kwargs or {}]) if isinstance(item, Tensor)]
        if any(pick in name for pick in _PICKS):
            self.total += sum(_size(t) for t in tensors[1:]) + _size(result)
        elif any(put in name for put in _PUTS):
            copied = 0 if name.split(".")[1].endswith("_") else _size(tensors[0])
            self.total += sum(_size(t) for t in tensors[1:]) + copied
        elif "copy_" in name or "zero_" in name or "fill_" in name:
            self.total += sum(_size(t) for t in tensors[1:])
        else:
            self.total += sum(_size(t) for t in tensors)
        return result


def _flat(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [leaf for value in item.values() for leaf in _flat(value)]
    if isinstance(item, list | tuple):
        return [leaf for value in item for leaf in _flat(value)]
    return [item]


def _size(tensor: Any) -> int:
    """Bytes behind a tensor; an expanded dimension is read once."""
    if not isinstance(tensor, Tensor):
        return 0
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count * tensor.element_size()


class Ledger:
    """Which rows of p and q were looked at, whole or in single entries."""

    def __init__(self, item_size: int, vocabulary: int, *, rows_are_read_whole: bool = False) -> None:
        self.item_size, self.vocabulary = item_size, vocabulary
        self.rows_are_read_whole = rows_are_read_whole
        self.sequence = -1
        self.whole: set[tuple[int, str, int]] = set()
        self.single: set[tuple[int, str, int, int]] = set()

    def next_sequence(self) -> None:
        self.sequence += 1

    @property
    def total(self) -> int:
        lone = sum(1 for *row, _ in self.single if tuple(row) not in self.whole)
        return self.item_size * (len(self.whole) * self.vocabulary + lone)


class WatchedRow(np.ndarray):
    """A row that notes in a ledger when somebody reads it. What is computed from it is an ordinary array."""

    ledger: Ledger
    place: tuple[int, str, int]

    def __getitem__(self, index: Any) -> Any:
        plain = self.view(np.ndarray)
        if isinstance(index, int | np.integer):
            self.ledger.single.add((*self.place, int(index)))
        else:
            self.ledger.whole.add(self.place)
        return plain[index]

    def _read(self) -> np.ndarray[Any, Any]:
        self.ledger.whole.add(self.place)
        return self.view(np.ndarray)

    def copy(self, order: Any = "C") -> Any:
        return self._read().copy(order)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [item._read() if isinstance(item, WatchedRow) else item for item in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        plain = [item._read() if isinstance(item, WatchedRow) else item for item in args]
        return func(*plain, **kwargs)


class _WatchedRows:
    def __init__(self, rows: list[Any], ledger: Ledger, name: str) -> None:
        self.rows, self.ledger, self.name = rows, ledger, name

    def __getitem__(self, index: int) -> Any:
        if self.ledger.rows_are_read_whole:
            self.ledger.whole.add((self.ledger.sequence, self.name, index))
            return self.rows[index]
        row: WatchedRow = np.asarray(self.rows[index]).view(WatchedRow)
        row.ledger, row.place = self.ledger, (self.ledger.sequence, self.name, index)
        return row


def watched(rows: list[Any], ledger: Ledger, name: str) -> _WatchedRows:
    """The rows of one sequence's p or q, watched."""
    return _WatchedRows(rows, ledger, name)
