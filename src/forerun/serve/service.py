"""Between the server and the engine's thread: starts what an order asks for, and gives its pieces as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from forerun.engine.build import request_for, transcript_of
from forerun.engine.completion import Piece
from forerun.engine.llm import Writing
from forerun.engine.request import TokenLogprob
from forerun.engine.runner import Runner
from forerun.engine.statistics import Statistics
from forerun.serve.engines import PLAIN, Asked, Engines
from forerun.serve.errors import ApiError, engine_down, refused
from forerun.serve.limits import Gate
from forerun.serve.logs import log
from forerun.serve.metrics import Metrics
from forerun.serve.orders import Order, Served
from forerun.serve.steps import StepLog
from forerun.serve.tokens import TokenTexts


@dataclass
class Running:
    """The texts of an order that is being written."""

    order: Order
    writings: list[Writing] = field(default_factory=list)
    logs: list[StepLog] = field(default_factory=list)
    endings: frozenset[int] = frozenset()
    statistics: dict[int, Statistics] = field(default_factory=dict)
    """By the text's place among all."""
    cut: bool = False
    """Ended before its time."""
    expired: bool = False
    prompt_logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)
    """By the prompt's place, where they are asked for; there before its first piece."""

    def cancel(self) -> None:
        """Who reads is told at once, though the engine looks up only after its step."""
        for writing in self.writings:
            if not writing.handle.over:
                self.cut = True
                writing.handle.leave()

    def expire(self) -> None:
        self.expired = True
        self.cancel()


class Service:
    def __init__(self, served: Served, engines: Engines, runner: Runner, metrics: Metrics, places: int) -> None:
        """`places`: how many texts an engine writes at a time."""
        self.served, self.engines, self.runner, self.metrics = served, engines, runner, metrics
        self.gate = Gate(places, served.limits.queue)
        self.texts = TokenTexts(served.model.tokenizer)
        self.draining = False
        self._told = False
        """Whether the log knows that the engine broke down."""
        self.started = int(time.time())
        metrics.watch(lambda: engines.made, lambda: self.gate.inside, lambda: self.gate.waiting)

    @property
    def state(self) -> str:
        if self.runner.error is not None:
            return "broken"
        return "draining" if self.draining else "ok"

    def start(self, order: Order) -> Running:
        """The order's texts begin; whoever reads `pieces` to the end, or cancels, ends them."""
        if self.runner.error is not None:
            raise self._down()
        running = Running(order)
        drafter = self.served.drafters[0] if order.drafter == PLAIN else order.drafter
        shown = PLAIN if order.draft.nodes == 0 else drafter
        try:
            for place, prompt in enumerate(order.prompts):
                steps = StepLog(order.params.n, shown) if order.trace else None
                made = request_for(self.served.model, prompt, order.params, order.draft)
                scored = partial(running.prompt_logprobs.__setitem__, place) if order.scores_prompts else None
                asked = Asked(**vars(made), drafter=drafter, watch=steps.watch if steps else None, scored=scored)
                running.writings.append(Writing(self.runner.submit(asked), transcript_of(self.served.model, made)))
                running.logs += [steps] if steps else []
                running.endings = frozenset(made.params.stop_token_ids) | self.served.model.target.eos
        except RuntimeError:  # closed, or broken since we looked
            running.cancel()
            raise self._down() from None
        return running

    async def pieces(self, running: Running) -> AsyncIterator[tuple[int, Piece]]:
        """With the text's place among all of the order. Ends early only with an error."""
        n = running.order.params.n
        async with aclosing(cast("Any", _together(running.writings))) as merged:
            try:
                async for prompt, piece in merged:
                    place = prompt * n + piece.index
                    running.statistics[place] = piece.stats
                    yield place, piece
            except ValueError as error:
                if self.runner.error is not None:
                    raise self._down() from None
                raise refused(str(error)) from None
            except ApiError:
                raise
            except Exception:
                raise self._down() from None
        if running.expired:
            raise ApiError(
                504, f"the text was not done within {running.order.seconds:g} seconds: ask for less", code="timeout"
            )

    def _down(self) -> ApiError:
        if self.runner.error is not None:
            if not self._told:
                self._told = True
                log.critical("the engine broke down", exc_info=self.runner.error)
            return engine_down()
        return ApiError(503, "the server is shutting down: try another one", code="shutting_down")


async def _together(writings: list[Writing]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all, as they come."""
    if len(writings) == 1:
        async with aclosing(cast("Any", writings[0].apieces())) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def read(place: int, writing: Writing) -> None:
        try:
            async for piece in writing.apieces():
                queue.put_nowait((place, piece))
        except Exception as error:
            queue.put_nowait(error)
        finally:
            queue.put_nowait(None)

    readers = [asyncio.create_task(read(place, writing)) for place, writing in enumerate(writings)]
    try:
        left = len(readers)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
