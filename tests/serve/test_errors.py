"""What is wrong is told in OpenAI's shape, with the parameter's name and a status; nothing of the machine shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forerun.engine.loaded import LoadedModel
from forerun.serve.app import Doors
from forerun.serve.keys import Keys, read_keys
from forerun.serve.limits import Limits
from forerun.serve.server import Settings
from tests.serve.house import NAME, House, opened

ASK: Any = {"model": NAME, "prompt": "hello", "max_tokens": 4}
SAY: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
WRONG: list[tuple[str, str, Any, str | None, int]] = [
    ("completions", "temperature", 3, "temperature", 400),
    ("completions", "temperature", "hot", "temperature", 400),
    ("completions", "temperature", True, "temperature", 400),
    ("completions", "top_p", 1.5, "top_p", 400),
    ("completions", "top_k", -2, "top_k", 400),
    ("completions", "min_p", -0.1, "min_p", 400),
    ("completions", "n", 0, "n", 400),
    ("completions", "n", 9, "n", 400),
    ("completions", "max_tokens", 0, "max_tokens", 400),
    ("completions", "max_tokens", 2.5, "max_tokens", 400),
    ("completions", "seed", 2**63, "seed", 400),
    ("completions", "stop", [""], "stop[0]", 400),
    ("completions", "stop", 7, "stop", 400),
    ("completions", "logit_bias", {"word": 1}, "logit_bias", 400),
    ("completions", "logit_bias", {"5": 101}, "logit_bias.5", 400),
    ("completions", "logit_bias", {"999999": 1}, None, 400),
    ("completions", "logprobs", 21, "logprobs", 400),
    ("completions", "best_of", 2, "best_of", 400),
    ("completions", "suffix", "end", "suffix", 400),
    ("completions", "prompt", "", "prompt", 400),
    ("completions", "prompt", [], "prompt", 400),
    ("completions", "prompt", [1, "a"], "prompt", 400),
    ("completions", "prompt", [10**6], "prompt", 400),
    ("completions", "prompt", "a" * 600, "prompt", 400),
    ("completions", "prompt", "half \ud800", "prompt", 400),
    ("completions", "model", "gpt-5", "model", 404),
    ("completions", "unheard_of", 1, "unheard_of", 400),
    ("completions", "stream_options", {"usage": True}, "stream_options.usage", 400),
    ("completions", "speculation", {"drafter": "eagle3"}, "speculation.drafter", 400),
    ("completions", "speculation", {"drafter": "../eagle3"}, "speculation.drafter", 400),
    ("completions", "speculation", {"length": 65}, "speculation.length", 400),
    ("completions", "speculation", {"tree": "a,b"}, "speculation.tree", 400),
    ("completions", "grammar", "start: (", "grammar", 400),
    ("completions", "grammar", {"type": "regex", "grammar": "("}, "grammar", 400),
    ("completions", "timeout", 0, "timeout", 400),
    ("chat", "messages", [], "messages", 400),
    ("chat", "messages", [{"role": "user"}], "messages[0].content", 400),
    ("chat", "messages", [{"role": "king", "content": "hello"}], "messages[0]", 400),
    ("chat", "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None, 400),
    ("chat", "top_logprobs", 2, "top_logprobs", 400),
    ("chat", "response_format", {"type": "xml"}, "response_format", 400),
    ("chat", "response_format", {"type": "json_schema"}, "response_format.json_schema", 400),
    (
        "chat",
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}},
        "response_format",
        400,
    ),
    ("chat", "tool_choice", "required", "tool_choice", 400),
    ("chat", "tools", [{"type": "function", "function": {"name": ""}}], "tools[0].function.name", 400),
]


def checked(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert not any(part in answer.text for part in ("site-packages", ".py", "/home", "/tmp", "/work"))
    return error


@pytest.mark.parametrize(("endpoint", "name", "value", "param", "status"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_parameter_is_named(
    house: House, endpoint: str, name: str, value: Any, param: str | None, status: int
) -> None:
    path, body = ("/v1/completions", ASK) if endpoint == "completions" else ("/v1/chat/completions", SAY)
    content = json.dumps({**body, name: value})
    for stream in (False, True):
        whole = content if not stream else content[:-1] + ', "stream": true}'
        answer = httpx.post(house.address + path, content=whole, headers={"Content-Type": "application/json"})
        error = checked(answer, status)
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param


def test_null_is_the_same_as_nothing(house: House) -> None:
    nothing = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "grammar", "speculation")
    )
    assert house.post("/v1/completions", **ASK, **nothing).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff\xfe", b'{"model": NaN}', b'{"model": 1e999}', b"[" * 100000],
)
def test_a_body_that_is_none(house: House, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        checked(httpx.post(house.address + path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_must_say_that_it_is_json(house: House) -> None:
    """As a page elsewhere cannot, without being allowed to."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = httpx.post(f"{house.address}/v1/completions", content=json.dumps(ASK), headers={"Content-Type": kind})
        checked(answer, 415)


