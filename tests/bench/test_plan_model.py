"""What a plan makes of its measurements: arithmetic that can be done by hand, and drafters that are made up."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from forerun.bench.plan_check import Check
from forerun.bench.plan_model import Candidate, Walk, closed_seconds, expect, step_seconds, tokens_per_pass, walk
from forerun.bench.plan_probe import WHOLE, Step
from forerun.bench.plan_profile import PLAIN, Profile, never_falling
from forerun.core.params import SamplingParams
from forerun.theory.closed_form import expected_tokens
from forerun.theory.costs import PassCosts


def profile(batch: int = 1, row: float = 0.001, noise: float = 0.0) -> Profile:
    """A step takes 10 ms, and some more for each further row of a text."""
    luck = random.Random(3)
    found = Profile(batch)
    for _ in range(9):
        mood = 1 + noise * luck.random()
        times = {rows: mood * (0.01 + (rows - 1) * row) for rows in (1, 2, 4, 8, 16)}
        found.rounds.append({PLAIN: mood * 0.01, **times})
    return found


def chains(alpha: float, length: int, texts: int = 40, tokens: int = 60) -> list[list[Step]]:
    """Texts written with chains of `length` drafts, each right with the chance alpha if all before it were."""
    luck = random.Random(1)
    written = []
    for _ in range(texts):
        steps: list[Step] = []
        while sum(step.committed for step in steps) < tokens:
            right = 0
            while right < length and luck.random() < alpha:
                right += 1
            sizes = (1, 2, 4, WHOLE)
            accepted = {size: min(size, right) for size in sizes}
            steps.append(Step(right + 1, accepted, {size: min(size, length) for size in sizes}))
        written.append(steps)
    return written


def candidate(steps: list[list[Step]], size: int = WHOLE, drafting: float = 0.0, prompt: int = 0) -> Candidate:
    walks = [walk(prompt, own, size) for own in steps]
    return Candidate("made-up", size, "chain", {}, walks, {1: [drafting] * 5, 8: [drafting] * 5})


def test_a_smaller_draft_takes_more_steps_for_the_same_tokens() -> None:
    step = Step(9, {4: 4, WHOLE: 8}, {4: 4, WHOLE: 8})
    assert walk(0, [step], WHOLE) == Walk(0, 9, (8,))
    assert walk(0, [step], 4) == Walk(0, 9, (4, 4))
    assert walk(0, [Step(5, {4: 4, WHOLE: 4}, {4: 4, WHOLE: 8})], 4).steps == 1
    assert walk(0, [Step(2, {4: 0, WHOLE: 1}, {4: 4, WHOLE: 8})], 4).steps == 2
    assert walk(0, [Step(1)], 4) == Walk(0, 1, (0,))  # nothing could be drafted
    assert walk(0, [Step(3, {WHOLE: 2}, {WHOLE: 2})], 4) == Walk(0, 3, (2,))  # a size beyond what was drafted


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.85])
def test_shorter_chains_agree_with_the_closed_form(alpha: float) -> None:
    """Though all that was seen are chains of eight."""
    steps = chains(alpha, 8, texts=300)
    for size, length in ((1, 1), (2, 2), (4, 4), (WHOLE, 8)):
        found = tokens_per_pass([walk(0, own, size) for own in steps])
        assert found == pytest.approx(expected_tokens(alpha, length), rel=0.05)


def test_a_gain_is_tokens_over_time() -> None:
    steps = [[Step(3, {WHOLE: 2}, {WHOLE: 3})] * 20] * 4
    found = expect(candidate(steps, drafting=0.002), profile())
    assert found.tokens_per_pass == 3
    assert found.rows == 4
    assert found.step_seconds == pytest.approx(0.015)  # 10 for the first row, 3 for the others, 2 to draft
    assert found.gain == pytest.approx(3 * 10 / 15)
    assert found.low == pytest.approx(found.high)  # all texts are alike and all times too
    assert found.pays


def test_reading_prompts_takes_its_share() -> None:
    steps = [[Step(3, {WHOLE: 2}, {WHOLE: 0})] * 20]
    known = profile(row=0.0)
    known.reading = 0.01
    assert expect(candidate(steps, prompt=60), known).gain == pytest.approx(2 / (1 + 1 / 3))  # half of plain is reading


def test_answers_of_a_single_token_gain_nothing() -> None:
    """Also where a bootstrap draws nothing else."""
    steps = [[Step(3, {WHOLE: 2}, {WHOLE: 2})] * 4, []]
    found = expect(candidate(steps, prompt=5), profile())
    assert found.low == 1.0 < found.gain
    assert not found.pays
    assert expect(candidate([[], []], prompt=5), profile()).gain == 1.0


def test_a_bad_drafter_does_not_pay() -> None:
    assert not expect(candidate(chains(0.1, 8), drafting=0.001), profile(row=0.002)).pays
    assert expect(candidate(chains(0.9, 8), drafting=0.001), profile(row=0.002)).pays


def test_intervals_hold_what_they_say() -> None:
    """Of plans from a few texts each, about nine in ten have the gain of all texts within."""
    everything = chains(0.6, 4, texts=200, tokens=40)
    truth = expect(candidate(everything), profile()).gain
    held = 0
    for start in range(0, 200, 10):
        found = expect(candidate(everything[start : start + 10]), profile())
        held += found.low <= truth <= found.high
        assert found.low < found.gain < found.high
    assert 14 <= held <= 20
    few, many = (expect(candidate(everything[:count]), profile()) for count in (10, 100))
    assert many.high - many.low < few.high - few.low


def test_a_machine_in_changing_moods_is_compared_within_rounds() -> None:
    calm, moody = (expect(candidate(chains(0.6, 4)), profile(noise=noise)) for noise in (0.0, 3.0))
    assert moody.gain == pytest.approx(calm.gain, rel=1e-6)


def test_a_batch_sees_the_mean_of_its_texts() -> None:
    walks = [Walk(0, 10, (0,) * 5 + (10,) * 5)] * 8
    steep = PassCosts((1, 6, 11), (1.0, 1.0, 11.0))
    assert step_seconds(walks, steep, 1) == pytest.approx(6.0)
    assert 1.0 < step_seconds(walks, steep, 8) < 4.0  # about six rows each


def test_noise_cannot_make_more_rows_cheaper() -> None:
    assert never_falling([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert never_falling([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert never_falling([1.0, 2.0]) == [1.0, 2.0]


def test_the_last_texts_run_in_smaller_company() -> None:
    assert closed_seconds([5, 5, 5], 3, lambda texts: 1.0) == 5
    assert closed_seconds([5, 5, 5], 2, float) == 5 * 2 + 5 * 1
    assert closed_seconds([4, 2, 3], 2, float) == 2 * 2 + 2 * 2 + 1
    assert closed_seconds([0, 2], 1, lambda texts: 1.0, reading=7.0) == 9


def test_a_short_run_waits_for_its_slowest_text() -> None:
    """What is predicted for a check is for that very run: here the last text gains nothing."""
    fast, slow = Walk(0, 20, (1,) * 10), Walk(0, 20, (1,) * 20)
    own = Candidate("made-up", 1, "chain", {}, [fast] * 7 + [slow], {1: [0.0], 8: [0.0]})
    profiles = {batch: profile(batch, row=0.0) for batch in (1, 8)}
    check = Check(cast("Any", None), {}, [], SamplingParams(), profiles)
    assert check.predicted(own, 1, range(8)) == pytest.approx(160 / 90)
    assert check.predicted(own, 8, range(8)) == pytest.approx(1)
    assert check.predicted(own, 8, range(7)) == pytest.approx(2)
    assert expect(own, profiles[8]).gain == pytest.approx(160 / 90)  # where others wait, they take the places
