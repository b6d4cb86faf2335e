"""Where rounding, zeros and extreme uniforms lie in wait. Warnings are errors here, so no division makes a NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from forerun.core import drawing as draws
from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.verify.plain import PlainTree
from forerun.verify.rule import VerificationRule, all_rules, why_not

from .drafting import (
    CHAIN_FORMS,
    TREE_FORMS,
    Drafted,
    OneNoise,
    draw_trees,
    generator,
    random_drafts,
    random_noise,
    verdicts,
)

LARGEST = 1 - 2.0**-52
"""The largest uniform there is; the smallest is 0."""
FASTEST, SLOWEST = 2.0**-53, 36.7
"""The same for the exponentials of a race."""

RULES = [pytest.param(rule, id=name) for name, rule in all_rules().items()]
JUDGES_BY_Q = ["block", "chain_rejection", "recursive_iid", "recursive_without_replacement", "traversal"]
TREE = TreeShape.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (1, 0)])
CHAIN = TreeShape.chain(3)


@dataclass(frozen=True)
class TableNoise:
    """Given numbers for a batch: accept [B, N, K], final [B, D + 1], race [B, D + 1, V]."""

    accepts: Tensor
    finals: Tensor
    races: Tensor

    @classmethod
    def all_the_same(cls, drafted: Drafted, u: float) -> TableNoise:
        tree = drafted.tree
        size = (tree.batch, tree.size, max(tree.width, 1))
        accepts = torch.full(size, u, dtype=torch.float64)
        finals = torch.full((tree.batch, tree.max_depth + 1), u, dtype=torch.float64)
        return cls(accepts, finals, cls._races(drafted))

    @classmethod
    def extremes(cls, drafted: Drafted, seed: int) -> TableNoise:
        """0 or the largest uniform, by chance."""
        same = cls.all_the_same(drafted, 0.0)
        rng = generator(seed)
        accepts = same.accepts.masked_fill(torch.rand(same.accepts.shape, generator=rng) < 0.5, LARGEST)
        finals = same.finals.masked_fill(torch.rand(same.finals.shape, generator=rng) < 0.5, LARGEST)
        return cls(accepts, finals, same.races)

    @staticmethod
    def _races(drafted: Drafted) -> Tensor:
        """Tokens that some node of that depth cannot draw arrive as fast as they can, the others as late."""
        tree = drafted.tree
        races = torch.full((tree.batch, tree.max_depth + 1, drafted.p.shape[2]), SLOWEST, dtype=torch.float64)
        impossible = (drafted.p == 0).to(torch.float64)  # also False in the NaN of padding
        depths = tree.depths[..., None].expand_as(impossible)
        return races.masked_fill(torch.zeros_like(races).scatter_add(1, depths, impossible) > 0, FASTEST)

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        ranks = torch.as_tensor(rank).expand_as(nodes).clamp_max(self.accepts.shape[2] - 1)
        return self.accepts[torch.arange(nodes.shape[0]), nodes, ranks]

    def final(self, depths: Tensor) -> Tensor:
        return self.finals.gather(1, depths[:, None]).squeeze(1)

    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor:
        return (p / self.races[torch.arange(depths.shape[0]), depths]).argmax(-1)

    def take(self, sequences: Tensor) -> TableNoise:
        return TableNoise(self.accepts[sequences], self.finals[sequences], self.races[sequences])


def one_sequence(table: TableNoise, b: int) -> OneNoise:
    """The same for sequence b, as the plain forms want it."""
    return OneNoise(table.accepts[b].tolist(), table.finals[b].tolist(), table.races[b].numpy())


def judge(rule: VerificationRule, drafted: Drafted, noise: TableNoise) -> list[tuple[tuple[int, ...], int]]:
    """The verdicts, batched and plain, which must be the same."""
    found = verdicts(rule.verify(drafted.tree, drafted.p, noise))
    for b, (path, token) in enumerate(found):
        rows = list(drafted.p[b].numpy())
        plain = rule.reference(PlainTree.of(drafted.tree, b), rows, one_sequence(noise, b))
        assert (plain.path, plain.token) == (path, token), f"sequence {b}"
    return found


def assert_possible(drafted: Drafted, found: list[tuple[tuple[int, ...], int]]) -> None:
    """Every committed token has a probability under p."""
    for b, (path, token) in enumerate(found):
        node = 0
        for child in path:
            assert int(drafted.tree.parents[b, child]) == node
            assert float(drafted.p[b, node, drafted.tree.tokens[b, child]]) > 0, f"sequence {b} accepted node {child}"
            node = child
        assert float(drafted.p[b, node, token]) > 0, f"sequence {b} drew {token}"


def drafts_for(rule: VerificationRule, drawing: Drawing) -> list[str]:
    if why_not(rule, drawing, chain=True, greedy=True) is not None:
        return []
    return list(TREE_FORMS if why_not(rule, drawing, chain=False, greedy=True) is None else CHAIN_FORMS)


@pytest.mark.parametrize("rule", RULES)
def test_what_p_does_not_hold_never_comes_out(rule: VerificationRule) -> None:
    """Not at u = 0 either, where `<=` would let it pass."""
    tempted = 0
    for drawing in Drawing:
        for number, form in enumerate(drafts_for(rule, drawing)):
            drafted = random_drafts(17, form, drawing, 6, 7, torch.float64 if number % 2 else torch.float32)
            for noise in (
                TableNoise.all_the_same(drafted, 0.0),
                TableNoise.all_the_same(drafted, LARGEST),
                TableNoise.extremes(drafted, 3),
            ):
                assert_possible(drafted, judge(rule, drafted, noise))
            tree = drafted.tree
            drafted_p = drafted.p.gather(1, tree.parents.clamp_min(0)[..., None].expand_as(drafted.p))
            p_x = drafted_p.gather(2, tree.tokens[..., None])[..., 0]
            tempted += int(((p_x == 0) & (tree.parents >= 0)).sum())
    assert tempted > 20


@pytest.mark.parametrize("u", [0.0, LARGEST])
@pytest.mark.parametrize("vocabulary", [3, 256, 257, 700])
def test_a_draw_has_weight(u: float, vocabulary: int) -> None:
    weights = torch.zeros(4, vocabulary)
    weights[0, 0] = weights[1, -1] = weights[2, vocabulary // 2] = 1.0
    weights[3, 1 : vocabulary - 1] = 1 / (vocabulary - 2)
    tokens = exact.draw(weights, torch.full((4,), u, dtype=torch.float64))
    last = vocabulary - 2 if u else 1
    assert tokens.tolist() == [0, vocabulary - 1, vocabulary // 2, last]


# --- p = q, p apart from q ---------------------------------------------------------------------------------------


def same_laws(drawing: Drawing, shape: TreeShape, dtype: torch.dtype, batch: int = 20, vocabulary: int = 9) -> Drafted:
    """p is the law every child was drawn from."""
    rng = generator(23)
    weights = torch.rand(batch, shape.size, vocabulary, generator=rng, dtype=torch.float64) ** 4
    weights = weights * (torch.rand(weights.shape, generator=rng) < 0.8) + 1e-9
    p = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    ranks = shape.width if drawing is Drawing.INDEPENDENT else 1
    q = p.repeat_interleave(ranks, 1)
    parents = torch.tensor(shape.parents).expand(batch, -1)
    return draw_trees(rng, random_noise(rng, batch), drawing, parents, p, q)


def leftmost(shape: TreeShape) -> tuple[int, ...]:
    path: list[int] = []
    while shape.children[path[-1] if path else 0]:
        path.append(shape.children[path[-1] if path else 0][0])
    return tuple(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", JUDGES_BY_Q)
def test_equal_laws_accept_everything(name: str, dtype: torch.dtype) -> None:
    rule = all_rules()[name]
    for drawing in (d for d in Drawing if d.sampled):
        for shape in (CHAIN, TREE):
            if why_not(rule, drawing, chain=shape.is_chain, greedy=False) is not None:
                continue
            drafted = same_laws(drawing, shape, dtype)
            for noise in (TableNoise.all_the_same(drafted, LARGEST), TableNoise.extremes(drafted, 4)):
                assert [path for path, _ in judge(rule, drafted, noise)] == [leftmost(shape)] * 20


def test_equal_laws_pass_the_bar_of_k_seq() -> None:
    """On a chain ρ = 1; for several draws ρ is found by halving, which ends a little above 1."""
    rule = all_rules()["k_seq"]
    for shape, u in ((CHAIN, LARGEST), (TREE, 0.998)):
        drafted = same_laws(Drawing.IID, shape, torch.float64)
        found = judge(rule, drafted, TableNoise.all_the_same(drafted, u))
        assert [path for path, _ in found] == [leftmost(shape)] * 20


def apart(drawing: Drawing, shape: TreeShape, dtype: torch.dtype, batch: int = 20, vocabulary: int = 12) -> Drafted:
    """p holds the even tokens, q the odd ones."""
    rng = generator(29)
    even = torch.arange(vocabulary) % 2 == 0
    ranks = shape.width if drawing is Drawing.INDEPENDENT else 1
    p = torch.rand(batch, shape.size, vocabulary, generator=rng, dtype=torch.float64) * even
    q = torch.rand(batch, shape.size * ranks, vocabulary, generator=rng, dtype=torch.float64) * ~even
    p, q = (law / law.sum(-1, keepdim=True) for law in (p, q))
    parents = torch.tensor(shape.parents).expand(batch, -1)
    noise = random_noise(rng, batch)
    return draw_trees(rng, noise, drawing, parents, p.to(dtype), q.to(dtype))


def plain_decoding(rule: VerificationRule, p: Tensor, noise: StepNoise) -> list[int]:
    """The tokens that the rule takes after the root where there are no drafts. p [B, V]"""
    depth = torch.zeros_like(noise.seeds)
    if rule.name == "greedy":
        return p.argmax(-1).tolist()
    if rule.name == "gumbel":
        return (p / noise.race(depth, p.shape[1])).argmax(-1).tolist()
    return exact.draw(p, noise.final(depth)).tolist()


@pytest.mark.parametrize("rule", RULES)
def test_disjoint_laws_reject_everything(rule: VerificationRule) -> None:
    """What comes out is then what plain decoding draws from p."""
    for drawing in (d for d in Drawing if d.sampled):
        for shape in (CHAIN, TREE):
            if why_not(rule, drawing, chain=shape.is_chain, greedy=True) is not None:
                continue
            for dtype in (torch.float32, torch.float64):
                drafted = apart(drawing, shape, dtype)
                found = verdicts(rule.verify(drafted.tree, drafted.p, drafted.noise))
                wanted = plain_decoding(rule, drafted.p[:, 0], drafted.noise)
                assert found == [((), token) for token in wanted]
                for u in (0.0, LARGEST):
                    found = judge(rule, drafted, TableNoise.all_the_same(drafted, u))
                    assert all(path == () and token % 2 == 0 for path, token in found)


# --- no drafts ---------------------------------------------------------------------------------------------------

Build = Callable[[Tensor, Tensor, Drawing, Tensor | None], DraftTree]
BARE: dict[str, Build] = {
    "build": lambda tokens, positions, drawing, q: DraftTree.build(
        tokens, torch.full_like(tokens, -1), positions, drawing, q=q
    ),
    "chain": lambda tokens, positions, drawing, q: DraftTree.chain(
        tokens, positions, drawing, q=None if q is None else q[:, :0]
    ),
    "from_shape": lambda tokens, positions, drawing, q: DraftTree.from_shape(
        TreeShape.chain(0), tokens, positions, drawing, q=q
    ),
    "from_paths": lambda tokens, positions, drawing, q: DraftTree.from_paths(
        tokens[:, 0].tolist(), [[]] * len(tokens), positions, drawing, q=None if q is None else q[:, :0]
    ),
    "absent": lambda tokens, positions, drawing, q: DraftTree.from_shape(
        CHAIN,
        tokens.expand(-1, CHAIN.size),
        positions,
        drawing,
        q=q,
        present=torch.arange(CHAIN.size).expand(len(tokens), -1) == 0,
    ),
    "empty_chain": lambda tokens, positions, drawing, q: DraftTree.chain(
        tokens.expand(-1, 3), positions, drawing, q=q, lengths=torch.zeros(len(tokens), dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("made", BARE)
@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_it_is_plain_decoding(rule: VerificationRule, made: str) -> None:
    batch, vocabulary = 50, 300
    rng = generator(31)
    noise = random_noise(rng, batch)
    for dtype in (torch.float32, torch.float64):
        p = torch.softmax(2 * torch.randn(batch, 1, vocabulary, generator=rng, dtype=torch.float64), -1).to(dtype)
        for drawing in Drawing:
            if (made == "from_paths" and drawing is Drawing.WITHOUT_REPLACEMENT) or not drafts_for(rule, drawing):
                continue
            tokens = torch.zeros(batch, 1, dtype=torch.int64)
            tree = BARE[made](tokens, noise.starts - 1, drawing, p if drawing.sampled else None)
            laws = p.expand(-1, tree.size, -1).clone()
            wanted = [((), token) for token in plain_decoding(rule, p[:, 0], noise)]
            assert verdicts(rule.verify(tree, laws, noise)) == wanted


# --- rounding ----------------------------------------------------------------------------------------------------


def just_below(drawing: Drawing, shape: TreeShape, batch: int = 20, vocabulary: int = 4) -> Drafted:
    """float32 laws with p a little under q everywhere, as rounding may leave them: [p − q]+ is 0."""
    rng = generator(37)
    ranks = shape.width if drawing is Drawing.INDEPENDENT else 1
    q = torch.rand(batch, shape.size, vocabulary, generator=rng) + 0.1
    q = (q / q.sum(-1, keepdim=True)).to(torch.float32)
    p = q * (1 - 2.0**-20)
    assert bool((p < q).all())
    parents = torch.tensor(shape.parents).expand(batch, -1)
    return draw_trees(rng, random_noise(rng, batch), drawing, parents, p, q.repeat_interleave(ranks, 1))


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_residual_is_p(rule: VerificationRule) -> None:
    """The root token is among the children now and then, and nodes have fewer draws than the widest: what pads the
    list of draws must not be taken for one of them."""
    for drawing in Drawing:
        for shape in (CHAIN, TREE, TreeShape((-1, 0, 0, 0, 0, 1, 1, 2))):
            if why_not(rule, drawing, chain=shape.is_chain, greedy=True) is not None:
                continue
            drafted = just_below(drawing, shape)
            for noise in (TableNoise.all_the_same(drafted, LARGEST), TableNoise.extremes(drafted, 6)):
                found = judge(rule, drafted, noise)
                assert_possible(drafted, found)
                if rule.name == "chain_rejection":  # all are refused; p itself is drawn from
                    tokens = exact.draw(rows_at(drafted.p, found), noise.final(lengths_of(found)))
                    assert [token for _, token in found] == tokens.tolist()
            if rule.name in JUDGES_BY_Q:
                found = judge(rule, drafted, TableNoise.all_the_same(drafted, LARGEST))
                assert all(path == () for path, _ in found)


def rows_at(p: Tensor, found: list[tuple[tuple[int, ...], int]]) -> Tensor:
    return p[torch.arange(len(found)), torch.tensor([path[-1] if path else 0 for path, _ in found])]


def lengths_of(found: list[tuple[tuple[int, ...], int]]) -> Tensor:
    return torch.tensor([len(path) for path, _ in found])


@pytest.mark.parametrize("rule", RULES)
def test_almost_certain_laws_of_two_tokens(rule: VerificationRule) -> None:
    """float32 cannot tell much between 1 − 1e-7 and 1: ratios of 1e7, remainders of one rounding."""
    sure = torch.tensor([[1 - 1e-7, 1e-7], [1e-7, 1 - 1e-7], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float32)
    sure = torch.cat([sure, torch.tensor([[1 - 1e-7, 0.0], [1.0, 1e-30], [1 - 2.0**-24, 2.0**-24]])])
    rng = generator(41)
    batch = 16
    for drawing in Drawing:
        for shape in (CHAIN, TREE):
            if why_not(rule, drawing, chain=shape.is_chain, greedy=True) is not None:
                continue
            ranks = shape.width if drawing is Drawing.INDEPENDENT else 1
            p = sure[torch.randint(0, len(sure), (batch, shape.size), generator=rng)]
            q = sure[torch.randint(0, len(sure), (batch, shape.size * ranks), generator=rng)]
            parents = torch.tensor(shape.parents).expand(batch, -1)
            drafted = draw_trees(rng, random_noise(rng, batch), drawing, parents, p, q)
            for noise in (
                TableNoise.all_the_same(drafted, 0.0),
                TableNoise.all_the_same(drafted, LARGEST),
                TableNoise.extremes(drafted, 7),
                TableNoise.all_the_same(drafted, 0.4),
            ):
                assert_possible(drafted, judge(rule, drafted, noise))


# --- chains ------------------------------------------------------------------------------------------------------


@cache
def chains(drawing: Drawing) -> list[Drafted]:
    """On wide laws that are near each other, where acceptance hangs in the balance."""
    made = []
    for vocabulary, dtype in itertools.product((7, 300), (torch.float32, torch.float64)):
        rng = generator(43 + vocabulary)
        scores = torch.randn(150, 5, vocabulary, generator=rng, dtype=torch.float64)
        shifted = scores + 0.7 * torch.randn(scores.shape, generator=rng, dtype=torch.float64)
        p, q = (law.softmax(-1).to(dtype) for law in (scores, shifted))
        parents = torch.tensor(TreeShape.chain(4).parents).expand(150, -1)
        noise = random_noise(rng, 150)
        made.append(draw_trees(rng, noise, drawing, parents, p, q, as_chain=vocabulary == 7))
    return made


@pytest.mark.parametrize("drawing", [d for d in Drawing if d.sampled])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("block", "traversal"),  # both judge node i by accept(i), with h_i what is left of r_i when the rest is deleted
        ("chain_rejection", "recursive_iid"),
        ("chain_rejection", "recursive_without_replacement"),
        ("chain_rejection", "k_seq"),  # ρ = 1 for one draw
    ],
)
def test_rules_that_are_one_on_a_chain(one: str, other: str, drawing: Drawing) -> None:
    differs = 0
    for drafted in chains(drawing):
        found = verdicts(all_rules()[one].verify(drafted.tree, drafted.p, drafted.noise))
        assert verdicts(all_rules()[other].verify(drafted.tree, drafted.p, drafted.noise)) == found
        third = "chain_rejection" if one == "block" else "block"
        against = verdicts(all_rules()[third].verify(drafted.tree, drafted.p, drafted.noise))
        differs += sum(a != b for a, b in zip(found, against, strict=True))
    assert differs > 60  # the two families do not agree, or nothing is shown


def test_candidates_end_where_the_law_ends() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    for tokens in (draws.top_children(q, 4), draws.race_children(q, torch.full((2, 3), FASTEST), 4)):
        assert sorted(tokens[0].tolist()) == [-1, -1, 0, 1]
        assert tokens[1].tolist() == [1, -1, -1, -1]
    u = torch.tensor([[0.0, LARGEST]], dtype=torch.float64).expand(2, -1)
    assert draws.iid_children(q, u).tolist() == [[0, 1], [1, 1]]
