"""Reading a JSON object that somebody else wrote: every value has the type it should have, or one sentence says not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**40
"""No size, count or number of a token is larger: what is would overflow in some library or fill the memory."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. A file that is not there raises `FileNotFoundError`, as `open` would."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON: fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: fetch the file again")
    return value


@dataclass(frozen=True)
class Fields:
    """`values`, and behind them `defaults` for keys that are absent. A key that is there and null is None."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str = "config.json"

    def raw(self, *keys: str) -> Any:
        """Of the first of `keys` that is there; other spellings of one thing come behind it."""
        for source in (self.values, self.defaults):
            for key in keys:
                if key in source:
                    return source[key]
        return None

    def integer(self, *keys: str, least: int = 1, most: int = LARGEST) -> int:
        value = self.raw(*keys)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(keys[0], value, f"a whole number of at least {least}")
        if value > most:
            raise self._wrong(keys[0], value, f"a whole number of at most {most}")
        return value

    def maybe_integer(self, key: str, least: int = 1) -> int | None:
        return None if self.raw(key) is None else self.integer(key, least=least)

    def number(self, *keys: str, above: float = -math.inf) -> float:
        value = self.raw(*keys)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise self._wrong(keys[0], value, "a number")
        if value <= above:
            raise self._wrong(keys[0], value, f"a number above {above:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def text(self, *keys: str) -> str:
        value = self.raw(*keys)
        if not isinstance(value, str):
            raise self._wrong(keys[0], value, "a text")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def items(self, key: str, least: int = 0) -> list[Any] | None:
        """A list of at least that many entries, or None where there is none."""
        value = self.raw(key)
        if value is not None and (not isinstance(value, list) or len(value) < least):
            raise self._wrong(key, value, f"a list of at least {least}" if least else "a list")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> ValueError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ValueError(f"{self.where}: {key} must be {wanted}, not {shown}: fetch the model again, or correct it")
