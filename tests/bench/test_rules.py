"""What is measured: the order of the rules, figures that are known otherwise, and that it can be repeated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from forerun.bench import synthetic
from forerun.bench.rules import COMPARISONS, ENTRIES, Level, Measurement, Settings, measure
from forerun.verify.rule import all_rules

SMALL = Settings(distances=(0.2, 0.45), vocabulary=200, samples=40, depth=3)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure(Settings(distances=(0.2, 0.4), vocabulary=400, samples=2500, seed=1))


@pytest.fixture(params=[0, 1], ids=["near", "far"])
def level(measured: Measurement, request: pytest.FixtureRequest) -> Level:
    return measured.levels[int(request.param)]


@pytest.mark.parametrize("place", range(3), ids=[better for better, _ in COMPARISONS])
def test_the_three_comparisons_hold(level: Level, place: int) -> None:
    gain = level.gains[place]
    assert (gain.better, gain.than) == COMPARISONS[place]
    assert gain.significant
    difference = level.tokens(gain.better).value - level.tokens(gain.than).value
    assert gain.tokens.value == pytest.approx(difference)
    assert gain.relative == pytest.approx(difference / level.tokens(gain.than).value)


def test_pairing_makes_gains_sharper(level: Level) -> None:
    for gain in level.gains[:2]:
        apart = level.tokens(gain.better).error ** 2 + level.tokens(gain.than).error ** 2
        assert 0 < gain.tokens.error**2 < 0.9 * apart


def test_known_figures(level: Level) -> None:
    rows = {row.label: row for row in level.rules}
    variation = level.total_variation.value
    assert variation == pytest.approx(level.distance, abs=0.015)
    first = rows["chain_rejection"].first  # a draft is accepted with probability 1 − TV
    assert abs(first.value - (1 - variation)) < 4 * first.error
    alpha = 1 - variation  # of independent laws: the closed form
    tokens = rows["chain_rejection"].tokens
    assert abs(tokens.value - (1 - alpha**5) / (1 - alpha)) < 4 * tokens.error
    fixed = rows["recursive_fixed"].first
    assert abs(fixed.value - level.root[1].fixed.value) < 4 * fixed.error
    assert rows["gumbel_1"].first == level.root[0].coupled  # the same races, by the rule and by hand
    assert rows["gumbel_2"].first == level.root[1].coupled
    bound = level.root[0].coupled
    assert bound.value + 3 * bound.error > (1 - variation) / (1 + variation)


def test_rows(level: Level) -> None:
    assert [row.label for row in level.rules] == [entry.label for entry in ENTRIES]
    assert {row.nodes for row in level.rules if row.label in {"chain_rejection", "block", "gumbel_1"}} == {5}
    assert {row.nodes for row in level.rules if row.label not in {"chain_rejection", "block", "gumbel_1"}} == {15}
    assert all(1 <= row.tokens.value <= 5 and 0 < row.tokens.error < 0.1 for row in level.rules)


def test_every_lossless_sampling_rule_is_measured() -> None:
    wanted = {name for name, rule in all_rules().items() if rule.lossless and not rule.greedy_only}
    assert {entry.rule for entry in ENTRIES} == wanted


def test_the_published_matches_at_the_root() -> None:
    """On 2,000 tokens at TV 0.33 coupled candidates match 0.60, 0.78 and 0.90; the likeliest four 0.38."""
    (level,) = measure(Settings(distances=(0.33,), samples=1500, depth=1)).levels
    assert [match.candidates for match in level.root] == [1, 2, 4]
    for match, coupled in zip(level.root, (0.60, 0.78, 0.90), strict=True):
        assert match.coupled.value == pytest.approx(coupled, abs=0.04)
    assert level.root[2].fixed.value == pytest.approx(0.38, abs=0.02)


def test_the_same_seed_gives_the_same_result() -> None:
    first = measure(SMALL).as_dict()
    assert measure(SMALL).as_dict() == first
    assert measure(replace(SMALL, seed=1)).as_dict()["levels"] != first["levels"]


def test_progress_hears_of_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_MEMORY", 1 << 19)
    heard: list[int] = []
    result = measure(SMALL, heard.append)
    assert len(heard) > 4
    assert sum(heard) == SMALL.samples * len(SMALL.distances)
    assert all(row.tokens.error > 0 for level in result.levels for row in level.rules)


def test_json_shape() -> None:
    answer: Any = json.loads(json.dumps(measure(SMALL).as_dict(), allow_nan=False))
    assert answer["tree"] == [2, 2, 1]
    assert answer["settings"]["distances"] == [0.2, 0.45]
    assert "softmax" in answer["laws"]
    assert [level["distance"] for level in answer["levels"]] == [0.2, 0.45]
    for level in answer["levels"]:
        assert set(level) == {"distance", "total_variation", "noise", "rules", "gains", "root"}
        assert set(level["rules"][0]) == {"label", "rule", "drafts", "nodes", "tokens", "first"}
        assert set(level["gains"][0]) == {"better", "than", "tokens", "relative", "significant"}
        assert set(level["root"][0]) == {"candidates", "coupled", "fixed"}
        assert set(level["total_variation"]) == {"value", "error"}


@pytest.mark.parametrize(("depth", "widths"), [(1, (2,)), (2, (2, 2)), (5, (2, 2, 1, 1, 1))])
def test_the_tree(depth: int, widths: tuple[int, ...]) -> None:
    assert Settings(depth=depth).widths == widths


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"distances": ()}, "there is no distance"),
        ({"distances": (0.2, 0.0)}, "distance is 0: give a total variation"),
        ({"distances": (float("nan"),)}, "distance is nan"),
        ({"vocabulary": 2}, "vocabulary is 2: give 16 or more"),
        ({"samples": 1}, "samples is 1: give 2 or more"),
        ({"depth": 0}, "depth is 0: give 1 or more"),
        ({"spread": 0.0}, "spread is 0: give a number between"),
        ({"seed": -1}, "seed is -1: give 0 or more"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings(**wrong)
