"""What a user hands in: a text on the command line, in a file, or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path


def read_text(source: str | Path) -> str:
    """The text of a file, or of standard input for -; without the line break at its end."""
    data = standard_input() if str(source) == "-" else Path(source).read_bytes()
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        name = "standard input" if str(source) == "-" else str(source)
        raise ValueError(f"{name} is not text: give UTF-8") from None


def standard_input() -> bytes:
    if sys.stdin is None:  # closed, as by `<&-`
        raise ValueError("cannot read standard input: it is closed")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise ValueError(f"cannot read standard input: {error.strerror or error}") from None
