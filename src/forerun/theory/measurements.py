"""What the planner is told: how long passes take and how often drafts are accepted, as read from JSON.

    {
      "target": {
        "name": "the model",
        "passes": [{"batch": 1, "rows": [1, 2, 4, 8], "ms": [20.0, 20.3, 21.0, 24.0]}]
      },
      "drafters": [
        {"name": "small model", "kind": "chain", "acceptance": {"alpha": 0.7, "samples": 5000},
         "step_ms": 2.0},
        {"name": "tree head", "kind": "tree", "acceptance": {"by_rank": [0.6, 0.15]},
         "step_ms": {"1": 1.2}, "overhead_ms": 0.3, "max_depth": 6, "max_rows": 32}
      ]
    }

`rows` are rows per sequence, the root included: 1 is plain decoding and must be there. A step with drafts of
depth d costs overhead_ms + d · step_ms + the target's pass; `step_ms` is a number, or one per batch size.
There are at most 32 batch sizes and 32 drafters. Unknown keys and bad values are refused with their path.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

from forerun.theory import checks
from forerun.theory.costs import PassCosts

LARGEST_COUNT = 10**12  # of samples, rows, ...: beyond it something was mistyped, and floats are not exact
LONGEST_TIME = 1e9  # milliseconds: eleven days
MOST_ENTRIES = 32  # batch sizes, and drafters: every one is compared with every other


@dataclass(frozen=True)
class TargetPasses:
    """The target's pass time in milliseconds at one batch size."""

    batch: int
    ms: PassCosts

    @classmethod
    def from_dict(cls, data: object, path: str) -> TargetPasses:
        fields = _fields(data, path, required={"batch", "rows", "ms"})
        rows = tuple(_count(f"{path}.rows[{i}]", count) for i, count in _items(fields, "rows", path))
        ms = tuple(_time(f"{path}.ms[{i}]", time) for i, time in _items(fields, "ms", path))
        for i, time in enumerate(ms):
            checks.positive(f"{path}.ms[{i}]", time)
        try:
            costs = PassCosts(rows, ms)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(_count(f"{path}.batch", fields["batch"]), costs)


@dataclass(frozen=True)
class Acceptance:
    """One of: α at every depth; conditional acceptance by depth; acceptance by child rank.

    `samples` says how sure it is: drafts decided (alpha), chains started, or nodes whose children were tried.
    """

    alpha: float | None = None
    by_depth: tuple[float, ...] | None = None
    by_rank: tuple[float, ...] | None = None
    samples: int | None = None

    @classmethod
    def from_dict(cls, data: object, path: str) -> Acceptance:
        fields = _fields(data, path, optional={"alpha", "by_depth", "by_rank", "samples"})
        given = [key for key in ("alpha", "by_depth", "by_rank") if key in fields]
        if len(given) != 1:
            raise ValueError(f"{path} has {given or 'no acceptance'}: give one of alpha, by_depth, by_rank")
        alpha, by_depth, by_rank, samples = None, None, None, None
        if "alpha" in fields:
            alpha = checks.probability(f"{path}.alpha", fields["alpha"])
        elif "by_depth" in fields:
            items = _items(fields, "by_depth", path)
            by_depth = tuple(checks.probability(f"{path}.by_depth[{i}]", a) for i, a in items)
        else:
            items = _items(fields, "by_rank", path)
            by_rank = checks.rank_acceptance(f"{path}.by_rank", [a for _, a in items])
        if "samples" in fields:
            samples = _count(f"{path}.samples", fields["samples"])
        return cls(alpha, by_depth, by_rank, samples)


@dataclass(frozen=True)
class DrafterMeasurements:
    """One drafter: how often it is right and what it costs. `step_ms` has an entry for every batch size."""

    name: str
    kind: Literal["chain", "tree"]
    acceptance: Acceptance
    step_ms: Mapping[int, float]
    overhead_ms: float = 0.0
    max_depth: int | None = None
    max_rows: int | None = None

    @classmethod
    def from_dict(cls, data: object, path: str, batches: tuple[int, ...]) -> DrafterMeasurements:
        fields = _fields(
            data,
            path,
            required={"name", "kind", "acceptance", "step_ms"},
            optional={"overhead_ms", "max_depth", "max_rows"},
        )
        kind = fields["kind"]
        if kind not in ("chain", "tree"):  # a tuple: what JSON holds need not be hashable
            raise ValueError(f'{path}.kind is {checks.briefly(kind)}: give "chain" or "tree"')
        acceptance = Acceptance.from_dict(fields["acceptance"], f"{path}.acceptance")
        if kind == "tree" and acceptance.by_rank is None:
            raise ValueError(f"{path}.acceptance has no by_rank: a tree is planned from acceptance by child rank")
        if kind == "chain" and acceptance.by_rank is not None:
            raise ValueError(f"{path}.acceptance has by_rank: a chain is planned from alpha or by_depth")
        limits = {
            key: _count(f"{path}.{key}", fields[key]) if key in fields else None for key in ("max_depth", "max_rows")
        }
        return cls(
            name=_text(fields["name"], f"{path}.name"),
            kind=cast(Literal["chain", "tree"], kind),
            acceptance=acceptance,
            step_ms=_by_batch(fields["step_ms"], f"{path}.step_ms", batches),
            overhead_ms=_time(f"{path}.overhead_ms", fields.get("overhead_ms", 0.0)),
            **limits,
        )


