"""Rounds on an accelerator: a tree is drafted, the target reads it, what it takes is taken over, and the next tree is
drafted on that, without a look at the host.

Everything a round tells the next is made where it is read: the rows that stay move to their place in the target's
cache, and what the drafter reads next, the new tokens or the target's states, goes into its own buffers. The host
learns what was taken when a round is over, while the next one runs.

A round takes as long as the device takes: four graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.core.tree import DraftTree
from forerun.drafters.told import Told
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels.attention import mask_words
from forerun.kernels.step import move_rows
from forerun.kernels.walk import Walked, walk
from forerun.models.static.buffers import Bucket, slots_at
from forerun.models.static.capture import Graphs, Replayed
from forerun.models.static.rows import Result
from forerun.models.static.static_pass import StaticPass, named
from forerun.models.storage import Storage

Choose = Callable[[Result, DraftTree], Tensor]
"""The tokens [n] that the target takes behind the first n rows of its pass, which are the nodes of the first trees."""


class Growth(Protocol):
    """What drafts the trees of a round, for some number of texts and one kind of tree. Before the first one it is
    brought what it needs."""

    @property
    def spec(self) -> TreeSpec: ...
    @property
    def texts(self) -> int: ...
    @property
    def told(self) -> Told: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose states it reads."""
        ...

    @property
    def graphs(self) -> Graphs: ...
    @property
    def pool(self) -> Any: ...

    @property
    def run(self) -> Callable[[], DraftTree]: ...

    @property
    def fixed(self) -> bool:
        """Whether the trees of all runs lie in the same place."""
        ...

    def rest(self) -> None:
        """There are no texts, so nothing is to be written."""
        ...

    def go_on(self, features: Mapping[int, Tensor], walked: Walked) -> None:
        """Behind what was taken. Features are those of the target's pass: a row for each node of each tree."""
        ...


class Rounds:
    """In the target's cache, `storage`."""

    def __init__(self, growth: Growth, target: StaticPass, storage: Storage, blocks: int) -> None:
        """`blocks`: what a text may have in the cache."""
        spec = growth.spec
        assert storage.whole is not None
        self.growth, self.spec = growth, spec
        self.storage = weakref.ref(storage)
        self.ids = target.rows.model.ids
        self.texts = texts = growth.texts
        self.nodes = 1 + spec.size
        bucket = Bucket.regular(texts, self.nodes, blocks, growth.layers, all_wanted=True)
        self.target = target.pass_of(bucket, storage)
        self.device = device = self.target.buffers.flat.device
        self.each_node = torch.arange(self.nodes, device=device)
        self.each_step = torch.arange(1 + spec.depth, device=device)
        self.chosen = torch.zeros(texts, self.nodes, dtype=torch.int64, device=device)
        # Captured while there are no texts: nothing is written then.
        self.begin([], [])
        growth.rest()
        self.tree = growth.run()
        graphs, pool, what = growth.graphs, growth.pool, f"rounds of {texts} texts"
        # A graph reads where something lay when it was captured: trees, and what the target's pass gives, must stay.
        self._lay: Callable[[], bool] = self._lay_rows
        if growth.fixed:
            self._lay = Replayed(self._lay_rows, graphs, pool, what)
        self._lay()
        self.result = self.target.run()
        self._take_over: Callable[[], Tensor] = self._settle
        if growth.fixed and self.target.fixed:
            self._take_over = Replayed(self._settle, graphs, pool, what)

    def begin(self, contexts: Many[int], blocks: Many[list[int]]) -> None:
        """Where the rows of the target's passes lie, in its cache. What they are is laid there before each."""
        buffers = self.target.buffers
        numbers, count = buffers.stage.place(), len(contexts)
        rows = self.texts * self.nodes
        numbers["slots"][:] = -1
        numbers["positions"][:] = numbers["contexts"][:] = numbers["counts"][:] = numbers["wanted"][:] = 0
        numbers["wanted"][:rows] = np.arange(rows)
        numbers["starts"][:] = np.arange(self.texts) * self.nodes
        numbers["tails"][:] = numbers["counts"][:count] = self.nodes
        numbers["contexts"][:count] = contexts
        for table, own in zip(numbers["blocks"], blocks, strict=False):
            table[: len(own)] = own
        buffers.stage.send(buffers.flat)

    def draft(self) -> None:
        self.tree = self.growth.run()

    def check(self) -> None:
        self._lay()
        self.result = self.target.run()

    def settle(self, choose: Choose | None) -> Tensor:
        """[B, 2 · S + 2]: the nodes on the way of each text, what the target took behind them (−1 where its logits are
        broken), how many there are, and whether drafts were refused at the last. By default it takes the likeliest."""
        if choose is None:
            taken = named(self.result.likeliest[: self.chosen.numel()], self.ids)
        else:
            taken = choose(self.result, self.tree)
        self.chosen.view(-1)[: taken.shape[0]].copy_(taken)
        return self._take_over()

    def _lay_rows(self) -> bool:
        """The nodes of all trees as rows."""
        buffers, tree = self.target.buffers, self.tree
        packed, rows = buffers.packed, self.texts * self.nodes
        places = packed.contexts[:, None] + self.each_node
        buffers.tokens[:rows].copy_(tree.tokens.view(-1))
        buffers.positions[:rows].copy_(tree.positions.view(-1))
        buffers.slots[:rows].copy_(slots_at(packed, places.masked_fill(packed.counts[:, None] == 0, -1)).view(-1))
        words = mask_words(tree.ancestors).flatten(0, 1)
        buffers.mask[:rows, : words.shape[1]].copy_(words)
        return True

    def _settle(self) -> Tensor:
        storage = self.storage()
        assert storage is not None
        assert storage.whole is not None
        packed, tree = self.target.buffers.packed, self.tree
        walked = walk(tree.tokens, tree.parents, self.chosen, packed.counts, depth=self.spec.depth)
        moves = walked.nodes > self.each_step
        sources, goals = (
            slots_at(packed, (packed.contexts[:, None] + place).masked_fill(~moves, -1))
            for place in (walked.nodes, self.each_step)
        )
        move_rows(storage.whole, sources, goals)
        packed.contexts.add_(walked.counts)
        self.growth.go_on(self.result.features, walked)
        return torch.cat([walked.nodes, walked.tokens, walked.counts[:, None], walked.refused[:, None]], 1)


class RoundsOf:
    """What was captured for one target and its cache."""

    def __init__(self, target: StaticPass, storage: Storage) -> None:
        self.target, self.storage = target, storage
        self.known: dict[tuple[Growth, int], Rounds] = {}

    def of(self, growth: Growth, blocks: int) -> Rounds:
        """For texts that have so many `blocks` at most in the target's cache."""
        bucket = Bucket.regular(growth.texts, 1 + growth.spec.size, blocks, (), all_wanted=True)
        key = growth, bucket.blocks
        if key not in self.known:
            self.known[key] = Rounds(growth, self.target, self.storage, bucket.blocks)
        return self.known[key]
