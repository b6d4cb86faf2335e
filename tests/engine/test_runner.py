"""The engine's thread, with an engine that does as it is told."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from forerun.core.params import SamplingParams
from forerun.core.sequence import FinishReason
from forerun.engine.request import Request, Update
from forerun.engine.runner import Handle, Runner
from forerun.engine.statistics import Statistics


@dataclass
class Scripted:
    """Counts up from each prompt's first token, one a step, for every text; refuses an empty prompt, fails on -1."""

    running: dict[int, Request] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    most: int = 0
    first: int = 0
    """How many were there in the first step."""
    go: threading.Event = field(default_factory=threading.Event)
    """Steps wait for it."""
    number: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> int:
        self.threads.add(threading.get_ident())
        if not request.prompt:
            raise ValueError("the prompt is empty: say something")
        if request.prompt == [-2]:
            raise ZeroDivisionError("in add")
        self.number += 1
        self.running[self.number], self.written[self.number] = request, 0
        return self.number

    def cancel(self, request_id: int) -> None:
        self.threads.add(threading.get_ident())
        self.cancelled.append(request_id)
        del self.running[request_id]

    def step(self) -> list[Update]:
        assert self.go.wait(10)
        self.threads.add(threading.get_ident())
        self.most = max(self.most, len(self.running))
        self.first = self.first or len(self.running)
        updates = []
        for number, request in list(self.running.items()):
            if request.prompt == [-1]:
                raise ZeroDivisionError("in step")
            token = request.prompt[0] + self.written[number]
            self.written[number] += 1
            last = self.written[number] == request.params.max_tokens
            for index in range(request.params.n):
                reason: FinishReason | None = "length" if last else None
                updates.append(Update(number, index, [token], ["bonus"], None, reason, Statistics()))
            if last:
                del self.running[number]
        return updates


def ask(first: int, tokens: int = 3, n: int = 1) -> Request:
    return Request([first], SamplingParams(max_tokens=tokens, n=n))


def tokens_of(updates: Iterator[Update] | Handle) -> list[int]:
    return [token for update in updates for token in update.tokens]


def test_what_is_asked_together_begins_together() -> None:
    """Else the steps of one call would be others every time."""
    engine = Scripted()
    engine.go.set()
    with Runner(engine) as runner:
        handles = runner.submit_all(ask(first) for first in range(0, 400, 10))
        assert [tokens_of(handle) for handle in handles] == [[n, n + 1, n + 2] for n in range(0, 400, 10)]
    assert engine.first == 40


@pytest.fixture
def engine() -> Scripted:
    engine = Scripted()
    engine.go.set()
    return engine


