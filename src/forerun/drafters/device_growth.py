"""A dynamic tree grown on an accelerator in one piece: all passes of the head, the growing between them and the tree
itself are one graph, which the host launches and does not wait for.

It is `growing` for heads, with every shape known beforehand: a level has `width` rows for each text, whether they are
worth anything or not, and a tree as many levels as the specification has. What a text's budget forbids gets no slot and
no value. It serves requests whose law is a plain softmax: greedy ones, and seeded ones that cut nothing off.

Between two passes there are a handful of launches (`kernels/growth.py`): a head's pass is so short that they count.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.noise import Purpose, gumbel, row_key
from forerun.core.sequence import Sequence
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.told import Told, races
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels.attention import WORD, PackedRows, mask_words
from forerun.kernels.growth import (
    Chosen,
    Nodes,
    Race,
    Texts,
    best_children,
    grow_level,
    lay_out_on_device,
    noise_on_device,
)
from forerun.kernels.kernel import Kernel
from forerun.kernels.walk import Walked
from forerun.models.batch import Batch
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.static.buffers import Bucket, Buffers, fill, slots_at
from forerun.models.static.capture import Replayed
from forerun.models.static.rows import scores
from forerun.models.storage import Storage
from forerun.trees.dynamic import rerank


def fits(spec: TreeSpec) -> bool:
    """Whether the rows below the root have their bits in one word of a mask."""
    return spec.dynamic and spec.width * (spec.depth - 1) <= WORD


def _plain_noise(seeds: Tensor, positions: Tensor, ids: Tensor, ahead_of: int) -> Tensor:
    """[B, V] what the target's race of the tokens `ids` [V] adds to their scores, at `positions` [B] + `ahead_of`."""
    return gumbel(row_key(seeds, positions + ahead_of, Purpose.TOKEN)[:, None], ids)


def _plain_tree(starts: Tensor, limits: Tensor, grown: Nodes, spec: TreeSpec) -> DraftTree:
    """Of all that was grown on roots at `starts` [B] what a tree keeps; `limits` [B] say how many nodes it may have."""
    trees = rerank(grown.tokens, grown.parents, grown.values, 1 + spec.size)
    kept = torch.arange(1 + spec.size, device=starts.device) <= limits[:, None]
    return DraftTree.build(
        trees.tokens,
        torch.where(kept, trees.parents, -1),
        starts,
        Drawing.FIXED,
        max_depth=spec.depth,
        width=spec.width,
        check=False,
    )


def _tree_on_device(starts: Tensor, limits: Tensor, grown: Nodes, spec: TreeSpec) -> DraftTree:
    tables = lay_out_on_device(grown, limits, starts, size=1 + spec.size, width=spec.width, depth=spec.depth)
    return DraftTree(
        **vars(tables), drawing=Drawing.FIXED, q=None, q_rows=None, max_depth=spec.depth, max_draws=spec.size
    )


token_noise = Kernel("token_noise", noise_on_device, _plain_noise)
best_tree = Kernel("best_tree", _tree_on_device, _plain_tree)


@dataclass(frozen=True)
class Level:
    """The rows of one level, as a pass takes them."""

    bucket: Bucket
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    features: Tensor
    packed: PackedRows


