"""Random drafts for the tests of this folder: trees of every form, whose children are really drawn from their q.

Laws come wide, peaked, tied, with zeros and as one-hots, and q is unrelated to p, near it, equal to it or disjoint
from it. What nobody may read (the rows of nodes that are not there, q where nothing was drawn) is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Generator, Tensor

from forerun.core import drawing as draws
from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.plain import PlainTree, Row
from forerun.verify.rule import VerificationRule

NAN = float("nan")
CHAIN_FORMS = ("chain", "shaped_chain", "one_path", "root")
TREE_FORMS = ("random", "cartesian", "merged", "ragged_chain_in_tree", *CHAIN_FORMS)


@dataclass(frozen=True)
class Drafted:
    """A batch of drafts and the target's laws on it."""

    tree: DraftTree
    p: Tensor  # [B, N, V]
    noise: StepNoise

    def take(self, rows: Tensor) -> Drafted:
        noise = StepNoise(self.noise.seeds[rows], self.noise.starts[rows])
        return Drafted(self.tree.take(rows), self.p[rows], noise)

    def to(self, device: str) -> Drafted:
        columns = {item.name: getattr(self.tree, item.name) for item in fields(self.tree)}
        moved: dict[str, Any] = {name: c.to(device) for name, c in columns.items() if isinstance(c, Tensor)}
        noise = StepNoise(self.noise.seeds.to(device), self.noise.starts.to(device))
        return Drafted(replace(self.tree, **moved), self.p.to(device), noise)


def generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def _integers(rng: Generator, low: int, high: int, *size: int) -> Tensor:
    """Both ends included."""
    return torch.randint(low, high + 1, size, generator=rng)


def random_noise(rng: Generator, batch: int) -> StepNoise:
    return StepNoise(torch.randint(0, 2**62, (batch,), generator=rng), _integers(rng, 1, 5000, batch))


# --- laws ------------------------------------------------------------------------------------------------------


