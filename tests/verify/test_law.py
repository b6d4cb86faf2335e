"""The law of a text that is really decoded: real noise, real drawing, batched rules, several steps.

A target and a drafter that see one token back, over four tokens; tens of thousands of seeds; the first three tokens
of every text. Their counts must fit the target's exact law (χ² test). Seeds are fixed: what passes, passes always.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

from forerun.core import drawing as draws
from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.noise import Purpose, StepNoise, row_key, uniform
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.verify.rule import VerificationRule, all_rules, why_not

TOKENS = 3
VOCABULARY = 4
SEEDS = 20_000
SHAPES = {"chain": TreeShape.chain(2), "tree": TreeShape.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])}

# Rows: the last token. The drafter is off by so much, and so differently from token to token, that what is left of p
# after a refusal is a law of several tokens: then a wrong remainder shows, and so does a number used twice.
TARGET = torch.tensor(
    [[0.14, 0.56, 0.14, 0.16], [0.16, 0.34, 0.22, 0.28], [0.14, 0.36, 0.26, 0.24], [0.14, 0.20, 0.10, 0.56]],
    dtype=torch.float64,
)
DRAFTER = torch.tensor(
    [[0.48, 0.08, 0.28, 0.16], [0.06, 0.08, 0.38, 0.48], [0.08, 0.08, 0.64, 0.20], [0.18, 0.18, 0.60, 0.04]],
    dtype=torch.float64,
)
SECOND = torch.tensor(
    [[0.10, 0.20, 0.50, 0.20], [0.20, 0.50, 0.20, 0.10], [0.40, 0.20, 0.20, 0.20], [0.10, 0.20, 0.30, 0.40]],
    dtype=torch.float64,
)


@dataclass(frozen=True)
class Toy:
    """Decodes a batch of texts, one for each seed, all after token 0."""

    rule: VerificationRule
    drawing: Drawing
    shape: TreeShape
    target: Tensor = TARGET
    noise: type[StepNoise] = StepNoise
    coupled: bool = False

    def texts(self, seeds: Tensor) -> Tensor:
        """[B, TOKENS]"""
        text = torch.zeros(len(seeds), 1 + TOKENS, dtype=torch.int64)
        done = torch.zeros_like(seeds)
        while bool((done < TOKENS).any()):
            open_ = (done < TOKENS).nonzero()[:, 0]
            last = text[open_, done[open_]]
            committed = self.step(last, self.noise(seeds[open_], done[open_] + 1))
            for place in range(committed.shape[1]):
                room = (committed[:, place] >= 0) & (done[open_] < TOKENS)
                text[open_[room], done[open_][room] + 1] = committed[room, place]
                done[open_[room]] += 1
        return text[:, 1:]

    def step(self, last: Tensor, noise: StepNoise) -> Tensor:
        """[B, D + 1] the tokens one step commits after the tokens `last` [B], padded with -1."""
        tree = self.draft(last, noise)
        verdict = self.rule.verify(tree, self.target[tree.tokens], noise)
        return verdict.committed(tree.tokens)

    def draft(self, last: Tensor, noise: StepNoise) -> DraftTree:
        batch, shape = len(last), self.shape
        columns = [last] + [last] * (shape.size - 1)
        q: list[Tensor] = []
        for node, children in enumerate(shape.children):
            mine = [self.drafter(rank)[columns[node]] for rank in range(max(shape.width, 1))]
            q += mine if self.drawing is Drawing.INDEPENDENT else mine[:1]
            nodes = torch.full((batch,), node)
            drawn = self.children(noise, nodes, shape.depths[node], mine, len(children))
            for rank, child in enumerate(children):
                columns[child] = drawn[:, rank]
        parents = torch.tensor(shape.parents).expand(batch, -1)
        tokens, positions = torch.stack(columns, 1), noise.starts - 1
        if not self.drawing.sampled:
            return DraftTree.build(tokens, parents, positions, self.drawing, check=False)
        q_rows = None
        if self.drawing is Drawing.INDEPENDENT:
            rows = torch.arange(shape.size)[:, None] * shape.width + torch.arange(shape.width)
            q_rows = rows.expand(batch, -1, -1)
        laws = torch.stack(q, 1)
        return DraftTree.build(tokens, parents, positions, self.drawing, q=laws, q_rows=q_rows, check=False)

    def drafter(self, rank: int) -> Tensor:
        return SECOND if self.drawing is Drawing.INDEPENDENT and rank % 2 else DRAFTER

    def children(self, noise: StepNoise, nodes: Tensor, depth: int, laws: list[Tensor], count: int) -> Tensor:
        """[B, count]"""
        if self.coupled:  # with the noise that the target will use at this position
            return draws.race_children(laws[0], noise.race(torch.full_like(nodes, depth), VOCABULARY), count)
        if self.drawing is Drawing.FIXED:
            return draws.top_children(laws[0], count)
        if self.drawing is Drawing.WITHOUT_REPLACEMENT:
            return draws.race_children(laws[0], noise.draft_race(nodes, VOCABULARY), count)
        if self.drawing is Drawing.IID or count == 0:
            return draws.iid_children(laws[0], noise.draft(nodes, count))
        return exact.draw(torch.stack(laws[:count], 1), noise.draft(nodes, count))


def counts(texts: Tensor) -> NDArray[np.int64]:
    place = texts @ torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    return torch.bincount(place, minlength=VOCABULARY**TOKENS).numpy()


def exact_law(target: Tensor = TARGET) -> NDArray[np.float64]:
    table = target.numpy()
    law = [table[0, a] * table[a, b] * table[b, c] for a, b, c in itertools.product(range(VOCABULARY), repeat=TOKENS)]
    return np.array(law)


def p_value(toy: Toy, seeds: int = SEEDS) -> float:
    found = counts(toy.texts(torch.arange(seeds)))
    return float(chisquare(found, seeds * exact_law(toy.target)).pvalue)


def cases() -> Iterator[object]:
    for rule in all_rules().values():
        for drawing in Drawing:
            for name, shape in SHAPES.items():
                refused = why_not(rule, drawing, chain=shape.is_chain, greedy=False)
                # On a chain the first drafter's tokens are independent draws and i.i.d. ones: one of them will do.
                if rule.lossless and refused is None and not (shape.is_chain and drawing is Drawing.INDEPENDENT):
                    yield pytest.param(rule, drawing, shape, id=f"{rule.name}-{drawing.value}-{name}")


@pytest.mark.parametrize(("rule", "drawing", "shape"), list(cases()))
def test_the_law_of_the_text_is_the_targets(rule: VerificationRule, drawing: Drawing, shape: TreeShape) -> None:
    assert p_value(Toy(rule, drawing, shape)) > 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_coupled_drafts_keep_the_law_and_the_text(name: str) -> None:
    """With Gumbel coupling the text is also the same, token for token, whatever drafts it."""
    gumbel = all_rules()["gumbel"]
    coupled = Toy(gumbel, Drawing.FIXED, SHAPES[name], coupled=True)
    assert p_value(coupled) > 1e-3
    seeds = torch.arange(2000)
    plain = Toy(gumbel, Drawing.FIXED, TreeShape.chain(0)).texts(seeds)
    for drawing in Drawing:
        assert torch.equal(Toy(gumbel, drawing, SHAPES[name]).texts(seeds), plain)
    assert torch.equal(coupled.texts(seeds), plain)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("drawing", Drawing)
def test_greedy_texts_are_the_greedy_text(drawing: Drawing, name: str) -> None:
    """At temperature 0 the law is one text."""
    one_hot = torch.nn.functional.one_hot(TARGET.argmax(-1), VOCABULARY).to(torch.float64)
    wanted, last = [], 0
    for _ in range(TOKENS):
        last = int(TARGET[last].argmax())
        wanted.append(last)
    for rule in (rule for rule in all_rules().values() if rule.lossless):
        if why_not(rule, drawing, chain=SHAPES[name].is_chain, greedy=True) is None:
            texts = Toy(rule, drawing, SHAPES[name], target=one_hot).texts(torch.arange(200))
            assert texts.tolist() == [wanted] * 200, rule.name


# --- the test can fail -------------------------------------------------------------------------------------------


class KeyedByPosition(StepNoise):
    """Accept numbers keyed by where the node stands in the text. On a chain a node's number is its depth."""

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        key = row_key(self.seeds, self.starts + nodes, Purpose.ACCEPT)
        return uniform(key, torch.zeros_like(nodes) + rank)


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_accept_numbers_keyed_by_position_change_the_law(name: str) -> None:
    """Why `StepNoise.accept` is keyed by the start of the step. These rules judge from the end: a refusal of the
    second draft is known when the first is refused too, and the next step's first draft stands where that second
    one stood. Were it judged by the same number, it would be refused too often."""
    rule = all_rules()[name]
    assert p_value(Toy(rule, Drawing.IID, SHAPES["chain"])) > 1e-3
    assert p_value(Toy(rule, Drawing.IID, SHAPES["chain"], noise=KeyedByPosition)) < 1e-6


def test_a_lossy_rule_changes_the_law() -> None:
    for name, shape in SHAPES.items():
        assert p_value(Toy(all_rules()["typical"], Drawing.IID, shape)) < 1e-6, name


def test_chain_rejection_of_fixed_drafts_would_change_the_law() -> None:
    """A pair that is refused is refused for a reason: the most likely token is no sample of q."""

    @dataclass(frozen=True)
    class Pretending(Toy):
        def children(self, noise: StepNoise, nodes: Tensor, depth: int, laws: list[Tensor], count: int) -> Tensor:
            return draws.top_children(laws[0], count)

    assert p_value(Pretending(all_rules()["chain_rejection"], Drawing.IID, SHAPES["chain"])) < 1e-6
