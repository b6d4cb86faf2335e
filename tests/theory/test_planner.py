"""Plans for machines made up so that the right answer is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from forerun.core.shape import TreeShape
from forerun.theory import closed_form
from forerun.theory.measurements import Measurements
from forerun.theory.planner import Recommendation, at_batch, recommend

FLAT = {"batch": 1, "rows": [1, 64], "ms": [10.0, 10.0]}


def small_shape(ranks: Sequence[float], size: int, depth: int) -> tuple[TreeShape, float]:
    """Grow the tree by the likeliest node that may be added: slow, plain, and right for falling acceptances."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < size:
        room = [
            (*path, rank)
            for path, rank in product(paths, range(len(ranks)))
            if len(path) < depth and (*path, rank) not in paths and (rank == 0 or (*path, rank - 1) in paths)
        ]
        if not room:
            break
        paths.append(max(room, key=lambda path: math.prod(ranks[rank] for rank in path)))
    shape = TreeShape.from_rank_paths(paths)
    return shape, closed_form.expected_tokens_of_tree(shape, ranks)


def chain(name: str = "small", alpha: float = 0.7, step_ms: float = 1.0, **more: Any) -> dict[str, Any]:
    acceptance = {"alpha": alpha, **({"samples": more.pop("samples")} if "samples" in more else {})}
    return {"name": name, "kind": "chain", "acceptance": acceptance, "step_ms": step_ms, **more}


def plan(drafters: list[dict[str, Any]], *passes: dict[str, Any]) -> tuple[Recommendation, ...]:
    data = {"target": {"passes": list(passes or (FLAT,))}, "drafters": drafters}
    return recommend(Measurements.from_dict(data), small_shape)


def test_the_best_chain_is_that_of_the_closed_form() -> None:
    (only,) = plan([chain(alpha=0.7, step_ms=1.0)])
    gamma = closed_form.best_gamma(0.7, 0.1)
    assert only.speculate
    assert (only.best.kind, only.best.depth, only.best.rows) == ("chain", gamma, gamma + 1)
    assert only.best.speedup == pytest.approx(closed_form.speedup(0.7, gamma, 0.1))
    assert only.best.tokens_per_pass == pytest.approx(2.7731)


def test_a_draft_that_costs_too_much_is_not_used() -> None:
    (only,) = plan([chain(alpha=0.7, step_ms=7.5)])
    assert not only.speculate
    assert (only.best.speedup, only.best.rows) == (1.0, 1)
    assert only.advice.startswith("Do not speculate")
    assert only.alternatives[0].speedup == pytest.approx(1.7 / 1.75)


def test_a_tie_with_plain_decoding_is_not_a_gain() -> None:
    (only,) = plan([chain(alpha=0.7, step_ms=7.0)])  # 1.7 tokens for 17 ms
    assert only.alternatives[0].speedup == pytest.approx(1.0)
    assert not only.speculate


def test_overhead_counts_once_per_step() -> None:
    (only,) = plan([chain(alpha=0.7, step_ms=1.0, overhead_ms=2.0, max_depth=4)])
    assert only.best.step_ms == pytest.approx(10.0 + 4.0 + 2.0)
    assert only.best.speedup == pytest.approx(2.7731 * 10.0 / 16.0)


def test_the_faster_drafter_is_preferred_and_the_rest_is_ranked() -> None:
    slow, fast = chain("slow", 0.8, 4.0), chain("fast", 0.7, 0.5)
    for drafters in ([slow, fast], [fast, slow]):
        (only,) = plan(drafters)
        assert only.best.drafter == "fast"
        gains = [only.best.speedup, *(each.speedup for each in only.alternatives)]
        assert gains == sorted(gains, reverse=True)
        assert {each.drafter for each in only.alternatives} == {"slow", "fast", "plain"}


def test_each_batch_size_has_its_own_plan() -> None:
    busy = {"batch": 32, "rows": [1, 2, 4], "ms": [40.0, 80.0, 160.0]}
    idle, loaded = plan([chain(step_ms=1.0)], FLAT, busy)
    assert (idle.batch, loaded.batch) == (1, 32)
    assert idle.speculate
    assert not loaded.speculate


def test_one_batch_size_can_be_asked_for() -> None:
    measured = Measurements.from_dict({"target": {"passes": [FLAT]}, "drafters": [chain()]})
    assert at_batch(measured, 1) == measured
    with pytest.raises(ValueError, match=r"batch size 8 was not measured: choose from \[1\]"):
        at_batch(measured, 8)


