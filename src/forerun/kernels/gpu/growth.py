"""What happens to a draft tree between two passes of the head, and at its end.

Nodes are numbered in the order they grow. Of equal values the earlier node counts more, of equal scores the lower
column: a value is compared together with its number, never by itself.
"""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl, wait_for_the_one_before
from forerun.kernels.gpu.race import logarithm, mixed


@jit()
def ordered(bits: Value) -> Value:
    """The bits of float32 numbers as integers of the same order, and back again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def key_of(score: Value, column: Value) -> Value:
    """One integer that is the larger the better a candidate is."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # −0 is 0
    return (ordered(bits).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@jit()
def score_of(key: Value) -> Value:
    return ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@jit("size", "ahead")
def token_noise(
    seeds: Value,  # [B] int64
    positions: Value,  # [B] int64
    ids: Value,  # [size] int64
    noise: Value,  # [B, size]
    size: Value,
    ahead: Value,
    TILE: constexpr,
    OVERLAP: constexpr,
) -> Value:
    """`row_key` of `core/noise.py` at positions + ahead, for tokens, and its `gumbel`: the same bits."""
    wait_for_the_one_before(OVERLAP)
    text = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    every = tl.zeros([TILE], tl.int64)
    key = mixed(tl.load(seeds + text + every) + -7046029254386353131)
    key = mixed(key ^ ((tl.load(positions + text + every) + ahead) * -7046029254386353131))
    key = mixed(key + -7046029254386353131)
    token = tl.load(ids + column, mask=inside, other=0)
    bits = (mixed(key + (token + 1) * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    late = 0.0 - logarithm((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16)
    tl.store(noise + text * size + column, (0.0 - logarithm(late)).to(tl.float32), mask=inside)


@jit("size", "tiles")
def best_of_tiles(
    scores: Value,  # [R, size]
    noise: Value,  # [B, size], read if RACED, as the next two
    heat: Value,  # [B]
    raced: Value,  # [B] int64
    keys: Value,  # [R, tiles, WIDTH] int64: the best of a tile
    tops: Value,  # [R, tiles] its largest score
    sums: Value,  # [R, tiles] Σ exp(score − largest)
    size: Value,
    tiles: Value,
    stride: Value,
    sharper: Value,
    colder: Value,
    SHARE: constexpr,  # rows of a text
    WIDTH: constexpr,
    TILE: constexpr,
    RACED: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < size
    score = tl.load(scores + row * stride + column, mask=inside, other=-float("inf"))
    if RACED:
        text = row // SHARE
        added = tl.load(noise + text * size + column, mask=inside, other=0.0)
        arrives = (tl.div_rn(score, tl.load(heat + text)) + added) * colder
        score = tl.where(tl.load(raced + text) > 0, arrives, score * sharper)
    else:
        score = score * sharper
    score = tl.where(score > -float("inf"), score, -float("inf"))  # NaN is above nothing
    score = tl.minimum(score, 3.4028234663852886e38)
    top = tl.max(score, 0)
    place = row * tiles + tile
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(score - tl.where(top == -float("inf"), 0.0, top)), 0))
    key = tl.where(inside, key_of(score, column), -0x8000000000000000)
    for rank in range(WIDTH):
        best = tl.max(key, 0)
        tl.store(keys + place * WIDTH + rank, best)
        key = tl.where(key == best, -0x8000000000000000, key)


@jit("tiles")
def best_of_row(
    keys: Value,  # [R, tiles, WIDTH]
    tops: Value,  # [R, tiles]
    sums: Value,  # [R, tiles]
    shares: Value,  # [R, WIDTH]
    columns: Value,  # [R, WIDTH] int64
    tiles: Value,
    WIDTH: constexpr,
    TILES: constexpr,
    KEYS: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    top = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=-float("inf"))
    part = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.sum(part * tl.exp(top - highest), 0)
    log = tl.log(tl.where(total > 0.0, total, 1.0))  # of a row without any score nothing has a share
    listed = tl.arange(0, KEYS)
    key = tl.load(keys + row * tiles * WIDTH + listed, mask=listed < tiles * WIDTH, other=-0x8000000000000000)
    for rank in range(WIDTH):
        best = tl.max(key, 0)
        key = tl.where(key == best, -0x8000000000000000, key)
        score = score_of(best)
        share = tl.where(score == -float("inf"), -float("inf"), (score - highest) - log)
        tl.store(shares + row * WIDTH + rank, share)
        tl.store(columns + row * WIDTH + rank, 0x7FFFFFFF - (best & 0xFFFFFFFF))


@jit()
def values_of(
    shares: Value, above: Value, node: Value, alive: Value, FRONTIER: constexpr, WIDTH: constexpr, ROOT: constexpr
) -> Value:
    """Of a text's candidates: the parent's value and the share, −∞ for who is absent."""
    inside = node < FRONTIER * WIDTH
    share = tl.load(shares + node, mask=inside, other=-float("inf"))
    value = tl.where(share <= 0.0, share, tl.where(share > 0.0, 0.0, -float("inf")))  # the last for NaN
    if not ROOT:
        value += tl.load(above + node // WIDTH, mask=inside, other=-float("inf"))
    return tl.where(inside & alive, value, -float("inf"))


@jit("level", "first", "grown", "positions_end", "blocks_end")
def grow_level(
    shares: Value,  # [B, FRONTIER, WIDTH], falling
    columns: Value,  # [B, FRONTIER, WIDTH] int64
    ids: Value,  # [V] int64
    above_nodes: Value,  # [B, FRONTIER] of those whose children these are; not read if ROOT, as the next two
    above_values: Value,  # [B, FRONTIER]
    above_mask: Value,  # [B, FRONTIER] int64
    roots: Value,  # [B] tokens; read if ROOT
    root_rows: Value,  # [B]; read if ROOT
    depths: Value,  # [B]
    text_contexts: Value,  # [B]
    text_tails: Value,  # [B]
    text_counts: Value,  # [B]
    blocks: Value,  # [B, blocks_end]
    grown_tokens: Value,  # [B, grown]
    grown_parents: Value,  # [B, grown]
    grown_values: Value,  # [B, grown]
    nodes: Value,  # [B, WIDTH] those that get children next, and what follows likewise
    values: Value,
    tokens: Value,
    positions: Value,
    slots: Value,
    origins: Value,
    mask: Value,
    counts: Value,  # [B]
    contexts: Value,  # [B]
    level: Value,  # of FRONTIER
    first: Value,  # the number of the first child
    grown: Value,
    positions_end: Value,
    blocks_end: Value,
    blocks_stride: Value,
    FRONTIER: constexpr,
    WIDTH: constexpr,
    PAD: constexpr,
    STEP: constexpr,
    BLOCK: constexpr,
    ROOT: constexpr,
    LAST: constexpr,
    OVERLAP: constexpr,
) -> Value:
    """One program takes a text. A candidate finds its place by counting who is before it."""
    wait_for_the_one_before(OVERLAP)
    text = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PAD)
    inside = node < FRONTIER * WIDTH
    deepest = tl.load(depths + text)
    shares += text * (FRONTIER * WIDTH)
    above_values += text * FRONTIER
    value = values_of(shares, above_values, node, level < deepest, FRONTIER, WIDTH, ROOT)
    column = tl.load(columns + text * (FRONTIER * WIDTH) + node, mask=inside, other=0)
    token = tl.load(ids + column, mask=value > -float("inf"), other=0)
    parent = tl.zeros([PAD], tl.int64)
    if not ROOT:
        parent = tl.load(above_nodes + text * FRONTIER + node // WIDTH, mask=inside, other=0)
    place = text * grown + first + node
    tl.store(grown_tokens + place, token, mask=inside)
    tl.store(grown_parents + place, parent, mask=inside)
    tl.store(grown_values + place, value, mask=inside)
    if ROOT:
        tl.store(grown_tokens + text * grown, tl.load(roots + text))
        tl.store(grown_parents + text * grown, -1)
        tl.store(grown_values + text * grown, 0.0)
    if not LAST:
        rank = tl.zeros([PAD], tl.int32)
        for start in range(0, PAD, STEP):
            other = start + tl.arange(0, STEP)
            rival = values_of(shares, above_values, other, level < deepest, FRONTIER, WIDTH, ROOT)
            before = (rival[None, :] == value[:, None]) & (other[None, :] < node[:, None])
            rank += tl.sum((before | (rival[None, :] > value[:, None])).to(tl.int32), 1)
        chosen = inside & (rank < WIDTH)
        rank = tl.where(chosen, rank, 0).to(tl.int64)
        own = rank + level * WIDTH
        seen = tl.full([PAD], 1, tl.int64) << own
        origin = tl.zeros([PAD], tl.int64)
        if ROOT:
            origin += tl.load(root_rows + text)
        else:
            seen = seen | tl.load(above_mask + text * FRONTIER + node // WIDTH, mask=inside, other=0)
            origin += text * FRONTIER + node // WIDTH
        length = tl.load(text_contexts + text) + tl.load(text_tails + text)
        there = (tl.load(text_counts + text) > 0) & (level + 1 < deepest)
        at = length + own
        block = tl.load(blocks + text * blocks_stride + tl.minimum(at // BLOCK, blocks_end - 1), mask=chosen, other=0)
        to = text * WIDTH + rank
        tl.store(nodes + to, (first + node).to(tl.int64), mask=chosen)
        tl.store(values + to, value, mask=chosen)
        tl.store(tokens + to, token, mask=chosen)
        last = tl.minimum(tl.maximum(length + level, 0), positions_end - 1)
        tl.store(positions + to, last + tl.zeros([PAD], tl.int64), mask=chosen)
        tl.store(slots + to, tl.where(there, block * BLOCK + at % BLOCK, -1), mask=chosen)
        tl.store(origins + to, origin, mask=chosen)
        tl.store(mask + to, seen, mask=chosen)
        tl.store(counts + text, tl.where(there, WIDTH, 0).to(tl.int64))
        tl.store(contexts + text, length)


@jit("grown", "size")
def rank_nodes(
    values: Value,  # [B, grown]
    places: Value,  # [B, grown] int32: each node's among the most valuable
    order: Value,  # [B, size] int32: the nodes at the first places
    grown: Value,
    size: Value,
    TILE: constexpr,
    STEP: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    text = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = node < grown
    value = tl.load(values + text * grown + node, mask=inside, other=-float("inf"))
    rank = tl.zeros([TILE], tl.int32)
    for start in range(0, grown, STEP):
        other = start + tl.arange(0, STEP)
        rival = tl.load(values + text * grown + other, mask=other < grown, other=-float("inf"))
        before = (rival[None, :] == value[:, None]) & (other[None, :] < node[:, None])
        rank += tl.sum((before | (rival[None, :] > value[:, None])).to(tl.int32), 1)
    tl.store(places + text * grown + node, rank, mask=inside)
    tl.store(order + text * size + rank, node, mask=inside & (rank < size))


@jit()
def kept(order: Value, values: Value, column: Value, limit: Value, size: Value) -> Value:
    """The grown nodes that stand in some columns of a tree, and whether they were drafted."""
    node = tl.load(order + column, mask=column < size, other=0).to(tl.int64)
    drafted = (column > 0) & (column <= limit) & (column < size)
    return node, drafted & (tl.load(values + node, mask=drafted, other=-float("inf")) > -float("inf"))


@jit("grown", "size")
def lay_out(
    order: Value,  # [B, size]
    places: Value,  # [B, grown]
    grown_tokens: Value,  # [B, grown]
    grown_parents: Value,  # [B, grown]
    grown_values: Value,  # [B, grown]
    limits: Value,  # [B] drafted nodes
    starts: Value,  # [B] positions of the roots
    tokens: Value,  # [B, size], and so on: the tables of a DraftTree
    parents: Value,
    depths: Value,
    positions: Value,
    ancestors: Value,  # [B, size, size] uint8
    children: Value,  # [B, size, WIDTH]
    grown: Value,
    size: Value,
    WIDTH: constexpr,
    SLOTS: constexpr,  # WIDTH, padded
    DEPTH: constexpr,
    PAD: constexpr,  # of size
    TILE: constexpr,
    OVERLAP: constexpr,
) -> Value:
    """One program writes some rows of one tree's tables."""
    wait_for_the_one_before(OVERLAP)
    text = tl.program_id(0).to(tl.int64)
    order += text * size
    places += text * grown
    grown_parents += text * grown
    grown_values += text * grown
    limit = tl.load(limits + text)
    start = tl.load(starts + text)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PAD)
    inside = row < size

    node, drafted = kept(order, grown_values, row, limit, size)
    token = tl.load(grown_tokens + text * grown + node, mask=drafted | (row == 0), other=0)
    above = tl.full([TILE], -1, tl.int32)
    depth = tl.zeros([TILE], tl.int64)
    sees = row[:, None] == column[None, :]
    rising = drafted
    for step in range(DEPTH):
        node = tl.load(grown_parents + node, mask=rising, other=0)
        place = tl.load(places + node, mask=rising, other=-1)
        above = tl.where((step == 0) & rising, place, above)
        sees = sees | (rising[:, None] & (place[:, None] == column[None, :]))
        depth += rising.to(tl.int64)
        rising = rising & (node > 0)
    to = text * size + row
    tl.store(tokens + to, token, mask=inside)
    tl.store(parents + to, above.to(tl.int64), mask=inside)
    tl.store(depths + to, depth, mask=inside)
    tl.store(positions + to, start + depth, mask=inside)
    square = inside[:, None] & (column < size)[None, :]
    tl.store(ancestors + to[:, None] * size + column[None, :], sees.to(tl.uint8), mask=square)

    child, born = kept(order, grown_values, column, limit, size)
    child_parent = tl.load(places + tl.load(grown_parents + child, mask=born, other=0), mask=born, other=-1)
    own = inside[:, None] & born[None, :] & (child_parent[None, :] == row[:, None])
    elder = tl.cumsum(own.to(tl.int32), 1) - 1
    many = tl.sum(own.to(tl.int32), 1)
    base = children + to[:, None] * WIDTH
    tl.store(base + elder, (column[None, :] + tl.zeros([TILE, PAD], tl.int32)).to(tl.int64), mask=own)
    slot = tl.arange(0, SLOTS)
    free = inside[:, None] & (slot[None, :] >= many[:, None]) & (slot < WIDTH)[None, :]
    tl.store(base + slot[None, :], tl.full([TILE, SLOTS], -1, tl.int64), mask=free)
