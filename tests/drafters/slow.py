"""The draft model as a slow reference: every path is read from scratch, one node after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.transformer import Transformer
from tests.drafters.models import VOCABULARY, slow_law


@dataclass
class SlowDrafter:
    """One sequence; nothing is kept from one question to the next."""

    model: Transformer
    spec: TreeSpec
    text: Sequence

    def law(self, path: list[int]) -> Tensor:
        params = self.text.params
        if params.greedy and self.spec.branches:
            params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        return slow_law(self.model, self.text, path, params, VOCABULARY)

    def noise(self) -> StepNoise:
        return StepNoise(torch.tensor([self.text.seed]), torch.tensor([self.text.position + 1]))

    def race(self, path: list[int]) -> Tensor:
        """The times at which tokens arrive at the position after the path, for a seeded request."""
        return self.noise().race(torch.tensor([len(path)]), VOCABULARY)[0] / self.law(path).double()

    def ranked(self, path: list[int], node: int) -> list[int]:
        """Candidates after a path, the best first."""
        q, params = self.law(path), self.text.params
        place = torch.tensor([node])
        if params.greedy or (not self.text.coupled and self.spec.drawing is Drawing.FIXED):
            order = sorted(range(VOCABULARY), key=lambda token: -float(q[token]))
        elif self.text.coupled:
            times = self.race(path)
            order = sorted(range(VOCABULARY), key=lambda token: float(times[token]))
        elif self.spec.drawing is Drawing.IID:
            return [int(exact.draw(q, self.noise().draft(place, 1)[0, 0]))]
        else:
            return self.without_replacement(q, self.noise().draft(place, self.spec.width)[0].tolist())
        return [token for token in order if q[token] > 0]

    def without_replacement(self, q: Tensor, uniforms: list[float]) -> list[int]:
        chances = {token: float(q[token]) for token in range(VOCABULARY) if q[token] > 0}
        drawn: list[int] = []
        for u in uniforms:
            level = u * sum(chances.values())
            for token, chance in list(chances.items()):
                level -= chance
                if level < 0:
                    drawn.append(token)
                    del chances[token]
                    break
        return drawn

    def shaped(self, budget: Budget) -> dict[int, list[int]]:
        """Node to path, for the nodes that are there."""
        shape = self.spec.cut(budget)
        paths: dict[int, list[int]] = {0: []}
        for node in range(1, shape.size):
            parent, rank = shape.parents[node], shape.ranks[node]
            if parent in paths:
                candidates = self.ranked(paths[parent], parent)
                if rank < len(candidates):
                    paths[node] = [*paths[parent], candidates[rank]]
        return paths

    def grown(self, budget: Budget) -> list[tuple[int, ...]]:
        """EAGLE-2's tree, in falling order of value."""
        width, depth, size = self.spec.numbers
        limit = min(depth, budget.depth, budget.nodes)
        level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        everything = list(level)
        for _ in range(limit):
            frontier = sorted(level, key=lambda node: -node[0])[:width]
            level = [
                (value + confidence, (*path, token))
                for value, path in frontier
                for token, confidence in self.confident(list(path), width)
            ]
            everything += level
        best = sorted(everything, key=lambda node: -node[0])
        return [path for _, path in best[: 1 + min(size, max(0, budget.nodes))]] if limit > 0 else [()]

    def confident(self, path: list[int], width: int) -> list[tuple[int, float]]:
        q = self.law(path)
        scores = 1 / self.race(path) if self.text.coupled else q
        order = sorted(range(VOCABULARY), key=lambda token: -float(scores[token]))[:width]
        return [(token, float((scores[token] / scores.sum()).log())) for token in order if q[token] > 0]