def test_nothing_beyond_the_measured_rows_is_considered() -> None:
    short = {"batch": 1, "rows": [1, 3], "ms": [10.0, 10.0]}
    tree = {"name": "head", "kind": "tree", "acceptance": {"by_rank": [0.9]}, "step_ms": 0.0}
    (only,) = plan([chain(alpha=1.0, step_ms=0.0), tree], short)
    assert max(each.rows for each in (only.best, *only.alternatives)) == 3
    deeper = {"name": "deep", "kind": "chain", "acceptance": {"by_depth": [0.9, 0.9]}, "step_ms": 0.0}
    assert plan([deeper])[0].best.depth == 2  # a third depth was not measured
    assert plan([chain(alpha=1.0, step_ms=0.0, max_rows=5)])[0].best.rows == 5


def test_pass_times_are_interpolated() -> None:
    passes = {"batch": 1, "rows": [1, 3, 5], "ms": [10.0, 12.0, 30.0]}
    (only,) = plan([chain(alpha=0.9, step_ms=0.0, max_depth=1)], passes)
    assert only.best.step_ms == pytest.approx(11.0)


def test_the_best_tree_is_that_of_trying_all() -> None:
    ranks, step = [0.6, 0.2, 0.1], 1.5
    rows, ms = [1, 4, 8, 16], [10.0, 10.5, 12.0, 18.0]
    tree = {"name": "head", "kind": "tree", "acceptance": {"by_rank": ranks}, "step_ms": step, "max_depth": 5}
    (only,) = plan([tree], {"batch": 1, "rows": rows, "ms": ms})
    gains = {}
    for size, depth in product(range(2, 17), range(1, 6)):
        shape, tokens = small_shape(ranks, size, depth)
        time = float(np.interp(shape.size, rows, ms)) + shape.depth * step
        gains[shape] = tokens * 10.0 / time
    assert only.best.speedup == pytest.approx(max(gains.values()))
    assert gains[only.best.shape] == pytest.approx(max(gains.values()))
    assert only.best.kind == "tree"
    assert only.best.shape.width > 1


def test_standard_error_of_alpha_is_that_of_repeated_measurements() -> None:
    alpha, samples, gamma = 0.7, 400, 4
    (only,) = plan([chain(alpha=alpha, step_ms=1.0, samples=samples)])
    measured = np.random.default_rng(0).binomial(samples, alpha, size=4000) / samples
    gains = [closed_form.speedup(each, gamma, 0.1) for each in measured]
    assert only.best.standard_error == pytest.approx(np.std(gains), rel=0.05)


def test_standard_error_of_ranks_is_that_of_repeated_measurements() -> None:
    ranks, samples = [0.5, 0.2, 0.1], 500
    tree = {"name": "head", "kind": "tree", "acceptance": {"by_rank": ranks, "samples": samples}, "step_ms": 0.5}
    (only,) = plan([tree], {"batch": 1, "rows": [1, 8], "ms": [10.0, 10.0]})
    draws = np.random.default_rng(0).multinomial(samples, [*ranks, 0.2], size=3000)[:, :3] / samples
    gains = [closed_form.expected_tokens_of_tree(only.best.shape, row.tolist()) for row in draws]
    assert only.best.standard_error == pytest.approx(np.std(gains) * 10.0 / only.best.step_ms, rel=0.06)


def test_standard_error_by_depth_knows_how_few_chains_get_deep() -> None:
    by_depth, samples = [0.6, 0.7, 0.8], 1000
    drafter = {"name": "d", "kind": "chain", "acceptance": {"by_depth": by_depth, "samples": samples}, "step_ms": 0.0}
    (only,) = plan([drafter])
    generator = np.random.default_rng(0)
    tokens = []
    for _ in range(3000):
        reached, measured = samples, []
        for chance in by_depth:
            accepted = int(generator.binomial(reached, chance))
            measured.append(accepted / reached)
            reached = accepted
        tokens.append(closed_form.expected_tokens_by_depth(measured))
    assert only.best.depth == 3
    assert only.best.standard_error == pytest.approx(np.std(tokens), rel=0.06)