def test_addresses_and_methods(house: House) -> None:
    checked(house.get("/v1/nothing"), 404)
    checked(house.get("/v1/completions"), 405)
    checked(httpx.post(f"{house.address}/v1/models", json={}), 405)
    assert house.get("/docs").status_code == 404


def test_the_client_raises_its_own_errors(house: House) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        house.client.completions.create(model=NAME, prompt="hello", temperature=7)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        house.client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hello"}])
    assert unknown.value.code == "model_not_found"


def test_pages_elsewhere_may_not_ask_unless_they_are_named(house: House, model: LoadedModel) -> None:
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{house.address}/v1/completions", headers=asking)
    assert "access-control-allow-origin" not in answer.headers
    settings = Settings(NAME, cache_tokens=256, max_batch=1, also=(), doors=Doors(origins=["https://example.org"]))
    with opened(model, settings) as open_house:
        answer = httpx.options(f"{open_house.address}/v1/completions", headers=asking)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        other = httpx.options(f"{open_house.address}/v1/completions", headers={**asking, "Origin": "https://evil.org"})
        assert "access-control-allow-origin" not in other.headers


# --- keys and limits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(model: LoadedModel) -> Iterator[House]:
    limits = Limits(prompt_tokens=40, output_tokens=20, body_bytes=2000, texts=2)
    doors = Doors(Keys(["sk-the-first-key", "sk-the-second-key"]))
    with opened(model, Settings(NAME, cache_tokens=512, max_batch=2, also=(), limits=limits, doors=doors)) as house:
        yield house


def test_keys_are_asked_for(guarded: House) -> None:
    for key in ("sk-the-first-key", "sk-the-second-key"):
        client = guarded.client.with_options(api_key=key)
        assert client.completions.create(model=NAME, prompt="hello", max_tokens=2).choices
    with pytest.raises(openai.AuthenticationError) as refused:
        guarded.client.with_options(api_key="sk-the-third-key").completions.create(model=NAME, prompt="hello")
    assert refused.value.code == "invalid_api_key"
    for header in ({}, {"Authorization": "sk-the-first-key"}, {"Authorization": "Basic sk-the-first-key"}):
        for path in ("/v1/models", "/v1/nothing", "/metrics"):
            checked(httpx.get(guarded.address + path, headers=header), 401)
        checked(httpx.post(f"{guarded.address}/v1/completions", json=ASK, headers=header), 401)
    assert guarded.get("/health").json() == {"status": "ok"}
    assert guarded.get("/page/info").status_code == 200


def test_limits_are_told(guarded: House) -> None:
    def post(**body: Any) -> httpx.Response:
        headers = {"Authorization": "Bearer sk-the-first-key"}
        return httpx.post(f"{guarded.address}/v1/completions", json={**ASK, **body}, headers=headers)

    assert checked(post(prompt="a" * 41), 400)["code"] == "context_length_exceeded"
    assert post(prompt="a" * 40).status_code == 200
    assert checked(post(max_tokens=21), 400)["param"] == "max_tokens"
    assert checked(post(n=3), 400)["param"] == "n"
    assert checked(post(prompt=["a", "b"], n=2), 400)["param"] == "n"
    checked(post(prompt="a" * 3000), 413)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key"),
        (b"# only a comment\n", "holds no key"),
        (b"short\n", "key 1 of"),
        (b"sk-long-enough\nwith a space in it\n", "key 2 of"),
        (b"\xff\xfe\xfa", "not a text"),
    ],
)
def test_a_bad_key_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_keys(path)


def test_a_good_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-long-enough\n\n  sk-another-one  \n")
    assert read_keys(path) == ["sk-long-enough", "sk-another-one"]
