"""How much is drafted: for texts of different luck, under a load that changes, and in the real engine."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.drafters.layer_skip import LayerSkip
from forerun.drafters.none import NoDrafter
from forerun.drafters.parallel import Parallel
from forerun.engine.build import build_engine
from forerun.engine.controller import GUESSED, STANDS, Controller
from forerun.engine.engine import Engine
from forerun.engine.experience import SIZES, Step
from forerun.engine.loaded import LoadedModel
from forerun.engine.request import Request
from forerun.models.heads.files import HeadFolder, write_head
from forerun.models.transformer import Transformer
from tests.engine.made_up_machines import Machine
from tests.engine.tiny import RandomTrees, tiny_model
from tests.tiny_folder import save_tiny_model


def test_texts_whose_drafts_are_never_right_are_left_out() -> None:
    """Where every row takes its time. They are tried again now and then: how often is a matter of luck."""
    assert fmean(drafts_for_nothing(seed) for seed in range(6)) < 15


def drafts_for_nothing(seed: int) -> int:
    controller = Controller()
    machine = Machine(lambda texts, rows: 1.0 + 0.03 * rows, lambda texts, nodes: 0.0, 8, seed=seed)
    machine.write(controller, [0.95, 0.0, 0.95, 0.0] * 3, 200, 4)
    assert not controller.texts
    texts, drafted = [10, 11, 12, 13], [0, 0, 0, 0]
    for step in range(120):
        own = [8 if limit is None else min(8, limit) for limit in controller.limits(texts)]
        drafted = [before + (step >= 60 and nodes > 0) for before, nodes in zip(drafted, own, strict=True)]
        tokens = [5 if nodes and text % 2 == 0 else 1 for text, nodes in zip(texts, own, strict=True)]
        controller.observe(texts, own, tokens, 1.0 + 0.03 * (4 + sum(own)))
    assert min(drafted[0], drafted[2]) > 50
    assert controller.texts[11].luck.value < 0.5 < controller.texts[10].luck.value
    controller.forget(11)
    assert 11 not in controller.texts
    return max(drafted[1], drafted[3])


def test_it_follows_a_load_that_changes() -> None:
    """Alone it pays, in a large batch it does not, and alone it pays again."""
    controller = Controller()
    machine = Machine(lambda texts, rows: max(1.0, 0.05 * rows), lambda texts, nodes: 0.0, 16)
    for texts, drafts in ((1, True), (32, False), (1, True)):
        machine.write(controller, [0.7] * texts, 400, texts)
        chosen = controller.times[texts].chosen
        assert bool(SIZES[chosen] != 0) == drafts


def test_prompts_are_read_beside_what_is_best_so_far() -> None:
    controller = Controller()
    assert controller.usual([1]) == [0]
    Machine(lambda texts, rows: 1.0, lambda texts, nodes: 0.0, 16).write(controller, [0.7], 200, 1)
    before = dict(controller.texts)
    assert controller.usual([1]) == [SIZES[controller.times[1].chosen]] != [0]
    assert controller.texts == before


def test_the_next_engine_begins_with_what_the_last_one_learnt(tmp_path: Path) -> None:
    model = LoadedModel.load(save_tiny_model(tmp_path / "model"), dtype="float32", device="cpu")

    def engine(tokens: int, adaptive: bool = True) -> Engine:
        return build_engine(model, "ngram", {"tokens": tokens}, max_batch=2, cache_tokens=512, adaptive=adaptive)

    first = engine(4)
    first.add(Request([5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    while first.has_work:
        first.step()
    assert first.controller is not None
    second, other = engine(4), engine(8)
    assert second.controller is not None
    assert second.controller is not first.controller
    assert second.controller.times[1].of(0) == first.controller.times[1].of(0) is not None
    assert other.controller is not None
    assert not other.controller.times
    assert engine(4, adaptive=False).controller is None


def test_only_one_of_engine_and_drafter_says_how_much_is_drafted(tmp_path: Path) -> None:
    model = LoadedModel.load(save_tiny_model(tmp_path / "model"), dtype="float32", device="cpu")
    for adaptive in (False, True):
        engine = build_engine(
            model, "layer_skip", {"layers": "0"}, max_batch=1, cache_tokens=256, adaptive=adaptive, prepared=False
        )
        assert isinstance(engine.drafter, LayerSkip)
        assert engine.drafter.adaptive != adaptive


def test_it_begins_with_what_a_drafter_promises_of_each_size(tmp_path: Path) -> None:
    model = LoadedModel.load(save_tiny_model(tmp_path / "model"), dtype="float32", device="cpu")
    assert isinstance(model.target, Transformer)
    weight = torch.zeros(2, model.target.config.hidden_size)
    known = {"calibration": {"accuracies": [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]}}
    write_head(tmp_path / "head", HeadFolder("parallel", {}, {"look_ahead.weight": weight}, known))
    options = {"path": str(tmp_path / "head"), "nodes": 15}
    engine = build_engine(model, "parallel", options, max_batch=1, cache_tokens=256, adaptive=True)
    assert engine.controller is not None
    assert isinstance(engine.drafter, Parallel)
    believed = [each.value for each in engine.controller.shape]
    assert believed[1] == pytest.approx(engine.drafter.gain(2) / engine.drafter.gain(None))
    assert believed[-1] == 1 > believed[2] > believed[1] > believed[0] == 0


def test_the_text_does_not_change() -> None:
    target = tiny_model()
    requests = [
        Request([5 + n, 6, 7], SamplingParams(temperature=temperature, seed=n, max_tokens=40, ignore_eos=True))
        for n, temperature in enumerate((0.0, 1.0, 0.7))
    ]

    def texts(engine: Engine) -> dict[int, list[int]]:
        for request in requests:
            engine.add(request)
        found: dict[int, list[int]] = {}
        while engine.has_work:
            for update in engine.step():
                found.setdefault(update.request, []).extend(update.tokens)
            engine.check_integrity()
        return found

    plain = texts(Engine(target, NoDrafter(), slots=512))
    controller = Controller()
    assert texts(Engine(target, RandomTrees(0), slots=512, controller=controller)) == plain
    assert controller.times
    assert not controller.texts


def test_where_drafts_pay_a_promising_size_needs_no_time_to_lose() -> None:
    """A head's first reading of a long prompt uses up all that may be lost; the next sizes must not wait for it."""
    controller = Controller()
    chosen = set()
    for step in range(200):
        (limit,) = controller.limits([0])
        size = 60 if limit is None else limit
        chosen.add(size)
        controller.observe(
            [0], [size], [1 + (size > 0) + (size > 2) + (size > 6) + (size > 15)], 1.0, beside=60 * (step == 2)
        )
    assert chosen == {0, 2, 6, 15, 60}


