"""The steps between two passes of a head: each kernel against its plain form, and both against the tree that they are
meant to grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.tree import DraftTree
from forerun.drafters import device_growth
from forerun.drafters.confidence import Taus
from forerun.drafters.device_growth import best_tree, token_noise
from forerun.drafters.tree_spec import TreeSpec
from forerun.kernels import growth as module
from forerun.kernels.attention import PackedRows
from forerun.kernels.growth import Chosen, Nodes, Race, Texts, best_children, first_of, grow_level
from forerun.kernels.kernel import Kernel
from forerun.trees.dynamic import Frontier, expand_and_rerank
from tests.drafters.test_device_growth import lived

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numbers wrap with a warning

Forms = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
PLAIN: Forms = (best_children.plain, grow_level.plain, best_tree.plain)
BLOCK = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row has several."""
    monkeypatch.setattr(module, "TILE", 64)


# --- the best of a row ---------------------------------------------------------------------------------------


def coarse(rows: int, size: int, device: torch.device, seed: int = 0) -> Tensor:
    """Scores with many ties, among them 0 and −0, and with numbers that are none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-6, 7, (rows, size), generator=generator) / 2.0
    scores = torch.where(torch.rand(rows, size, generator=generator) < 0.2, -0.0, scores)
    odd = torch.tensor([math.nan, -math.inf, math.inf, 3e38])[torch.randint(4, (rows, size), generator=generator)]
    often = torch.tensor([0.0, 0.1, 0.9, 0.02])[torch.arange(rows) % 4, None]
    return torch.where(torch.rand(rows, size, generator=generator) < often, odd, scores).to(device)


def race_of(texts: int, size: int, device: torch.device, tau: float = 1.3) -> Race:
    generator = torch.Generator().manual_seed(texts)
    noise = -(-torch.rand(texts, size, generator=generator).clamp(1e-6, 1 - 1e-6).log()).log()
    heat = torch.rand(texts, generator=generator) + 0.5
    return Race(noise.to(device), heat.to(device), (torch.arange(texts) % 3 != 1).long().to(device), tau)


def same_best(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].isinf(), expected[0].isinf())
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("texts", "share", "size", "width"),
    [(1, 1, 1, 1), (1, 6, 64, 6), (3, 2, 65, 3), (2, 4, 300, 4), (1, 2, 500, 20), (4, 3, 7, 7)],
)
@pytest.mark.parametrize("raced", [False, True])
def test_the_best_are_those_of_a_stable_sort(
    texts: int, share: int, size: int, width: int, raced: bool, built: Callable[..., Any], device: torch.device
) -> None:
    race = race_of(texts, size, device) if raced else None
    fine = torch.randn(texts * share, size, generator=torch.Generator().manual_seed(size)).to(device) * 4
    for scores in (fine, coarse(texts * share, size, device, size)):
        for tau in (1.0, 0.7):
            same_best(built(best_children)(scores, width, race, tau), best_children.plain(scores, width, race, tau))


def test_what_the_best_are() -> None:
    scores = torch.tensor([[1.0, 3.0, math.nan, 3.0, -math.inf], [math.nan] * 2 + [-math.inf] * 3])
    shares, columns = best_children(scores, 4)
    total = math.log(2 * math.exp(3) + math.exp(1))
    assert columns.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    torch.testing.assert_close(shares[0], torch.tensor([3 - total, 3 - total, 1 - total, -math.inf]))
    assert (shares[1] == -math.inf).all()


def test_a_row_of_nothing(built: Callable[..., Any], device: torch.device) -> None:
    scores = torch.full((3, 100), -math.inf, device=device)
    scores[1] = math.nan
    scores[2, 99] = 5.0
    shares, columns = built(best_children)(scores, 3)
    same_best((shares, columns), best_children.plain(scores, 3))
    assert columns.tolist() == [[0, 1, 2], [0, 1, 2], [99, 0, 1]]


def test_rows_of_a_wider_tensor(built: Callable[..., Any], device: torch.device) -> None:
    scores = torch.randn(5, 200, generator=torch.Generator().manual_seed(3)).to(device)[:, :130]
    same_best(built(best_children)(scores, 5), best_children.plain(scores, 5))


def test_long_tiles_where_there_would_be_too_many(
    built: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 16)
    scores = torch.randn(2, 500, generator=torch.Generator().manual_seed(4)).to(device)
    same_best(built(best_children)(scores, 6), best_children.plain(scores, 6))


def test_the_noise_is_the_targets_to_the_last_bit(built: Callable[..., Any], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**62), 2**62, (3,), generator=generator).to(device)
    positions = torch.tensor([0, 17, 131_000], device=device)
    ids = torch.randperm(5000, generator=generator)[:700].to(device)
    for ahead_of in (1, 4):
        noise = built(token_noise)(seeds, positions, ids, ahead_of)
        assert torch.equal(noise, token_noise.plain(seeds, positions, ids, ahead_of))
    assert abs(float(noise.mean()) - 0.577) < 0.15  # Euler's constant is the mean of a Gumbel number


# --- a level, and the tree -----------------------------------------------------------------------------------


def texts_of(count: int, device: torch.device, seed: int) -> Texts:
    """Some of them absent, some without a level to grow, the first at the end of its blocks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5 * BLOCK, (count,), generator=generator)
    lengths[0] = 6 * BLOCK - 1
    depths = torch.randint(0, 6, (count,), generator=generator)
    depths[0] = 5
    tails = torch.minimum(lengths, torch.randint(1, 4, (count,), generator=generator))
    counts = tails * (torch.arange(count) % 5 != 3)
    packed = PackedRows(
        starts=torch.zeros(count, dtype=torch.int64, device=device),
        counts=counts.to(device),
        contexts=(lengths - tails).to(device),
        tails=tails.to(device),
        blocks=torch.randperm(6 * count, generator=generator).view(count, 6).to(device),
        mask=torch.zeros(count, 1, dtype=torch.int64, device=device),
        positions=torch.zeros(count, dtype=torch.int64, device=device),
        max_rows=4,
        max_context=6 * BLOCK,
        block_size=BLOCK,
    )
    return Texts(
        roots=torch.randint(100, (count,), generator=generator).to(device),
        rows=torch.randint(50, (count,), generator=generator).to(device),
        depths=depths.to(device),
        packed=packed,
    )


