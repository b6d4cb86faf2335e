"""A tiny random model and drafters that do their worst, for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.engine.engine import Engine
from forerun.engine.request import Request, Update
from forerun.models.config import Layer, ModelConfig
from forerun.models.transformer import Transformer

VOCABULARY = 50
EOS = 3
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    layers=(Layer(), Layer(window=9), Layer(rope=None)),
    context_length=160,
    eos=(EOS,),
)


def tiny_model(seed: int = 0, spread: float = 0.3) -> Transformer:
    """Large weights, so that laws are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if "norm" in name:
                parameter.add_(1.0)
    return model.requires_grad_(False)


class Drafts:
    """The part of a drafter that these do not need."""

    drawing = Drawing.FIXED
    branches = True
    layers: tuple[int, ...] = ()
    top = 0

    def observe(self, observations: Many[Observation]) -> None:
        for seen in observations:
            assert len(seen.tokens) == 0 or seen.sequence.tokens[-len(seen.tokens) :] == seen.tokens

    def forget(self, sequence: Sequence) -> None: ...


def roots(sequences: Many[Sequence]) -> tuple[list[int], Tensor]:
    return [sequence.tokens[-1] for sequence in sequences], torch.tensor([s.position for s in sequences])


class Nothing(Drafts):
    branches = False

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tokens, positions = roots(sequences)
        return DraftTree.from_paths(tokens, [[] for _ in sequences], positions, Drawing.FIXED)


class Oracle(Drafts):
    """Knows the texts; always right, or always wrong."""

    branches = False

    def __init__(self, texts: dict[tuple[int, ...], list[int]], *, right: bool, length: int = 5) -> None:
        self.texts, self.right, self.length = texts, right, length

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tokens, positions = roots(sequences)
        paths = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            text = self.texts[tuple(sequence.prompt)]
            ahead = text[len(sequence.output) :][: min(self.length, budget.nodes, budget.depth)]
            paths.append([ahead if self.right else [(token + 1) % VOCABULARY for token in ahead]])
        return DraftTree.from_paths(tokens, paths, positions, Drawing.FIXED)


class RandomTrees(Drafts):
    """Fixed trees of random tokens and shapes, different in each step, sometimes none."""

    def __init__(
        self, seed: int, hints: dict[tuple[int, ...], list[int]] | None = None, likely: Many[int] = range(VOCABULARY)
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.hints = hints or {}
        self.likely = list(likely)

    def _number(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self.generator))

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tokens, positions = roots(sequences)
        paths: list[list[list[int]]] = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            known = self.hints.get(tuple(sequence.prompt), [])[len(sequence.output) :]
            left, own = budget.nodes, []
            for _ in range(self._number(5)):
                length = min(self._number(7), left, budget.depth)
                path = [self.likely[self._number(len(self.likely))] for _ in range(length)]
                right = min(self._number(7), length, len(known))
                path[:right] = known[:right]
                own.append(path)
                left -= length
            paths.append(own)
        return DraftTree.from_paths(tokens, paths, positions, Drawing.FIXED)


class RandomSamples(Drafts):
    """A sampled chain, or several sampled chains merged, from laws of its own; its length changes from step to step."""

    drawing = Drawing.INDEPENDENT

    def __init__(self, seed: int, paths: int = 2, likely: Many[int] = range(VOCABULARY)) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.zeros(VOCABULARY)
        self.weights[list(likely)] = 1.0
        self.paths = paths
        self.branches = paths > 1
        if paths == 1:
            self.drawing = Drawing.IID

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tokens, positions = roots(sequences)
        length = int(torch.randint(4, (1,), generator=self.generator))
        lengths = [min(length, budget.depth, budget.nodes // self.paths) for budget in budgets]
        q = torch.rand(len(sequences), self.paths * max(*lengths, 1), VOCABULARY, generator=self.generator) ** 2
        q = q * self.weights
        q = q / q.sum(-1, keepdim=True)
        drawn = torch.multinomial(q.view(-1, VOCABULARY), 1, generator=self.generator).view(q.shape[:2])
        longest = max(lengths)
        paths = [
            [drawn[b, j * longest : j * longest + lengths[b]].tolist() for j in range(self.paths)]
            for b in range(len(sequences))
        ]
        return DraftTree.from_paths(tokens, paths, positions, self.drawing, q=q)


def drain(engine: Engine, requests: Many[Request]) -> list[list[list[int]]]:
    """The tokens of each of the n texts of each request, all submitted at once; integrity is checked at every step."""
    ids = [engine.add(request) for request in requests]
    texts: dict[int, list[list[int]]] = {
        number: [[] for _ in range(request.params.n)] for number, request in zip(ids, requests, strict=True)
    }
    while engine.has_work:
        for update in step_checked(engine):
            texts[update.request][update.index] += update.tokens
    return [texts[number] for number in ids]


def step_checked(engine: Engine) -> list[Update]:
    """A step, after which every slot that holds nothing committed is filled with garbage."""
    updates = engine.step()
    engine.check_integrity()
    unused = engine.cache.unused_slots()
    for tensor in (*engine.cache.storage.keys, *engine.cache.storage.values):
        tensor[unused] = 1e4
    return updates


def drafters(known: dict[tuple[int, ...], list[int]]) -> dict[str, Drafter]:
    """Of every kind; `known` are the texts by their prompts."""
    return {
        "nothing": Nothing(),
        "always right": Oracle(known, right=True),
        "always wrong": Oracle(known, right=False),
        "random trees": RandomTrees(3),
        "half right trees": RandomTrees(4, known),
        "sampled chains": RandomSamples(5, paths=1),
        "sampled trees": RandomSamples(6, paths=3),
    }
