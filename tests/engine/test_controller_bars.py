"""What the controller is held to, on machines whose times and acceptances are made up: never much slower than plain
decoding, and for one text at once nearly as fast as the best that never changes. And that these tests notice when it is
broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise
from statistics import fmean

import pytest

from forerun.engine import controller as module
from forerun.engine.controller import Controller
from forerun.engine.experience import PLAIN, Standing, Times
from tests.engine.made_up_machines import LUCKS, MACHINES, Chooser, Fixed, machine, rights

LENGTH = 200
BAR, SHARE = 0.97, 0.95
SEEDS = range(6)
Make = Callable[[], Chooser]
Limits = Callable[[Many[int]], list[int | None]]


def seconds(name: str, luck: str, batch: int, chooser: Chooser, seed: int, length: int = LENGTH) -> float:
    texts = 3 if batch == 1 else 2 * batch
    return machine(name, seed).write(chooser, rights(luck, texts), length, batch)


def beside_plain(name: str, luck: str, batch: int, make: Make = Controller) -> float:
    """Of an engine that knows nothing yet."""
    return fmean(
        seconds(name, luck, batch, Fixed(0), seed) / seconds(name, luck, batch, make(), seed) for seed in SEEDS
    )


def gains_alone(name: str, luck: str, length: int = LENGTH) -> tuple[float, float]:
    """For one text at once: what a second engine gains, that begins with what a first one has learnt, and what the best
    fixed number of drafts gains."""
    own, best = [], []
    natural = machine(name, 0).natural
    for seed in SEEDS:
        plain = seconds(name, luck, 1, Fixed(0), seed, length)
        first = Controller()
        seconds(name, luck, 1, first, seed + 100, length)
        own.append(plain / seconds(name, luck, 1, Controller(first), seed, length) - 1)
        fixed = (seconds(name, luck, 1, Fixed(nodes), seed, length) for nodes in (natural // 4, natural // 2, natural))
        best.append(plain / min(fixed) - 1)
    return fmean(own), fmean(best)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("luck", LUCKS)
@pytest.mark.parametrize("name", MACHINES)
def test_never_much_slower_than_plain_decoding(name: str, luck: str, batch: int) -> None:
    """A few hundred steps, the first ones among them."""
    assert beside_plain(name, luck, batch) >= BAR


@pytest.mark.parametrize("name", MACHINES)
def test_gains_that_were_measured_elsewhere_do_little_harm(name: str) -> None:
    """Of a drafter that went deep, where texts go another way."""
    for batch in (1, 8):
        assert beside_plain(name, "mixed", batch, lambda: Controller(gains=[0, 1.22, 2.17, 2.84, 3.73])) >= 0.96


def test_gains_that_were_measured_are_where_it_begins() -> None:
    own = Controller(gains=[0.0, 1.0, 2.0, 3.0, 4.0])
    assert [mean.value for mean in own.shape] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [mean.value for mean in Controller(own, [0.0] * 5).shape] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [mean.value for mean in Controller(gains=[0.0] * 5).shape] == [0.0] * 5


@pytest.mark.parametrize(
    ("name", "luck"),
    [(name, luck) for name in MACHINES[:5] for luck in ("good", "mixed")] + [("cpu, lookup", "poor")],
)
def test_alone_nearly_as_fast_as_the_best_that_never_changes(name: str, luck: str) -> None:
    """But for two hundredths of plain decoding, which is what noise makes of so few steps."""
    own, best = gains_alone(name, luck)
    assert own >= SHARE * best - 0.02


def test_a_little_more_time_is_worth_many_more_tokens() -> None:
    """Sizes that take nearly the same time, as on an accelerator: what a try gains must not be held against a level
    that lags behind."""
    takes = {0: 4.4, 2: 5.1, 6: 6.1, 15: 6.2, 60: 6.4}
    gains = {0: 0.0, 2: 1.2, 6: 2.0, 15: 2.6, 60: 3.2}
    own, dice, spent, written = Controller(), random.Random(1), 0.0, 0
    for text in range(12):
        for _ in range(40):
            (limit,) = own.limits([text])
            drafted = 60 if limit is None else limit
            chance = gains[drafted] / (1 + gains[drafted])
            tokens = 1
            while tokens < 8 and dice.random() < chance:
                tokens += 1
            spent, written = spent + takes[drafted], written + tokens
            own.observe([text], [drafted], [tokens], takes[drafted] / 1e3)
        own.forget(text)
    whole = 1 + sum((gains[60] / (1 + gains[60])) ** depth for depth in range(1, 8))
    assert written / spent - 1 / 4.4 >= 0.93 * (whole / 6.4 - 1 / 4.4)


# --- broken on purpose


class DeafToRuns:
    """Takes a run of plain decoding for a single pass."""

    def __init__(self) -> None:
        self.inner = Controller()

    def limits(self, texts: list[int]) -> list[int | None]:
        return self.inner.limits(texts)

    def observe(self, texts: list[int], drafted: list[int], tokens: list[int], seconds: float, steps: int = 1) -> None:
        self.inner.observe(texts, drafted, tokens, seconds)

    def forget(self, text: int) -> None:
        self.inner.forget(text)


def believes_the_first(self: Times, size: int) -> float | None:
    return self.seconds[size][0] if self.seconds[size] else None


def switches() -> int:
    """How often the choice changes where drafts hardly pay."""
    chosen: list[int] = []
    for seed in range(12):
        own = Controller()
        limits = own.limits

        def watched(texts: Many[int], own: Controller = own, limits: Limits = limits) -> list[int | None]:
            found = limits(texts)
            chosen.append(own.times[1].chosen)
            return found

        own.limits = watched  # type: ignore[method-assign]
        seconds("cpu, trees", "poor", 1, own, seed)
    return sum(before != after for before, after in pairwise(chosen))


def test_without_hysteresis_the_choice_wavers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STANDS", 1)  # which steadies it as well
    steady = switches()
    monkeypatch.setattr(module, "CLEARLY", 0.0)
    assert switches() > 2 * steady > 0


def test_without_tries_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIED", 0.0)
    monkeypatch.setattr(module, "GRANTED", -1e9)
    own, best = gains_alone("cpu, lookup", "good")
    assert own < SHARE * best


def test_tries_without_limit_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIED", 1e9)
    monkeypatch.setattr(module, "SAVED", 1e9)
    monkeypatch.setattr(module, "SELDOM", 0)
    assert beside_plain("arithmetic", "none", 8) < BAR


def test_cold_steps_that_are_believed_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "of", believes_the_first)
    found = [beside_plain(name, "none", batch) for name in ("cpu, lookup", "arithmetic") for batch in (1, 8)]
    own, best = gains_alone("accelerator, head", "good")
    assert min(found) < BAR or own < SHARE * best


class CountsAll(Controller):
    """As if every text had drafts in every step."""

    def _tokens(self, times: Times, standings: Many[Standing], size: int) -> float:
        return len(standings) + sum(self._gains(times, standings, size))


def test_drafts_that_only_some_have_must_not_count_for_all() -> None:
    assert min(beside_plain("cpu, seldom", luck, 8, CountsAll) for luck in ("poor", "good", "mixed")) < BAR


def test_a_run_that_is_taken_for_one_pass_costs_too_much() -> None:
    """Plain decoding would seem eight times as slow as it is."""
    assert beside_plain("accelerator, head", "none", 8, DeafToRuns) < BAR


def test_what_was_learnt_is_handed_on_and_fades() -> None:
    first = Controller()
    seconds("cpu, lookup", "good", 1, first, 0)
    second = Controller(first)
    assert second.times[1].chosen == first.times[1].chosen != PLAIN
    assert second.times[1].of(PLAIN) == first.times[1].of(PLAIN)
    assert second.most == first.most
    assert not second.texts
    limits = second.limits([7])
    assert limits != [0]  # it does not begin anew
    for _ in range(4):  # the machine is slower now: a few steps are enough to see it
        second._size = 3
        second.observe([7], [8], [2], 99.0)
    assert second.times[1].of(3) == 99.0
