"""The benchmark's own arithmetic, with methods whose times are known."""

from __future__ import annotations

import pytest

from forerun.bench.cases import Case, Setting, cases, plan, settings
from forerun.bench.contest import warm_ups
from forerun.bench.measures import counted
from tests.bench.scripted import QUESTIONS, Scripted, by_name, contest_of, rows_of, run


def test_the_grid_has_every_pair_that_makes_sense() -> None:
    def choices(name: str) -> tuple[bool, bool]:
        return {"eagle3": (True, True), "suffix": (True, False), "vllm": (False, False)}[name]

    found = cases(["eagle3", "suffix", "vllm"], ["", "gumbel"], ["", "5", "3,2,1"], choices)
    assert found[0] == Case("none")
    assert [case for case in found if case.drafter == "eagle3"] == [
        Case("eagle3", rule, tree) for rule in ("", "gumbel") for tree in ("", "5", "3,2,1")
    ]
    assert [case for case in found if case.drafter == "suffix"] == [Case("suffix"), Case("suffix", "gumbel")]
    assert found[-1] == Case("vllm")
    assert Case("eagle3", "gumbel", "5").label == "eagle3 5 gumbel"
    both = cases(["suffix", "vllm"], [""], [""], choices, (False, True))
    assert both == [Case("none"), Case("suffix"), Case("suffix", adaptive=True), Case("vllm")]
    assert both[2].label == "suffix adaptive"


def test_settings_are_closed_batches_and_arrivals() -> None:
    found = settings([1, 8], [0.0, 1.0], [0.5])
    assert len(found) == len(set(found)) == 8
    assert found[0] == Setting(1, 0.0)
    assert Setting(8, 1.0, 0.5) in found
    with pytest.raises(ValueError, match="above 0"):
        settings([1], [0.0], [0.0])
    with pytest.raises(ValueError, match="at least 1"):
        settings([0], [0.0], [])


def test_methods_take_turns_and_rounds_start_with_another() -> None:
    methods = [Case("none"), Case("a"), Case("peer")]
    found = plan(methods, [Setting(), Setting(4)], ["math", "chat"], lambda case: 1 if case.drafter == "peer" else 2)
    told = [(place.round, place.pool, place.case.drafter) for place in found if place.setting == Setting()]
    assert told == [
        *((0, pool, name) for pool in ("math", "chat") for name in ("none", "a", "peer")),
        *((1, pool, name) for pool in ("math", "chat") for name in ("a", "none")),
    ]
    batched = [place for place in found if place.setting == Setting(4)]
    assert {place.pool for place in batched} == {"overall"}  # one category would not fill it
    assert len(found) == len(set(found)) == 10 + 5


def test_figures_are_what_the_times_say() -> None:
    methods = {"none": Scripted(20), "fast": Scripted(50, per_pass=2), "other": Scripted(10, token=8)}
    contest, starts = contest_of(methods, Setting(), Setting(4), repeat=3)
    found = by_name(rows_of(contest)(run(contest)))
    assert set(found) == {(m, b, c) for m in methods for b in (1, 4) for c in ("overall", "math", "chat")}
    overall = found["fast", 1, "overall"]
    assert overall["rounds"] == 3
    assert overall["tokens"] == 40
    assert overall["tokens_per_second"] == pytest.approx(50)
    assert overall["tokens_per_pass"] == pytest.approx(2)
    assert overall["speedup"] == overall["speedup_low"] == pytest.approx(2.5)
    assert overall["outside_share"] == pytest.approx(0.1)
    assert overall["shares"]["rest"] == pytest.approx(0.1)
    assert overall["acceptance_by_depth"] == [1.0]
    assert (overall["rows_verified"], overall["rows_wasted"]) == (40, 0)
    assert overall["cache_bytes"] == 1000
    assert (overall["identical_to_plain"], overall["identical"], overall["answers"]) == (True, 4, 4)
    assert found["other", 1, "math"]["speedup"] == pytest.approx(0.5)
    assert found["other", 1, "math"]["identical_to_plain"] is False
    assert found["none", 4, "overall"]["speedup"] == pytest.approx(1)
    assert found["fast", 4, "chat"]["tokens_per_second"] is None  # its time is not apart from that of the others
    assert found["fast", 4, "chat"]["speedup"] == pytest.approx(2.5)
    assert starts == dict.fromkeys(methods, 6)
    assert methods["none"].closed == 6


def test_the_prediction_is_the_closed_form() -> None:
    contest, _ = contest_of({"none": Scripted(20), "fast": Scripted(40, per_pass=2)})
    row = by_name(rows_of(contest)(run(contest)))["fast", 1, "overall"]
    assert row["predicted_tokens_per_pass"] == pytest.approx(2)
    # A pass takes 0.8 · 0.25 s / 5 behind 0.8 · 0.5 s / 10, drafting an eighth of the pass: 2 / (1 + 1/8); the first of
    # ten tokens of plain decoding reads the prompt.
    assert row["predicted_speedup"] == pytest.approx(1 / (0.1 + 0.9 / (2 / 1.125)))