def test_a_try_in_which_something_is_captured_is_paid_for() -> None:
    """Else it would be tried again and again, each time with something else to capture."""
    controller = Controller()
    tries = 0
    for _ in range(300):
        (limit,) = controller.limits([0])
        size = 60 if limit is None else limit
        tries += size > 0
        controller.observe([0], [size], [1 + (size > 0)], 20.0 if size else 1.0, settled=not size)
    assert 1 <= tries <= 3
    assert controller.times[1].of(1) is None


def test_a_step_in_which_the_drafter_knew_nothing_is_no_try() -> None:
    """It cost nothing that could have been had: what may be lost by trying stays."""
    controller = Controller()
    Machine(lambda texts, rows: 1.0, lambda texts, nodes: 0.0, 16).write(controller, [0.7], 200, 1)
    controller.credit, found = 1.0, 0
    for _ in range(40):
        (limit,) = controller.limits([1])
        found, before = found + (limit != 0), controller.credit
        controller.observe([1], [0], [1], 1.0)
        assert controller.credit > before or limit == 0
    assert found > 5


def test_what_drafts_take_beside_themselves_counts_and_is_forgotten() -> None:
    """A head reads what it had put off when it is to draft: where that takes longer than drafts gain, nothing is
    drafted; but one long pause is not held against them for ever."""
    taken = []
    for often in (1, 1000):
        controller, drafting = Controller(), 0
        for step in range(1500):
            (limit,) = controller.limits([0])
            size = 2 if limit is None else min(2, limit)
            drafting += size > 0
            beside = 2.0 if size and step % often == 0 else 0.0
            controller.observe([0], [size], [1 + (size > 0)], 1.4 if size else 1.0, beside=beside)
        taken.append(drafting)
    assert taken[0] < 150
    assert taken[1] > 1200


def steps_before_a_draft(own: Controller, texts: list[int], most: int = 400) -> int:
    """Of plain decoding, a hundredth of a second each."""
    for step in range(most):
        if any(limit != 0 for limit in own.limits(texts)):
            return step
        own.observe(texts, [0] * len(texts), [1] * len(texts), 0.01)
    return most


def test_what_reading_took_says_what_a_first_draft_may_cost() -> None:
    """Where every row takes its time, drafts for many texts are put off until there is time to lose; where rows are
    nearly free, or for one text, they are tried at once."""
    for row, texts, at_once in ((0.0003, 32, False), (0.0003, 1, True), (0.00001, 32, True)):
        own = Controller()
        own.read(256, 256 * row)
        assert (steps_before_a_draft(own, list(range(texts))) < 8) == at_once


