"""Passes of a model on an accelerator: each bucket is captured when it is met again, and replayed. A kernel that cannot
be built leaves the model to its plain pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.core.largest import largest
from forerun.kernels.attention import tree_attention
from forerun.models.batch import Batch, TextEnds
from forerun.models.static.buffers import BLOCK, MOST_AHEAD, Bucket, Buffers, advance, fill, fill_ends
from forerun.models.static.capture import Graphs, Replayed
from forerun.models.static.rows import Result, Rows
from forerun.models.storage import Storage
from forerun.models.target import Output, Written

if TYPE_CHECKING:
    from forerun.models.transformer import Transformer

CAPTURED_ROWS = 4096
"""With more, the device takes longer for a pass than the host for its launches, and capturing gains nothing."""
PATIENCE = 3
"""When so many batches of a bucket have come it is captured, which takes as long as several passes: of prompts some
shapes come once."""
LEAST_LAYERS = 3
"""With fewer the host launches a pass about as fast as a graph, and capturing gains nothing."""
Choose = Callable[[Tensor, int], Tensor]
"""Tokens [S] from logits [S, V], at a number of steps from the start."""


class StaticPass:
    def __init__(self, model: Transformer) -> None:
        self.rows = Rows(model)
        self.device = model.device
        self.graphs = Graphs(self.device)
        self.patience = PATIENCE if len(model.config.layers) >= LEAST_LAYERS else None
        self.captured: dict[int, Captures] = {}  # by the identity of the cache, as long as there is one

    @property
    def usable(self) -> bool:
        """Without its kernels the plain pass is the faster one."""
        return tree_attention.broken is None or self.device.type != "cuda"

    def takes(self, batch: Batch) -> bool:
        """Whether this pass can run the batch; the plain one runs any."""
        if not self.usable:
            return False
        if batch.texts:
            return all(text.block_size == BLOCK for text in batch.texts)
        return all(segment.blocks is not None for segment in batch.given)

    def forward(self, batch: Batch, storage: Storage, layers: Sequence[int], only: Sequence[int] | None) -> Output:
        """What it returns holds until the next pass of the model."""
        captured = self.pass_of(Bucket.of(batch, layers, only), storage, self.patience)
        fill(captured.buffers, batch)
        result = captured.run()
        wanted = sum(each.logits for each in batch.brought)
        features = {layer: states[: batch.rows] for layer, states in result.features.items()}
        return Output(result.logits[:wanted], features, result.likeliest[:wanted])

    def write(
        self,
        ends: TextEnds,
        storage: Storage,
        count: int,
        choose: Choose | None,
        layers: Sequence[int],
        top: int,
        only: Sequence[int] | None,
    ) -> Written:
        """The next tokens: the likeliest, or what `choose` makes of the logits. The host launches passes and looks at
        nothing."""
        assert count <= MOST_AHEAD
        texts = len(ends.positions)
        bucket = Bucket.of_ends(ends, "likeliest" if choose is None else "chosen", layers, only)
        captured = self.pass_of(bucket, storage)
        buffers = captured.buffers
        fill_ends(buffers, ends)
        buffers.step.zero_()
        seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        likely: list[Tensor] = []
        for step in range(count):
            result = captured.run()
            for layer, states in seen.items():
                states.append(result.features[layer][:texts].clone())
            if top:
                likely.append(named(largest(result.logits[:texts], top)[1], self.rows.model.ids))
            if choose is not None:
                tokens = result.likeliest.clone()
                chosen = choose(result.logits[:texts], step)
                tokens[:texts] = torch.where(tokens[:texts] < 0, -1, chosen)
                advance(buffers, tokens)
        features = {layer: torch.stack(states, 1).flatten(0, 1) for layer, states in seen.items()}
        return Written(buffers.written[:count, :texts], features, torch.stack(likely, 1) if likely else None)

    def pass_of(self, bucket: Bucket, storage: Storage, patience: int | None = 0) -> Captured:
        """The pass over the rows that are in the buffers of a bucket; captured at once, or when it is called for the
        `patience`-th time, or never where that is None."""
        own = self.captured.get(id(storage))
        if own is None:
            own = self.captured[id(storage)] = Captures(self.graphs)
            weakref.finalize(storage, self.captured.pop, id(storage), None)
        if bucket not in own.buckets:
            own.buckets[bucket] = Captured(self, bucket, storage, own.pool, patience)
        elif patience == 0:
            own.buckets[bucket].capture()
        return own.buckets[bucket]


class Captures:
    """What was captured for one cache: graphs name its memory, and go when it goes."""

    def __init__(self, graphs: Graphs) -> None:
        self.pool = graphs.pool()
        self.buckets: dict[Bucket, Captured] = {}


class Captured:
    """The buffers of a bucket, and the pass that reads them."""

    def __init__(self, owner: StaticPass, bucket: Bucket, storage: Storage, pool: Any, patience: int | None) -> None:
        rows = owner.rows
        self.buffers = buffers = Buffers(bucket, owner.device, rows.model.feature_like)
        buffers.slots.fill_(-1)  # until a batch comes nothing is written
        kept = weakref.ref(storage)  # a graph must not keep the cache that it goes with

        def launch() -> Result:
            storage = kept()
            assert storage is not None
            result = rows.run(buffers, storage)
            if bucket.feeds == "likeliest":
                advance(buffers, named(result.likeliest, rows.model.ids))
            return result

        self.run: Callable[[], Result] = launch
        self._replayed = partial(
            Replayed, launch, owner.graphs, pool, f"passes of up to {bucket.rows} rows of {bucket.sequences} texts"
        )
        if patience is not None and bucket.rows <= CAPTURED_ROWS:
            self.run = self._replayed(patience)

    @property
    def fixed(self) -> bool:
        """Whether what it gives always lies in the same place."""
        return isinstance(self.run, Replayed) and self.run.graph is not None

    def capture(self) -> None:
        """If it is not yet and can be. What the buffers hold is lost then."""
        if self.fixed or self.buffers.bucket.rows > CAPTURED_ROWS:
            return
        self.buffers.slots.fill_(-1)
        if isinstance(self.run, Replayed):
            self.run.capture()
        else:
            self.run = self._replayed()


def named(columns: Tensor, ids: Tensor | None) -> Tensor:
    """The tokens of columns of the logits; -1 stays."""
    return columns if ids is None else torch.where(columns < 0, columns, ids[columns.clamp_min(0)])
