"""The shape of a draft tree: who is whose child, before any token is known.

Node 0 is the root, the last committed token. A node's *rank* is its place among its siblings: rank 0 is
the drafter's first candidate there. A sampled tree must have its shape chosen before the samples are seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TreeShape:
    """`parents[i]` is the parent of node i; the root has parent -1 and every parent precedes its child."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("a tree starts with its root: parents[0] must be -1")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}: a parent must come before its child, between 0 and {node - 1}"
                )

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """`length` drafted tokens, one after the other; 0 is plain decoding."""
        if length < 0:
            raise ValueError(f"a chain cannot have {length} drafted tokens")
        return cls(tuple(range(-1, length)))

    @classmethod
    def from_rank_paths(cls, paths: Iterable[tuple[int, ...]]) -> TreeShape:
        """From the notation of Medusa and EAGLE: (0, 2) is the third child of the first child of the root.

        Nodes come out breadth first. A path whose parent or elder sibling is missing is refused: its
        node's rank would silently become another one.
        """
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in ordered:
            if not path:
                continue
            parent, rank = path[:-1], path[-1]
            if parent not in index:
                raise ValueError(f"path {path} has no parent: add {parent}")
            if rank < 0 or (rank > 0 and (*parent, rank - 1) not in index):
                raise ValueError(f"path {path} has no elder sibling: add {(*parent, rank - 1)}")
            index[path] = len(parents)
            parents.append(index[parent])
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """Nodes including the root: the rows of the target's pass."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.width <= 1

    @property
    def width(self) -> int:
        """The largest number of children of one node."""
        return max((len(children) for children in self.children), default=0)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Each node's place among its siblings; 0 for the root."""
        seen = [0] * self.size
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(seen[parent])
            seen[parent] += 1
        return tuple(ranks)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(siblings) for siblings in children)

    @cached_property
    def rank_paths(self) -> tuple[tuple[int, ...], ...]:
        """The inverse of `from_rank_paths`, one path per node, () for the root."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], rank))
        return tuple(paths)
