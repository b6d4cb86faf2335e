"""A chain: one candidate per position, the tree of Leviathan et al. and Chen et al. (2023)."""

from __future__ import annotations

from forerun.core.shape import TreeShape


def chain(length: int) -> TreeShape:
    """`length` drafted tokens, one after the other; 0 is plain decoding."""
    return TreeShape.chain(length)


def examples() -> list[TreeShape]:
    return [chain(2), chain(3)]
