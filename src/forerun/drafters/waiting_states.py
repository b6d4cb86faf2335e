"""States of the target that were observed and that a head has not read yet."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from forerun.core.transfer import to_device
from forerun.drafters.drafter import StepStates
from forerun.drafters.run_ahead import Run
from forerun.models.heads.feature_head import FeatureHead

LONG = 32
"""Rows of one text in a step."""
CUT_OUT = 8
"""Pieces up to which each is cut out by itself."""


class Seen:
    """States of the target as they were observed, by layer; what the head reads of them is made when it is asked for. A
    text for which nothing is drafted should cost nothing."""

    def __init__(self, head: FeatureHead, layers: Mapping[int, Tensor]) -> None:
        self._head, self._layers = head, layers

    @cached_property
    def fused(self) -> Tensor:
        """[.., H]"""
        made = self._head.fuse(self._layers)
        self._layers = {}
        return made


@dataclass(frozen=True, eq=False)
class Fused:
    """States of which the head has made what it reads already."""

    fused: Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows among the states of several texts."""

    whole: Seen | Fused
    start: int
    end: int


def pieces_of(head: FeatureHead, features: Many[Mapping[int, Tensor]]) -> list[Piece]:
    """The states of each text of a step, of all of which the head will make what it reads in one go, but for long ones:
    those of a prompt would stay as long as those of any text beside it."""
    counts = [each.count if isinstance(each, StepStates) else len(each[head.taps[0]]) for each in features]
    if max(counts) > LONG and len(features) > 1:
        short = [each for each, count in zip(features, counts, strict=True) if count <= LONG]
        made = iter(_own(head, short) if short else ())
        pairs = zip(features, counts, strict=True)
        return [next(made) if count <= LONG else _own(head, [each])[0] for each, count in pairs]
    of_step = _of_one_step(features)
    if of_step:
        whole = Seen(head, {layer: of_step[0].whole[layer] for layer in head.taps})
        return [Piece(whole, each.start, each.start + each.count) for each in of_step]
    return _own(head, features)


def _of_one_step(features: Many[Mapping[int, Tensor]]) -> list[StepStates]:
    """All of them, if they are; else none."""
    found = [each for each in features if isinstance(each, StepStates)]
    alike = len(found) == len(features) and all(each.whole is found[0].whole for each in found)
    return found if alike else []


def _own(head: FeatureHead, features: Many[Mapping[int, Tensor]]) -> list[Piece]:
    """In tensors of their own."""
    of_step = _of_one_step(features) if len(features) > 1 else []
    if of_step:
        rows = [row for each in of_step for row in range(each.start, each.start + each.count)]
        index = to_device(rows, next(iter(of_step[0].whole.values())).device)
        whole = Seen(head, {layer: of_step[0].whole[layer].index_select(0, index) for layer in head.taps})
        ends = list(accumulate(each.count for each in of_step))
    else:
        whole = Seen(head, {layer: torch.cat([each[layer] for each in features]) for layer in head.taps})
        ends = list(accumulate(len(each[head.taps[0]]) for each in features))
    return [Piece(whole, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def joined(pieces: Many[Piece]) -> Tensor:
    """[n, H]. Pieces that follow each other in their tensor, as those of all texts after a step, are cut out once; of
    many that do not, all rows are picked at once."""
    runs: list[Piece] = []
    for piece in pieces:
        if runs and runs[-1].whole is piece.whole and runs[-1].end == piece.start:
            runs[-1] = replace(runs[-1], end=piece.end)
        else:
            runs.append(piece)
    if len(runs) <= CUT_OUT:
        parts = [run.whole.fused[run.start : run.end] for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    wholes = {id(run.whole): run.whole.fused for run in runs}
    starts = dict(zip(wholes, accumulate((len(each) for each in wholes.values()), initial=0), strict=False))
    every = torch.cat(list(wholes.values()))
    rows = [starts[id(run.whole)] + row for run in runs for row in range(run.start, run.end)]
    return every.index_select(0, to_device(rows, every.device))


@dataclass
class Waiting:
    """The observed states of one text that no committed row of the cache has read."""

    states: list[Piece] = field(default_factory=list)
    rows: int = 0
    in_run: int = 0
    """So many of them were read by the last run, in rows that are only reserved."""
    run: Run | None = None

    def add(self, piece: Piece) -> None:
        self.states.append(piece)
        self.rows += piece.end - piece.start

    def first(self, count: int) -> list[Piece]:
        found: list[Piece] = []
        for piece in self.states:
            taken = min(count, piece.end - piece.start)
            if taken:
                found.append(replace(piece, end=piece.start + taken))
            count -= taken
        return found

    def drop(self, count: int) -> None:
        left: list[Piece] = []
        self.rows -= count
        for piece in self.states:
            gone = min(count, piece.end - piece.start)
            count -= gone
            if piece.start + gone < piece.end:
                left.append(replace(piece, start=piece.start + gone))
        self.states = left
