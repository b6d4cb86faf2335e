"""Rounds on an accelerator: a tree is drafted, the target reads it, what it takes is taken over, and the next tree is
drafted on that, without a look at the host.

Everything a round tells the next is made where it is read: the rows that stay move to their place in the target's
cache, and what the head reads next, the new tokens with the target's states before them, goes into the buffers of its
next pass. The host learns what was taken when a round is over, while the next one runs.

It serves what `device_growth` serves, and takes as long as the device takes: four graphs a round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.device_growth import DeviceGrowth, Growths
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels.attention import mask_words
from forerun.kernels.step import move_rows
from forerun.kernels.walk import walk
from forerun.models.batch import Batch
from forerun.models.static.buffers import Bucket, slots_at
from forerun.models.static.capture import Replayed
from forerun.models.static.rows import Result
from forerun.models.static.static_pass import StaticPass, named
from forerun.models.storage import Storage

Choose = Callable[[Result, DraftTree], Tensor]
"""The tokens [n] that the target takes behind the first n rows of its pass, which are the nodes of the first trees."""


class Rounds:
    """For some number of texts and one kind of tree."""

    def __init__(self, growth: DeviceGrowth, target: StaticPass, storage: Storage, blocks: int, pool: object) -> None:
        """`blocks`: what a text may have in the target's cache, `storage`."""
        head, spec = growth.head, growth.spec
        assert storage.whole is not None
        assert head.static is not None
        self.growth, self.head, self.spec = growth, head, spec
        self.storage = weakref.ref(storage)
        self.ids = target.rows.model.ids
        self.texts = texts = growth.text.bucket.sequences
        self.nodes, self.steps = 1 + spec.size, 1 + spec.depth
        bucket = Bucket.regular(texts, self.nodes, blocks, head.taps, all_wanted=True)
        self.target = target.pass_of(bucket, storage)
        device = head.device
        self.each_node = torch.arange(self.nodes, device=device)
        self.each_step = torch.arange(self.steps, device=device)
        text = torch.arange(texts, device=device)[:, None]
        self.first_nodes, self.first_steps = text * self.nodes, text * self.steps
        self.chosen = torch.zeros(texts, self.nodes, dtype=torch.int64, device=device)
        chain = torch.ones(self.steps, self.steps, dtype=torch.bool, device=device).tril()
        self.chain = mask_words(chain).repeat(texts, 1)
        # Captured while there are no texts: nothing is written then.
        self._bring_roots([], [])
        self.growth.text.packed.counts.zero_()
        self.tree = growth.run()
        graphs, what = head.static.graphs, f"rounds of {texts} texts"
        self._lay = Replayed(self._lay_rows, graphs, pool, what)
        self._lay()
        self.result = self.target.run()
        # A graph reads where something lay when it was captured: what the target's pass gives must stay there.
        self._take_over: Callable[[], Tensor] = self._settle
        if self.target.fixed:
            self._take_over = Replayed(self._settle, graphs, pool, what)

    def begin(
        self,
        batch: Batch,
        sequences: Many[Sequence],
        budgets: Many[Budget],
        contexts: Many[int],
        blocks: Many[list[int]],
    ) -> None:
        """`batch` brings what the head has not read yet; contexts and blocks are those in the target's cache."""
        self.growth.bring(batch, sequences, budgets)
        self._bring_roots(contexts, blocks)

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

    def waiting(self, texts: int) -> Tensor:
        """[B · S, H] what the head would read next, S places for each of the first texts."""
        features = self.growth.text.features
        assert features is not None
        return features[: texts * self.steps].clone()

    def _bring_roots(self, contexts: Many[int], blocks: Many[list[int]]) -> None:
        """Where the rows of the target's passes lie. What they are is laid there before each."""
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
        kept = (self.first_nodes + walked.nodes.clamp_min(0)).view(-1)
        self._bring_states(
            self.head.fuse({tap: self.result.features[tap].index_select(0, kept) for tap in self.head.taps})
        )
        self._bring_text(walked.tokens, walked.counts)
        return torch.cat([walked.nodes, walked.tokens, walked.counts[:, None], walked.refused[:, None]], 1)

    def _bring_states(self, states: Tensor) -> None:
        features = self.growth.text.features
        assert features is not None
        features[: states.shape[0]].copy_(states)

    def _bring_text(self, tokens: Tensor, counts: Tensor) -> None:
        """The rows that the head reads next: tokens [B, S], of which the first `counts` [B] are there."""
        text, rows = self.growth.text, self.chain.shape[0]
        packed = text.packed
        packed.contexts.add_(packed.tails)
        packed.tails.copy_(counts)
        packed.counts.copy_(counts)
        packed.starts.copy_(self.first_steps[:, 0])
        places = packed.contexts[:, None] + self.each_step
        text.tokens[:rows].copy_(tokens.clamp_min(0).view(-1))
        text.positions[:rows].copy_(places.clamp(0, self.head.context_length - 1).view(-1))
        text.slots[:rows].copy_(slots_at(packed, places.masked_fill(self.each_step >= counts[:, None], -1)).view(-1))
        text.mask[:rows, : self.chain.shape[1]].copy_(self.chain)
        last = (counts - 1).clamp_min(0)[:, None]
        text.wanted[: self.texts].copy_((self.first_steps + last)[:, 0])
        told = self.growth.told
        told["tokens"].copy_(tokens.clamp_min(0).gather(1, last)[:, 0])
        told["positions"].add_(counts)


class RoundsOf:
    """What was captured for one target and one head, in their two caches."""

    def __init__(self, growths: Growths, target: StaticPass, storage: Storage) -> None:
        self.growths, self.target, self.storage = growths, target, storage
        self.known: dict[tuple[DeviceGrowth, int], Rounds] = {}

    def of(self, spec: TreeSpec, texts: int, blocks: tuple[int, int], raced: bool, tau: float) -> Rounds:
        """For texts that have so many `blocks` at most in the target's cache and in the head's."""
        bucket = Bucket.regular(texts, 1 + spec.depth, blocks[1], (1,), all_wanted=False)
        growth = self.growths.of(spec, bucket, raced, tau)
        key = growth, Bucket.regular(texts, 1 + spec.size, blocks[0], (), all_wanted=True).blocks
        if key not in self.known:
            self.known[key] = Rounds(growth, self.target, self.storage, key[1], self.growths.pool)
        return self.known[key]
