"""Whether memory ran out. PyTorch says so in several ways, on a CPU by a plain `RuntimeError`."""

from __future__ import annotations

import re

WORDS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "size calculation overflowed")


def ran_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def shortage(error: BaseException) -> str:
    """In words, with how much was asked for where that is told."""
    wanted = re.search(r"(?:tried|unable) to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    if wanted is None:
        return "there is not enough memory"
    amount, unit = wanted.groups()
    if unit == "bytes":
        amount, unit = f"{float(amount) / 2**30:,.1f}", "GiB"
    return f"there is not enough memory for another {amount} {unit}"
