"""What the tests of the benchmark have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """A contest collects garbage each time a method leaves; what was there before the test need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()