def test_a_text_is_the_same_if_it_is_in_every_round_and_each_round_is_predicted_by_itself() -> None:
    fast = Scripted(40, per_pass=2)
    contest, _ = contest_of({"none": Scripted(20), "fast": fast}, repeat=3)
    cells = run(contest)
    (last,) = (
        cell for cell in cells if (cell.place.case.drafter, cell.place.round, cell.place.pool) == ("fast", 2, "math")
    )
    last.sums["math"].texts[0] = "another one"
    last.sums["math"].phases["target"] *= 100  # a pause, in one round of three
    row = by_name(rows_of(contest)(cells))["fast", 1, "overall"]
    assert (row["identical_to_plain"], row["identical"], row["answers"]) == (False, 3, 4)
    assert row["predicted_speedup"] == pytest.approx(1 / (0.1 + 0.9 / (2 / 1.125)))


def test_turns_are_answered_one_after_the_other() -> None:
    scripted = Scripted()
    contest, _ = contest_of({"none": scripted}, repeat=1)
    run(contest)
    assert scripted.asked == [["one", "three"], ["two"], ["two ok and then?"]]


def test_methods_warm_up_before_they_are_measured() -> None:
    scripted = Scripted()
    contest, _ = contest_of({"none": scripted}, Setting(3), repeat=1, warm_up=5)
    cells = run(contest)
    assert len(scripted.asked[0]) == 3
    assert not set(scripted.asked[0]) & {question.turns[0] for question in QUESTIONS}
    assert sum(sums.tokens for sums in cells[0].sums.values()) == 40


def test_texts_to_warm_up_on_differ() -> None:
    """One that looks things up would learn from equal ones what it will not find again."""
    scripted = Scripted()
    contest, _ = contest_of({"none": scripted}, Setting(3), repeat=1, warm_up=5)
    run(contest)
    assert len(set(scripted.asked[0])) == 3
    assert len(set(warm_ups(210))) == 210


def test_a_huge_batch_warms_up_with_no_more_texts_than_there_are() -> None:
    scripted = Scripted()
    contest, _ = contest_of({"none": scripted}, Setting(4000), repeat=1, warm_up=5)
    run(contest)
    assert max(map(len, scripted.asked)) == len(QUESTIONS)


def test_arrivals_are_the_same_for_every_method() -> None:
    methods = {"none": Scripted(), "a": Scripted(40)}
    contest, _ = contest_of(methods, Setting(2, 0.0, 5.0), repeat=1)
    found = by_name(rows_of(contest)(run(contest)))
    assert methods["none"].arrivals == methods["a"].arrivals
    assert methods["none"].arrivals[0] is not None
    assert found["a", 2, "overall"]["speedup"] == pytest.approx(2)


def test_a_method_that_fails_is_a_row_with_its_error() -> None:
    methods = {"none": Scripted(), "a": Scripted(fails_on="three"), "b": Scripted(fails_on="o")}
    contest, starts = contest_of(methods)
    rows = by_name(rows_of(contest)(run(contest)))
    assert len(rows) == 9
    assert rows["a", 1, "math"]["error"] == "RuntimeError: the device is on fire"
    assert rows["a", 1, "math"]["speedup"] is rows["a", 1, "math"]["tokens"] is None
    assert rows["a", 1, "chat"]["error"] is None
    assert rows["a", 1, "chat"]["speedup"] == pytest.approx(1)
    assert rows["a", 1, "overall"]["error"] == "RuntimeError: the device is on fire"
    assert rows["a", 1, "overall"]["speedup"] is None  # a part is not the whole
    assert all(rows["b", 1, category]["error"] for category in ("overall", "math", "chat"))
    assert set(rows["b", 1, "math"]) == set(rows["none", 1, "math"])
    assert starts["a"] == 4  # after an error it begins anew
    assert rows["none", 1, "overall"]["speedup"] == pytest.approx(1)


def test_a_method_that_cannot_start_is_asked_once_a_round() -> None:
    contest, starts = contest_of({"none": Scripted(), "a": Scripted(fails_on="lighthouse")}, warm_up=4)
    cells = [cell for cell in run(contest) if cell.place.case == Case("a")]
    assert len(cells) == 4
    assert all(cell.error for cell in cells)
    assert starts["a"] == 2


def test_without_plain_decoding_there_is_no_speedup() -> None:
    contest, _ = contest_of({"x": Scripted()}, repeat=1)
    rows = rows_of(contest)(run(contest))
    assert all(row["speedup"] is None and row["identical_to_plain"] is None for row in rows)
    assert all(row["tokens_per_second"] for row in rows)


def test_tokens_are_counted_up_to_the_end() -> None:
    assert counted([5, 6, 2, 9, 2], {2}) == [5, 6, 2]
    assert counted([5, 6], {2}) == [5, 6]
    assert len(QUESTIONS) == 3