def test_few_samples_are_not_taken_for_certainty() -> None:
    (few,) = plan([chain(alpha=1.0, step_ms=1.0, samples=10, max_depth=3)])
    assert few.best.standard_error is not None
    assert few.best.standard_error > 0.1
    (unsure,) = plan([chain(alpha=0.2, step_ms=1.0, samples=10)])
    assert unsure.speculate
    assert "measure more" in unsure.advice
    assert "measure more" not in plan([chain(alpha=0.7, step_ms=1.0, samples=5000)])[0].advice
    assert plan([chain()])[0].best.standard_error is None


GOOD: dict[str, Any] = {
    "target": {"name": "t", "passes": [{"batch": 1, "rows": [1, 2], "ms": [10.0, 11.0]}]},
    "drafters": [{"name": "d", "kind": "chain", "acceptance": {"alpha": 0.7}, "step_ms": {"1": 1.0}}],
}


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("colour", 1, "measurements.colour is unknown"),
        ("target.speed", 1, "target.speed is unknown"),
        ("target.passes.0.row", 1, "target.passes[0].row is unknown"),
        ("drafters.0.acceptance.alhpa", 0.5, "drafters[0].acceptance.alhpa is unknown"),
        ("drafters.0.acceptance.alpha", 1.5, "drafters[0].acceptance.alpha is 1.5"),
        ("drafters.0.acceptance.alpha", math.nan, "drafters[0].acceptance.alpha is nan"),
        ("drafters.0.acceptance.alpha", "0.5", "drafters[0].acceptance.alpha is '0.5'"),
        ("drafters.0.acceptance.by_depth", [0.5], "drafters[0].acceptance has ['alpha', 'by_depth']"),
        ("drafters.0.acceptance", {"by_depth": []}, "drafters[0].acceptance.by_depth is []"),
        ("drafters.0.acceptance", {"by_depth": [0.5, 2]}, "drafters[0].acceptance.by_depth[1] is 2"),
        ("drafters.0.acceptance", {"by_rank": [0.5]}, "drafters[0].acceptance has by_rank"),
        ("drafters.0.acceptance", {}, "drafters[0].acceptance has no acceptance"),
        ("drafters.0.acceptance.samples", 0, "drafters[0].acceptance.samples is 0"),
        ("drafters.0.kind", "tree", "drafters[0].acceptance has no by_rank"),
        ("drafters.0.kind", "bush", "drafters[0].kind is 'bush'"),
        ("drafters.0.name", "", "drafters[0].name is ''"),
        ("drafters.0.step_ms", -1, "drafters[0].step_ms is -1"),
        ("drafters.0.step_ms", {"2": 1.0}, "drafters[0].step_ms.2 is no measured batch size"),
        ("drafters.0.step_ms", {}, "drafters[0].step_ms.1 is missing"),
        ("drafters.0.overhead_ms", 10**400, "drafters[0].overhead_ms is inf"),
        ("drafters.0.max_depth", 0, "drafters[0].max_depth is 0"),
        ("drafters", [], "measurements.drafters is []"),
        ("drafters", {"a": 1}, "measurements.drafters is {'a': 1}"),
        ("drafters", [1], "drafters[0] is 1: give an object"),
        ("drafters", GOOD["drafters"] * 2, "give each drafter a name of its own"),
        ("target.passes", GOOD["target"]["passes"] * 2, "give each batch size once"),
        ("target.passes.0.ms", [10.0], "target.passes[0]: 2 row counts but 1 costs"),
        ("target.passes.0.rows", [2, 1], "target.passes[0]: the cost of 1 row is missing"),
        ("target.passes.0.rows", [1, 1], "target.passes[0]: row counts [1, 1] do not increase"),
        ("target.passes.0.rows", [1, 2.5], "target.passes[0].rows[1] is 2.5"),
        ("target.passes.0.ms", [10.0, 0], "target.passes[0].ms[1] is 0"),
        ("target.passes.0.batch", True, "target.passes[0].batch is True"),
    ],
)
def test_bad_measurements_are_refused_with_their_path(path: str, value: object, sentence: str) -> None:
    data = json.loads(json.dumps(GOOD))
    Measurements.from_dict(data)  # good before the change
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key)] if key.isdecimal() else place[key]
    place[last] = value
    with pytest.raises(ValueError) as refusal:
        Measurements.from_dict(data)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("key", ["target", "drafters"])
def test_missing_parts_are_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"measurements\.{key} is missing"):
        Measurements.from_dict({name: part for name, part in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"target": 1, "target": 2}', "the key 'target' comes twice"),
        ("[]", r"measurements is \[\]: give an object"),
    ],
)
def test_bad_json_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Measurements.from_json(text)
