"""Text on standard output while it is written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.style import Style

from forerun.cli.statistics import COLORS

if TYPE_CHECKING:
    from forerun.engine.completion import Piece


def print_piece(piece: Piece, *, color: bool) -> None:
    """What a step added; in colours by how its tokens came about."""
    for text, kind in piece.spans:
        shown = printable(text, terminal=sys.stdout.isatty())
        sys.stdout.write(Style.parse(COLORS[kind]).render(shown) if color else shown)
    sys.stdout.flush()


def end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def printable(text: str, *, terminal: bool) -> str:
    """Model output for a terminal, which must not obey it; for a file it stays as it is."""
    if not terminal:
        return text
    return "".join(sign if sign in "\n\t" or not _is_control(sign) else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _is_control(sign: str) -> bool:
    return ord(sign) < 0x20 or 0x7F <= ord(sign) < 0xA0
