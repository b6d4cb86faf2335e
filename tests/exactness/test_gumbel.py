"""Gumbel coupling: what comes out is, token for token, what plain sampling with the same seed gives.

Whatever drafts: chains, trees of every shape and random ones, merged paths, candidates coupled or not, random tokens,
drafts that are reordered or pruned by looking at the very noise, in any batch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun.core.drawing import ABSENT, Drawing, iid_children, race_children, top_children
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.verify.plain import PlainTree, PlainVerdict, SequenceNoise
from forerun.verify.rule import all_rules

from .cases import tree_shapes

VOCABULARY, LENGTH = 40, 12
GUMBEL = all_rules()["gumbel"]
PARAMS = {
    "plain": SamplingParams(),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k": SamplingParams(top_k=5),
    "min_p, bias": SamplingParams(min_p=0.02, logit_bias={3: 0.5, 5: float("-inf")}),
}


def table(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def laws(logits: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """[..., V] laws after `tokens` [...], a bigram model."""
    rows = logits[tokens.reshape(-1)]
    settings = LawSettings.of([params]).take(torch.zeros(rows.shape[0], dtype=torch.int64))
    return law(rows, settings).view(*tokens.shape, VOCABULARY)


def random_shape(rng: np.random.Generator) -> TreeShape:
    size = int(rng.integers(1, 12))
    return TreeShape((-1, *(int(rng.integers(0, node)) for node in range(1, size))))


def draft(shape: TreeShape, how: str, roots: Tensor, starts: Tensor, noise: StepNoise, q_logits: Tensor) -> DraftTree:
    """Fill a shape with tokens drawn in one of many ways, also bad ones."""
    batch = roots.shape[0]
    tokens = torch.zeros(batch, shape.size, dtype=torch.int64)
    present = torch.ones(batch, shape.size, dtype=torch.bool)
    tokens[:, 0] = roots
    for node, children in enumerate(shape.children):
        if not children:
            continue
        count = len(children)
        q = torch.softmax(q_logits[tokens[:, node]], -1)
        depth = torch.full((batch,), shape.depths[node])
        at = torch.full((batch,), node)
        if how == "coupled":
            drawn = race_children(q, noise.race(depth, VOCABULARY), count)
        elif how == "without_replacement":
            drawn = race_children(q, noise.draft_race(at, VOCABULARY), count)
        elif how == "iid":
            drawn = iid_children(q, noise.draft(at, count))
        elif how == "reversed":
            drawn = race_children(q, noise.race(depth, VOCABULARY), VOCABULARY)[:, -count:].flip(-1)
        elif how == "pruned":  # of the coupled candidates only those with an even number
            drawn = race_children(q, noise.race(depth, VOCABULARY), count)
            drawn = drawn.masked_fill(drawn % 2 == 1, ABSENT)
        elif how == "random":
            drawn = (noise.draft(at, count) * VOCABULARY).long()
        else:
            drawn = top_children(q, count)
        for rank, child in enumerate(children):
            present[:, child] = present[:, node] & (drawn[:, rank] != ABSENT)
            tokens[:, child] = drawn[:, rank].clamp_min(0)
    if how != "iid":
        return DraftTree.from_shape(shape, tokens, starts - 1, Drawing.FIXED, present=present)
    paths = [[leaf_path(shape, row, leaf) for leaf in range(1, shape.size)] for row in tokens.tolist()]  # merged
    return DraftTree.from_paths(roots.tolist(), paths, starts - 1, Drawing.FIXED)


def leaf_path(shape: TreeShape, tokens: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = shape.parents[node]
    return path


def generate(
    shapes: list[TreeShape], how: str, seeds: Tensor, params: SamplingParams, p_logits: Tensor, q_logits: Tensor
) -> Tensor:
    """[B, LENGTH] texts of a bigram model; `shapes` takes turns, sequences advance at their own pace."""
    batch = seeds.shape[0]
    texts = torch.zeros(batch, LENGTH + 20, dtype=torch.int64)
    lengths = torch.ones(batch, dtype=torch.int64)  # the prompt is one token
    steps = 0
    while int(lengths.min()) < LENGTH:
        shape = shapes[steps % len(shapes)]
        noise = StepNoise(seeds, lengths)
        roots = texts.gather(1, (lengths - 1)[:, None]).squeeze(1)
        tree = draft(shape, how, roots, lengths, noise, q_logits)
        verdict = GUMBEL.verify(tree, laws(p_logits, tree.tokens, params), noise)
        committed = verdict.committed(tree.tokens)
        for offset in range(committed.shape[1]):
            take = (committed[:, offset] >= 0) & (lengths + offset < texts.shape[1])
            place = (lengths + offset).clamp_max(texts.shape[1] - 1)[:, None]
            kept = torch.where(take[:, None], committed[:, offset, None], texts.gather(1, place))
            texts.scatter_(1, place, kept)
        lengths = (lengths + verdict.lengths + 1).clamp_max(LENGTH + 8)
        steps += 1
    return texts[:, :LENGTH]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("how", ["coupled", "without_replacement", "iid", "fixed", "reversed", "pruned", "random"])
def test_same_text_as_plain_sampling(how: str, params: SamplingParams) -> None:
    p_logits, q_logits = table(1), table(1) + table(2) * 0.5
    seeds = torch.arange(48) * 7919
    plain = generate([TreeShape.chain(0)], how, seeds, params, p_logits, q_logits)
    assert len(set(map(tuple, plain.tolist()))) > 40, "seeds must matter"
    rng = np.random.default_rng(3)
    for shapes in [[shape] for shape in tree_shapes().values()] + [[random_shape(rng) for _ in range(7)]]:
        assert torch.equal(generate(shapes, how, seeds, params, p_logits, q_logits), plain), shapes


def test_same_text_in_any_batch() -> None:
    p_logits, q_logits = table(4), table(5)
    seeds = torch.arange(20) + 100
    shape = [TreeShape.from_rank_paths([(0,), (1,), (0, 0)])]
    together = generate(shape, "coupled", seeds, SamplingParams(), p_logits, q_logits)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = generate(shape, "coupled", seeds[order], SamplingParams(), p_logits, q_logits)
    assert torch.equal(shuffled, together[order])
    alone = torch.cat(
        [generate(shape, "coupled", seeds[i : i + 1], SamplingParams(), p_logits, q_logits) for i in range(20)]
    )
    assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_form_equals_the_reference(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(9)
    for trial in range(40):
        shape = random_shape(rng)
        seeds, starts = torch.arange(8) + 50 * trial, torch.arange(8) * 3 + 1
        noise = StepNoise(seeds, starts)
        tree = draft(shape, "coupled", torch.zeros(8, dtype=torch.int64), starts, noise, table(trial))
        p = laws(table(trial + 100), tree.tokens, SamplingParams()).to(dtype)
        verdict = GUMBEL.verify(tree, p, noise)
        for b in range(8):
            wanted = GUMBEL.reference(PlainTree.of(tree, b), list(p[b].numpy()), SequenceNoise(noise, b, VOCABULARY))
            path = tuple(node for node in verdict.nodes[b].tolist() if node >= 0)
            assert PlainVerdict(path, int(verdict.tokens[b])) == wanted


def test_plain_sampling_with_seeds_has_the_targets_law() -> None:
    """argmax of p over exponentials is a draw from p: over 40,000 seeds, at three positions."""
    logits = torch.linspace(-2, 2, 12)
    p = torch.softmax(logits, -1)
    seeds = torch.arange(40_000)
    for position in (1, 2, 1000):
        race = StepNoise(seeds, torch.full_like(seeds, position)).race(torch.zeros_like(seeds), 12)
        counts = torch.bincount((p / race).argmax(-1), minlength=12)
        assert stats.chisquare(counts.numpy(), (p.double() / p.double().sum() * 40_000).numpy()).pvalue > 1e-3
