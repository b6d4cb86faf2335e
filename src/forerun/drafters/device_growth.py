"""A dynamic tree grown on an accelerator in one piece: all passes of the head, the growing between them and the tree
itself are one graph, which the host launches and does not wait for.

It is `growing` for heads, with every shape known beforehand: a level has `width` rows for each text, whether they are
worth anything or not, and a tree as many levels as the specification has. What a text's budget forbids gets no slot and
no value. It serves requests whose law is a plain softmax: greedy ones, and seeded ones that cut nothing off.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.noise import Purpose, row_key, uniform
from forerun.core.sequence import Sequence
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels.attention import WORD, PackedRows
from forerun.models.batch import Batch
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.static.buffers import BLOCK, Bucket, Buffers, fill
from forerun.models.static.capture import Replayed
from forerun.models.storage import Storage
from forerun.trees.dynamic import Frontier, expand_and_rerank

TABLE = ("tokens", "positions", "depths", "nodes", "seeds", "raced")
"""What the host tells of each text: its root, how deep its tree may get and how many nodes it may have, its noise."""


def fits(spec: TreeSpec) -> bool:
    """Whether the rows below the root have their bits in one word of a mask."""
    return spec.dynamic and spec.width * (spec.depth - 1) <= WORD


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
        self, head: FeatureHead, storage: Storage, spec: TreeSpec, bucket: Bucket, raced: bool, tau: float, pool: Any
    ) -> None:
        """`bucket` is that of the rows that are read up to the roots; `raced` says whether any text has noise."""
        assert head.static is not None
        self.head, self.spec, self.raced, self.tau = head, spec, raced, tau
        self.rows = head.static.rows
        self.text = Buffers(bucket, head.device, head.feature_like)
        self.text.slots.fill_(-1)  # until a batch comes nothing is written
        texts = bucket.sequences
        self.table = torch.zeros(len(TABLE), texts, dtype=torch.int64, device=head.device)
        self.heat = torch.ones(texts, device=head.device)
        columns = head.vocab_size if head.ids is None else head.ids.shape[0]
        self.ids = torch.arange(columns, device=head.device) if head.ids is None else head.ids
        self.storage = weakref.ref(storage)
        self.run = Replayed(self._launch, head.static.graphs, pool, f"trees of {texts} texts")

    def grow(self, batch: Batch, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        """Reads the batch, the rows up to the roots with the states they bring, and grows a tree on each."""
        fill(self.text, batch)
        rows = [
            [
                *(s.tokens[-1], s.position, min(budget.depth, budget.nodes), budget.nodes),
                *(s.seed, int(s.coupled and not s.params.greedy)),
            ]
            for s, budget in zip(sequences, budgets, strict=True)
        ]
        count = len(rows)
        self.table[:, :count].copy_(to_device(rows, self.table.device).T)
        if self.raced:
            heats = [s.params.temperature or 1.0 for s in sequences]
            self.heat[:count].copy_(to_device(heats, self.heat.device, self.heat.dtype))
        tree = self.run()
        # Every table but those of numbers has a row for each text of the bucket.
        own: dict[str, Any] = {name: value[:count] for name, value in vars(tree).items() if isinstance(value, Tensor)}
        return replace(tree, **own)

    def _launch(self) -> DraftTree:
        storage = self.storage()
        assert storage is not None
        told = dict(zip(TABLE, self.table.unbind(), strict=True))
        spec, texts = self.spec, self.table.shape[1]
        width, depth = spec.width, spec.depth
        first = self.rows.run(self.text, storage)
        packed = self.text.packed
        lengths = packed.contexts + packed.tails  # of the texts, as the head reads them
        roots = first.features[1].index_select(0, self.text.wanted[:texts])
        made = self.head.next_states(roots)[:, None]  # [B, 1 + I, H] the root's first
        bits = torch.zeros_like(lengths)[:, None]  # [B, 1 + I] what each has above it, and itself, among the drafted
        grown = 1 + width + width * width * (depth - 1)
        places = torch.zeros(texts, grown, dtype=torch.int64, device=made.device)  # of grown nodes in `made`

        def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
            nonlocal made, bits
            level = frontier.depth
            logits = first.logits[:texts, None]
            if level:
                parents = places.gather(1, frontier.parents)  # [B, W]
                own = torch.arange(width, device=parents.device) + (level - 1) * width
                seen = bits.gather(1, parents) | (torch.ones_like(own) << own)
                states = made.gather(1, parents[:, :, None].expand(-1, -1, made.shape[2]))
                rows = self._level(frontier.tokens, states, seen, lengths, own, level, told["depths"])
                result = self.rows.run(rows, storage)
                made = torch.cat([made, self.head.next_states(result.features[1]).view(texts, width, -1)], 1)
                bits = torch.cat([bits, seen], 1)
                places.scatter_(1, frontier.nodes, (1 + own).expand(texts, -1))
                logits = result.logits.view(texts, width, -1)
            shares, columns = self._shares(logits, level, told).topk(width)
            shares = shares.masked_fill((level >= told["depths"])[:, None, None], -torch.inf)
            return self.ids[columns], shares

        trees = expand_and_rerank(told["tokens"], children, width=width, depth=depth, size=1 + spec.size)
        kept = torch.arange(1 + spec.size, device=made.device) <= told["nodes"][:, None]
        return DraftTree.build(
            trees.tokens,
            torch.where(kept, trees.parents, -1),
            told["positions"],
            Drawing.FIXED,
            max_depth=depth,
            width=width,
            check=False,
        )

    def _level(
        self, tokens: Tensor, states: Tensor, seen: Tensor, lengths: Tensor, own: Tensor, level: int, depths: Tensor
    ) -> Level:
        """Nodes [B, W] as rows behind the text; `own` are their numbers among the drafted ones."""
        texts, width = tokens.shape
        packed, device = self.text.packed, tokens.device
        at = lengths[:, None] + own
        block = packed.blocks.gather(1, (at // BLOCK).clamp_max(packed.blocks.shape[1] - 1))
        there = (packed.counts > 0) & (level < depths)
        slots = torch.where(there[:, None], block * BLOCK + at % BLOCK, -1)
        # Also rows that are computed for nothing, at the end of the context, are turned by some position.
        last = (lengths - 1 + level).clamp(0, self.head.context_length - 1)
        positions = last[:, None].expand(-1, width).reshape(-1).contiguous()
        # Rows of a text with neither slots nor depth left are computed for nothing, and see what is there.
        of_level = PackedRows(
            starts=torch.arange(texts, device=device) * width,
            counts=torch.where(there, width, 0),
            contexts=lengths,
            tails=torch.full_like(lengths, level * width),
            blocks=packed.blocks,
            mask=seen.reshape(-1, 1).contiguous(),
            positions=positions,
            max_rows=width,
            max_context=packed.max_context,
            block_size=BLOCK,
        )
        bucket = replace(self.text.bucket, rows=texts * width, tail=level * width, wanted=texts * width)
        wanted = torch.arange(texts * width, device=device)
        brought = states.reshape(texts * width, -1).contiguous()
        return Level(bucket, tokens.reshape(-1), positions, slots.reshape(-1), wanted, brought, of_level)

    def _shares(self, logits: Tensor, level: int, told: dict[str, Tensor]) -> Tensor:
        """The logarithms of the candidates' shares, [B, F, Vd]: of q, or of (q/E)^(1/tau) where the text has noise."""
        scores = logits.float().nan_to_num()
        if self.raced:
            keys = row_key(told["seeds"], told["positions"] + 1 + level, Purpose.TOKEN)
            u = uniform(keys[:, None], self.ids)
            noise = -(-(u + 2.0**-53).log()).log().to(scores.dtype)  # [B, Vd], shared by the nodes of a depth
            raced = (scores / self.heat[:, None, None] + noise[:, None]) / self.tau
            scores = torch.where((told["raced"] > 0)[:, None, None], raced, scores)
        return scores.log_softmax(-1)


