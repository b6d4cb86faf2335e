"""Drafts nothing: plain decoding, and the measure of all others, since it runs through the same engine."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup


@dataclass(frozen=True)
class Options:
    """It has none."""


def roots_only(sequences: Many[Sequence]) -> DraftTree:
    """Trees of one node each. Put together by hand: there is nothing to check or to compute."""
    roots = [[sequence.tokens[-1], sequence.position] for sequence in sequences]
    columns = torch.tensor(roots, dtype=torch.int64).view(-1, 2)
    return replace(_bare(len(sequences)), tokens=columns[:, :1], positions=columns[:, 1:])


@lru_cache(maxsize=256)
def _bare(batch: int) -> DraftTree:
    """What all such trees have in common."""
    tokens = torch.zeros(batch, 1, dtype=torch.int64)
    return DraftTree(
        tokens=tokens,
        parents=torch.full_like(tokens, -1),
        depths=tokens,
        positions=tokens,
        ancestors=torch.ones(batch, 1, 1, dtype=torch.bool),
        drawing=Drawing.FIXED,
        children=tokens.new_empty(batch, 1, 0),
        q=None,
        q_rows=None,
        max_depth=0,
        max_draws=0,
        sizes=(1,) * batch,
    )


class NoDrafter:
    drawing = Drawing.FIXED
    branches = False
    layers: tuple[int, ...] = ()
    top: int = 0

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        return roots_only(sequences)

    def observe(self, observations: Many[Observation]) -> None:
        """There is nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing was kept."""


def make(options: Options, setup: Setup) -> Drafter:
    return NoDrafter()
