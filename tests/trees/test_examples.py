"""What the exactness suite relies on: every module of the folder shows small shapes of its own."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import forerun.trees
from forerun.core.shape import TreeShape
from forerun.trees.chain import chain
from tests.trees.all_shapes import shapes_of

MODULES = [module.name for module in pkgutil.iter_modules(forerun.trees.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_small(name: str) -> None:
    shapes: list[TreeShape] = importlib.import_module(f"forerun.trees.{name}").examples()
    assert 2 <= len(shapes) <= 4
    assert len({shape.parents for shape in shapes}) == len(shapes)
    for shape in shapes:
        assert 3 <= shape.size <= 6
        assert shape.depth <= 3
        assert shape.width <= 3


def test_chain() -> None:
    assert chain(0) == TreeShape((-1,))
    assert chain(3).parents == (-1, 0, 1, 2)
    with pytest.raises(ValueError, match="-1"):
        chain(-1)


def test_the_enumeration_is_complete() -> None:
    """A brute force is worth what its list of trees is worth: Catalan numbers, no doubles."""
    for nodes, catalan in [(1, 1), (2, 1), (3, 2), (4, 5), (5, 14), (6, 42), (7, 132)]:
        shapes = shapes_of(nodes)
        assert len(shapes) == len({shape.parents for shape in shapes}) == catalan
        assert {shape.size for shape in shapes} == {nodes}
