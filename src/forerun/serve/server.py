"""A server from its options to its end: the port first, then the model, then requests until it is told to stop.

SIGTERM and Ctrl-C drain: no connection is taken any more, texts that are being written are written to their end, or
until the grace is over. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.drafters.find import read_options
from forerun.engine.build import build_engine
from forerun.engine.engine import Engine
from forerun.engine.loaded import LoadedModel
from forerun.engine.runner import Runner
from forerun.serve.app import Doors, make_app
from forerun.serve.engines import PLAIN, Engines
from forerun.serve.limits import Limits
from forerun.serve.logs import tell
from forerun.serve.metrics import Metrics
from forerun.serve.orders import Served
from forerun.serve.service import Service
from forerun.verify.rule import all_rules

if TYPE_CHECKING:
    import uvicorn

FREE = ("ngram", "suffix", "recycling", "lookahead")
"""Drafters that need nothing but the model, and so can be had with any."""
SHARE = 4
"""How much smaller than the first engine's the caches of the others are."""
STACK = 128 << 20
"""Bytes for the calls of a thread, of which only those are taken that are used. A grammar may lead the library that
reads it through thousands of rules inside each other, and a stack that is full ends the process."""


@dataclass(frozen=True)
class Settings:
    """What is served, besides the model itself."""

    name: str
    drafter: str = PLAIN
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = FREE
    """Further drafters that a request may name."""
    rule: str | None = None
    max_batch: int = 16
    cache_tokens: int | None = None
    adaptive: bool = True
    reuse: bool = True
    """Prompts that begin like an earlier text are not read again while its cache is there."""
    limits: Limits = field(default_factory=Limits)
    doors: Doors = field(default_factory=Doors)
    grace: float = 30.0
    """Seconds that texts get to end when the server is told to stop."""

    def check(self) -> None:
        """Without a model, so that a typing mistake is told before one is loaded."""
        read_options(self.drafter, self.drafter_options)
        others = [name for name in dict.fromkeys(self.also) if name not in {self.drafter, PLAIN}]
        for name in others:
            read_options(name)
        called = [shown_name(name) for name in (self.drafter, *others)]
        if twice := {name for name in called if called.count(name) > 1}:
            raise ValueError(f"two drafters would be called {', '.join(sorted(twice))}: rename a folder")
        if self.rule is not None and self.rule not in all_rules():
            raise ValueError(f"there is no verification rule {self.rule!r}: use one of {', '.join(all_rules())}")


def bind(host: str, port: int) -> socket.socket:
    """Taken before anything is loaded, so that a used port is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"there is no address {host!r} here: use 127.0.0.1, or 0.0.0.0 for all") from None
    taken = socket.socket(family, kind, protocol)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except (OSError, OverflowError) as error:
        taken.close()
        raise _cannot_listen(host, port, error) from None
    return taken


def listen(taken: socket.socket) -> None:
    """Only when there is someone to answer: until then connections are refused, not left waiting."""
    try:
        taken.listen(2048)
    except OSError as error:
        host, port = taken.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: Exception) -> ValueError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ValueError(f"cannot listen on {host}:{port} ({reason}): choose another --port, or end who uses it")


@contextmanager
def open_service(model: LoadedModel, settings: Settings) -> Iterator[Service]:
    """Engines, their thread and what they are told through; ended with the `with`."""
    metrics = Metrics()
    make = partial(build_engine, model, max_batch=settings.max_batch, adaptive=settings.adaptive, reuse=settings.reuse)
    makers: dict[str, Callable[[], Engine]] = {
        shown_name(settings.drafter): partial(
            make, settings.drafter, settings.drafter_options, cache_tokens=settings.cache_tokens, rule=settings.rule
        )
    }

    def beside(name: str) -> Engine:
        """With a cache that holds one text at least, and a share of what the first engine's does. Others are being
        written for when it is made: they should not wait."""
        first = engines.first
        slots = first.cache.total_blocks * first.cache.block_size
        return make(name, {}, cache_tokens=max(first.context_length, slots // SHARE), prepared=False)

    for name in settings.also:
        if name != PLAIN:  # which every engine can do
            makers.setdefault(shown_name(name), partial(beside, name))
    engines = Engines(makers, counted=metrics.counted)
    served = Served(model, settings.name, engines.names, engines.first.context_length, settings.limits)
    with deep_threads(), Runner(engines) as runner:
        yield Service(served, engines, runner, metrics, settings.max_batch)


@contextmanager
def deep_threads() -> Iterator[None]:
    """Threads that begin meanwhile can go deep."""
    before = threading.stack_size(STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


def shown_name(drafter: str) -> str:
    """A trained drafter's folder without its path: that is nobody's business."""
    return Path(drafter).name or drafter


def make_server(service: Service, settings: Settings) -> uvicorn.Server:
    """Not started; `serve` on a bound socket starts it."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn would raise them again at the end, and a server that was told to stop would
            look as if it had been killed."""
            yield

    config = uvicorn.Config(
        make_app(service, settings.doors),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.grace)),
        lifespan="off",
        ws="none",
    )
    return Server(config)


def serve(service: Service, settings: Settings, taken: socket.socket, *, ready: Callable[[], None]) -> None:
    """Until a signal comes."""
    listen(taken)
    server = make_server(service, settings)

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            tell("stopping", signal=signal.Signals(number).name, texts=service.gate.inside)
            server.force_exit |= server.should_exit  # told twice
            server.should_exit = service.draining = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        loop.call_soon(ready)
        await server.serve([taken])
        tell("stopped", texts=service.gate.inside)

    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(run())
