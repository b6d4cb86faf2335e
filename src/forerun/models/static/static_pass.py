"""Passes of a model on an accelerator: each bucket is captured as a CUDA graph when it is first met, and replayed.

Capturing takes a moment, and the very first time the kernels are built, which takes seconds; both are told to
`listeners`. A kernel that cannot be built leaves the model to its plain pass; a graph that cannot be captured leaves
the same launches to the host.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.kernels.attention import tree_attention
from forerun.models.batch import Batch, TextEnds
from forerun.models.static.buffers import BLOCK, MOST_AHEAD, Bucket, Buffers, advance, fill, fill_ends
from forerun.models.static.rows import Result, Rows
from forerun.models.storage import Storage
from forerun.models.target import Output

if TYPE_CHECKING:
    from forerun.models.transformer import Transformer

log = logging.getLogger(__name__)

Choose = Callable[[Tensor, int], Tensor]
"""Tokens [S] from logits [S, V], at a number of steps from the start."""

listeners: list[Callable[[str], None]] = []
"""Called with a line about anything that makes the user wait."""


class StaticPass:
    def __init__(self, model: Transformer) -> None:
        self.rows = Rows(model)
        self.device = model.device
        self.graphs = self.device.type == "cuda"
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
        captured = self._captured(Bucket.of(batch, layers, only), storage)
        fill(captured.buffers, batch)
        result = captured.run(storage)
        wanted = sum(each.logits for each in batch.brought)
        features = {layer: states[: batch.rows] for layer, states in result.features.items()}
        return Output(result.logits[:wanted], features, result.likeliest[:wanted])

    def write(
        self, ends: TextEnds, storage: Storage, count: int, choose: Choose | None, only: Sequence[int] | None
    ) -> Tensor:
        """[count, S] the next tokens: the likeliest, or what `choose` makes of the logits. The host launches passes and
        looks at nothing."""
        assert count <= MOST_AHEAD
        texts = len(ends.positions)
        bucket = Bucket.of_ends(ends, "likeliest" if choose is None else "chosen", only)
        captured = self._captured(bucket, storage)
        buffers = captured.buffers
        fill_ends(buffers, ends)
        buffers.step.zero_()
        for step in range(count):
            result = captured.run(storage)
            if choose is not None:
                tokens = result.likeliest.clone()
                chosen = choose(result.logits[:texts], step)
                tokens[:texts] = torch.where(tokens[:texts] < 0, -1, chosen)
                advance(buffers, tokens)
        return buffers.written[:count, :texts]

    def _captured(self, bucket: Bucket, storage: Storage) -> Captured:
        own = self.captured.get(id(storage))
        if own is None:
            own = self.captured[id(storage)] = Captures(self.graphs)
            weakref.finalize(storage, self.captured.pop, id(storage), None)
        if bucket not in own.buckets:
            own.buckets[bucket] = Captured(self, bucket, storage, own.pool)
        return own.buckets[bucket]


class Captures:
    """What was captured for one cache: graphs name its memory, and go when it goes."""

    def __init__(self, graphs: bool) -> None:
        self.pool = torch.cuda.graph_pool_handle() if graphs else None
        self.buckets: dict[Bucket, Captured] = {}


class Captured:
    """The buffers of a bucket and, on an accelerator, the graph that reads them."""

    def __init__(self, owner: StaticPass, bucket: Bucket, storage: Storage, pool: Any) -> None:
        self.owner, self.pool = owner, pool
        self.buffers = Buffers(bucket, owner.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Result | None = None
        if owner.graphs:
            self._capture(bucket, storage)

    def run(self, storage: Storage) -> Result:
        if self.graph is None or self.result is None:
            return self._launch(storage)
        self.graph.replay()
        return self.result

    def _launch(self, storage: Storage) -> Result:
        result = self.owner.rows.run(self.buffers, storage)
        if self.buffers.bucket.feeds == "likeliest":
            advance(self.buffers, result.likeliest)
        return result

    def _capture(self, bucket: Bucket, storage: Storage) -> None:
        owner = self.owner
        started = time.perf_counter()
        for listener in listeners:
            listener(f"preparing passes of up to {bucket.rows} rows of {bucket.sequences} texts")
        # Once for real, on a stream of its own: this builds the kernels. The buffers are empty, so nothing is written.
        side = torch.cuda.Stream(owner.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(owner.device))
        self.buffers.slots.fill_(-1)
        with torch.cuda.stream(side):
            self._launch(storage)
        torch.cuda.current_stream(owner.device).wait_stream(side)
        torch.cuda.synchronize(owner.device)
        if tree_attention.broken is not None:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = self._launch(storage)
        except RuntimeError as error:
            owner.graphs = False
            warnings.warn(
                f"this pass cannot be captured as a CUDA graph, so every launch comes from the host, which is slower: "
                f"{str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.graph, self.result = graph, result
        log.info("captured %s in %.2f s", bucket, time.perf_counter() - started)
