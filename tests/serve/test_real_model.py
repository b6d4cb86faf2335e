"""The default model behind the server, through the official client: texts, streams, forms and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.models.builtin import BUILTINS
from forerun.models.store import Store
from forerun.serve.server import Settings
from tests.serve.house import House, opened

MODEL = "smollm2-135m"
TALK: Any = [{"role": "user", "content": "Say the words one two three one two three again and again."}]

pytestmark = [
    pytest.mark.skipif(
        not BUILTINS[MODEL].path(Store.default()).exists(),
        reason=f"{MODEL} is not in the cache: run `forerun models fetch {MODEL}`",
    ),
    pytest.mark.xdist_group("real model"),
]


@pytest.fixture(scope="module")
def real() -> LoadedModel:
    return LoadedModel.load(MODEL, device="cpu", offline=True)


@pytest.fixture(scope="module")
def served(real: LoadedModel) -> Iterator[House]:
    # Always drafting: whether that pays for so short a text is the machine's affair.
    settings = Settings(MODEL, "suffix", max_batch=4, cache_tokens=4096, also=("eagle3",), adaptive=False)
    with opened(real, settings) as house:
        yield house


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}], ids=str)
def test_streamed_whole_and_alone_the_text_is_the_same(
    served: House, real: LoadedModel, settings: dict[str, Any]
) -> None:
    done = served.client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=24, **settings)
    texts = ["" for _ in done.choices]
    for chunk in served.client.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=24, stream=True, **settings
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    with LLM(real, cache_tokens=1024, max_batch=1) as plain:
        alone = plain.generate(TALK, SamplingParams(max_tokens=24, **settings))
    assert texts == [choice.message.content for choice in done.choices] == [choice.text for choice in alone.choices]
    assert done.usage is not None
    assert done.usage.model_extra is not None
    assert done.usage.model_extra["speculation"]["accepted"] > 0


@pytest.mark.parametrize("drafter", ["suffix", "eagle3"])
def test_a_trace_tells_how_sure_the_drafter_was_of_each_node(served: House, drafter: str) -> None:
    done = served.client.chat.completions.create(
        model=MODEL,
        messages=TALK,
        temperature=0,
        max_tokens=40,
        extra_body={"speculation": {"drafter": drafter, "trace": True}},
    )
    assert done.model_extra is not None
    steps = done.model_extra["forerun"]["steps"]
    told = [chance for step in steps for chance in step["confidences"]]
    assert len(told) > 20
    assert all(0 <= chance <= 1 for chance in told)
    assert all(len(step["confidences"]) == len(step["tokens"]) for step in steps)
    for step in steps:
        first = [chance for chance, parent in zip(step["confidences"], step["parents"], strict=True) if parent < 0]
        assert sum(first) < 1.001
    deep = [
        chance > step["confidences"][parent] >= 0
        for step in steps
        for chance, parent in zip(step["confidences"], step["parents"], strict=True)
        if parent >= 0
    ]
    assert any(deep), "it is a node's chance where its parent is accepted, not that of its whole path"


def test_a_tool_is_called_and_a_schema_is_kept(served: House) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    ask: Any = [{"role": "user", "content": "What will the weather be in Rome for three days?"}]
    called = served.client.chat.completions.create(
        model=MODEL, messages=ask, tools=[tool], tool_choice="required", temperature=1, seed=1, max_tokens=80
    ).choices[0]
    (call,) = called.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), schema)  # type: ignore[union-attr]
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": schema}}
    told = served.client.chat.completions.create(
        model=MODEL, messages=ask, response_format=form, temperature=1, seed=2, max_tokens=80
    ).choices[0]
    jsonschema.validate(json.loads(told.message.content or ""), schema)
    free = served.client.chat.completions.create(model=MODEL, messages=ask, tools=[tool], temperature=0, max_tokens=8)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls
