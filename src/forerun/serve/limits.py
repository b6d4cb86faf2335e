"""What one request may ask for, how many may wait, and how long."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from forerun.serve.errors import ApiError, refused

LONGEST_WAIT = 60
"""Seconds that a client is told to wait, at most."""


@dataclass(frozen=True)
class Limits:
    queue: int = 64
    """Texts that may wait besides those that are being written."""
    prompt_tokens: int | None = None
    """Of one prompt; None for what the context holds."""
    output_tokens: int | None = None
    """Of one text; None for what the context holds."""
    texts: int = 16
    """Of one request: prompts times n."""
    body_bytes: int = 4 << 20
    seconds: float = 600.0
    """For a request, from when it came to its last token."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name == "queue" else 1
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"the limit {each.name} is {value!r}: give a number of at least {least}")


class Gate:
    """Counts the texts that are inside, and lets no more in than can be written or may wait. For one event loop."""

    def __init__(self, places: int, queue: int) -> None:
        self.places, self.queue = places, queue
        self.inside = 0
        self._seconds = 1.0
        """What a text takes, lately."""

    @property
    def waiting(self) -> int:
        return max(0, self.inside - self.places)

    @contextmanager
    def enter(self, texts: int) -> Iterator[None]:
        room = self.places + self.queue
        if texts > room:
            raise refused(f"the request asks for {texts} texts and the server has room for {room}: ask for fewer", "n")
        if self.inside + texts > room:
            raise ApiError(
                429,
                "the server is busy: try again a little later",
                code="queue_full",
                headers={"Retry-After": str(self._wait())},
            )
        self.inside += texts
        started = time.monotonic()
        try:
            yield
        finally:
            self.inside -= texts
            self._seconds += 0.1 * (time.monotonic() - started - self._seconds)

    def _wait(self) -> int:
        """Seconds after which there should be a place again."""
        return min(LONGEST_WAIT, max(1, math.ceil(self._seconds * (1 + self.waiting) / max(1, self.places))))