class DeviceGrowth:
    """The trees of one bucket of texts."""

    def __init__(
        self, head: FeatureHead, storage: Storage, spec: TreeSpec, bucket: Bucket, raced: bool, taus: Taus, pool: Any
    ) -> None:
        """`bucket` is that of the rows that are read up to the roots; `raced` says whether any text has noise."""
        assert head.static is not None
        self.head, self.spec, self.raced, self.taus = head, spec, raced, taus
        self.rows = head.static.rows
        self.text = Buffers(bucket, head.device, head.feature_like)
        self.text.slots.fill_(-1)  # until a batch comes nothing is written
        self.texts = texts = bucket.sequences
        self.layers, self.graphs, self.pool = head.taps, head.static.graphs, pool
        self.told = Told(texts, head.device)
        columns = head.vocab_size if head.ids is None else head.ids.shape[0]
        self.ids = torch.arange(columns, device=head.device) if head.ids is None else head.ids.contiguous()
        self.each = torch.arange(texts * spec.width, device=head.device)
        self.starts = torch.arange(texts, device=head.device) * spec.width
        self.tails = [torch.full_like(self.starts, level * spec.width) for level in range(spec.depth)]
        self.storage = weakref.ref(storage)
        self.each_step = torch.arange(1 + spec.depth, device=head.device)
        text = torch.arange(texts, device=head.device)[:, None]
        self.first_nodes, self.first_steps = text * (1 + spec.size), text * (1 + spec.depth)
        chain = torch.ones(1 + spec.depth, 1 + spec.depth, dtype=torch.bool, device=head.device).tril()
        self.chain = mask_words(chain).repeat(texts, 1)
        self.grown: Nodes | None = None
        self.run = Replayed(self._launch, self.graphs, pool, f"trees of {texts} texts")

    def grow(self, batch: Batch, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        """Reads the batch, the rows up to the roots with the states they bring, and grows a tree on each."""
        self.bring(batch, sequences, budgets)
        tree = self.run()
        # Every table but those of numbers has a row for each text of the bucket.
        count = len(sequences)
        own: dict[str, Any] = {name: value[:count] for name, value in vars(tree).items() if isinstance(value, Tensor)}
        return replace(tree, **own, log_values=lambda: self._log_values(count))

    def _log_values(self, count: int) -> list[list[float]]:
        """Of the trees that were grown last: nodes are in the order of their values."""
        assert self.grown is not None
        best: Tensor = self.grown.values[:count].sort(dim=1, descending=True, stable=True).values
        return best[:, : 1 + self.spec.size].tolist()

    def bring(self, batch: Batch, sequences: Many[Sequence], budgets: Many[Budget]) -> None:
        """What `run` reads."""
        fill(self.text, batch)
        self.told.bring(sequences, budgets)

    @property
    def fixed(self) -> bool:
        return self.run.graph is not None

    def rest(self) -> None:
        """Until a batch comes nothing is written."""
        self.text.packed.counts.zero_()

    def go_on(self, features: Mapping[int, Tensor], walked: Walked) -> None:
        """What is read next are the tokens that were taken, with the target's states before them. There is a row for
        each node of the longest way."""
        text, steps, rows = self.text, self.each_step, self.chain.shape[0]
        packed = text.packed
        kept = (self.first_nodes + walked.nodes.clamp_min(0)).view(-1)
        states = self.head.fuse({layer: features[layer].index_select(0, kept) for layer in self.layers})
        assert text.features is not None
        text.features[:rows].copy_(states)
        packed.contexts.add_(packed.tails)
        packed.tails.copy_(walked.counts)
        packed.counts.copy_(walked.counts)
        packed.starts.copy_(self.first_steps[:, 0])
        places = packed.contexts[:, None] + steps
        written = places.masked_fill(steps >= walked.counts[:, None], -1)
        text.tokens[:rows].copy_(walked.tokens.clamp_min(0).view(-1))
        text.positions[:rows].copy_(places.clamp(0, self.head.context_length - 1).view(-1))
        text.slots[:rows].copy_(slots_at(packed, written).view(-1))
        text.mask[:rows, : self.chain.shape[1]].copy_(self.chain)
        text.wanted[: self.texts].copy_(self.first_steps[:, 0] + (walked.counts - 1).clamp_min(0))
        self.told.go_on(walked)

    def waiting(self, texts: int) -> Tensor:
        """[B · S, H] what would be read next, S places for each of the first texts."""
        assert self.text.features is not None
        return self.text.features[: texts * self.each_step.shape[0]].clone()

    def _launch(self) -> DraftTree:
        storage = self.storage()
        assert storage is not None
        told, spec, texts = self.told, self.spec, self.texts
        rows = self.text.wanted[:texts]
        on = Texts(told["tokens"], rows, told["depths"], self.text.packed)
        self.grown = grown = Nodes.room(texts, spec.width, spec.depth, self.head.device)
        read, made = self.rows.states(self.text, storage)
        read = read.index_select(0, rows)
        chosen: Chosen | None = None
        for level in range(spec.depth):
            if chosen is not None:
                brought = self.head.next_states(made[1].index_select(0, chosen.origins))
                read, made = self.rows.states(self._rows_of(chosen, brought, level), storage)
            logits = scores(self.head.head, read).float()
            best = best_children(logits, spec.width, self._race(level), self.taus.greedy)
            shares, columns = (each.view(texts, -1, spec.width) for each in best)
            chosen = grow_level(
                shares,
                columns,
                self.ids,
                on,
                grown,
                chosen,
                level=level,
                context_length=self.head.context_length,
                last=level == spec.depth - 1,
            )
        return best_tree(told["positions"], told["nodes"], grown, spec)

    def _rows_of(self, chosen: Chosen, brought: Tensor, level: int) -> Level:
        """Rows of a text with neither slots nor depth left are computed for nothing, and see what is there."""
        packed = replace(
            self.text.packed,
            starts=self.starts,
            counts=chosen.counts,
            contexts=chosen.contexts,
            tails=self.tails[level],
            mask=chosen.mask,
            positions=chosen.positions,
            max_rows=self.spec.width,
        )
        rows = self.each.shape[0]
        bucket = replace(self.text.bucket, rows=rows, tail=level * self.spec.width, wanted=rows)
        return Level(bucket, chosen.tokens, chosen.positions, chosen.slots, self.each, brought, packed)

    def _race(self, level: int) -> Race | None:
        """Candidates are ranked by q, or by q/E where the text has noise; its nodes of a depth share it."""
        if not self.raced:
            return None
        noise = token_noise(self.told["seeds"], self.told["positions"], self.ids, 1 + level)
        return Race(noise, self.told.heat, self.told["raced"], self.taus.coupled)


def among(tree: DraftTree, members: Many[int], sequences: Many[Sequence]) -> DraftTree:
    """Trees of some sequences as those of all: the others have their roots alone."""
    device = tree.tokens.device
    rows = to_device(members, device)
    roots = to_device([[sequence.tokens[-1], sequence.position] for sequence in sequences], device)
    tokens = roots.new_zeros(len(sequences), tree.size)
    tokens[:, 0] = roots[:, 0]
    parents = torch.full_like(tokens, -1)

    def log_values() -> list[Many[float] | None]:
        assert tree.log_values is not None
        told = dict(zip(members, tree.log_values(), strict=True))
        return [told.get(b) for b in range(len(sequences))]

    return DraftTree.build(
        tokens.index_copy_(0, rows, tree.tokens),
        parents.index_copy_(0, rows, tree.parents),
        roots[:, 1],
        tree.drawing,
        max_depth=tree.max_depth,
        width=tree.width,
        check=False,
        log_values=None if tree.log_values is None else log_values,
    )


class Growths:
    """What was captured for the cache of one head."""

    def __init__(self, head: FeatureHead, storage: Storage) -> None:
        self.head, self.storage = head, storage
        self.known: dict[tuple[TreeSpec, Bucket, bool, Taus], DeviceGrowth] = {}
        self.pool: Any = None

    def take(self, spec: TreeSpec, batch: Batch) -> bool:
        static = self.head.static
        return fits(spec) and spec.width <= self.head.vocab_size and static is not None and static.takes(batch)

    def grow(
        self, spec: TreeSpec, batch: Batch, sequences: Many[Sequence], budgets: Many[Budget], taus: Taus
    ) -> DraftTree:
        return self.of(spec, Bucket.of(batch, (1,), None), races(sequences), taus).grow(batch, sequences, budgets)

    def of(self, spec: TreeSpec, bucket: Bucket, raced: bool, taus: Taus) -> DeviceGrowth:
        static = self.head.static
        assert static is not None
        key = spec, bucket, raced, taus
        if key not in self.known:
            if self.pool is None:
                self.pool = static.graphs.pool()
            self.known[key] = DeviceGrowth(self.head, self.storage, spec, bucket, raced, taus, self.pool)
        return self.known[key]
