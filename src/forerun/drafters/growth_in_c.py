"""A dynamic tree behind one text, grown by a head in C: `host_growth` without Python between the levels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.native import choice
from forerun.core.noise import Purpose, key_at
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.host_growth import dynamic_depth
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.native.growth import LONGEST, WIDEST, Race, Text, TreeInC
from forerun.models.storage import Storage

TOKENS = 3.0
"""A step brings about so many."""
HIGHEST_LEAST = 0.25
"""Of a head that is large beside its target no more is asked than this."""


def least_chance(head: FeatureHead) -> float:
    """How likely a text must be to get to a level for the level to be worth its pass. It may bring one more token. It
    takes as long as going by its weights, a step about as long as going by the target's, and that one brings a few."""
    assert head.in_c is not None
    return min(HIGHEST_LEAST, TOKENS * head.in_c.weights_time / head.target_time)


class GrowthInC:
    """Of one head. Its trees are those of `host_growth`, but that they end where going on would not pay, and that
    tokens far behind do not race."""

    def __init__(self, head: FeatureHead) -> None:
        self.head = head
        self.least = least_chance(head) if head.in_c is not None else 0.0
        self.usable = head.in_c is not None and head.entry() is not None and choice.library() is not None
        self.known: dict[tuple[int, int], TreeInC] = {}

    def takes(self, spec: TreeSpec, unread: int) -> bool:
        """Whether it grows such a tree behind a text of which so many rows are unread."""
        fits = spec.dynamic and spec.width <= min(WIDEST, self.head.vocab_size)
        return self.usable and fits and unread <= LONGEST

    def grow(
        self,
        spec: TreeSpec,
        sequence: Sequence,
        budget: Budget,
        states: Tensor,
        slots: NDArray[np.int64],
        storage: Storage,
        taus: Taus,
    ) -> DraftTree:
        """`states` [n, H] are what the rows of the text bring that the head has not read, the root's last; `slots` are
        those of the head's text and of the rows behind it."""
        depth = dynamic_depth(spec, budget)
        race, tau = None, taus.greedy
        if sequence.coupled and not sequence.params.greedy:
            first = sequence.position + 1
            keys = [key_at(sequence.seed, at, Purpose.TOKEN) for at in range(first, first + depth)]
            race, tau = Race(keys, sequence.params.temperature), taus.coupled
        text = Text(sequence.tokens[-states.shape[0] :], states, slots, len(sequence.tokens) - 1)
        size = 1 + max(0, min(spec.size, budget.nodes))
        tokens, parents, values = self._tree(spec).grow(text, race, storage, size, depth, tau, self.least)
        return DraftTree.of_lists([(tokens, parents)], [sequence.position], log_values=lambda: [values])

    def _tree(self, spec: TreeSpec) -> TreeInC:
        key = spec.width, spec.depth
        if key not in self.known:
            head, entry = self.head, self.head.entry()
            assert head.in_c is not None
            assert entry is not None
            ids = torch.arange(head.vocab_size) if head.ids is None else head.ids
            self.known[key] = TreeInC(head.in_c, entry, ids, *key)
        return self.known[key]
