"""Several drafters for one model, in one thread: an engine for each, made when it is first asked for.

They share the model's weights and take turns, a step each, while they have work; every engine has a cache of its own.
A request that wants no drafts runs in the first engine, beside those that do, so plain decoding is always there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from forerun.core.step_record import SequenceRecord, StepRecord
from forerun.engine.engine import Engine
from forerun.engine.request import Request, TokenLogprob, Update
from forerun.engine.scoring import score
from forerun.engine.statistics import Statistics

Watch = Callable[[StepRecord, SequenceRecord], None]
"""Told, in the engine's thread, what a step did to a text, before its update comes."""
PLAIN = "none"
log = logging.getLogger("forerun.serve")


@dataclass(frozen=True)
class Asked(Request):
    """A request that names its drafter."""

    drafter: str = PLAIN
    watch: Watch | None = None
    scored: Callable[[list[TokenLogprob | None]], None] | None = None
    """Told the log probabilities of the prompt, before the first update comes."""


@dataclass(frozen=True)
class Watched:
    """A request that someone watches, and which of its texts are not over."""

    watch: Watch
    open: set[int]


@dataclass
class Bench:
    """One engine, and who watches it."""

    engine: Engine
    watched: dict[int, Watched] = field(default_factory=dict)

    def listen(self, listening: bool) -> None:
        """A trace makes a device look at every token, so there is none while nobody reads it."""
        self.engine.trace = self.trace if listening else None

    def trace(self, record: StepRecord) -> None:
        for part in record.sequences:
            if part.request in self.watched:
                self.watched[part.request].watch(record, part)

    def add(self, request: Asked) -> int:
        if request.scored is not None:
            request.scored(score(self.engine.target, request.prompt, request.params.logprobs or 0))
        number = self.engine.add(request)
        if request.watch is not None:
            self.watched[number] = Watched(request.watch, set(range(request.params.n)))
        return number

    def step(self) -> list[Update]:
        if self.watched:
            self.listen(True)
        updates = self.engine.step()
        for update in updates:
            watched = self.watched.get(update.request)
            if watched is not None and update.finish_reason is not None:
                watched.open.discard(update.index)
                if not watched.open:
                    del self.watched[update.request]
        if self.engine.trace is not None and not self.watched:
            self.listen(False)
        return updates


class Engines:
    """Looks like one engine to a `Runner`. Everything but the reading of figures happens in the runner's thread."""

    def __init__(
        self, makers: Mapping[str, Callable[[], Engine]], *, counted: Callable[[str, int, int], None] | None = None
    ) -> None:
        """`makers` by the names of their drafters, the default one first: that one is made at once. `counted` is told
        after a step for how many texts how much was drafted."""
        self.names = list(makers)
        self.default = self.names[0]
        self._makers = dict(makers)
        self._counted = counted
        self.called: Callable[[], bool] = bool
        """Whether somebody waits for the step to end."""
        self._meanwhile: Callable[[], None] | None = None
        self._made = {self.default: Bench(self._makers[self.default]())}

    @property
    def first(self) -> Engine:
        return self._made[self.default].engine

    @property
    def made(self) -> dict[str, Engine]:
        """Those that there are, by name; a copy, for any thread."""
        return {name: bench.engine for name, bench in list(self._made.items())}

    @property
    def has_work(self) -> bool:
        return any(bench.engine.has_work for bench in self._made.values())

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """Called by every engine in its steps, when others can be seen to at no cost."""
        return self._meanwhile

    @meanwhile.setter
    def meanwhile(self, call: Callable[[], None] | None) -> None:
        self._meanwhile = call
        for engine in self.made.values():
            engine.meanwhile, engine.called = call, self._calls

    def _calls(self) -> bool:
        """An engine keeps its step short for those who want to join, and for the other engines."""
        return self.called() or sum(bench.engine.has_work for bench in self._made.values()) > 1

    def add(self, request: Request) -> int:
        """Requests of all engines are numbered without doubles: by number and place."""
        wanted = request.drafter if isinstance(request, Asked) else self.default
        name = wanted if wanted in self._makers else self.default
        if name not in self._made:
            self._made[name] = Bench(self._make(name))
            self.meanwhile = self._meanwhile
        asked = request if isinstance(request, Asked) else Asked(**vars(request))
        return self._made[name].add(asked) * len(self.names) + self.names.index(name)

    def _make(self, name: str) -> Engine:
        """A drafter that cannot be had is one request's trouble; why it cannot be is for the log, not for a client."""
        try:
            return self._makers[name]()
        except Exception as error:
            log.warning("the drafter %s cannot be made: %s", name, error)
            raise ValueError(f"the drafter {name} cannot be used on this server: choose another one") from None

    def cancel(self, number: int) -> None:
        own, place = divmod(number, len(self.names))
        self._made[self.names[place]].engine.cancel(own)

    def step(self) -> list[Update]:
        found = []
        for name, bench in self._made.items():
            if bench.engine.has_work:
                before = _counts(bench.engine.statistics)
                place = self.names.index(name)
                updates = bench.step()
                found += [replace(each, request=each.request * len(self.names) + place) for each in updates]
                self._tell(name, before, _counts(bench.engine.statistics))
        return found

    def _tell(self, name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
        if self._counted is not None and after[0] > before[0]:
            self._counted(name, after[0] - before[0], after[1] - before[1])


def _counts(statistics: Statistics) -> tuple[int, int]:
    return statistics.target_passes, statistics.drafted
