"""What happens to a draft tree between two passes of the head, and at its end: a few launches where PyTorch has dozens.

A level: `best_children` reads the logits once, and `grow_level` makes of its candidates the nodes that were grown and
the rows of the next pass. At the end `lay_out_on_device` makes the tables of a tree; its plain form is `rerank` of
`trees/dynamic.py` and `DraftTree.build`, which stand above this. So does the plain form of the noise: `core/noise.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention import PackedRows
from forerun.kernels.kernel import Kernel, ahead, power_of_two

TILE, WARPS = 1024, 4
"""Columns of a program that looks for the best of them, and its warps."""
MOST_KEYS = 4096
"""That the best of a row are chosen from: wide trees over large vocabularies have longer tiles."""
RANKED = 128
"""Nodes of a program that ranks them."""
COMPARED = 4096
"""Pairs of nodes at a time that a program compares: more do not fit in its registers."""
LAID_OUT = 16
"""Nodes of a program that writes their rows of a tree's tables."""


def noise_on_device(seeds: Tensor, positions: Tensor, ids: Tensor, ahead_of: int) -> Tensor:
    """[B, V] float32 Gumbel noise of tokens `ids` [V] at `positions` [B] + `ahead_of`, for the seeds [B]."""
    from forerun.kernels.gpu import growth as gpu

    assert seeds.is_contiguous()
    assert positions.is_contiguous()
    assert ids.is_contiguous()
    texts, size = seeds.shape[0], ids.shape[0]
    noise = torch.empty(texts, size, dtype=torch.float32, device=seeds.device)
    gpu.token_noise[(texts, -(-size // 256))](
        seeds, positions, ids, noise, size, ahead_of,
        TILE=256, num_warps=4, enable_fp_fusion=False, **ahead(seeds.device),
    )  # fmt: skip
    return noise


@dataclass(frozen=True)
class Race:
    """What makes of a text's scores those of its race: score → (score / heat + noise) / tau. The rows of a text share
    its noise."""

    noise: Tensor  # [B, V] float32
    heat: Tensor  # [B] float32
    raced: Tensor  # [B] int64; 0 for a text whose scores stay as they are
    tau: float


def _plain_best(scores: Tensor, width: int, race: Race | None = None, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """scores [R, V] float32 → the logarithms of the shares that the `width` best have of all, [R, width], falling, and
    their columns. Of equal scores the lower column is better; NaN counts as −∞, and who has −∞ has no share.

    With a race of B texts, each has R / B rows, one behind the other. Shares are those of e^(score / tau) where there
    is no race.
    """
    scores, raw = scores * (1 / tau), scores
    if race is not None:
        of_text = raw.view(race.heat.shape[0], -1, raw.shape[1])
        arrives = (of_text / race.heat[:, None, None] + race.noise[:, None]) * (1 / race.tau)
        scores = torch.where((race.raced > 0)[:, None, None], arrives, scores.view_as(arrives)).view_as(raw)
    scores = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
    best, columns = scores.sort(dim=-1, descending=True, stable=True)
    best, columns = best[:, :width], columns[:, :width].contiguous()
    shares = scores.log_softmax(-1).gather(1, columns)
    return shares.masked_fill(best == -math.inf, -math.inf), columns


def _device_best(scores: Tensor, width: int, race: Race | None = None, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    from forerun.kernels.gpu import growth as gpu

    rows, size = scores.shape
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    assert width <= size
    assert race is None or (race.noise.is_contiguous() and race.raced.is_contiguous() and race.heat.is_contiguous())
    tile = max(TILE, power_of_two(-(-size * width // MOST_KEYS)))
    tiles = -(-size // tile)
    device = scores.device
    keys = torch.empty(rows, tiles, width, dtype=torch.int64, device=device)
    tops, sums = (torch.empty(rows, tiles, dtype=torch.float32, device=device) for _ in range(2))
    shares = torch.empty(rows, width, dtype=torch.float32, device=device)
    columns = torch.empty(rows, width, dtype=torch.int64, device=device)
    noise, heat, raced = (scores, scores, scores) if race is None else (race.noise, race.heat, race.raced)
    gpu.best_of_tiles[(rows, tiles)](
        scores, noise, heat, raced, keys, tops, sums, size, tiles, scores.stride(0),
        1 / tau, 1.0 if race is None else 1 / race.tau, SHARE=1 if race is None else rows // race.heat.shape[0],
        WIDTH=width, TILE=tile, RACED=race is not None, num_warps=WARPS, **ahead(device),
    )  # fmt: skip
    listed = power_of_two(tiles * width)
    gpu.best_of_row[(rows,)](
        keys, tops, sums, shares, columns, tiles,
        WIDTH=width, TILES=power_of_two(tiles), KEYS=listed, num_warps=1 if listed <= 256 else 4, **ahead(device),
    )  # fmt: skip
    return shares, columns


@dataclass(frozen=True)
class Texts:
    """What trees grow on, B texts."""

    roots: Tensor  # [B] their last tokens
    rows: Tensor  # [B] and these tokens' rows in the pass that read them
    depths: Tensor  # [B] how many levels may be drafted
    packed: PackedRows  # as that pass read them


@dataclass(frozen=True)
class Nodes:
    """All that was grown, in the order it grew: the root, W children, then W · W of each level."""

    tokens: Tensor  # [B, G] int64; 0 for who is absent
    parents: Tensor  # [B, G] int64, numbers of nodes; −1 for the root
    values: Tensor  # [B, G] float32: sums of logarithms of shares; −∞ for who is absent

    @classmethod
    def room(cls, texts: int, width: int, depth: int, device: torch.device) -> Nodes:
        grown = first_of(depth, width)
        tokens, parents = (torch.empty(texts, grown, dtype=torch.int64, device=device) for _ in range(2))
        return cls(tokens, parents, torch.empty(texts, grown, dtype=torch.float32, device=device))


def first_of(level: int, width: int) -> int:
    """The number of the first child of the nodes of a level; the root's is level 0."""
    return 1 if level == 0 else 1 + width + width * width * (level - 1)


@dataclass(frozen=True)
class Chosen:
    """The W nodes of each text that get children next, most valuable first, and their rows of a pass. They are written
    behind the text, level after level; a text that may have no further level has no slots for them."""

    nodes: Tensor  # [B, W] int64, numbers of nodes
    values: Tensor  # [B, W] float32
    tokens: Tensor  # [B · W] int64
    positions: Tensor  # [B · W] int64
    slots: Tensor  # [B · W] int64
    origins: Tensor  # [B · W] int64: the row of the last pass, where their parent was read
    mask: Tensor  # [B · W, 1] int64
    counts: Tensor  # [B] int64 rows
    contexts: Tensor  # [B] int64: the text's length

    @classmethod
    def room(cls, texts: int, width: int, device: torch.device) -> Chosen:
        def numbers(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int64, device=device)

        rows = texts * width
        return cls(
            nodes=numbers(texts, width),
            values=torch.empty(texts, width, dtype=torch.float32, device=device),
            tokens=numbers(rows),
            positions=numbers(rows),
            slots=numbers(rows),
            origins=numbers(rows),
            mask=numbers(rows, 1),
            counts=numbers(texts),
            contexts=numbers(texts),
        )


def _plain_level(
    shares: Tensor,
    columns: Tensor,
    ids: Tensor,
    texts: Texts,
    grown: Nodes,
    above: Chosen | None,
    *,
    level: int,
    context_length: int,
    last: bool,
) -> Chosen | None:
    """Log shares and columns [B, F, W] of the children of F nodes, each node's falling: of `above`, or of the roots
    alone, which are level 0. `ids` [V] are the columns' tokens. They are written into `grown`, and the W most valuable
    are returned, unless this is the last level; of equal ones the earlier."""
    batch, frontier, width = shares.shape
    device = shares.device
    shares = shares.nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0.0)
    shares = shares.masked_fill((level >= texts.depths)[:, None, None], -math.inf)
    nodes = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    values, seen = torch.zeros(batch, 1, device=device), nodes
    if above is None:
        grown.tokens[:, 0], grown.parents[:, 0], grown.values[:, 0] = texts.roots, -1, 0.0
        origins = texts.rows[:, None]
    else:
        nodes, values, seen = above.nodes, above.values, above.mask.view(batch, frontier)
        origins = torch.arange(batch * frontier, device=device).view(batch, frontier)
    values = (values[:, :, None] + shares).flatten(1)  # [B, F · W]
    tokens = torch.where(values > -math.inf, ids[columns].flatten(1), 0)
    first = first_of(level, width)
    made = slice(first, first + frontier * width)
    grown.tokens[:, made], grown.values[:, made] = tokens, values
    grown.parents[:, made] = nodes.repeat_interleave(width, 1)
    if last:
        return None
    best, order = values.sort(dim=-1, descending=True, stable=True)
    best, order = best[:, :width], order[:, :width]
    own = torch.arange(width, device=device) + level * width  # their numbers behind the text
    packed = texts.packed
    contexts = packed.contexts + packed.tails
    at = contexts[:, None] + own
    block = packed.blocks.gather(1, (at // packed.block_size).clamp_max(packed.blocks.shape[1] - 1))
    there = (packed.counts > 0) & (level + 1 < texts.depths)
    # Also rows that are computed for nothing, at the end of the context, are turned by some position.
    positions = (contexts + level).clamp(0, context_length - 1)
    return Chosen(
        nodes=first + order,
        values=best.contiguous(),
        tokens=tokens.gather(1, order).flatten(),
        positions=positions.repeat_interleave(width),
        slots=torch.where(there[:, None], block * packed.block_size + at % packed.block_size, -1).flatten(),
        origins=origins.gather(1, order // width).flatten(),
        mask=(seen.gather(1, order // width) | (torch.ones_like(own) << own)).view(-1, 1),
        counts=torch.where(there, width, 0),
        contexts=contexts,
    )


def _device_level(
    shares: Tensor,
    columns: Tensor,
    ids: Tensor,
    texts: Texts,
    grown: Nodes,
    above: Chosen | None,
    *,
    level: int,
    context_length: int,
    last: bool,
) -> Chosen | None:
    from forerun.kernels.gpu import growth as gpu

    batch, frontier, width = shares.shape
    packed, device = texts.packed, shares.device
    read = (shares, columns, ids, texts.roots, texts.rows, texts.depths, packed.contexts, packed.tails, packed.counts)
    assert all(each.is_contiguous() for each in read)
    assert packed.blocks.stride(1) == 1
    pad = max(16, power_of_two(frontier * width))
    room = Chosen.room(batch, 0 if last else width, device)
    before = room if above is None else above  # not read in the first case
    gpu.grow_level[(batch,)](
        shares, columns, ids, before.nodes, before.values, before.mask,
        texts.roots, texts.rows, texts.depths, packed.contexts, packed.tails, packed.counts, packed.blocks,
        grown.tokens, grown.parents, grown.values,
        room.nodes, room.values, room.tokens, room.positions, room.slots, room.origins, room.mask,
        room.counts, room.contexts,
        level, first_of(level, width), grown.tokens.shape[1], context_length,
        packed.blocks.shape[1], packed.blocks.stride(0),
        FRONTIER=frontier, WIDTH=width, PAD=pad, STEP=min(pad, COMPARED // pad), BLOCK=packed.block_size,
        ROOT=above is None, LAST=last, num_warps=4, **ahead(device),
    )  # fmt: skip
    return None if last else room


@dataclass(frozen=True)
class Tables:
    """Of a `DraftTree`, which says what they are."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]
    depths: Tensor  # [B, N]
    positions: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N] bool
    children: Tensor  # [B, N, W]


def lay_out_on_device(grown: Nodes, limits: Tensor, starts: Tensor, *, size: int, width: int, depth: int) -> Tables:
    """The roots, at positions `starts` [B], and of all that was grown on them the `size` − 1 most valuable, or as many
    as `limits` [B] allow."""
    from forerun.kernels.gpu import growth as gpu

    texts, count = grown.tokens.shape
    device = grown.tokens.device
    assert size <= count
    assert limits.is_contiguous()
    assert starts.is_contiguous()
    places = torch.empty(texts, count, dtype=torch.int32, device=device)
    order = torch.empty(texts, size, dtype=torch.int32, device=device)
    gpu.rank_nodes[(texts, -(-count // RANKED))](
        grown.values, places, order, count, size, TILE=RANKED, STEP=COMPARED // RANKED, num_warps=4, **ahead(device)
    )
    tokens, parents, depths, positions = (torch.empty(texts, size, dtype=torch.int64, device=device) for _ in range(4))
    ancestors = torch.empty(texts, size, size, dtype=torch.uint8, device=device)
    children = torch.empty(texts, size, width, dtype=torch.int64, device=device)
    gpu.lay_out[(texts, -(-size // LAID_OUT))](
        order, places, grown.tokens, grown.parents, grown.values, limits, starts,
        tokens, parents, depths, positions, ancestors, children, count, size,
        WIDTH=width, SLOTS=power_of_two(width), DEPTH=depth, PAD=max(16, power_of_two(size)), TILE=LAID_OUT,
        num_warps=4, **ahead(device),
    )  # fmt: skip
    return Tables(tokens, parents, depths, positions, ancestors.view(torch.bool), children)


best_children = Kernel("best_children", _device_best, _plain_best)
grow_level = Kernel("grow_level", _device_level, _plain_level)
