"""What is answered when something is wrong, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Every status that is ever an error's."""


class ApiError(Exception):
    """Ends a request with a status and a sentence that names the fix; nothing of the machine shows in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def as_dict(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Something that the client can put right."""
    return ApiError(400, message, param=param, code=code)


def broken() -> ApiError:
    """Nothing that the client can do anything about; the log knows more."""
    return ApiError(500, "the server made a mistake: try again, and tell its keeper if it stays so", code="internal")


def engine_down() -> ApiError:
    return ApiError(500, "the engine broke down: the server has to be started again", code="engine_down")
