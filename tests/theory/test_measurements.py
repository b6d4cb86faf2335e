"""Odd JSON in place of measurements: a sentence with the path of the key, never a traceback."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cli.plan import EXAMPLE
from forerun.theory import checks
from forerun.theory.measurements import Measurements
from forerun.theory.planner import recommend
from forerun.trees.optimal import best_shape

Path = tuple[str | int, ...]
ODD: list[Any] = [[], {}, "", "x", "\x1b", None, True, False, 0, -1, 0.5, 10**400, -(10**400), 10**5000, 1e308, 5e-324]
ODD += [math.nan, math.inf, -math.inf, [[]], [{}], [None], ["chain"], {"1": {}}, {"": 1}, {"01": 1}, [10**5000]]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


def replaced(path: Path, value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(EXAMPLE)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


def written(path: Path) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(places(EXAMPLE))), st.sampled_from(ODD))
def test_an_odd_value_works_or_is_refused_by_path(path: Path, value: Any) -> None:
    data = replaced(path, value)
    try:
        Measurements.from_dict(data)
    except ValueError as refusal:
        sentence = str(refusal)
        owner = path[:-1] if path and isinstance(path[-1], int) else path  # "rows do not increase" is about the list
        assert sentence.startswith((written(owner), "measurements", "drafters", "target"))
        assert sentence.isprintable()
        assert len(sentence) < 300


def test_every_place_refuses_an_odd_type_with_its_own_path() -> None:
    for path in places(EXAMPLE):
        for value in (None, True, ["x"], "\x1b"):
            with pytest.raises(ValueError) as refusal:
                Measurements.from_dict(replaced(path, value))
            assert written(path) in str(refusal.value) or written(path[:-1]) in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("drafters", 0, "kind"), ["chain"], "drafters[0].kind is ['chain']: give"),
        (
            ("drafters", 0, "acceptance", "samples"),
            10**400,
            "samples is a number of about 400 digits: give 1000000000000",
        ),
        (("drafters", 0, "max_rows"), 10**4000, "drafters[0].max_rows is a number of about 4000 digits"),
        (("target", "passes", 0, "rows", 6), 10**400, "target.passes[0].rows[6] is a number of about 400 digits"),
        (("target", "passes", 0, "ms", 0), 1e300, "target.passes[0].ms[0] is 1e+300: give 1e+09 milliseconds or less"),
        (("drafters", 0, "step_ms"), {"1": 1, "8": 1, "32": 1, "01": 3}, "step_ms.01 is batch size 1 once more"),
        (("drafters", 0, "step_ms"), {"9" * 5000: 1}, "is no measured batch size: the target has [1, 8, 32]"),
        (("drafters", 0, "name"), "a\x1b[31m", r"drafters[0].name is 'a\x1b[31m': leave out its control characters"),
        (("target", "name"), "a\u202e", r"target.name is 'a\u202e': leave out"),
        (("drafters",), EXAMPLE["drafters"] * 11, "measurements.drafters has 33 entries: give 32 or fewer"),
    ],
    ids=range(10),  # a number of 4,000 digits is no name for a test
)
def test_refusals(path: Path, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Measurements.from_dict(replaced(path, value))
    assert sentence in str(refusal.value)


def test_a_number_too_long_to_read_is_refused_by_path() -> None:
    text = json.dumps(EXAMPLE).replace("4000", "9" * 5000, 1)
    with pytest.raises(ValueError, match=r"drafters\[0\]\.acceptance\.samples is inf: give a whole number"):
        Measurements.from_json(text)


def test_extreme_measurements_can_be_planned() -> None:
    extremes: list[tuple[Path, Any]] = [
        (("drafters", 0, "acceptance", "samples"), 10**12),
        (("target", "passes", 0, "ms", 0), 5e-324),
        (("target", "passes", 0, "ms", 6), 1e9),
        (("drafters", 2, "acceptance", "by_rank"), [1e-5] * 50_000),
    ]
    for path, value in extremes:
        for plan in recommend(Measurements.from_dict(replaced(path, value)), best_shape):
            assert all(math.isfinite(each.speedup) for each in (plan.best, *plan.alternatives))


def test_briefly_is_brief() -> None:
    for value in (*ODD, [[[[[]]]]] * 100, "x" * 10**6, {str(key): [key] * 50 for key in range(100)}):
        assert len(checks.briefly(value)) <= 80
        assert checks.briefly(value).isprintable()
