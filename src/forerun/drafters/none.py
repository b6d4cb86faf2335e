"""Drafts nothing: plain decoding, and the measure of all others, since it runs through the same engine."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup


@dataclass(frozen=True)
class Options:
    """It has none."""


def roots_only(sequences: Many[Sequence]) -> DraftTree:
    """Trees of one node each."""
    roots = [([sequence.tokens[-1]], [-1]) for sequence in sequences]
    return DraftTree.of_lists(roots, [sequence.position for sequence in sequences])


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
