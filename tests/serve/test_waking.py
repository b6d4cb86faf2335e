"""How readers in an event loop learn of a step: all at once, and by every engine when it has the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forerun.engine.request import Request, Update
from forerun.engine.runner import Handle, ring
from forerun.engine.statistics import Statistics
from tests.serve.house import House


def test_an_event_loop_is_called_once_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = [Handle(Request([1]), lambda handle: None) for _ in range(5)]
    calls = 0

    async def read(handle: Handle) -> list[int]:
        return [token async for update in handle for token in update.tokens]

    async def together() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(callback: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(callback, *arguments)

        readers = [asyncio.create_task(read(handle)) for handle in handles]
        await asyncio.sleep(0.01)  # until all wait
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for number, handle in enumerate(handles):
            handle.take(Update(0, 0, [number], ["bonus"], None, "stop", Statistics()))
        ring(handles)
        return await asyncio.wait_for(asyncio.gather(*readers), 10)

    assert asyncio.run(together()) == [[0], [1], [2], [3], [4]]
    assert calls == 1


def test_every_engine_tells_in_its_own_time(house: House) -> None:
    for drafter in ("none", "suffix"):
        answer = house.post("/v1/completions", prompt="hello", max_tokens=3, speculation={"drafter": drafter})
        assert answer.status_code == 200
    engines = house.service.engines
    assert len(engines.made) > 1
    assert engines.meanwhile is not None
    assert {engine.meanwhile for engine in engines.made.values()} == {engines.meanwhile}
    assert not any(engine.called() for engine in engines.made.values())
    before, engines.called = engines.called, lambda: True
    assert all(engine.called() for engine in engines.made.values())
    engines.called = before
