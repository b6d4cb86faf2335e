"""What is captured before the first text is what is met afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters.drafter import Drafter
from forerun.drafters.ngram import NGram, Options
from forerun.drafters.none import NoDrafter
from forerun.engine.controller import Controller
from forerun.engine.drafting import most_beside
from forerun.engine.drafting_ahead import SMALLER
from forerun.engine.engine import Engine
from forerun.engine.experience import SIZES
from forerun.engine.preparing import crowded, drafted, prepare, readings
from forerun.engine.statistics import Clock
from forerun.kernels.attention import Plan
from forerun.kernels.gpu import language
from forerun.models.batch import Batch, TextRows
from forerun.models.static.buffers import Bucket
from forerun.models.static.static_pass import Captured, StaticPass
from tests.engine.test_drafting_ahead import GREEDY, SEEDED, drafter, plain, request, target


class Chosen(Controller):
    """Every size in turn, a few steps each."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def limits(self, texts: object) -> list[int | None]:
        self.asked += 1
        super().limits(texts)  # type: ignore[arg-type]
        return [SIZES[self.asked // 3 % len(SIZES)]] * len(texts)  # type: ignore[arg-type]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bucket]]:
    """The buckets that were made, of all models."""
    made: list[Bucket] = []
    build = Captured.__init__

    def noted(
        captured: Captured, owner: StaticPass, bucket: Bucket, storage: Any, pool: Any, patience: int | None
    ) -> None:
        if patience is not None:  # as what a head reads of texts, which comes in many shapes
            made.append(bucket)
        build(captured, owner, bucket, storage, pool, patience)

    monkeypatch.setattr(Captured, "__init__", noted)
    return iter([made])


@given(st.lists(st.integers(1, 65), min_size=1, max_size=12))
def test_every_step_of_drafts_has_its_bucket(rows: list[int]) -> None:
    if max(rows) == 1 or sum(rows) > 512:
        return
    texts = tuple(TextRows(n, own, [0] * own, None, 0, [0] * 5, 16, own) for n, own in enumerate(rows))
    assert Bucket.of(Batch(texts=texts), (3,), None) in set(drafted(12, 512, (3,)))


def engine_with(head: bool) -> Engine:
    model = target()
    made: Drafter = drafter(model) if head else NGram(Options())
    return Engine(model, made, slots=1024, max_batch=4, controller=Chosen())


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_nothing_is_captured_while_texts_are_written(
    head: bool, params: dict[str, float], met: Iterator[list[Bucket]]
) -> None:
    """But for the steps that read prompts."""
    made = next(met)
    requests = [request(number, 60, **params) for number in (0, 2, 3)]
    expected = plain(requests)
    engine = engine_with(head)
    made.clear()
    prepare(engine)
    before = len(made)
    assert before > 5
    numbers = [engine.add(each) for each in requests]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        known, reads = len(made), any(engine.scheduler._missing(job) > 1 for job in engine.scheduler.running)
        fresh = bool(engine.scheduler.waiting)
        for update in engine.step():
            texts[update.request].extend(update.tokens)
        if not reads and not fresh:
            assert made[known:] == []
    assert [texts[number] for number in numbers] == expected


def test_who_drafts_nothing_is_prepared_for_plain_decoding(met: Iterator[list[Bucket]]) -> None:
    made = next(met)
    prepare(Engine(target(), NoDrafter(), slots=512, max_batch=4, controller=Controller()))
    assert {bucket.tail for bucket in made} == {1}


def test_some_memory_stays_free() -> None:
    assert crowded(5, 100)
    assert not crowded(50, 100)


def test_where_nothing_is_captured_nothing_is_prepared(met: Iterator[list[Bucket]]) -> None:
    model = target()
    model.static = None
    prepare(Engine(model, NGram(Options()), slots=512, controller=Controller()))
    assert next(met) == []


def test_a_size_of_the_controller_is_a_tree_of_that_size() -> None:
    """Else it would seem that the drafter likes no more than that, and nothing larger would be tried."""
    assert {size for size in SIZES if size} <= set(SMALLER)


@given(st.lists(st.integers(1, 511), min_size=1, max_size=12))
def test_the_kernels_of_a_heads_reading_are_there(rows: list[int]) -> None:
    if sum(rows) > 512:
        return
    texts = tuple(TextRows(n, own, [0] * own, None, 0, [0] * 40, 16, 0) for n, own in enumerate(rows))
    met = Bucket.of(Batch(texts=texts), (), None)

    def plan(bucket: Bucket) -> Plan:
        queries = 2 * min(bucket.rows, bucket.tail)
        return Plan.choose(bucket.sequences, 16, queries, bucket.blocks * 16, 128, 132)

    assert plan(met) in {plan(bucket) for bucket in readings(12)}


def test_what_is_built_on_the_way_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(torch.device("cpu"))
    assert clock.undisturbed
    monkeypatch.setattr(language, "_built", [None])
    assert not clock.undisturbed


def test_beside_prompts_an_accelerator_drafts_little_and_in_runs_nothing() -> None:
    class There:
        device = torch.device("cuda")

    class Here:
        device = torch.device("cpu")

    assert most_beside(There(), in_runs=True) == 0  # type: ignore[arg-type]
    assert most_beside(There(), in_runs=False) == 512  # type: ignore[arg-type]
    assert most_beside(Here(), in_runs=True) is None  # type: ignore[arg-type]
