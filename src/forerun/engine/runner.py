"""The engine in a thread of its own: any thread or event loop hands in requests and reads what becomes of them.

Only that thread ever touches the engine, so the engine needs no locks. It steps while there is work and sleeps
otherwise. A refused request fails alone; an error inside a step leaves the engine in an unknown state, so it reaches
everyone who waits, and the runner takes nothing more.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from forerun.engine.request import Request, Update

WAKE = 0.5
"""Seconds after which a waiting reader looks up, so that Ctrl-C gets through where a lock would keep it out."""


class Steps(Protocol):
    """What is used of the engine."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[Update]: ...


@runtime_checkable
class WorksApart(Protocol):
    """An engine that calls `meanwhile` in every step, at a moment when others can be seen to at no cost, and that asks
    in a long step whether it is `called`."""

    meanwhile: Callable[[], None] | None
    called: Callable[[], bool]


class Handle:
    """One request on its way. Iterate over it, with `for` or `async for`, to get its updates; leaving early cancels it.

    A refusal of the request, or an error of the engine, is raised from the iteration.
    """

    def __init__(self, request: Request, send_cancel: Callable[[Handle], None]) -> None:
        self.request = request
        self._send_cancel = send_cancel
        self._updates: deque[Update] = deque()
        self._changed = threading.Condition()
        self._bells: list[_Bell] = []
        self._unfinished = set(range(request.params.n))
        self._over = False
        self._left = False
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come, though some may still have to be read."""
        return self._over

    def cancel(self) -> None:
        """Ends the request soon, unless it is over already. The iteration ends without further updates."""
        if not self._over:
            self._send_cancel(self)

    def leave(self) -> None:
        """As `cancel`, and the iteration ends at once, though the engine may be in a long step."""
        self.cancel()
        with self._changed:
            self._left = True
        ring([self])

    def __iter__(self) -> Iterator[Update]:
        try:
            while True:
                with self._changed:
                    while not (self._updates or self._over or self._left):
                        self._changed.wait(WAKE)
                    update = self._next()
                if update is None:
                    return
                yield update
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Update]:
        changed = asyncio.Event()
        bell = _Bell(asyncio.get_running_loop(), changed)
        with self._changed:
            self._bells.append(bell)
        try:
            while True:
                changed.clear()
                with self._changed:
                    waiting = not (self._updates or self._over or self._left)
                    update = None if waiting else self._next()
                if waiting:
                    await changed.wait()
                elif update is None:
                    return
                else:
                    yield update
        finally:
            with self._changed:
                self._bells.remove(bell)
            self.cancel()

    def _next(self) -> Update | None:
        """None at the end."""
        if self._left:
            return None
        if self._updates:
            return self._updates.popleft()
        if self._error is not None:
            raise self._error
        return None

    def take(self, update: Update) -> None:
        """From the engine's thread: an update came. Who waits learns of it by `ring`."""
        if update.finish_reason is not None:
            self._unfinished.discard(update.index)
        with self._changed:
            self._updates.append(update)
            self._over = not self._unfinished

    def end(self, error: BaseException | None = None) -> None:
        """From the engine's thread: nothing more comes."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
        ring([self])

    def wake_threads(self) -> list[_Bell]:
        """Those that wait; the event loops that wait too are returned."""
        with self._changed:
            self._changed.notify_all()
            return list(self._bells)


@dataclass(frozen=True, eq=False)
class _Bell:
    """Wakes who waits in an event loop."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event


def ring(handles: Iterable[Handle]) -> None:
    """Wake all who wait for these. An event loop is called once for all: it would begin to tell one text's news while
    the others' are still being handed over, and the two threads would be in each other's way."""
    bells: dict[asyncio.AbstractEventLoop, list[tuple[_Bell, Handle]]] = {}
    for handle in handles:
        for bell in handle.wake_threads():
            bells.setdefault(bell.loop, []).append((bell, handle))
    for loop, waiting in bells.items():
        try:
            loop.call_soon_threadsafe(_set_all, [bell.changed for bell, _ in waiting])
        except RuntimeError:  # that event loop is closed: nobody reads any more
            for _, handle in waiting:
                handle.cancel()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


