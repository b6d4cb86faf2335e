"""Requests made from the OpenAPI document, right and wrong ones: none is answered with a 500 or without an answer."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

from forerun.serve.app import Doors, make_app
from forerun.serve.errors import KINDS
from tests.serve.house import NAME, House

EXAMPLES = int(os.environ.get("FORERUN_FUZZ_EXAMPLES", "40"))
"""Of each kind for each address; more by the variable."""
ADDRESSES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/page/info"),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize(("method", "path"), ADDRESSES)
def test_no_request_breaks_the_server(house: House, method: str, path: str, mode: GenerationMode) -> None:
    document: Any = make_app(house.service, Doors()).openapi()
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        return  # there is nothing that could be wrong in these
    seen: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if method == "POST" else 3,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            if "model" in case.body and len(str(case.body)) % 4:
                case.body["model"] = NAME  # by chance it is never the right one
            if isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 8)
        answer = case.call(base_url=house.address)
        seen.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 504, (case.body, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.status_code in KINDS

    ask()
    assert seen
    assert httpx.get(f"{house.address}/health").json() == {"status": "ok"}
    assert house.eventually(lambda: house.idle)
    house.check_integrity()
