"""Every parameter through the official client, over HTTP: what the engine is asked, and what comes back."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from tests.serve.house import NAME, House

PROMPT = "what is it? the the"
CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": -5},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2},
    {"temperature": 1.0, "top_p": 0, "seed": 2},
    {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 5}},
    {"temperature": 1.0, "seed": 3, "extra_body": {"min_p": 0.2}},
    {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": -1, "repetition_penalty": 1.3}},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 1.5},
    {"temperature": 0.8, "seed": 4, "frequency_penalty": -1.5},
    {"temperature": 0, "logit_bias": {"65": 90}},
    {"temperature": 0.9, "seed": 5, "stop": ["a", "e"]},
    {"temperature": 0.9, "seed": 5, "stop": "i"},
    {"temperature": 0.9, "seed": 5, "extra_body": {"stop_token_ids": [101, 102, 103], "ignore_eos": True}},
    {"temperature": 0.9, "seed": 6, "n": 3},
    {"temperature": 0, "user": "someone"},
]
OURS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> LLM:
    """The engine without a server and without drafts."""
    return LLM(model, cache_tokens=1024, max_batch=4)


def params(settings: dict[str, Any], **more: Any) -> SamplingParams:
    flat = {**settings, **settings.get("extra_body", {})}
    flat = {key: value for key, value in flat.items() if key not in {"extra_body", "user"}}
    if "seed" in flat:
        flat["seed"] %= 2**63
    if "stop" in flat:
        flat["stop"] = (flat["stop"],) if isinstance(flat["stop"], str) else tuple(flat["stop"])
    if "logit_bias" in flat:
        flat["logit_bias"] = {int(key): value for key, value in flat["logit_bias"].items()}
    if "stop_token_ids" in flat:
        flat["stop_token_ids"] = tuple(flat["stop_token_ids"])
    flat["top_k"] = max(0, flat.get("top_k", 0))
    flat["top_p"] = max(1e-9, flat.get("top_p", 1.0))
    return SamplingParams(**flat, **more)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_completions_say_what_the_engine_says(house: House, alone: LLM, settings: dict[str, Any]) -> None:
    expected = alone.generate(PROMPT, params(settings, max_tokens=24), chat=False)
    done = house.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, **settings)
    assert [choice.text for choice in done.choices] == [choice.text for choice in expected.choices]
    assert [choice.finish_reason for choice in done.choices] == [choice.finish_reason for choice in expected.choices]
    assert [choice.index for choice in done.choices] == list(range(len(expected.choices)))
    assert (done.object, done.model) == ("text_completion", NAME)
    assert done.id.startswith("cmpl-")
    usage = done.usage
    assert usage is not None
    assert usage.prompt_tokens == expected.prompt_tokens
    assert usage.completion_tokens == sum(len(choice.token_ids) for choice in expected.choices)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_chats_stream_what_they_would_say_whole(house: House, alone: LLM, settings: dict[str, Any]) -> None:
    expected = alone.generate(CHAT, params(settings, max_tokens=24))
    done = house.client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=24, **settings)
    assert [choice.message.content for choice in done.choices] == [choice.text for choice in expected.choices]
    assert {choice.message.role for choice in done.choices} == {"assistant"}
    texts, roles = ["" for _ in done.choices], []
    reasons: list[Any] = [None for _ in done.choices]
    usage = None
    for chunk in house.client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        **settings,
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            assert usage is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            roles += [choice.delta.role] if choice.delta.role else []
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in expected.choices]
    assert reasons == [choice.finish_reason for choice in done.choices]
    assert roles == ["assistant"] * len(texts)
    assert usage is not None
    assert done.usage is not None
    assert usage.completion_tokens == done.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT, "hello"], [1, 2, 3, 4], [[1, 2, 3], [4, 5], [6]]], ids=["text", "texts", "ids", "lists"]
)
def test_prompts_of_all_forms(house: House, alone: LLM, prompt: Any, stream: bool) -> None:
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    expected = [
        alone.generate(each, SamplingParams(temperature=0.5, seed=9, n=2, max_tokens=9), chat=False) for each in many
    ]
    settings: dict[str, Any] = {"temperature": 0.5, "seed": 9, "n": 2, "max_tokens": 9}
    wanted = [choice.text for each in expected for choice in each.choices]
    if not stream:
        done = house.client.completions.create(model=NAME, prompt=prompt, **settings)
        assert [choice.text for choice in done.choices] == wanted
        return
    texts = [""] * len(wanted)
    for chunk in house.client.completions.create(model=NAME, prompt=prompt, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == wanted


def test_without_max_tokens_a_completion_has_sixteen_and_a_chat_what_fits(house: House) -> None:
    done = house.client.completions.create(model=NAME, prompt="the", temperature=0, extra_body={"ignore_eos": True})
    assert done.usage is not None
    assert done.usage.completion_tokens == 16
    chat = house.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "the"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens == house.service.served.context_length
    assert chat.choices[0].finish_reason == "length"


def test_log_probabilities_of_a_chat(house: House, alone: LLM) -> None:
    expected = alone.generate(CHAT, SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    done = house.client.chat.completions.create(
        model=NAME, messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    found = expected.logprobs
    assert found is not None
    for entry, each in zip(told.content, found, strict=True):
        assert entry.logprob == pytest.approx(each.logprob, abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for _, value in each.top], abs=1e-4)
        assert entry.bytes is not None
    assert b"".join(bytes(entry.bytes or []) for entry in told.content).decode("utf-8", "replace") == expected.text
    plain = house.client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_tokens=3, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content or []] == [[], [], []]


def test_log_probabilities_of_a_completion_and_its_prompt(house: House, alone: LLM) -> None:
    """Written and read, a token is as likely: scored as a prompt, a completion has the figures it was written with."""
    expected = alone.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, logprobs=2), chat=False)
    done = house.client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=10, logprobs=2)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.token_logprobs == pytest.approx([each.logprob for each in expected.logprobs or []], abs=1e-4)
    whole = house.client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, max_tokens=10, logprobs=2, echo=True
    ).choices[0]
    assert whole.text == PROMPT + expected.text
    assert whole.logprobs is not None
    count = expected.prompt_tokens
    values: list[float | None] = [*(whole.logprobs.token_logprobs or [])]
    assert values[0] is None
    assert values[count:] == pytest.approx(told.token_logprobs, abs=1e-4)
    assert whole.logprobs.text_offset is not None
    assert whole.logprobs.text_offset[0] == 0
    assert whole.logprobs.text_offset[count] == len(PROMPT)
    ids = [*alone.tokens(PROMPT, chat=False), *expected.token_ids]
    scored = house.client.completions.create(model=NAME, prompt=ids, max_tokens=0, logprobs=2, echo=True)
    again = scored.choices[0].logprobs
    assert again is not None
    assert again.token_logprobs is not None
    assert len(again.token_logprobs) == len(ids)
    assert again.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-3)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].finish_reason == "length"


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_streams_as_it_is_told_whole(house: House, logprobs: int | None) -> None:
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 8, "echo": True}
    settings |= {} if logprobs is None else {"logprobs": logprobs}
    done = house.client.completions.create(model=NAME, prompt=[PROMPT, "so"], **settings)
    texts = ["" for _ in done.choices]
    values: list[list[Any]] = [[] for _ in done.choices]
    for chunk in house.client.completions.create(model=NAME, prompt=[PROMPT, "so"], stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            values[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    assert texts == [choice.text for choice in done.choices]
    assert texts[0].startswith(PROMPT)
    assert texts[3].startswith("so")
    for choice, own in zip(done.choices, values, strict=True):
        whole = (choice.logprobs and choice.logprobs.token_logprobs) or []
        assert [value is None for value in own] == [value is None for value in whole]
        assert [value for value in own if value is not None] == pytest.approx([v for v in whole if v is not None])
        assert all(value is None or math.isfinite(value) for value in own)


# --- speculation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speculation",
    [
        {"drafter": "none"},
        {"off": True},
        {"length": 0},
        {"length": 2},
        {"tree": "3"},
        {"drafter": "suffix"},
        {"drafter": "recycling", "tree": "2,2"},
        {"drafter": "lookahead", "length": 3},
    ],
    ids=str,
)
def test_a_request_chooses_its_drafter_and_not_its_text(house: House, alone: LLM, speculation: dict[str, Any]) -> None:
    expected = alone.generate(CHAT, SamplingParams(temperature=0.3, seed=11, max_tokens=40, ignore_eos=True))
    done = house.client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        temperature=0.3,
        seed=11,
        max_tokens=40,
        extra_body={"speculation": {**speculation, "trace": True}, "ignore_eos": True},
    )
    assert done.choices[0].message.content == expected.text
    assert done.usage is not None
    assert done.usage.model_extra is not None
    told = done.usage.model_extra["speculation"]
    details = done.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == told["accepted"] <= told["drafted"]
    assert told["tokens_per_pass"] == pytest.approx(40 / told["passes"], abs=1e-3)
    assert done.model_extra is not None
    steps = done.model_extra["forerun"]["steps"]
    deepest = max(depth(step["parents"]) for step in steps)
    if speculation.get("off") or speculation.get("length") == 0 or speculation.get("drafter") == "none":
        assert (told["drafted"], told["passes"], deepest) == (0, 40, 0)
        assert {step["drafter"] for step in steps} == {"none"}
    else:
        assert told["drafted"] > 0
        assert {step["drafter"] for step in steps} == {speculation.get("drafter", "ngram")}
        told_chances = [chance for step in steps for chance in step["confidences"]]
        if speculation.get("drafter") == "suffix":
            assert all(0 < chance <= 1 for chance in told_chances)
        assert deepest <= speculation.get("length", {"3": 3, "2,2": 2}.get(speculation.get("tree", ""), 64))


def depth(parents: list[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else 1 + depths[parent])
    return max(depths, default=0)


def test_a_trace_tells_every_step_of_every_chunk(house: House) -> None:
    steps: list[Any] = []
    text = ""
    for chunk in house.client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"speculation": {"trace": True}, "ignore_eos": True},
    ):
        assert chunk.model_extra is not None
        own = chunk.model_extra["forerun"]["steps"]
        steps += own
        text += "".join(choice.text for choice in chunk.choices)
    committed = [token for step in steps for token in step["committed"]]
    assert len(committed) == 40
    assert house.service.served.model.tokenizer.decode(committed) == text
    assert [step["step"] for step in steps] == sorted({step["step"] for step in steps})
    for step in steps:
        size = len(step["tokens"])
        assert len(step["texts"]) == len(step["parents"]) == len(step["confidences"]) == size
        assert all(-1 <= parent < place for place, parent in enumerate(step["parents"]))
        assert [step["tokens"][place] for place in step["accepted"]] == step["committed"][: len(step["accepted"])]
        assert step["kinds"][: len(step["accepted"])] == ["accepted"] * len(step["accepted"])
        assert set(step["seconds"]) == {"draft", "target", "verify", "rest"}
    assert any(step["accepted"] for step in steps)
    assert house.eventually(lambda: not house.service.engines.first.trace)


# --- tools and forms -------------------------------------------------------------------------------------------

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "sky",
        "parameters": {
            "type": "object",
            "properties": {"c": {"enum": ["x", "y"]}, "d": {"type": "boolean"}},
            "required": ["c", "d"],
            "additionalProperties": False,
        },
    },
}
NOTHING: Any = {"type": "function", "function": {"name": "nothing"}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sky"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_fits_its_schema(house: House, choice: Any, stream: bool) -> None:
    settings: Any = {
        "model": NAME,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [WEATHER] if choice == "required" else [NOTHING, WEATHER],
        "tool_choice": choice,
        "temperature": 1,
        "seed": 4,
        "max_tokens": 300,
    }
    if stream:
        chunks = list(house.client.chat.completions.create(stream=True, **settings))
        calls: Any = [call for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or []]
        reason = [each.finish_reason for chunk in chunks for each in chunk.choices][-1]
        assert all(not each.delta.content for chunk in chunks for each in chunk.choices)
    else:
        done = house.client.chat.completions.create(**settings).choices[0]
        calls, reason = done.message.tool_calls or [], done.finish_reason
        assert done.message.content is None
    assert reason == "tool_calls"
    (call,) = calls
    assert call.function.name == "sky"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"c", "d"}
    assert arguments["c"] in {"x", "y"}
    assert call.id.startswith("call_")


def test_an_optional_call_leaves_the_text_free(house: House) -> None:
    free = house.client.chat.completions.create(
        model=NAME, messages=CHAT, tools=[WEATHER, NOTHING], temperature=0, max_tokens=20
    ).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content
    talk: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    after = house.client.chat.completions.create(
        model=NAME, messages=talk, tools=[WEATHER], tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.content is not None


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_forms_hold_whatever_drafts(house: House, drafter: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    speculation = {"speculation": {"drafter": drafter}}
    for seed in range(3):
        settings: Any = {"model": NAME, "messages": CHAT, "temperature": 1, "seed": seed, "max_tokens": 60}
        form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        done = house.client.chat.completions.create(**settings, response_format=form, extra_body=speculation)
        assert json.loads(done.choices[0].message.content or "")["a"] in {"x", "y"}
        for grammar in ('start: "yes" | "no"', {"type": "regex", "grammar": "yes|no"}):
            done = house.client.chat.completions.create(**settings, extra_body={"grammar": grammar, **speculation})
            assert done.choices[0].message.content in {"yes", "no"}
    open_ended: Any = {"type": "json_object"}
    done = house.client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=40, response_format=open_ended, extra_body=speculation
    )
    assert (done.choices[0].message.content or "").startswith("{")


# --- conversations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_conversation_is_not_read_again(house: House, alone: LLM, drafter: str) -> None:
    talk: Any = [{"role": "user", "content": f"a question for {drafter}, with words that nobody has said before"}]
    cached = []
    for turn in range(3):
        expected = alone.generate(talk, SamplingParams(temperature=0.4, seed=8, max_tokens=10))
        done = house.client.chat.completions.create(
            model=NAME,
            messages=talk,
            temperature=0.4,
            seed=8,
            max_tokens=10,
            extra_body={"speculation": {"drafter": drafter}},
        )
        assert done.choices[0].message.content == expected.text
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        cached.append((done.usage.prompt_tokens_details.cached_tokens or 0, done.usage.prompt_tokens))
        talk += [{"role": "assistant", "content": expected.text}, {"role": "user", "content": f"and then {turn}?"}]
    assert cached[0][0] < 16
    assert all(found >= before for (found, _), (_, before) in zip(cached[1:], cached, strict=False))


# --- the rest --------------------------------------------------------------------------------------------------


def test_models_are_listed(house: House) -> None:
    assert [model.id for model in house.client.models.list()] == [NAME]
    assert house.client.models.retrieve(NAME).owned_by == "forerun"
    with pytest.raises(openai.NotFoundError):
        house.client.models.retrieve("another")


def test_the_page_learns_what_there_is(house: House) -> None:
    info = house.get("/page/info").json()
    assert info["model"] == NAME
    assert [each["name"] for each in info["drafters"]] == ["ngram", "suffix", "recycling", "lookahead", "none"]
    assert all(each["description"].endswith(".") for each in info["drafters"])
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/", "/page/none.html"):
        assert house.get(path).status_code == 404


def test_metrics_count_what_was_done(house: House) -> None:
    def figures() -> dict[str, float]:
        lines = [line for line in house.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = figures()
    written = 0
    for _ in range(2):
        done = house.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=30, temperature=0, n=2)
        assert done.usage is not None
        written += done.usage.completion_tokens
    after = figures()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('forerun_requests_total{endpoint="completions",status="200"}') == 2
    assert grown('forerun_tokens_total{kind="completion"}') == written
    assert grown('forerun_target_passes_total{drafter="ngram"}') < written
    assert grown("forerun_time_to_first_token_seconds_count") == 2
    assert grown("forerun_inter_token_seconds_count") > 10
    assert grown('forerun_draft_offered_total{drafter="ngram",position="1"}') > 0
    assert grown('forerun_draft_budget_tokens_count{drafter="ngram"}') > 0
    assert grown('forerun_tokens_per_pass_count{drafter="ngram"}') == 2
    assert 0 <= after['forerun_cache_used_ratio{drafter="ngram"}'] < 1
    assert after["forerun_texts_inside"] == 0
