"""The routes. FastAPI is imported here, when an app is made."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import forerun
from forerun.serve.document import ANSWERS, described
from forerun.serve.errors import ApiError, broken, refused
from forerun.serve.exchange import GONE, Exchange
from forerun.serve.keys import Keys
from forerun.serve.limits import Limits
from forerun.serve.logs import log
from forerun.serve.orders import Order, Served, read_chat, read_completion
from forerun.serve.page_files import page_file, page_info
from forerun.serve.schema import read_json
from forerun.serve.service import Service
from forerun.serve.tables import CHAT, COMPLETION

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.responses import Response

GUARDED = ("/v1/", "/metrics")
"""What asks for a key, where there are keys."""
LATE = 5.0
"""Seconds beyond its time that an answer gets to be taken, by a client that reads slowly or not at all."""
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'; "
        b"base-uri 'none'",
    ),
]


@dataclass(frozen=True)
class Doors:
    """Who may come in."""

    keys: Keys = field(default_factory=lambda: Keys([]))
    origins: list[str] = field(default_factory=list)
    """Of pages elsewhere that may ask; none by default."""


def make_app(service: Service, doors: Doors) -> "FastAPI":
    from fastapi import FastAPI, Request
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, Response

    app = FastAPI(title="Forerun", version=forerun.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.as_dict(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: "there is nothing at this address: see /openapi.json", 405: "this address takes another method"}
        told = ApiError(error.status_code, known.get(error.status_code, "the request cannot be served"))
        return JSONResponse(told.as_dict(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return JSONResponse(broken().as_dict(), 500)

    async def completions(request: Request) -> Response:
        return await _answered(request, service, read_completion, "completions")

    async def chat(request: Request) -> Response:
        return await _answered(request, service, read_chat, "chat")

    app.post("/v1/completions", **described(COMPLETION, "Go on with a text."))(completions)
    app.post("/v1/chat/completions", **described(CHAT, "Answer in a chat."))(chat)

    @app.get("/v1/models", responses=ANSWERS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", responses=ANSWERS)
    async def model(name: str) -> dict[str, Any]:
        if name != service.served.name:
            raise ApiError(404, f"there is no model {name!r} here: see /v1/models", code="model_not_found")
        return _model(service)

    @app.get("/health", responses={503: {"description": "It cannot serve: broken, or shutting down."}})
    async def health() -> JSONResponse:
        state = service.state
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", responses=ANSWERS, response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/page/info")
    async def info() -> dict[str, Any]:
        return page_info(service)

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return await page("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str) -> Response:
        found = page_file(name)
        return Response(found.content, media_type=found.kind, headers={"Cache-Control": "no-cache"})

    app.add_middleware(Guard, doors=doors, service=service)
    if doors.origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=doors.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


class Guard:
    """Asks for the key and adds headers. Plain ASGI, so that it stands in the way of no stream."""

    def __init__(self, app: Any, doors: Doors, service: Service) -> None:
        self.app, self.doors, self.service = app, doors, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in HEADERS if pair[0] not in there)]
            await send(message)

        path: str = scope["path"]
        if path.startswith(GUARDED) and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization")
            try:
                self.doors.keys.check(None if given is None else given.decode("latin-1"))
            except ApiError as error:
                from starlette.responses import JSONResponse

                self.service.metrics.requests.labels("unknown", str(error.status)).inc()
                answer = JSONResponse(error.as_dict(), error.status, error.headers)
                await answer(scope, receive, with_headers)
                return
        await self.app(scope, receive, with_headers)


async def _answered(
    request: "Request", service: Service, read: Callable[[Any, Served], Order], endpoint: str
) -> "Response":
    """Errors before the first byte become answers with a status; the metrics know of every one."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    exchange: Exchange | None = None
    try:
        body = read_json(await _body(request, service.served.limits))
        order = await asyncio.to_thread(read, body, service.served)
        exchange = Exchange(service, order, endpoint)
        exchange.begin()
        return await _begun(request, exchange)
    except ClientDisconnect:  # in the middle of its own question
        service.metrics.requests.labels(endpoint, str(GONE)).inc()
        return Response(status_code=GONE)
    except Exception as error:
        told = error if isinstance(error, ApiError) else broken()
        if told is not error:
            log.exception("a request failed")
        if exchange is not None:
            exchange.leave(told.status)
        else:
            service.metrics.requests.labels(endpoint, str(told.status)).inc()
        return JSONResponse(told.as_dict(), told.status, told.headers)
    except BaseException:  # the server is stopped, and this task with it
        if exchange is not None:
            exchange.leave()
        raise


async def _begun(request: "Request", exchange: Exchange) -> "Response":
    """A client that goes away ends its texts."""
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.types import Receive, Scope, Send

    class Stream(StreamingResponse):
        """Leaves the exchange also where the client had gone before the first event, or does not take what it gets."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                async with asyncio.timeout(exchange.order.seconds + LATE):
                    await super().__call__(scope, receive, send)
            except TimeoutError:
                exchange.leave(GONE)
            finally:
                exchange.leave()

    watching = asyncio.create_task(_until_gone(request, exchange))
    try:
        if exchange.order.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return Stream(await exchange.events(), media_type="text/event-stream", headers=headers)
        answer = await exchange.whole()
        exchange.leave()
        return JSONResponse(answer)
    finally:
        watching.cancel()


async def _until_gone(request: "Request", exchange: Exchange) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    exchange.running.cancel()


async def _body(request: "Request", limits: Limits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no page elsewhere can send without being allowed to
        raise ApiError(415, "the body is not declared as JSON: send `Content-Type: application/json`")
    read = bytearray()
    close = {"Connection": "close"}
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                read += chunk
                if len(read) > limits.body_bytes:
                    raise ApiError(413, f"the body has more than {limits.body_bytes} bytes: send less", headers=close)
    except TimeoutError:
        raise ApiError(
            504,
            f"the body did not come within {limits.seconds:g} seconds: send it faster",
            code="timeout",
            headers=close,
        ) from None
    if not read:
        raise refused("the body is empty: send JSON")
    return bytes(read)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.served.name,
        "object": "model",
        "created": service.started,
        "owned_by": "forerun",
        "max_model_len": service.served.context_length,
    }