def test_a_short_reading_says_nothing() -> None:
    own = Controller()
    own.read(3, 1.0)
    assert steps_before_a_draft(own, list(range(32))) < 8
    assert Controller(own).row == own.row


def test_what_pays_for_many_texts_is_taken_for_fewer_that_never_drafted() -> None:
    """Also where nothing may be lost by trying any more: here since plain steps of a few were known before."""
    own, few, many = Controller(), [100, 101], list(range(8))
    for _ in range(4):
        own.observe(few, [0, 0], [1, 1], 0.009)
    for _ in range(60):
        limits = own.limits(many)
        drafted = [60 if limit is None else limit for limit in limits]
        own.observe(many, drafted, [1 + min(2, nodes) for nodes in drafted], 0.01 + 0.002 * (max(drafted) > 0))
    own.credit = -1.0
    assert own.limits(few) != [0, 0]
    for text in many:
        own.forget(text)
    for _ in range(20):  # it does not pay for them: as soon as that is known, it is over
        limits = own.limits(few)
        drafted = [60 if limit is None else limit for limit in limits]
        own.observe(few, drafted, [1, 1], 0.02 if any(drafted) else 0.009)
    assert own.limits(few) == [0, 0]


def written(controller: Controller, seed: int, steps: int = 2000, left: int = 0) -> float:
    """Tokens a second of a drafter that drafts from what the step before looked ahead: a step gains what the smaller of
    the two lets it. Alone on an accelerator, in times of plain steps. Of up to 15 rows it has no use for `left`."""
    gains = {0: 0.0, 2: 0.2, 6: 0.44, 15: 0.56, 60: 0.76}
    times = {0: 1.0, 2: 1.14, 6: 1.16, 15: 1.18, 60: 1.26}
    dice, before, tokens, seconds = random.Random(seed), 0, 0, 0.0
    for step in range(steps):
        (limit,) = controller.limits([0])
        size = 60 if limit is None else limit
        gain = gains[min(size, before)]
        came = 1 + (dice.random() < gain / 1.5) + (dice.random() < gain / 3)
        controller.observe([0], [size - left if size == 15 else size], [came], times[size])
        if step >= steps // 4:
            tokens, seconds = tokens + came, seconds + times[size]
        before = size
    return tokens / seconds


def test_a_promise_keeps_it_from_what_a_first_step_seems_to_say() -> None:
    """A larger size gains nothing in its first step, so that tries of one step belittle it."""
    best, gains = 1.76 / 1.26, [0.0, 0.21, 0.44, 0.56, 0.76]
    promised, thrifty, guessed = (
        sum(written(Controller(gains=gains), seed, left=left) for seed in range(8)) / 8
        for gains, left in ((gains, 0), (gains, 2), (GUESSED, 0))
    )
    assert min(promised, thrifty) > 0.97 * best
    assert guessed < promised - 0.02 * best


def test_sizes_of_which_no_more_is_expected_are_one() -> None:
    assert Controller(gains=[0.0, 0.2, 0.4, 0.5, 0.5])._sizes() == range(4)
    own = Controller(gains=[0.0, 0.2, 0.4, 0.5, 0.6])
    assert own._sizes() == Controller(own)._sizes() == range(5)
    assert own.shape[1].count == Controller(own).shape[1].count > Controller().shape[1].count


def test_what_there_is_no_room_for_is_not_taken_for_more() -> None:
    """With 64 texts a step may have rows for 7 drafts each. Two are worth their rows here, and six are not."""
    texts, taken = list(range(64)), []
    controller = Controller(gains=[0.0, 0.47, 0.73, 0.94, 1.17])
    gains, times = {0: 0.0, 2: 0.3, 6: 0.4, 7: 0.42}, {0: 1.0, 2: 1.1, 6: 1.25, 7: 1.28}
    controller.room, dice = 7, random.Random(3)
    for _ in range(600):
        sizes = [7 if limit is None else min(7, limit) for limit in controller.limits(texts)]
        tokens = [1 + (dice.random() < gains[size]) for size in sizes]
        controller.observe(texts, sizes, tokens, times[max(sizes)])
        taken.append(max(sizes))
    assert taken.count(7) == 0
    assert taken[200:].count(2) > 300


