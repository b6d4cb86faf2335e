"""Python's garbage collector, kept from what is known to stay.

It looks through all objects now and then. With a model, a tokenizer and the libraries there are some 400,000, which
takes a fifth of a second in which nothing is written.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_stays() -> Iterator[None]:
    """While this lasts, only what is made from now on is looked through."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
