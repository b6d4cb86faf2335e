"""Drafters for the tests of the dynamic tree: tables that the batched form and the reference both read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from forerun.trees.dynamic import Frontier, Grown, Node, expand_and_rerank, reference_expand_and_rerank

VOCABULARY = 5
# Coarse, so that ties abound between siblings, cousins and generations; 0 ties a child with its parent, -1e-9
# does in rounding only; above 0 is clamped; -inf and NaN are absent; -3e38 overflows on the second level.
CONFIDENCES = [
    0.0,
    -0.0,
    -1e-9,
    -0.5,
    -0.5,
    -1.0,
    -1.0,
    -1.5,
    -2.0,
    1e-6,
    0.3,
    -3e38,
    -math.inf,
    -math.inf,
    math.nan,
]


@dataclass(frozen=True)
class Table:
    """A drafter: candidates and confidences by sequence, depth and last token, all drawn from a seed.

    Their number may change from level to level, and they come in no order.
    """

    tokens: list[Tensor]  # per depth [B, V, C]
    log_confidences: list[Tensor]  # per depth [B, V, C]

    @classmethod
    def random(cls, seed: int, batch: int, candidates: list[int]) -> Table:
        generator = torch.Generator().manual_seed(seed)
        choice = torch.tensor(CONFIDENCES)
        # A small subset in each case: some tables are all ties, some mostly absent.
        choice = choice[torch.randint(len(choice), (4,), generator=generator)]
        shapes = [(batch, VOCABULARY, count) for count in candidates]
        return cls(
            [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes],
            [choice[torch.randint(len(choice), shape, generator=generator)] for shape in shapes],
        )

    @property
    def roots(self) -> Tensor:
        return torch.arange(len(self.tokens[0])) % VOCABULARY

    def row(self, b: int) -> Table:
        return Table([t[b : b + 1] for t in self.tokens], [c[b : b + 1] for c in self.log_confidences])

    def to(self, device: str) -> Table:
        return Table([t.to(device) for t in self.tokens], [c.to(device) for c in self.log_confidences])

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        tokens, confidences = self.tokens[frontier.depth], self.log_confidences[frontier.depth]
        rows = frontier.tokens[:, :, None].expand(-1, -1, tokens.shape[2])
        return tokens.gather(1, rows), confidences.gather(1, rows)

    def of_row(self, b: int, frontier: list[Node]) -> list[list[tuple[int, float]]]:
        """The same for the plain reference."""
        return [
            list(
                zip(
                    self.tokens[node.depth][b, node.token].tolist(),
                    self.log_confidences[node.depth][b, node.token].tolist(),
                    strict=True,
                )
            )
            for node in frontier
        ]


@dataclass(frozen=True)
class Case:
    table: Table
    width: int
    depth: int
    size: int

    def grow(self, table: Table | None = None, roots: Tensor | None = None) -> Grown:
        table = self.table if table is None else table
        roots = self.table.roots if roots is None else roots
        return expand_and_rerank(roots, table, width=self.width, depth=self.depth, size=self.size)

    def reference(self, b: int) -> list[Node]:
        return reference_expand_and_rerank(
            int(self.table.roots[b]),
            lambda frontier: self.table.of_row(b, frontier),
            width=self.width,
            depth=self.depth,
            size=self.size,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Widths beyond what is there, depth 0 and size 1 included."""
    candidates = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    table = Table.random(draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 4)), candidates)
    depth = draw(st.integers(0, len(candidates)))
    return Case(table, draw(st.integers(1, 6)), depth, draw(st.integers(1, 24)))


def fixed(tokens: list[int], probabilities: list[float], dtype: torch.dtype = torch.float32) -> Table:
    """The same candidates after every token, at every depth, for one sequence."""
    shape = (1, 100, len(tokens))
    return Table(
        [torch.tensor(tokens).expand(shape)] * 4,
        [torch.tensor(probabilities).log().to(dtype).expand(shape)] * 4,
    )