def test_less_room_than_before_ends_what_was_chosen() -> None:
    controller = Controller(gains=[0.0, 1.0, 2.0, 3.0, 4.0])
    for room, most in ((60, 60), (7, 6), (1, 2)):
        controller.room = room
        for _ in range(200):
            (limit,) = controller.limits([0])
            size = 60 if limit is None else limit
            controller.observe([0], [size], [1 + min(size, 4)], 1.0 + 0.001 * size)
        assert controller.times[1].chosen == SIZES.index(None if most == 60 else most)


def test_a_choice_stands_for_some_passes_and_for_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, once every size is known; and a try is a choice of its own."""
    controller = Controller()
    controller.rounded = True
    made: list[int] = []
    best = controller._best

    def counted(*given: Any) -> int:
        made.append(0)
        return best(*given)

    monkeypatch.setattr(controller, "_best", counted)

    def step(texts: list[int]) -> int:
        """How many choices it took."""
        before, limits = len(made), controller.limits(texts)
        sizes = [60 if limit is None else limit for limit in limits]
        tokens = [1 + (size > 0) + (size > 2) + (size > 6) + (size > 15) for size in sizes]
        controller.observe(texts, sizes, tokens, 1.0 + 0.01 * max(sizes))
        return len(made) - before + controller.trying

    beginning = [step([0]) for _ in range(8)]
    assert all(beginning)  # not every size is known
    for _ in range(300):
        step([0])
    taken = [step([0]) for _ in range(40)]
    assert 10 <= sum(taken) <= 20
    for _ in range(300):
        step([0, 1])
    while not step([0, 1]):
        pass
    if controller.trying:
        step([0, 1])
    assert step([0, 2])  # another text, though as many


def test_what_was_seen_while_a_choice_stands_may_wait() -> None:
    """Whether it is looked at at once or later: the same choices."""
    at_once, later = Controller(), Controller()
    chance, waited = random.Random(3), 0
    for controller in (at_once, later):
        controller.rounded = True
    for step in range(1500):
        texts = [step // 200] if step % 500 < 300 else [step // 200, 1000]
        limits = at_once.limits(texts)
        assert later.limits(texts) == limits
        sizes = [60 if limit is None else limit for limit in limits]
        tokens = [1 + (chance.random() < 0.1 * size) + (chance.random() < 0.03 * size) for size in sizes]
        for controller in (at_once, later):
            controller.observe(texts, sizes, tokens, 1.0 + 0.004 * sum(sizes))
        at_once.catch_up()
        waited += bool(later._seen)
        if step % 170 == 0:
            for controller in (at_once, later):
                controller.forget(texts[0])
    assert waited > 400


def test_a_text_that_is_left_out_comes_back_seldom() -> None:
    controller, drafted, passes = Controller(), 0, 3000
    controller.rounded = True
    for _ in range(passes):
        limits = controller.limits([0, 1, 2, 3, 4, 5])
        sizes = [60 if limit is None else limit for limit in limits]
        tokens = [1 + 2 * (size > 0) * (text > 0) for text, size in enumerate(sizes)]
        drafted += sizes[0] > 0
        controller.observe([0, 1, 2, 3, 4, 5], sizes, tokens, 1.0 + 0.01 * sum(sizes))
    assert 0.005 * passes < drafted < 0.06 * passes


def test_plain_steps_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing pays: none is lost, and tries go on between them."""
    controller, looked = Controller(), []
    take = controller._take

    def taken(step: Step) -> None:
        looked.append(step)
        take(step)

    monkeypatch.setattr(controller, "_take", taken)
    plain = tries = 0
    for _ in range(3000):
        drafted = [60 if limit is None else limit for limit in controller.limits([0])]
        tries += any(drafted)
        plain += not any(drafted)
        controller.observe([0], drafted, [1], 3.0 if any(drafted) else 1.0)
    controller.catch_up()
    steps = [step for step in looked if not any(step.drafted)]
    assert sum(step.passes for step in steps) == plain == sum(step.tokens[0] for step in steps)
    assert all(step.seconds == step.passes <= STANDS for step in steps)
    assert len(steps) < 0.4 * plain
    assert 3 < tries < 40


def test_steps_of_other_texts_and_unsettled_ones_are_looked_at_by_themselves() -> None:
    plain = Step([0, 1], [0, 0], [1, 1], 1.0, 1, 0.25, True)
    assert plain.goes_on_with(plain)
    assert plain.and_then(plain) == Step([0, 1], [0, 0], [2, 2], 2.0, 2, 0.5, True)
    for other in (
        plain._replace(texts=[0]),
        plain._replace(texts=[0, 2]),
        plain._replace(drafted=[0, 2]),
        plain._replace(settled=False),
    ):
        assert not plain.goes_on_with(other)
        assert not other.goes_on_with(plain)