def falling(count: int, frontier: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shares with ties, absent ones, some that rounding made larger than 1, NaN behind all others; and columns."""
    choice = torch.tensor([0.0, -0.0, 1e-6, -1e-9, -0.5, -0.5, -1.0, -1.5, -2.0, -3e38, -math.inf, -math.inf])
    choice = choice[torch.randint(len(choice), (5,), generator=generator)]
    shares = choice[torch.randint(5, (count, frontier, width), generator=generator)]
    shares = shares.sort(-1, descending=True)[0]
    lost = torch.rand(count, frontier, width, generator=generator) < 0.1
    shares = torch.where(lost & (shares == -math.inf), math.nan, shares)
    return shares, torch.randint(40, (count, frontier, width), generator=generator)


def grown_by(
    forms: Forms, spec: TreeSpec, texts: Texts, levels: list[tuple[Tensor, Tensor]], context_length: int
) -> tuple[Nodes, list[Chosen]]:
    """All levels, from given children."""
    device = texts.roots.device
    grown = Nodes.room(texts.roots.shape[0], spec.width, spec.depth, device)
    ids = torch.arange(40, device=device).flip(0) * 3
    chosen: Chosen | None = None
    found = []
    for level, (shares, columns) in enumerate(levels):
        chosen = forms[1](
            *(shares, columns, ids, texts, grown, chosen),
            level=level,
            context_length=context_length,
            last=level == spec.depth - 1,
        )
        assert (chosen is None) == (level == spec.depth - 1)
        if chosen is not None:
            found.append(chosen)
    return grown, found


def assert_same(found: Any, expected: Any, what: str) -> None:
    for item in fields(expected):
        got, wanted = getattr(found, item.name), getattr(expected, item.name)
        if isinstance(wanted, Tensor):
            assert got.dtype == wanted.dtype, f"{what}: {item.name}"
            assert torch.equal(got, wanted), f"{what}: {item.name}"
        else:
            assert got == wanted, f"{what}: {item.name}"


TREES = ["dynamic:1,3,3", "dynamic:3,1,9", "dynamic:6,4,24", "dynamic:2,3,40", "dynamic:9,3,20"]


def levels_of(spec: TreeSpec, count: int, device: torch.device, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [falling(count, 1 if level == 0 else spec.width, spec.width, generator) for level in range(spec.depth)]
    return [(shares.to(device), columns.to(device)) for shares, columns in made]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("count", [1, 6])
def test_levels_and_trees_are_the_plain_ones(
    tree: str, count: int, built: Callable[..., Any], device: torch.device
) -> None:
    spec = TreeSpec.parse(tree)
    forms = whole_forms(built)
    for seed in range(2):
        texts, levels = texts_of(count, device, seed), levels_of(spec, count, device, seed)
        end = 45 if seed == 1 else 500
        grown, chosen = grown_by(forms, spec, texts, levels, end)
        plainly, expected = grown_by(PLAIN, spec, texts, levels, end)
        assert_same(grown, plainly, "grown")
        for level, (one, other) in enumerate(zip(chosen, expected, strict=True)):
            assert_same(one, other, f"level {level}")
        limits = torch.tensor([spec.size, 0, 1, 5, 1000, spec.size - 1], device=device)[:count]
        starts = texts.packed.contexts + texts.packed.tails
        assert_same(forms[2](starts, limits, grown, spec), best_tree.plain(starts, limits, grown, spec), "tree")


def whole_forms(built: Callable[..., Any]) -> Forms:
    return built(best_children), built(grow_level), built(best_tree)


def compare_with_expanding(forms: Forms, device: torch.device, tree: str, seed: int) -> None:
    """A drafter whose scores depend on the last token and the depth alone, so that both ways can ask it."""
    spec, count, size = TreeSpec.parse(tree), 3, 30
    generator = torch.Generator().manual_seed(seed)
    tables = (torch.randint(-4, 5, (spec.depth, count, size, size), generator=generator) / 2.0).to(device)
    ids = torch.arange(size, device=device)
    texts = texts_of(count, device, seed)
    texts = Texts(texts.roots % size, texts.rows, texts.depths.clamp_min(2), texts.packed)

    def scores_after(tokens: Tensor, depth: int) -> Tensor:
        return tables[depth].gather(1, tokens[:, :, None].expand(-1, -1, size)).flatten(0, 1)

    def candidates(tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        shares, columns = forms[0](scores_after(tokens, depth), spec.width)
        return shares.view(count, -1, spec.width), columns.view(count, -1, spec.width)

    grown = Nodes.room(count, spec.width, spec.depth, device)
    chosen: Chosen | None = None
    for level in range(spec.depth):
        tokens = texts.roots[:, None] if chosen is None else chosen.tokens.view(count, -1)
        chosen = forms[1](
            *(*candidates(tokens, level), ids, texts, grown, chosen),
            level=level,
            context_length=500,
            last=level == spec.depth - 1,
        )
    limits = torch.full((count,), spec.size, device=device)
    tree_found: DraftTree = forms[2](texts.roots, limits, grown, spec)

    def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
        shares, columns = candidates(frontier.tokens, frontier.depth)
        return columns, shares.masked_fill((frontier.depth >= texts.depths)[:, None, None], -math.inf)

    expected = expand_and_rerank(texts.roots, children, width=spec.width, depth=spec.depth, size=1 + spec.size)
    assert torch.equal(tree_found.tokens, expected.tokens)
    assert torch.equal(tree_found.parents, expected.parents)
    assert int((tree_found.parents >= 0).sum()) > spec.depth


@pytest.mark.parametrize("tree", ["dynamic:6,4,24", "dynamic:2,4,6", "dynamic:4,3,50"])
def test_the_tree_is_that_of_expanding_and_reranking(tree: str, device: torch.device) -> None:
    for seed in range(5):
        compare_with_expanding(PLAIN, device, tree, seed)


def test_and_so_is_that_of_the_kernels(built: Callable[..., Any], device: torch.device) -> None:
    compare_with_expanding(whole_forms(built), device, "dynamic:4,3,50", 1)


def test_a_head_grows_the_same_trees_with_kernels(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded texts, budgets that end early, a place of the bucket that is empty."""
    plainly = lived("eagle3", "dynamic:3,3,8", Taus(1.6, 0.7), 3)
    with_kernels: list[str] = []

    def counted(kernel: Kernel[Any, Any]) -> Callable[..., Any]:
        form = built(kernel)

        def call(*given: Any, **options: Any) -> Any:
            with_kernels.append(kernel.name)
            return form(*given, **options)

        return call

    for kernel in (best_children, grow_level, best_tree, token_noise):
        monkeypatch.setattr(device_growth, kernel.name, counted(kernel))
    assert lived("eagle3", "dynamic:3,3,8", Taus(1.6, 0.7), 3) == plainly
    steps = with_kernels.count("best_tree")
    assert steps > 0
    assert with_kernels.count("grow_level") == with_kernels.count("token_noise") == 3 * steps


def test_more_nodes_than_a_program_ranks(built: Callable[..., Any], device: torch.device) -> None:
    spec = TreeSpec.parse("dynamic:12,4,100")
    levels = levels_of(spec, 2, device, 9)
    texts = texts_of(2, device, 9)
    texts.depths.fill_(4)
    assert first_of(4, 12) > 2 * module.RANKED
    grown, _ = grown_by(whole_forms(built), spec, texts, levels, 500)
    limits = torch.tensor([100, 70], device=device)
    found = built(best_tree)(texts.roots, limits, grown, spec)
    assert_same(found, best_tree.plain(texts.roots, limits, grown, spec), "tree")
