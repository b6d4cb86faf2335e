"""Clients that mean harm, or are only unlucky: what they send costs them an answer, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import socket
import string
import time
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import httpx
import pytest

from forerun.engine.loaded import LoadedModel
from forerun.serve import app
from forerun.serve.limits import Limits
from forerun.serve.orders import LONGEST_GRAMMAR
from forerun.serve.schema import DEEPEST
from forerun.serve.server import Settings
from tests.serve.house import NAME, House, opened

SAY = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def posted(house: House, path: str, content: str) -> httpx.Response:
    return httpx.post(house.address + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    assert len(answer.text) < 2000
    return message


@pytest.mark.parametrize("depth", [DEEPEST, 300, 400, 600, 990])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")], ids=["objects", "lists"])
def test_a_body_that_nests_deeply(house: House, depth: int, opening: str, closing: str) -> None:
    """Inside what is not looked into, and where it is not wanted at all."""
    nested = opening * depth + "1" + closing * depth
    for name in ("metadata", "temperature"):
        whole = (
            json.dumps(SAY)[:-1] + f', "{name}": {nested if opening != "[" else f"{{{chr(34)}a{chr(34)}: {nested}}}"}}}'
        )
        assert f"more than {DEEPEST} deep" in refusal(posted(house, "/v1/chat/completions", whole))
    fine = json.dumps(SAY)[:-1] + ', "metadata": ' + '{"a":' * (DEEPEST - 2) + "1" + "}" * (DEEPEST - 1)
    assert posted(house, "/v1/chat/completions", fine).status_code == 200


def chain_of_rules(length: int) -> str:
    """A grammar in which every rule is the next one, with short names, so that there are many."""
    names = ["".join(signs) for signs in product(string.ascii_lowercase, repeat=3)]
    rules = [f"{name}:{after}" for name, after in pairwise(names)][: length // 8 - 4]
    return "\n".join(["start:aaa", *rules, f'{names[len(rules)]}:"z"'])


def test_a_grammar_that_leads_through_thousands_of_rules(house: House) -> None:
    """An ordinary thread's stack is too small for these, and the process would be gone."""
    text = chain_of_rules(LONGEST_GRAMMAR)
    assert LONGEST_GRAMMAR - 100 < len(text) <= LONGEST_GRAMMAR
    answer = house.post("/v1/completions", prompt="hello", grammar=text, max_tokens=4)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "z"


def test_references_that_lead_to_references(house: House) -> None:
    count = LONGEST_GRAMMAR // 48
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    schema = {"$defs": {**links, str(count): {"type": "null"}}, "$ref": "#/$defs/0"}
    assert len(json.dumps(schema)) <= LONGEST_GRAMMAR
    form = {"type": "json_schema", "json_schema": {"name": "chain", "schema": schema}}
    assert house.post("/v1/chat/completions", **SAY, response_format=form).status_code in {200, 400}
    assert house.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("kind", ["grammar", "response_format", "tools", "required"])