@dataclass(frozen=True)
class Measurements:
    """A target and the drafters that may run ahead of it, on one machine."""

    target: str
    passes: tuple[TargetPasses, ...]
    drafters: tuple[DrafterMeasurements, ...]

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(measured.batch for measured in self.passes)

    @classmethod
    def from_dict(cls, data: object) -> Measurements:
        fields = _fields(data, "measurements", required={"target", "drafters"})
        target = _fields(fields["target"], "target", required={"passes"}, optional={"name"})
        passes = tuple(
            TargetPasses.from_dict(item, f"target.passes[{i}]")
            for i, item in _items(target, "passes", "target", MOST_ENTRIES)
        )
        batches = tuple(measured.batch for measured in passes)
        if len(set(batches)) != len(batches):
            sizes = checks.briefly(list(batches))
            raise ValueError(f"target.passes has batch sizes {sizes}: give each batch size once")
        drafters = tuple(
            DrafterMeasurements.from_dict(item, f"drafters[{i}]", batches)
            for i, item in _items(fields, "drafters", "measurements", MOST_ENTRIES)
        )
        names = [drafter.name for drafter in drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafters have the names {checks.briefly(names)}: give each drafter a name of its own")
        return cls(_text(target.get("name", "target"), "target.name"), passes, drafters)

    @classmethod
    def from_json(cls, text: str) -> Measurements:
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_parse_int)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error}): see `forerun plan --example` for what is expected") from None
        except RecursionError:
            raise ValueError("nested too deeply: measurements are a few levels deep") from None
        return cls.from_dict(data)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key come twice and the last one win; a measurement would be lost without a word."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)[:40]!r} comes twice: keep one")
    return data


def _fields(
    data: object,
    path: str,
    required: Set[str] = frozenset(),
    optional: Set[str] = frozenset(),
) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{path} is {checks.briefly(data)}: give an object")
    known = required | optional
    for key in data:
        if key not in known:
            raise ValueError(f"{path}.{_shown(key)} is unknown: the keys here are {', '.join(sorted(known))}")
    for key in sorted(required):
        if key not in data:
            raise ValueError(f"{path}.{key} is missing: add it")
    return cast(Mapping[str, Any], data)


def _items(fields: Mapping[str, Any], key: str, path: str, most: int | None = None) -> list[tuple[int, Any]]:
    values = fields[key]
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{path}.{key} is {checks.briefly(values)}: give a list with at least one entry")
    if most is not None and len(values) > most:
        raise ValueError(f"{path}.{key} has {len(values)} entries: give {most} or fewer")
    return list(enumerate(values))


def _count(path: str, value: object) -> int:
    return checks.whole(path, value, least=1, most=LARGEST_COUNT)


def _time(path: str, value: object) -> float:
    if (checked := checks.non_negative(path, value)) > LONGEST_TIME:
        raise ValueError(f"{path} is {checked:g}: give {LONGEST_TIME:g} milliseconds or less")
    return checked


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path} is {checks.briefly(value)}: give a name")
    # Control and format characters, halves of surrogate pairs, line breaks: a terminal would obey them.
    if any(unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in value):
        raise ValueError(f"{path} is {checks.briefly(value)}: leave out its control characters")
    return value


def _by_batch(value: object, path: str, batches: tuple[int, ...]) -> dict[int, float]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(batches, _time(path, value))
    times: dict[int, float] = {}
    for key, time in value.items():
        digits = str(key).lstrip("0") if isinstance(key, str | int) and not isinstance(key, bool) else ""
        batch = next((batch for batch in batches if str(batch) == digits), None)
        if batch is None:
            known = checks.briefly(list(batches))
            raise ValueError(f"{path}.{_shown(key)} is no measured batch size: the target has {known}")
        if batch in times:
            raise ValueError(f"{path}.{_shown(key)} is batch size {batch} once more: keep one")
        times[batch] = _time(f"{path}.{_shown(key)}", time)
    for batch in batches:
        if batch not in times:
            raise ValueError(f"{path}.{batch} is missing: measure the draft step at batch size {batch}")
    return times


def _shown(key: object) -> str:
    """A key as part of a path: as it is where it is plain, quoted and short where it is not."""
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= 40
    return str(key) if plain else checks.briefly(key)


def _parse_int(digits: str) -> float:
    """Python refuses to read a number of 5,000 digits; as a float it is infinite, and refused with its path."""
    return int(digits) if len(digits) <= 400 else float(digits)
