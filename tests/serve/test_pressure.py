"""What happens when there is too much to do, when clients leave, and when the engine breaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from forerun.engine.engine import Engine
from forerun.engine.loaded import LoadedModel
from forerun.serve.limits import Gate, Limits
from forerun.serve.server import Settings
from tests.serve.house import NAME, House, opened

LONG: Any = {"model": NAME, "prompt": "the the", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


class Slow:
    """Lets an engine make a step only now and then, so that there is time to see what happens between two."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.go = threading.Event()
        step = engine.step

        def slowly() -> Any:
            self.go.wait(10)
            self.steps += 1
            time.sleep(0.01)
            return step()

        monkeypatch.setattr(engine, "step", slowly)


@pytest.fixture
def small(model: LoadedModel) -> Iterator[House]:
    settings = Settings(NAME, max_batch=2, cache_tokens=1024, also=(), limits=Limits(queue=2, texts=2))
    with opened(model, settings) as house:
        yield house


def test_a_full_queue_says_when_to_come_again(small: House, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(small.service.engines.first, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(small.post, "/v1/completions", **LONG | {"max_tokens": 20}) for _ in range(4)]
        assert small.eventually(lambda: small.service.gate.inside == 4)
        assert small.service.gate.waiting == 2
        for stream in (False, True):
            refused = small.post("/v1/completions", **LONG, stream=stream)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            small.client.completions.create(model=NAME, prompt="hello")
        assert small.get("/health").status_code == 200
        slow.go.set()
        assert [each.result().status_code for each in waiting] == [200] * 4
    assert small.post("/v1/completions", **LONG | {"max_tokens": 2}).status_code == 200


def test_the_official_client_comes_again_by_itself(small: House, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(small.service.engines.first, monkeypatch)
    client = small.client.with_options(max_retries=3)
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(small.post, "/v1/completions", **LONG | {"max_tokens": 4}) for _ in range(4)]
        assert small.eventually(lambda: small.service.gate.inside == 4)
        late = pool.submit(client.completions.create, model=NAME, prompt="hello", max_tokens=3)
        time.sleep(0.1)
        slow.go.set()
        assert late.result(30).choices
        assert all(each.result().status_code == 200 for each in waiting)


def test_a_gate_counts_what_is_inside() -> None:
    gate = Gate(2, 1)
    with gate.enter(2), gate.enter(1):
        assert (gate.inside, gate.waiting) == (3, 1)
        with pytest.raises(Exception, match="busy"), gate.enter(1):
            pass
    assert gate.inside == 0
    with pytest.raises(Exception, match="room for 3"), gate.enter(4):
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "writing"])
def test_who_leaves_is_cancelled_within_a_step(
    small: House, monkeypatch: pytest.MonkeyPatch, stream: bool, when: str
) -> None:
    slow = Slow(small.service.engines.first, monkeypatch)
    engine = small.service.engines.first

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            asking = asyncio.create_task(
                client.post(f"{small.address}/v1/completions", json={**LONG, "stream": stream, "n": 2})
            )
            while not engine.has_work:
                await asyncio.sleep(0.002)
            if when == "writing":
                slow.go.set()
                while slow.steps < 5:
                    await asyncio.sleep(0.002)
            asking.cancel()

    asyncio.run(ask_and_leave())
    left_at = slow.steps
    assert small.eventually(lambda: small.service.gate.inside == 0)
    slow.go.set()
    assert small.eventually(lambda: small.idle)
    assert slow.steps - left_at <= 5  # of 400: a step or two, and what passed until the connection was closed
    small.check_integrity()
    assert engine.statistics.tokens < 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(small: House, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    slow = Slow(small.service.engines.first, monkeypatch)
    slow.go.set()
    answer = small.post("/v1/completions", **LONG, timeout=0.3, stream=stream)
    if stream:  # text had come: the last event says why there is no more
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        assert '"type":"timeout_error"' in last
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
    assert small.eventually(lambda: small.idle)
    small.check_integrity()


def test_a_deadline_counts_while_waiting(small: House, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(small.service.engines.first, monkeypatch)
    answer = small.post("/v1/completions", **LONG, timeout=0.2, stream=True)
    assert answer.status_code == 504
    slow.go.set()
    assert small.eventually(lambda: small.idle)


@pytest.mark.parametrize("error", [RuntimeError("/secret/path broke"), ValueError("logits hold NaN")])
def test_a_broken_engine_is_told_and_nothing_hangs(
    small: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    steps = 0
    engine = small.service.engines.first
    step = engine.step

    def break_down() -> Any:
        nonlocal steps
        steps += 1
        if steps > 6:
            raise error
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine, "step", break_down)
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(small.post, "/v1/completions", **LONG)
        streamed = pool.submit(small.post, "/v1/completions", **LONG, stream=True)
        waiting = pool.submit(small.post, "/v1/completions", **LONG)
        assert whole.result(20).status_code == 500
        assert waiting.result(20).status_code == 500
        events = streamed.result(20)
        assert events.status_code == 500 or '"code":"engine_down"' in events.text
        assert "[DONE]" not in events.text
    for answer in (whole.result(), waiting.result()):
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
    health = small.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "broken"})
    for stream in (False, True):
        assert small.post("/v1/completions", **LONG, stream=stream).json()["error"]["code"] == "engine_down"
    with pytest.raises(openai.InternalServerError):
        small.client.completions.create(model=NAME, prompt="hello")
    assert small.get("/metrics").status_code == 200
    assert small.service.gate.inside == 0


def test_a_drafter_that_cannot_be_made_is_one_requests_trouble(model: LoadedModel) -> None:
    settings = Settings(NAME, max_batch=2, cache_tokens=512, also=("eagle3", "ngram"))
    with opened(model, settings) as house:
        answer = house.post("/v1/completions", prompt="hello", speculation={"drafter": "eagle3"})
        assert answer.status_code == 400
        assert "eagle3 cannot be used" in answer.json()["error"]["message"]
        good = house.post("/v1/completions", prompt="hello", speculation={"drafter": "ngram"})
        assert good.status_code == 200
        assert house.get("/health").status_code == 200
