"""What the OpenAPI document says of the routes that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from forerun.serve.errors import KINDS
from forerun.serve.tables import Table

ERROR: Table = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": sorted(set(KINDS.values()))},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
NAMES = {
    400: "A parameter is wrong.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    405: "Another method is meant.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The server is busy; Retry-After says for how long.",
    500: "The engine broke down.",
    503: "The server is shutting down.",
    504: "The time is over.",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}} for status, text in NAMES.items()
}


def described(table: Table, summary: str) -> dict[str, Any]:
    """For a route whose body has to fit the table."""
    body = {"required": True, "content": {"application/json": {"schema": table}}}
    whole = {"description": "The whole answer, or server-sent events.", "content": _EITHER}
    return {"summary": summary, "openapi_extra": {"requestBody": body}, "responses": {200: whole, **ANSWERS}}


_EITHER: dict[str, Any] = {
    "application/json": {"schema": {"type": "object", "required": ["id", "object", "choices", "usage"]}},
    "text/event-stream": {"schema": {"type": "string"}},
}
