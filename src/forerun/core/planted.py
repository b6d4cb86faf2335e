"""Draft trees as lists on the host, and the tensors of a `DraftTree` made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun.core.drawing import Drawing


@dataclass(frozen=True)
class Planted:
    """Trees as lists."""

    trees: tuple[tuple[list[int], list[int]], ...]
    root_positions: tuple[int, ...]
    silent: tuple[int, ...]
    """For each tree, how many of its last nodes are silent: see `DraftTree.of_lists`."""

    def drafted(self) -> list[tuple[list[int], list[int]]]:
        """The trees without their silent nodes."""
        ends = [len(tokens) - silent for (tokens, _), silent in zip(self.trees, self.silent, strict=True)]
        return [(tokens[:end], parents[:end]) for (tokens, parents), end in zip(self.trees, ends, strict=True)]

    def columns(self) -> dict[str, Any]:
        """The fields of a `DraftTree`. A silent node is padding there: no rule, no path and no bound knows of it."""
        batch, size = len(self.trees), max(len(tokens) for tokens, _ in self.trees)
        table = np.zeros((4, batch, size), np.int64)
        tokens, parents, depths, positions = table
        parents[:] = -1
        ancestors = np.zeros((batch, size, size), np.bool_)
        ancestors[:, range(size), range(size)] = True
        draws: list[tuple[tuple[int, int, int], int]] = []  # (tree, parent, rank) and the child
        drafted = self.drafted()
        for b, (own_tokens, own_parents) in enumerate(drafted):
            tokens[b, : len(own_tokens)] = own_tokens
            parents[b, : len(own_parents)] = own_parents
            above, elders = [0], [0] * len(own_tokens)
            for node, parent in enumerate(own_parents[1:], start=1):
                above.append(above[parent] + 1)
                ancestors[b, node] |= ancestors[b, parent]
                draws.append(((b, parent, elders[parent]), node))
                elders[parent] += 1
            depths[b, : len(above)] = above
        children = np.full((batch, size, 1 + max((place[2] for place, _ in draws), default=-1)), -1)
        for place, node in draws:
            children[place] = node
        positions[:] = depths + np.array(self.root_positions)[:, None]
        columns = torch.from_numpy(table)
        return {
            "tokens": columns[0],
            "parents": columns[1],
            "depths": columns[2],
            "positions": columns[3],
            "ancestors": torch.from_numpy(ancestors),
            "drawing": Drawing.FIXED,
            "children": torch.from_numpy(children),
            "q": None,
            "q_rows": None,
            "max_depth": int(depths.max()),
            "max_draws": max(len(tokens) for tokens, _ in drafted) - 1,
        }