@dataclass(eq=False)
class _Desk:
    """What the engine's thread shares with the others. It knows nothing of the runner, so that a runner nobody holds
    can go, and its thread with it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    arrivals: deque[Handle] = field(default_factory=deque)
    cancels: deque[Handle] = field(default_factory=deque)
    closing: bool = False
    error: BaseException | None = None

    def send(self, box: deque[Handle], *handles: Handle) -> None:
        with self.changed:
            if self.error is not None:
                if box is self.cancels:
                    return
                raise RuntimeError("the engine broke down in an earlier step: make a new one") from self.error
            if self.closing and box is self.arrivals:
                raise RuntimeError("the engine is closed: make a new one")
            box.extend(handles)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def pick_up(self, idle: Callable[[], bool]) -> tuple[list[Handle], list[Handle]]:
        """New requests and cancellations; waits for some while `idle`."""
        with self.changed:
            while not (self.arrivals or self.cancels or self.closing) and idle():
                self.changed.wait()
            picked = list(self.arrivals), list(self.cancels)
            self.arrivals.clear()
            self.cancels.clear()
        return picked


class Runner:
    def __init__(self, engine: Steps) -> None:
        self._desk = _Desk()
        self._thread = threading.Thread(target=_work, args=(engine, self._desk), name="forerun-engine", daemon=True)
        self._finalizer = weakref.finalize(self, _shut, self._desk, self._thread)  # also when the interpreter ends
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What broke the engine, if something did."""
        return self._desk.error

    def submit(self, request: Request) -> Handle:
        """Returns at once. From any thread."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request]) -> list[Handle]:
        """Together: no step begins with some of them."""
        desk = self._desk
        handles = [Handle(request, lambda handle: desk.send(desk.cancels, handle)) for request in requests]
        desk.send(desk.arrivals, *handles)
        return handles

    def close(self) -> None:
        """Ends all requests and the thread, after the step that it is in. Harmless when done twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shut(desk: _Desk, thread: threading.Thread) -> None:
    desk.close()
    if thread is not threading.current_thread():
        thread.join()


def _work(engine: Steps, desk: _Desk) -> None:
    """The engine's thread, until the desk closes or a step fails."""
    handles: dict[int, Handle] = {}
    numbers: dict[Handle, int] = {}
    arrivals: list[Handle] = []
    untold: list[Update] = []
    error: BaseException | None = None

    def tell() -> None:
        """Readers learn of a step when the next one is under way."""
        told, untold[:] = list(untold), []
        readers: set[Handle] = set()
        for update in told:
            reader = handles.get(update.request)
            if reader is not None:  # else it was cancelled
                readers.add(reader)
                reader.take(update)
                if reader.over:
                    del handles[update.request], numbers[reader]
        ring(readers)

    if isinstance(engine, WorksApart):
        engine.meanwhile = tell
        engine.called = lambda: bool(desk.arrivals or desk.cancels or desk.closing)
    try:
        while not desk.closing:
            if not engine.has_work or not isinstance(engine, WorksApart):
                tell()
            arrivals, cancels = desk.pick_up(lambda: not engine.has_work)
            while arrivals:
                handle = arrivals[0]
                try:
                    number = engine.add(handle.request)
                except ValueError as refusal:
                    handle.end(refusal)
                else:
                    handles[number], numbers[handle] = handle, number
                arrivals.pop(0)
            for handle in cancels:
                if handle in numbers:
                    number = numbers.pop(handle)
                    del handles[number]
                    engine.cancel(number)
                    handle.end()
            if engine.has_work and not desk.closing:
                untold += engine.step()
    except BaseException as failure:  # whatever it is, everyone who waits has to learn of it
        error = failure
    finally:
        tell()
        with desk.changed:
            desk.error, desk.closing = error, True
            left = [*handles.values(), *arrivals, *desk.arrivals]
            desk.arrivals.clear()
        for handle in left:
            handle.end(error or RuntimeError("the engine was closed before the text was finished"))