def test_a_grammar_that_is_too_long(house: House, kind: str) -> None:
    schema = {"enum": [f"word {number}" for number in range(10000)]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked: dict[str, Any] = {
        "grammar": {"grammar": "start: " + " | ".join(f'"{number}"' for number in range(10000))},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        "tools": {"tools": tools},
        "required": {"tools": tools, "tool_choice": "required"},
    }
    message = refusal(house.post("/v1/chat/completions", **SAY, **asked[kind]))
    assert "shorten" in message if "tools" in asked[kind] else f"may have {LONGEST_GRAMMAR}" in message


def test_long_values_are_not_told_back(house: House) -> None:
    answer = house.post("/v1/completions", prompt="hello", **{"model": "x" * 100000})
    assert answer.status_code == 404
    assert len(answer.text) < 500
    refusal(house.post("/v1/completions", prompt="hello", speculation={"tree": "1," * 50000}))


def test_more_prompts_than_are_allowed_are_not_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(type(house.service.served.model.tokenizer), "encode", lambda _, text: read.append(text))
    assert "10000 texts" in refusal(house.post("/v1/completions", prompt=["hello"] * 10000))
    assert read == []


# --- the connection --------------------------------------------------------------------------------------------


@pytest.fixture
def hasty(model: LoadedModel) -> Iterator[House]:
    """A server with little patience."""
    limits = Limits(queue=0, texts=4, seconds=1.0)
    with opened(model, Settings(NAME, max_batch=4, cache_tokens=2048, also=(), limits=limits)) as house:
        yield house


def begun(house: House, body: bytes, length: int | None = None, *, buffer: int | None = None) -> socket.socket:
    """A connection on which a question was begun; of `length` bytes, if it is not whole."""
    host, _, port = house.address.removeprefix("http://").partition(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


def answered(house: House, status: int) -> float:
    return float(house.service.metrics.requests.labels("completions", str(status))._value.get())


def test_who_leaves_in_the_middle_of_the_question(hasty: House, caplog: pytest.LogCaptureFixture) -> None:
    begun(hasty, b'{"model": ', 1000).close()
    assert hasty.eventually(lambda: answered(hasty, 499) == 1)
    assert answered(hasty, 500) == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_who_never_ends_the_question(hasty: House) -> None:
    with begun(hasty, b'{"model": ', 1000) as connection:
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 504")
    assert answered(hasty, 504) == 1


def test_who_never_reads_the_answer_keeps_no_place(hasty: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LATE", 0.2)
    engine = hasty.service.engines.first
    step = engine.step

    def told_at_length() -> Any:
        time.sleep(0.001)
        return step()

    monkeypatch.setattr(engine, "step", told_at_length)
    monkeypatch.setattr("forerun.serve.exchange._event", lambda data: b"data: " + b"x" * 200_000 + b"\n\n")
    body = {"model": NAME, "prompt": "the", "max_tokens": 400, "n": 4, "stream": True, "ignore_eos": True}
    with begun(hasty, json.dumps(body).encode(), buffer=4096):
        assert hasty.eventually(lambda: hasty.service.gate.inside == 4)
        assert hasty.eventually(lambda: hasty.service.gate.inside == 0, seconds=5)
        assert hasty.eventually(lambda: hasty.idle)
    assert answered(hasty, 499) == 1


# --- the official client's other ways ----------------------------------------------------------------------------


def test_the_clients_helpers(house: House) -> None:
    """Structured answers by a type, streams that gather themselves, and the client for event loops."""
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        right: bool

    ask: Any = {"model": NAME, "messages": SAY["messages"], "temperature": 1, "seed": 1, "max_tokens": 40}
    parsed = house.client.chat.completions.parse(**ask, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with house.client.chat.completions.stream(**ask, response_format=Answer) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == parsed.choices[0].message.content

    async def ask_in_a_loop() -> str | None:
        async with AsyncOpenAI(base_url=f"{house.address}/v1", api_key="sk-any") as client:
            gathered = ""
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                gathered += chunk.choices[0].delta.content or ""
            assert (await client.models.retrieve(NAME)).id == NAME
            return gathered

    assert asyncio.run(ask_in_a_loop()) == house.client.chat.completions.create(**ask).choices[0].message.content


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_tools_beside_a_form(house: House, choice: str) -> None:
    """A call, or a text of the form; where a call is required the form is nobody's."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    asked = SAY | {"tools": [tool], "tool_choice": choice, "response_format": form, "max_tokens": 60, "temperature": 1}
    calls = 0
    for seed in range(6):
        bias = {str(ord("<") - 33): 50 if seed % 2 else -50}  # for and against what a call begins with
        answer = house.post("/v1/chat/completions", **asked, seed=seed, logit_bias=bias)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        if message.get("tool_calls"):
            calls += 1
            assert json.loads(message["tool_calls"][0]["function"]["arguments"])["x"] in {1, 2}
        else:
            assert json.loads(message["content"])["x"] in {1, 2}
    assert {"required": calls == 6, "auto": calls == 3, "none": calls == 0}[choice]