def law_pairs(rng: Generator, rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """p and q [rows, V], every row of a random kind; two tokens at least have weight in p where q is disjoint."""
    p, q = _laws(rng, rows, vocabulary), _laws(rng, rows, vocabulary)
    relation = _integers(rng, 0, 3, rows)[:, None]
    near = p * torch.exp(0.3 * torch.randn(rows, vocabulary, generator=rng))
    half = torch.rand(rows, vocabulary, generator=rng) < 0.5
    half[:, 0], half[:, -1] = True, False
    apart = relation == 3
    flat = torch.ones_like(p)
    q = torch.where(relation == 1, p, torch.where(relation == 2, near, q))
    p = torch.where(apart & half, torch.where(p > 0, p, 1e-3 * flat), torch.where(apart, 0.0, p))
    q = torch.where(apart & half, 0.0, torch.where(apart & (q == 0), 1e-3 * flat, q))
    return _normal(p, dtype), _normal(q, dtype)


def _normal(weights: Tensor, dtype: torch.dtype) -> Tensor:
    return (weights / weights.sum(-1, keepdim=True)).to(dtype)


def _laws(rng: Generator, rows: int, vocabulary: int) -> Tensor:
    kind = _integers(rng, 0, 4, rows)[:, None]
    normal = torch.randn(rows, vocabulary, generator=rng)
    weights = torch.exp(torch.where(kind == 1, 6.0, 1.0) * normal).to(torch.float64)  # 0 wide, 1 peaked
    weights = torch.where(kind == 2, _integers(rng, 1, 2, rows, vocabulary), weights)  # ties
    one = torch.nn.functional.one_hot(_integers(rng, 0, vocabulary - 1, rows), vocabulary)
    kept = (torch.rand(rows, vocabulary, generator=rng) < 0.3) | (one > 0)
    weights = torch.where((kind == 3) & ~kept, 0.0, weights)
    return torch.where(kind == 4, one.to(torch.float64), weights)


# --- trees -----------------------------------------------------------------------------------------------------


def random_drafts(
    seed: int, form: str, drawing: Drawing, batch: int, vocabulary: int, dtype: torch.dtype = torch.float64
) -> Drafted:
    """Random trees of a form, with children drawn as `drawing` says."""
    rng = generator(seed)
    noise = random_noise(rng, batch)
    if form in ("merged", "one_path") and drawing is not Drawing.WITHOUT_REPLACEMENT:
        return _merged(rng, noise, drawing, vocabulary, dtype, 3 if form == "merged" else 1)
    parents = _parents(rng, form, batch)
    p, q = law_pairs(rng, batch * parents.shape[1] * _ranks(parents, drawing), vocabulary, dtype)
    p = p.view(batch, parents.shape[1], -1, vocabulary)[:, :, 0]
    q = q.view(batch, -1, vocabulary)
    return draw_trees(rng, noise, drawing, parents, p, q, as_chain=form == "chain")


def _ranks(parents: Tensor, drawing: Drawing) -> int:
    """The rows of q for each node: one, or one for each child where they have laws of their own."""
    return max(_width(parents), 1) if drawing is Drawing.INDEPENDENT else 1


def _width(parents: Tensor) -> int:
    return max(int(torch.bincount(row[row >= 0], minlength=1).max()) for row in parents)


def _parents(rng: Generator, form: str, batch: int) -> Tensor:
    """[B, N], -1 for the root and for padding."""
    if form == "root":
        return torch.full((batch, 1), -1)
    if form == "cartesian":
        first, second = _integers(rng, 1, 4, 2).tolist()
        shape = TreeShape.from_rank_paths(
            [(i,) for i in range(first)] + [(i, j) for i in range(first) for j in range(second)]
        )
        return torch.tensor(shape.parents).expand(batch, -1).clone()
    size = 5 if form in CHAIN_FORMS else 10
    before = torch.arange(-1, size - 1)
    parents = before.expand(batch, -1).clone()
    if form in ("random", "merged"):
        anywhere = (torch.rand(batch, size, generator=rng) * torch.arange(size)).long()
        deep = torch.rand(batch, size, generator=rng) < 0.3
        parents = torch.where(deep, before, anywhere)
    elif form == "ragged_chain_in_tree":  # half the batch are chains, deeper than the bushes beside them
        bushes = torch.arange(batch)[:, None] % 2 == 0
        parents = torch.where(bushes, (torch.arange(size) - 1) // 4, parents)
    last = _integers(rng, 0, size - 1, batch)
    last[_integers(rng, 0, batch - 1, 1)] = size - 1  # one of them in full
    parents = torch.where(torch.arange(size) <= last[:, None], parents, -1)
    parents[:, 0] = -1
    return parents


def draw_trees(
    rng: Generator, noise: StepNoise, drawing: Drawing, parents: Tensor, p: Tensor, q: Tensor, *, as_chain: bool = False
) -> Drafted:
    """Draw the children of every node, parents first; what a law has no token for is absent, with all below it."""
    batch, size = parents.shape
    vocabulary = p.shape[2]
    width, ranks = _width(parents), _ranks(parents, drawing)
    tokens = _integers(rng, 0, vocabulary - 1, batch, size)
    present = torch.zeros(batch, size, dtype=torch.bool)
    present[:, 0] = True
    drafted = torch.zeros(batch, size, width, dtype=torch.bool)
    for node in range(size):
        laws = q[:, node * ranks : (node + 1) * ranks]  # [B, 1 or K, V]
        candidates = _candidates(rng, noise, drawing, torch.full((batch,), node), laws, width)  # [B, K]
        mine = parents == node
        rank = (mine.cumsum(1) - 1).clamp(0, max(width - 1, 0))
        if width:
            token = candidates.gather(1, rank)
            here = mine & present[:, node, None] & (token >= 0)
            tokens = torch.where(here, token, tokens)
            present |= here
            drafted[:, node] = torch.zeros_like(drafted[:, node]).scatter_reduce(1, rank, here, "amax")
    parents = torch.where(present, parents, -1)
    p = p.masked_fill(~present[..., None], NAN)
    if not drawing.sampled:
        return Drafted(DraftTree.build(tokens, parents, noise.starts - 1, drawing), p, noise)
    if as_chain:
        q = q.view(batch, size, -1, vocabulary)[:, : size - 1, 0]
        tree = DraftTree.chain(tokens, noise.starts - 1, drawing, q=q, lengths=present.sum(1) - 1)
        return Drafted(tree, p, noise)
    used = drafted if drawing is Drawing.INDEPENDENT else drafted.any(-1, keepdim=True)
    q = q.masked_fill(~used.reshape(batch, -1, 1)[:, : q.shape[1]], NAN) if width else q * NAN
    q_rows = None
    if drawing is Drawing.INDEPENDENT:
        q_rows = (torch.arange(size)[:, None] * ranks + torch.arange(width)).expand(batch, -1, -1)
    # Leaves need no q: the rows after the last node with children are left out.
    last = max((int(node) for node in parents.max(1).values), default=0)
    q = q[:, : (max(last, 0) + 1) * ranks]
    return Drafted(
        DraftTree.build(tokens, parents, noise.starts - 1, drawing, q=q, q_rows=q_rows, width=width), p, noise
    )


def _candidates(rng: Generator, noise: StepNoise, drawing: Drawing, nodes: Tensor, q: Tensor, count: int) -> Tensor:
    """[B, count] children of `nodes`, drawn from their laws q [B, 1 or K, V]."""
    vocabulary = q.shape[2]
    if count == 0:
        return nodes.new_zeros(nodes.shape[0], 0)
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        return draws.race_children(q[:, 0], noise.draft_race(nodes, vocabulary), count)
    if drawing is Drawing.IID:
        return draws.iid_children(q[:, 0], noise.draft(nodes, count))
    if drawing is Drawing.INDEPENDENT:
        return exact.draw(q[:, :count], noise.draft(nodes, count))
    best = draws.top_children(q[:, 0], count)
    # A fixed tree may hold anything, the same token twice included.
    whim = torch.rand(best.shape, generator=rng) < 0.2
    return torch.where(whim, _integers(rng, 0, vocabulary - 1, *best.shape), best)


def _merged(
    rng: Generator, noise: StepNoise, drawing: Drawing, vocabulary: int, dtype: torch.dtype, most: int
) -> Drafted:
    """Up to `most` paths for each sequence, drawn one by one and merged; equal contexts have equal laws."""
    batch, depth = noise.seeds.shape[0], 3
    p_pool, q_pool = law_pairs(rng, batch * (2 * most * depth + 2), vocabulary, dtype)
    known: dict[tuple[int, ...], int] = {}

    def pool(*key: int) -> int:
        return known.setdefault(key, len(known))

    count = _integers(rng, 0, most, batch)
    count[0] = most
    lengths = torch.where(torch.arange(most) < count[:, None], _integers(rng, 0, depth, batch, most), 0)
    lengths[0, 0] = depth
    paths: list[list[list[int]]] = [[[] for _ in range(int(k))] for k in count]
    q = torch.zeros(batch, most * depth, vocabulary, dtype=dtype)
    for j in range(most):
        for d in range(depth):
            # A law belongs to its context, and under `independent` also to the drafter of path j.
            owner = j if drawing is Drawing.INDEPENDENT else 0
            rows = [pool(b, owner, *paths[b][j]) if lengths[b, j] > d else 0 for b in range(batch)]
            laws = q_pool[rows]
            token = exact.draw(laws, noise.draft(torch.full((batch,), j * depth + d), 1)[:, 0])
            for b in range(batch):
                if lengths[b, j] > d:
                    paths[b][j].append(int(token[b]))
                    q[b, j * depth + d] = laws[b]
    roots = _integers(rng, 0, vocabulary - 1, batch).tolist()
    tree = DraftTree.from_paths(roots, paths, noise.starts - 1, drawing, q=q if drawing.sampled else None)
    p = torch.full((batch, tree.size, vocabulary), NAN, dtype=dtype)
    texts = tree.paths().tolist()
    for b, node in tree.present.nonzero().tolist():
        context = [token for token in texts[b][node] if token >= 0]
        p[b, node] = p_pool[pool(b, 0, *context)]
    return Drafted(tree, p, noise)


# --- verdicts --------------------------------------------------------------------------------------------------


def verdicts(verdict: Verdict) -> list[tuple[tuple[int, ...], int]]:
    """Path and token of each sequence, once lengths, stops and padding are seen to fit the paths."""
    found = []
    rows = zip(
        verdict.nodes.tolist(),
        verdict.lengths.tolist(),
        verdict.tokens.tolist(),
        verdict.stops.tolist(),
        strict=True,
    )
    for nodes, length, token, stop in rows:
        path = tuple(nodes[:length])
        assert all(node > 0 for node in path), f"path {nodes} of length {length}"
        assert all(node == -1 for node in nodes[length:]), f"path {nodes} of length {length}"
        assert stop == (path[-1] if path else 0), f"stops at {stop} after {path}"
        found.append((path, token))
    return found


@dataclass(frozen=True)
class TableNoise:
    """What `SequenceNoise` says, made for the whole batch at once: thousands of single numbers take their time."""

    accepts: list[list[list[float]]]  # [B][N][K]
    finals: list[list[float]]  # [B][D + 1]
    races: Row  # [B, D + 1, V]

    @classmethod
    def of(cls, noise: StepNoise, tree: DraftTree, vocabulary: int) -> TableNoise:
        batch = noise.seeds.shape[0]
        nodes = torch.arange(tree.size).repeat_interleave(max(tree.width, 1))
        ranks = torch.arange(max(tree.width, 1)).repeat(tree.size)
        wide = StepNoise(noise.seeds[:, None], noise.starts[:, None])
        accepts = wide.accept(nodes.expand(batch, -1), ranks).view(batch, tree.size, -1)
        finals = wide.final(torch.arange(tree.max_depth + 1).expand(batch, -1))
        depths = [torch.full_like(noise.seeds, depth) for depth in range(tree.max_depth + 1)]
        races = torch.stack([noise.race(depth, vocabulary) for depth in depths], 1)
        return cls(accepts.tolist(), finals.tolist(), races.numpy())

    def of_sequence(self, b: int) -> OneNoise:
        return OneNoise(self.accepts[b], self.finals[b], self.races[b])


@dataclass(frozen=True)
class OneNoise:
    accepts: list[list[float]]
    finals: list[float]
    races: Row

    def accept(self, node: int, rank: int = 0) -> float:
        return self.accepts[node][rank]

    def final(self, depth: int) -> float:
        return self.finals[depth]

    def race(self, depth: int) -> Row:
        row: Row = self.races[depth]
        return row


def reference_verdicts(rule: VerificationRule, drafted: Drafted) -> list[tuple[tuple[int, ...], int]]:
    """What the plain form says, sequence by sequence."""
    found = []
    table = TableNoise.of(drafted.noise, drafted.tree, drafted.p.shape[2])
    for b in range(drafted.tree.batch):
        plain = rule.reference(PlainTree.of(drafted.tree, b), list(drafted.p[b].numpy()), table.of_sequence(b))
        found.append((plain.path, plain.token))
    return found
