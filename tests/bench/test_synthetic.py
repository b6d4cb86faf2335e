"""The law family and the drafts from it are what they say they are."""

from __future__ import annotations

import pytest
import torch

from forerun.bench import synthetic
from forerun.bench.synthetic import Chunk, Drafts, Family, variation
from forerun.core.drawing import Drawing, race_children
from forerun.core.shape import TreeShape
from forerun.trees.static import cartesian


def only_chunk(family: Family, shape: TreeShape, samples: int) -> Chunk:
    (chunk,) = family.chunks(shape, samples)
    return chunk


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_the_noise_gives_the_asked_distance(spread: float) -> None:
    family = Family(500, spread, seed=3)
    asked = (0.05, 0.2, 0.5)
    noises = family.noises(asked)
    assert noises == sorted(noises)
    chunk = only_chunk(family, TreeShape.chain(2), 200)
    for distance, noise in zip(asked, noises, strict=True):
        assert float(variation(chunk.p[:, :2], chunk.drafter(noise)).mean()) == pytest.approx(distance, abs=0.015)


def test_a_distance_out_of_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distance 0\.9 is out of reach"):
        Family(16, 10.0, seed=0).noises([0.9])


def test_no_few_tokens_hold_a_wide_law() -> None:
    p = only_chunk(Family(2000, 3.0, seed=0), TreeShape.chain(1), 200).p
    assert torch.allclose(p.sum(-1), torch.ones(200, 2), atol=1e-5)
    assert float(p.topk(4, -1).values.sum(-1).mean()) == pytest.approx(0.44, abs=0.02)


def test_laws_of_different_nodes_and_samples_differ() -> None:
    chunk = only_chunk(Family(100, 3.0, seed=0), cartesian([2, 1]), 4)
    assert len(torch.unique(chunk.p.flatten(0, 1), dim=0)) == 4 * 5
    assert len(torch.unique(chunk.drafter(1.0).flatten(0, 1), dim=0)) == 4 * 3


def test_chunks_are_new_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_MEMORY", 100_000)
    chunks = list(Family(100, 3.0, seed=0).chunks(TreeShape.chain(2), 50))
    assert len(chunks) > 2
    assert sum(len(chunk.p) for chunk in chunks) == 50
    assert len(torch.unique(torch.cat([chunk.noise.seeds for chunk in chunks]))) == 50
    assert len(torch.unique(torch.cat([chunk.p[:, 0] for chunk in chunks]), dim=0)) == 50


def test_seeds_beyond_32_bits_count() -> None:
    laws = [only_chunk(Family(50, 3.0, seed), TreeShape.chain(1), 1).p for seed in (1, 257, 1 + (1 << 32))]
    assert len(torch.unique(torch.stack(laws), dim=0)) == 3


def test_drafts_are_drawn_as_named() -> None:
    chunk = only_chunk(Family(40, 3.0, seed=2), cartesian([2, 2, 1]), 64)
    q = chunk.drafter(0.8)
    tokens = {drafts: chunk.draft(drafts, q) for drafts in Drafts}
    below = list(chunk.shape.children[1])  # of the root's first child
    assert torch.equal(tokens[Drafts.TOP][:, below], q[:, 1].topk(2, -1).indices)
    race = chunk.noise.race(torch.ones(64, dtype=torch.int64), 40)
    assert torch.equal(tokens[Drafts.COUPLED][:, below], race_children(q[:, 1], race, 2))
    for drafts in (Drafts.WITHOUT_REPLACEMENT, Drafts.TOP, Drafts.COUPLED):
        assert bool((tokens[drafts][:, 1] != tokens[drafts][:, 2]).all())
    assert bool((tokens[Drafts.SAMPLED][:, 1] == tokens[Drafts.SAMPLED][:, 2]).any())


def test_a_chain_is_the_leftmost_path() -> None:
    chunk = only_chunk(Family(40, 3.0, seed=2), cartesian([2, 2, 1]), 8)
    q = chunk.drafter(0.8)
    tokens = chunk.draft(Drafts.SAMPLED, q)
    path = [0, 1, 3, 7]
    assert [chunk.shape.parents[node] for node in path] == [-1, 0, 1, 3]
    tree, p = chunk.chain(Drafts.SAMPLED, tokens, q)
    assert tree.drawing is Drawing.IID
    assert torch.equal(tree.tokens, tokens[:, path])
    assert torch.equal(p, chunk.p[:, path])
    assert tree.q is not None
    assert torch.equal(tree.q, q[:, path[:-1]])
