"""A server in a thread of the test's own process, asked over real HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from forerun.engine.loaded import LoadedModel
from forerun.serve.server import Settings, bind, listen, make_server, open_service
from forerun.serve.service import Service

NAME = "tiny"
KEY = "sk-not-checked"


@dataclass(frozen=True)
class House:
    service: Service
    address: str
    client: openai.OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        body.setdefault("model", self.service.served.name)
        return httpx.post(f"{self.address}{path}", json=body, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=60)

    def eventually(self, true: Callable[[], bool], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.005)
        return true()

    @property
    def idle(self) -> bool:
        """Nobody is inside, and every engine has given everything back."""
        return self.service.gate.inside == 0 and not self.service.engines.has_work

    def check_integrity(self) -> None:
        for engine in self.service.engines.made.values():
            engine.check_integrity()
            assert not engine.cache.holders


@contextmanager
def opened(model: LoadedModel, settings: Settings) -> Iterator[House]:
    with open_service(model, settings) as service, bind("127.0.0.1", 0) as taken:
        listen(taken)
        server = make_server(service, settings)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([taken])), daemon=True)
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        thread.start()
        try:
            with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
                yield House(service, address, client)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
