"""What an accelerator captures before the first text, as long as there is memory for it.

These are the steps that write: plain runs, and drafts of every size that the controller may choose, for every number of
texts, of up to two thousand tokens each. Where a size had to be captured when it is tried, one try would take longer
than all that it can find out is worth. Steps that read prompts come in too many shapes; they, and what a drafter runs
by itself, are captured as they are met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from forerun.drafters.head_ahead import PASS_ROWS
from forerun.drafters.in_rounds import HeadInRounds
from forerun.drafters.none import NoDrafter
from forerun.engine.drafting import MAX_DRAFTING
from forerun.engine.engine import MAX_NODES, Engine
from forerun.engine.experience import SIZES
from forerun.models.static.buffers import BLOCK, Bucket, Feeds, rounded_texts, tails
from forerun.models.static.static_pass import StaticPass
from forerun.models.transformer import Transformer

SPARE = 0.1
"""Of a device's memory, what stays free."""
FEEDS: tuple[Feeds | None, ...] = ("likeliest", "chosen", None)


@torch.inference_mode()
def prepare(engine: Engine) -> None:
    target = engine.target
    if not isinstance(target, Transformer):
        return
    if not target.prepared:
        target.prepare()
    if not target.writes_ahead:
        return
    assert target.static is not None
    for capture in _captures(engine, target.static):
        if target.device.type == "cuda" and crowded(*torch.cuda.mem_get_info(target.device)):
            return
        try:
            capture()
        except torch.OutOfMemoryError:
            return


def crowded(free: int, total: int) -> bool:
    """Whether what is not captured yet had better wait until it is met: every graph keeps what it gives."""
    return free < SPARE * total


def _captures(engine: Engine, static: StaticPass) -> Iterator[Callable[[], object]]:
    """The likeliest first."""
    most, layers, storage = engine.scheduler.max_batch, engine.drafter.layers, engine.cache.storage
    texts = 1
    while texts < 2 * most:
        for feeds in FEEDS:
            yield partial(static.pass_of, Bucket.of_roots(texts, layers, feeds), storage)
        texts *= 2
    if isinstance(engine.drafter, NoDrafter):
        return
    if engine.ahead is not None:
        if isinstance(engine.ahead.drafts, HeadInRounds):
            head = engine.ahead.drafts.ahead
            assert head.model.static is not None
            for bucket in readings(most):
                yield head.model.static.pass_of(bucket, head.cache.storage, None).run
        for texts in sorted({rounded_texts(count) for count in range(1, most + 1)}):
            yield partial(engine.ahead.prepare, texts, _nodes(engine.scheduler.max_rows, texts))
        return
    yield partial(storage.move, [([0], [0])])  # what is accepted of a tree: its kernel is built
    drafting, rows = min(most, engine.scheduler.max_drafting), engine.scheduler.max_rows
    few = min(drafting, MAX_DRAFTING)
    for bucket in (*drafted(few, rows, layers), *drafted_alike(range(few + 1, drafting + 1), rows, layers)):
        yield partial(static.pass_of, bucket, storage)


def readings(most: int) -> Iterator[Bucket]:
    """Of what a head reads before it drafts. It is not captured, but once it has run its kernels are built."""
    texts = 1
    while texts < 2 * most:
        yield Bucket.of_roots(texts, (), None)
        shared = [(min(PASS_ROWS, texts * tail), tail) for tail in tails(texts)]
        alone = [(rows, rows) for rows in range(BLOCK, PASS_ROWS + 1, BLOCK)]
        yield from dict.fromkeys(Bucket.of_reading(texts, rows, longest) for rows, longest in shared + alone)
        texts *= 2


def _nodes(max_rows: int, texts: int) -> set[int]:
    """That a text may have where there are as many as `texts`, or as few as are rounded up to it."""
    rooms = [max_rows // count - 1 for count in range(1, texts + 1) if rounded_texts(count) == texts]
    return {min(room, MAX_NODES if size is None else size) for room in rooms for size in SIZES if room > 0}


def drafted_alike(counts: Iterable[int], max_rows: int, layers: tuple[int, ...]) -> Iterator[Bucket]:
    """Of steps that check trees of one of the controller's sizes for each of so many texts."""
    for texts in counts:
        for size in SIZES:
            nodes = min(max_rows // texts - 1, MAX_NODES if size is None else size)
            if nodes > 0:
                yield Bucket.of_trees(texts, texts * (1 + nodes), 1 + nodes, layers)


def drafted(most: int, max_rows: int, layers: tuple[int, ...]) -> Iterator[Bucket]:
    """Of steps that check drafts for up to so many texts, whichever of them have any."""
    found: dict[Bucket, None] = {}
    for texts in range(1, most + 1):
        for longest in range(2, 2 + MAX_NODES):
            rows = texts - 1 + longest
            while rows <= min(max_rows, texts * longest):
                bucket = Bucket.of_trees(texts, rows, longest, layers)
                found[bucket] = None
                rows = max(rows, bucket.wanted) + 1  # up to there it is the same one
    yield from found