def among(tree: DraftTree, members: Many[int], sequences: Many[Sequence]) -> DraftTree:
    """Trees of some sequences as those of all: the others have their roots alone."""
    device = tree.tokens.device
    rows = to_device(members, device)
    roots = to_device([[sequence.tokens[-1], sequence.position] for sequence in sequences], device)
    tokens = roots.new_zeros(len(sequences), tree.size)
    tokens[:, 0] = roots[:, 0]
    parents = torch.full_like(tokens, -1)
    return DraftTree.build(
        tokens.index_copy_(0, rows, tree.tokens),
        parents.index_copy_(0, rows, tree.parents),
        roots[:, 1],
        tree.drawing,
        max_depth=tree.max_depth,
        width=tree.width,
        check=False,
    )


class Growths:
    """What was captured for the cache of one head."""

    def __init__(self, head: FeatureHead, storage: Storage) -> None:
        self.head, self.storage = head, storage
        self.known: dict[tuple[TreeSpec, Bucket, bool, float], DeviceGrowth] = {}
        self.pool: Any = None

    def take(self, spec: TreeSpec, batch: Batch) -> bool:
        static = self.head.static
        return fits(spec) and spec.width <= self.head.vocab_size and static is not None and static.takes(batch)

    def grow(
        self, spec: TreeSpec, batch: Batch, sequences: Many[Sequence], budgets: Many[Budget], tau: float
    ) -> DraftTree:
        static = self.head.static
        assert static is not None
        raced = any(sequence.coupled and not sequence.params.greedy for sequence in sequences)
        key = spec, Bucket.of(batch, (1,), None), raced, tau
        if key not in self.known:
            if self.pool is None:
                self.pool = static.graphs.pool()
            self.known[key] = DeviceGrowth(self.head, self.storage, spec, key[1], raced, tau, self.pool)
        return self.known[key].grow(batch, sequences, budgets)
