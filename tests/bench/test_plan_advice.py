"""What a plan advises: a clear gain, and only if the check confirms it."""

from __future__ import annotations

import pytest

from forerun.bench.plan_check import Checked
from forerun.bench.plan_model import Candidate, Expected, Walk
from forerun.bench.plan_run import Recommendation


def expected(name: str, gain: float, low: float, high: float = 9.0, texts: int = 40) -> Expected:
    walks = [Walk(5, 20, (1,) * 10)] * texts
    candidate = Candidate(name, 1, "chain", {"tokens": "4"}, walks, {8: [0.0]})
    return Expected(candidate, 8, 2.0, 2.0, 0.01, 0.001, gain, low, high)


def checked(one: Expected, low: float | None, high: float | None = None) -> Checked:
    if low is None:
        return Checked(one.candidate, 8, 24, one.gain, None, None, None, None, None, "it broke")
    high = low if high is None else high
    return Checked(one.candidate, 8, 24, one.gain, (low + high) / 2, low, high, 2.0, 24)


@pytest.mark.parametrize(
    ("gain", "low", "texts", "pays"),
    [
        (1.02, 1.01, 40, False),  # sure, but nothing to count on
        (1.05, 1.01, 40, True),
        (1.20, 0.99, 40, False),  # not sure
        (1.20, 1.10, 1, False),  # a single text says nothing of others
        (1.40, 1.30, 1, True),
        (1.05, 1.01, 4, False),
    ],
)
def test_a_gain_must_be_clear(gain: float, low: float, texts: int, pays: bool) -> None:
    found = expected("ngram", gain, low, texts=texts)
    assert found.pays == pays
    made = Recommendation(8, [found])
    assert made.speculate == pays
    assert (made.use == "--drafter ngram --drafter-option tokens=4") == pays


def test_a_folder_is_used_where_it_lies_and_called_by_its_name() -> None:
    made = Recommendation(8, [expected("./my heads/mine", 1.2, 1.1)])
    assert made.use == "--drafter './my heads/mine' --drafter-option tokens=4"
    assert made.advice.startswith("Use mine tokens=4: ")


def test_what_was_measured_has_the_last_word() -> None:
    best, other = expected("suffix", 1.3, 1.2), expected("ngram", 1.2, 1.1)
    for low, high, advised in ((1.1, 1.2, True), (1.01, 1.03, False), (0.95, 1.3, False), (0.87, 0.98, False)):
        made = Recommendation(8, [best, other], [checked(best, low, high)])
        assert made.speculate == advised
        assert f"measured at {(low + high) / 2:.2f}× plain decoding, {low:.2f} to {high:.2f}" in made.advice
        assert made.advice.startswith("Use suffix tokens=4: " if advised else "Do not speculate: suffix tokens=4 was")
        assert made.as_dict()["use"] == ("--drafter suffix --drafter-option tokens=4" if advised else None)


def test_the_fastest_that_held_is_advised() -> None:
    best, other = expected("suffix", 1.3, 1.2), expected("ngram", 1.2, 1.1)
    made = Recommendation(8, [best, other], [checked(best, 0.9), checked(other, 1.15)])
    assert made.chosen is other
    made = Recommendation(8, [best, other], [checked(best, 1.1), checked(other, 1.15)])
    assert made.chosen is other
    made = Recommendation(8, [best, other], [checked(best, None), checked(other, 0.9)])
    assert made.chosen is None
    assert "the check failed" in made.advice


def test_a_gain_that_nobody_foresaw_must_be_beyond_doubt() -> None:
    poor = expected("ngram", 0.98, 0.9)
    assert not Recommendation(8, [poor], [checked(poor, 1.01, 1.09)]).speculate
    assert Recommendation(8, [poor], [checked(poor, 1.04, 1.09)]).speculate
    assert "not surely a gain" in Recommendation(8, [poor]).advice
    assert "a loss" in Recommendation(8, [expected("ngram", 0.9, 0.8, 0.95)]).advice
    assert "too small a gain" in Recommendation(8, [expected("ngram", 1.02, 1.01, 1.03)]).advice
    assert Recommendation(8, []).advice == "Do not speculate: no drafter drafts anything here."
