"""Drafts nothing: plain decoding, and the measure of all others, since it runs through the same engine."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup


@dataclass(frozen=True)
class Options:
    """It has none."""


def roots_only(sequences: Many[Sequence], device: torch.device | str) -> DraftTree:
    """Trees of one node each. Put together by hand: there is nothing to check or to compute."""
    roots = [[sequence.tokens[-1], sequence.position] for sequence in sequences]
    columns = torch.tensor(roots, dtype=torch.int64, device=device).view(-1, 2)
    tokens, positions = columns[:, :1], columns[:, 1:]
    batch = len(sequences)
    return DraftTree(
        tokens=tokens,
        parents=torch.full_like(tokens, -1),
        depths=torch.zeros_like(tokens),
        positions=positions,
        ancestors=torch.ones(batch, 1, 1, dtype=torch.bool, device=device),
        drawing=Drawing.FIXED,
        children=tokens.new_empty(batch, 1, 0),
        q=None,
        q_rows=None,
        max_depth=0,
        max_draws=0,
    )


class NoDrafter:
    drawing = Drawing.FIXED
    branches = False
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        return roots_only(sequences, self.device)

    def observe(self, observations: Many[Observation]) -> None:
        """There is nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing was kept."""


def make(options: Options, setup: Setup) -> Drafter:
    return NoDrafter(setup.target.device)
