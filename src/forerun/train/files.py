"""How a run writes: whole or not at all, and with a word about a disk that is full."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.models.store import fresh_file


@contextmanager
def told_when_full(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"the disk is full, so {path} cannot be written: free some space and go on with --resume; what was written "
            "before is still there"
        ) from None


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new one."""
    with told_when_full(path), fresh_file(path) as part:
        part.write_bytes(content)
