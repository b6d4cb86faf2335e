"""`choice.c` for tensors: laws and tokens of rows on a CPU. Who asks has checked that `usable` says yes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.native import build

FLAGS = ["-O3", "-march=native", "-ffp-contract=off"]
COUNTS = 2048
"""Buckets that a search for a threshold counts in."""


@cache
def library() -> ctypes.CDLL | None:
    return build.load(Path(__file__).with_suffix(".c"), FLAGS)


def usable(values: Tensor) -> bool:
    """Whether these rows [R, V] can be given to C."""
    return values.device.type == "cpu" and values.dtype == torch.float32 and library() is not None


def laws(
    scores: Tensor,
    best: Tensor,
    choice: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """p [R, V] from scores [R, V], their largest entries and where they are; everything else [R, 1]."""
    scores = scores.contiguous()
    rows, size = scores.shape
    p = torch.empty_like(scores)
    scratch = torch.empty_like(scores)
    counts = torch.empty(rows, COUNTS, dtype=torch.int64)
    kinds = ((best, scores.dtype), (temperature, torch.float64), (top_p, torch.float64), (min_p, torch.float64))
    best, temperature, top_p, min_p = (_column(column, rows, dtype) for column, dtype in kinds)
    choice, top_k = _column(choice, rows, torch.int64), _column(top_k, rows, torch.int64)
    columns = (best, choice, temperature, top_k, top_p, min_p)
    _call("forerun_laws", scores, rows, size, *columns, p, scratch, counts)
    return p


def race(p: Tensor, keys: Tensor) -> Tensor:
    """[R] the first to arrive under p [R, V] and keys [R]."""
    return _tokens("forerun_race", p, _column(keys, p.shape[0], torch.int64))


def chosen(
    logits: Tensor,
    rows: list[int],
    keys: list[int],
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> list[int]:
    """What `race` gives under what `laws` gives of some rows of logits [R, V], float32 or bfloat16; settings are one
    for each of them. -1 where a row is broken."""
    assert logits.dtype in (torch.float32, torch.bfloat16)
    count, size = len(rows), logits.shape[1]
    heats, masses, ratios = (_column(column, count, torch.float64) for column in (temperature, top_p, min_p))
    columns = (heats, _column(top_k, count, torch.int64), masses, ratios, torch.tensor(keys))
    scratch, counts = torch.empty(count, 3, size), torch.empty(count, COUNTS, dtype=torch.int64)
    tokens = torch.empty(count, dtype=torch.int64)
    half = int(logits.dtype == torch.bfloat16)
    logits = logits.contiguous()
    _call("forerun_chosen", logits, half, count, torch.tensor(rows), size, *columns, scratch, counts, tokens)
    found: list[int] = tokens.tolist()
    return found


def draws(weights: Tensor, u: Tensor) -> Tensor:
    """[R] the tokens at quantiles u [R] of weights [R, V]."""
    return _tokens("forerun_draws", weights, _column(u, weights.shape[0], torch.float64))


def largest(scores: Tensor, count: int, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` ≤ 64 largest of each row of scores [R, V], float32 or bfloat16, and where they are; `peaks`
    [R, V / B], in float32, are the largest of each B entries, and more than `count`."""
    rows, size = scores.shape
    values = torch.empty(rows, count)
    places = torch.empty(rows, count, dtype=torch.int64)
    half = int(scores.dtype == torch.bfloat16)
    block = size // peaks.shape[1]
    _call("forerun_largest", scores.contiguous(), half, rows, size, peaks.contiguous(), block, count, values, places)
    return values.to(scores.dtype), places


def candidates(
    logits: Tensor,
    ids: Tensor,
    count: int,
    *,
    temperature: list[float],
    keys: list[int],
    raced: list[bool],
    taus: tuple[float, float],
) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` ≤ 64 best columns of each row of logits [R, V], and the logarithms of their shares: of the likeliest,
    or where they are raced of the first in a race with the noise of (key, id of the column). Shares are those of
    q^(1/tau), or of (q/E)^(1/tau) with the other tau. -1 and -inf where a row has not so many."""
    rows, size = logits.shape
    assert logits.dtype in (torch.float32, torch.bfloat16)
    assert ids.dtype == torch.int64
    logits, ids = logits.contiguous(), ids.contiguous()
    shares = torch.empty(rows, count)
    places = torch.empty(rows, count, dtype=torch.int64)
    heats, names = torch.tensor(temperature, dtype=torch.float64), torch.tensor(keys)
    races = torch.tensor(raced, dtype=torch.int64)
    half = int(logits.dtype == torch.bfloat16)
    sharp = torch.tensor(taus, dtype=torch.float64)
    columns = (ids, heats, names, races, sharp)
    _call("forerun_candidates", logits, half, rows, size, *columns, count, torch.empty(3, size), shares, places)
    return places.tolist(), shares.tolist()


def _column(values: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """One number for each row, as C reads it."""
    return values.to("cpu", dtype).reshape(-1).expand(rows).contiguous()


def _tokens(function: str, rows: Tensor, per_row: Tensor) -> Tensor:
    rows = rows.contiguous()
    tokens = torch.empty(rows.shape[0], dtype=torch.int64)
    _call(function, rows, *rows.shape, per_row, tokens)
    return tokens


def _call(function: str, *arguments: Tensor | int) -> None:
    found = library()
    assert found is not None
    pointers = [
        ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_void_p(argument.data_ptr())
        for argument in arguments
    ]
    found[function](*pointers)
