"""A dynamic tree behind one text, grown by a head in C: `host_growth` without Python between the levels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.native import choice
from forerun.core.noise import Purpose, row_key
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.native.growth import WIDEST, Root, TreeInC
from forerun.models.storage import Storage


class GrowthInC:
    """Of one head."""

    def __init__(self, head: FeatureHead) -> None:
        self.head = head
        self.known: dict[tuple[int, int], TreeInC] = {}

    def takes(self, spec: TreeSpec) -> bool:
        head = self.head
        fits = spec.dynamic and spec.width <= min(WIDEST, head.vocab_size) and choice.library() is not None
        return fits and head.amx is not None and head.entry() is not None

    def grow(
        self,
        spec: TreeSpec,
        sequence: Sequence,
        budget: Budget,
        logits: Tensor,
        state: Tensor,
        slots: NDArray[np.int64],
        storage: Storage,
        tau: float,
    ) -> DraftTree:
        """logits [1, Vd] and state [H] are the root's; `slots` those of the head's text and of the rows behind it."""
        depth = max(0, min(spec.depth, budget.depth, budget.nodes))
        raced = sequence.coupled and not sequence.params.greedy
        tree, keys = self._tree(spec), [0]
        if raced:
            at = sequence.position + 1 + torch.arange(depth)
            keys = row_key(torch.tensor(sequence.seed), at, Purpose.TOKEN).tolist()
        heat = sequence.params.temperature
        places, shares = choice.candidates(
            logits, tree.kept["ids"], spec.width, temperature=[heat], keys=keys[:1], raced=[raced], tau=tau
        )
        root = Root(sequence.tokens[-1], state, places[0], shares[0], keys, heat, raced)
        size = 1 + max(0, min(spec.size, budget.nodes))
        grown = tree.grow(root, slots, len(sequence.tokens) - 1, storage, size, depth, tau)
        return DraftTree.of_lists([grown], [sequence.position])

    def _tree(self, spec: TreeSpec) -> TreeInC:
        key = spec.width, spec.depth
        if key not in self.known:
            head, entry = self.head, self.head.entry()
            assert head.amx is not None
            assert entry is not None
            ids = torch.arange(head.vocab_size) if head.ids is None else head.ids
            self.known[key] = TreeInC(head.amx, entry, ids, *key)
        return self.known[key]
