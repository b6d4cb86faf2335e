"""One request and its answer: from the order to the last byte, with its times and its line in the log."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any, cast

from forerun.engine.completion import Piece
from forerun.serve.errors import ApiError, broken
from forerun.serve.logs import log, tell
from forerun.serve.orders import Order
from forerun.serve.service import Running, Service
from forerun.serve.telling import ChatTeller, CompletionTeller, Json

DONE = b"data: [DONE]\n\n"
GONE = 499
"""For the log: the client left before the answer was whole."""


class Exchange:
    """`begin`, then either `whole` or `events`; `leave` in any case, and any number of times."""

    def __init__(self, service: Service, order: Order, endpoint: str) -> None:
        self.service, self.order, self.endpoint = service, order, endpoint
        self.arrived = time.perf_counter()
        self.created = int(time.time())
        self._stack = ExitStack()
        self._last: dict[int, float] = {}
        self._first: float | None = None
        self._written = 0
        self._left = False
        self._opened: set[int] = set()

    def begin(self) -> None:
        self._stack.enter_context(self.service.gate.enter(self.order.texts))
        self.running: Running = self.service.start(self.order)
        self._stack.callback(self.running.cancel)
        timer = asyncio.get_running_loop().call_later(self.order.seconds, self.running.expire)
        self._stack.callback(timer.cancel)
        teller = ChatTeller if self.order.chat else CompletionTeller
        self.teller = teller(self.order, self.service.texts, self.running.endings)
        self.id = f"{self.teller.prefix}-{secrets.token_hex(14)}"

    async def whole(self) -> Json:
        steps: list[Json] = []
        async for place, piece in self._pieces():
            self._choices(place, piece)
            steps += self._steps(place, piece)
        choices = [self.teller.whole(place) for place in range(self.order.texts)]
        answer = self._frame(self.teller.whole_object, choices) | {"usage": self.usage()}
        return answer | ({"forerun": {"steps": steps}} if self.order.trace else {})

    def _choices(self, place: int, piece: Piece) -> list[Json]:
        """Of the chunks that a piece gives, those before a text's first one among them."""
        opening: list[Json] = []
        if place not in self._opened:
            self._opened.add(place)
            opening = self.teller.opening(place, self.running.prompt_logprobs.get(place // self.order.params.n))
        return opening + ([] if self.order.nothing_more else self.teller.piece(place, piece))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, once the first chunk is there: before it an error still has a status of its own. What
        goes wrong after it is told as one more event."""
        chunks = self._chunks()
        try:
            first = await anext(chunks)
        except BaseException:
            await chunks.aclose()
            raise
        return self._events(first, chunks)

    async def _events(self, first: Json, chunks: AsyncGenerator[Json, None]) -> AsyncIterator[bytes]:
        try:
            yield _event(first)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield _event(chunk)
            yield DONE
        except ApiError as error:
            self.leave(error.status)
            yield _event(error.as_dict())
        except Exception:
            log.exception("an answer broke off")
            self.leave(500)
            yield _event(broken().as_dict())
        finally:
            self.leave()

    async def _chunks(self) -> AsyncGenerator[Json, None]:
        async for place, piece in self._pieces():
            steps = self._steps(place, piece)
            choices = self._choices(place, piece)
            for choice in choices[:-1]:
                yield self._chunk([choice], [])
            if choices or steps:
                yield self._chunk(choices[-1:], steps)
        if self.order.include_usage:
            yield self._chunk([], []) | {"usage": self.usage()}

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        async with aclosing(cast("Any", self.service.pieces(self.running))) as pieces:
            async for place, piece in pieces:
                self._time(place, len(piece.tokens))
                yield place, piece

    def _time(self, place: int, tokens: int) -> None:
        now = time.perf_counter()
        metrics = self.service.metrics
        if self._first is None:
            self._first = now - self.arrived
            metrics.first.observe(self._first)
        elif place in self._last:
            for _ in range(tokens):
                metrics.between.observe((now - self._last[place]) / tokens)
        self._last[place] = now
        self._written += 0 if self.order.nothing_more else tokens

    def _steps(self, place: int, piece: Piece) -> list[Json]:
        if not self.order.trace:
            return []
        watched = self.running.logs[place // self.order.params.n]
        return watched.told(piece.index, piece.tokens, place, self.service.texts)

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.served.name,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json], steps: list[Json]) -> Json:
        chunk = self._frame(self.teller.chunk_object, choices)
        if self.order.include_usage:
            chunk["usage"] = None
        if self.order.trace:
            chunk["forerun"] = {"steps": steps}
        return chunk

    def usage(self) -> Json:
        """Prompts count once, however many texts follow them."""
        figures = list(self.running.statistics.values())
        read = sum(len(prompt) for prompt in self.order.prompts)
        drafted, accepted = sum(each.drafted for each in figures), sum(each.accepted for each in figures)
        passes = sum(each.target_passes for each in figures)
        return {
            "prompt_tokens": read,
            "completion_tokens": self._written,
            "total_tokens": read + self._written,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "speculation": {
                "drafted": drafted,
                "accepted": accepted,
                "passes": passes,
                "tokens_per_pass": round(self._written / passes, 4) if passes else 0.0,
            },
        }

    def _cached(self) -> int:
        """Of each prompt what the first of its texts found in the cache."""
        n = self.order.params.n
        firsts = [self.running.statistics.get(place) for place in range(0, self.order.texts, n)]
        found = zip(firsts, self.order.prompts, strict=True)
        return sum(min(figures.reused, len(prompt)) for figures, prompt in found if figures is not None)

    def leave(self, status: int | None = None) -> None:
        """Without a status: 200 if all was told, else the client has gone."""
        if self._left:
            return
        self._left = True
        running: Running | None = getattr(self, "running", None)
        self._stack.close()
        status = status or (GONE if running is None or running.cut else 200)
        seconds = time.perf_counter() - self.arrived
        metrics = self.service.metrics
        metrics.requests.labels(self.endpoint, str(status)).inc()
        metrics.seconds.labels(self.endpoint).observe(seconds)
        drafter = self.order.drafter if self.order.draft.nodes != 0 else "none"
        usage: dict[str, Any] = self.usage() if running is not None else {}
        if usage:
            metrics.tokens.labels("prompt").inc(usage["prompt_tokens"])
            metrics.tokens.labels("completion").inc(self._written)
            if usage["speculation"]["passes"]:
                metrics.per_pass.labels(drafter).observe(usage["speculation"]["tokens_per_pass"])
        tell(
            "request",
            id=getattr(self, "id", None),
            endpoint=self.endpoint,
            status=status,
            stream=self.order.stream,
            texts=self.order.texts,
            seconds=round(seconds, 4),
            first_token_seconds=None if self._first is None else round(self._first, 4),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=self._written,
            drafter=drafter,
            **usage.get("speculation", {}),
        )


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