@pytest.fixture
def runner(engine: Scripted) -> Iterator[Runner]:
    with Runner(engine) as runner:
        yield runner


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()`, for at most some seconds."""
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.005)
    raise AssertionError(what)


def test_requests_run_together_in_one_other_thread(engine: Scripted, runner: Runner) -> None:
    engine.go.clear()
    handles = [runner.submit(ask(10 * number, tokens=4)) for number in range(1, 6)]
    engine.go.set()
    assert [tokens_of(handle) for handle in handles] == [[10 * n + k for k in range(4)] for n in range(1, 6)]
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    assert engine.most >= 4  # the first may have begun alone
    assert all(handle.over for handle in handles)
    assert not engine.cancelled


def test_a_request_ends_with_the_last_of_its_texts(runner: Runner) -> None:
    updates = list(runner.submit(ask(1, tokens=2, n=3)))
    assert sorted((update.index, *update.tokens) for update in updates) == [
        (0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)
    ]  # fmt: skip


def test_a_refusal_is_the_callers_alone(runner: Runner) -> None:
    good, bad = runner.submit(ask(1)), runner.submit(Request([], SamplingParams()))
    with pytest.raises(ValueError, match="the prompt is empty: say something"):
        list(bad)
    assert tokens_of(good) == [1, 2, 3]
    assert tokens_of(runner.submit(ask(5))) == [5, 6, 7]


@pytest.mark.parametrize("where", [-1, -2])
def test_an_error_reaches_everyone_and_the_runner_says_so(engine: Scripted, runner: Runner, where: int) -> None:
    engine.go.clear()
    handles = [runner.submit(ask(first, tokens=10**6)) for first in (1, 2, where)]
    engine.go.set()
    errors = []
    for handle in handles:
        with pytest.raises(ZeroDivisionError) as raised:
            list(handle)
        errors.append(raised.value)
    assert errors[0] is errors[1] is errors[2] is runner.error
    with pytest.raises(RuntimeError, match="make a new one") as told:
        runner.submit(ask(1))
    assert told.value.__cause__ is runner.error
    handles[0].cancel()  # harmless


def test_leaving_early_cancels(engine: Scripted, runner: Runner) -> None:
    for update in runner.submit(ask(1, tokens=10**9)):
        if update.tokens == [3]:
            break
    until(lambda: engine.cancelled == [1], "not cancelled")
    updates = cast("Generator[Update]", iter(runner.submit(ask(1, tokens=10**9))))
    next(updates)
    updates.close()
    until(lambda: engine.cancelled == [1, 2], "not cancelled")
    assert tokens_of(runner.submit(ask(7))) == [7, 8, 9]


def test_cancel_from_elsewhere_ends_the_iteration(engine: Scripted, runner: Runner) -> None:
    handle = runner.submit(ask(0, tokens=10**9))
    threading.Timer(0.05, handle.cancel).start()
    updates = list(handle)
    assert [token for update in updates for token in update.tokens] == list(range(len(updates)))
    assert updates[-1].finish_reason is None
    assert engine.cancelled == [1]
    handle.cancel()
    assert tokens_of(runner.submit(ask(7))) == [7, 8, 9]
    assert engine.cancelled == [1]


def test_a_keyboard_interrupt_cancels(engine: Scripted, runner: Runner) -> None:
    def read() -> None:
        for _ in runner.submit(ask(1, tokens=10**9)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    until(lambda: engine.cancelled == [1], "not cancelled")


def test_closing_ends_what_is_left(engine: Scripted) -> None:
    runner = Runner(engine)
    handle = runner.submit(ask(1, tokens=10**9))
    reader = iter(handle)
    next(reader)
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed before"):
        list(reader)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        runner.submit(ask(1))


def test_a_runner_that_nobody_holds_goes_with_its_thread(engine: Scripted) -> None:
    runner = Runner(engine)
    gone = weakref.ref(runner)
    names = [thread.name for thread in threading.enumerate()]
    assert "forerun-engine" in names
    del runner
    gc.collect()
    assert gone() is None
    assert [thread.name for thread in threading.enumerate()].count("forerun-engine") == names.count(
        "forerun-engine"
    ) - 1


# --- event loops -----------------------------------------------------------------------------------------------


def test_many_readers_in_an_event_loop(runner: Runner) -> None:
    async def read(first: int) -> list[int]:
        return [token async for update in runner.submit(ask(first, tokens=20)) for token in update.tokens]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*(read(100 * number) for number in range(8)))

    assert asyncio.run(together()) == [[100 * n + k for k in range(20)] for n in range(8)]


def test_refusals_and_errors_in_an_event_loop(runner: Runner) -> None:
    async def read(request: Request) -> None:
        async for _ in runner.submit(request):
            pass

    with pytest.raises(ValueError, match="the prompt is empty"):
        asyncio.run(read(Request([], SamplingParams())))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(read(ask(-1)))


def test_leaving_an_async_iteration_cancels(engine: Scripted, runner: Runner) -> None:
    async def leave() -> None:
        async for _ in runner.submit(ask(1, tokens=10**9)):
            break

    async def close() -> None:
        updates = cast("AsyncGenerator[Update]", aiter(runner.submit(ask(1, tokens=10**9))))
        await anext(updates)
        await updates.aclose()

    async def cancel() -> None:
        async def read() -> None:
            async for _ in runner.submit(ask(1, tokens=10**9)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def cancelled(count: int) -> bool:
        return len(engine.cancelled) == count

    for count, way in enumerate((leave, close, cancel), start=1):
        asyncio.run(way())
        until(partial(cancelled, count), "not cancelled")
    assert tokens_of(runner.submit(ask(7))) == [7, 8, 9]


def test_a_closed_event_loop_does_not_hurt_the_others(engine: Scripted, runner: Runner) -> None:
    loop = asyncio.new_event_loop()
    updates = aiter(runner.submit(ask(1, tokens=10**9)))
    loop.run_until_complete(anext(updates))
    loop.close()
    until(lambda: engine.cancelled == [1], "not cancelled")
    assert tokens_of(runner.submit(ask(7))) == [7, 8, 9]
