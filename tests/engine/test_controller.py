"""How much is drafted: on a machine whose times and acceptances are made up, and in the real engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from forerun.core.params import SamplingParams
from forerun.drafters.none import NoDrafter
from forerun.engine.controller import SHARES, Controller
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.engine.tiny import RandomTrees, tiny_model

NODES = 24


@dataclass
class Machine:
    """Writes texts of `length` tokens, and tells how long that takes. A draft is right with probability `right` of the
    text, one after another, and with fewer nodes less often: by their logarithm, as trees have it."""

    controller: Controller | None
    seconds: Callable[[int], float]
    """Of a pass with so many rows."""
    draft_seconds: float = 0.0
    fixed: int = NODES
    """What is drafted without a controller."""
    seed: int = 0

    def write(self, rights: list[float], length: int) -> float:
        chosen, total = random.Random(self.seed), 0.0
        left = dict.fromkeys(range(len(rights)), length)
        while left:
            texts = list(left)
            limits = [self.fixed] * len(texts) if self.controller is None else self.controller.limits(texts)
            drafted = [NODES if limit is None else min(limit, NODES) for limit in limits]
            tokens = [1 + self._accepted(chosen, rights[t], nodes) for t, nodes in zip(texts, drafted, strict=True)]
            spent = self.seconds(len(texts) + sum(drafted)) + (self.draft_seconds if any(drafted) else 0.0)
            spent *= chosen.uniform(0.95, 1.05) * (40.0 if chosen.random() < 0.01 else 1.0)
            if self.controller is not None:
                self.controller.observe(texts, drafted, tokens, spent)
            total += min(spent, 2 * self.seconds(len(texts) + sum(drafted)))  # pauses of the machine are not counted
            for text, count in zip(texts, tokens, strict=True):
                left[text] -= count
                if left[text] <= 0:
                    del left[text]
        return total

    @staticmethod
    def _accepted(chosen: random.Random, right: float, nodes: int) -> int:
        count = 0
        while nodes and count < 6 and chosen.random() < right * (nodes / NODES) ** 0.2:
            count += 1
        return count


def memory_bound(rows: int) -> float:
    return 1.0 + 0.002 * rows


def compute_bound(rows: int) -> float:
    return 0.2 + 0.1 * rows


@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("texts", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.3])
def test_never_much_worse_than_plain_and_nearly_as_good_as_the_best(
    seconds: Callable[[int], float], right: float, texts: int, draft_seconds: float
) -> None:
    """Long texts, so that the first steps, of which nothing is known, do not count."""
    rights, length = [right] * texts, 1500

    def fixed(nodes: int) -> float:
        return Machine(None, seconds, draft_seconds, nodes).write(rights, length)

    plain = fixed(0)
    sizes = [round(share * NODES) for share in SHARES]
    best = min(fixed(nodes) for nodes in sizes)
    adaptive = Machine(Controller(), seconds, draft_seconds).write(rights, length)
    assert adaptive < plain / 0.97
    if texts == 1:
        gained, possible = plain / adaptive - 1, plain / best - 1
        assert gained >= 0.9 * possible - 0.03
    else:
        assert adaptive < 1.12 * best


def test_texts_whose_drafts_are_never_right_are_left_out() -> None:
    controller = Controller()
    machine = Machine(controller, lambda rows: 1.0 + 0.03 * rows)
    rights = [0.9, 0.0, 0.9, 0.0]
    machine.write(rights, 300)
    texts = [10, 11, 12, 13]
    chosen = random.Random(1)
    for _ in range(60):
        limits = controller.limits(texts)
        drafted = [NODES if limit is None else limit for limit in limits]
        tokens = [1 + Machine._accepted(chosen, right, nodes) for right, nodes in zip(rights, drafted, strict=True)]
        controller.observe(texts, drafted, tokens, 1.0 + 0.03 * (4 + sum(drafted)))
    steps = [controller.limits(texts) for _ in range(4)]
    assert any(step[0] != 0 for step in steps)
    assert sum(step[1] == 0 for step in steps) >= 3
    assert controller.texts[11].luck < 0.5 < controller.texts[10].luck
    controller.forget(11)
    assert 11 not in controller.texts


def test_it_follows_a_load_that_changes() -> None:
    """Alone it pays, in a large batch it does not, and alone it pays again."""
    controller = Controller()
    machine = Machine(controller, lambda rows: max(1.0, 0.05 * rows))
    for texts, drafts in ((1, True), (32, False), (1, True)):
        machine.write([0.7] * texts, 600)
        limits = [controller.limits(list(range(texts))) for _ in range(9)]
        assert sum(any(limit != 0 for limit in each) for each in limits) >= (8 if drafts else 0)
        assert drafts or sum(any(limit != 0 for limit in each) for each in limits) <= 1


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
