"""From the body of a request to what the engine is asked: checked, with its prompts as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forerun.core.params import SamplingParams
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import Message, Prompt, as_prompts, to_tokens
from forerun.engine.request import DraftOptions
from forerun.serve.engines import PLAIN
from forerun.serve.errors import ApiError, refused
from forerun.serve.limits import Limits
from forerun.serve.schema import check
from forerun.serve.tables import CHAT, COMPLETION
from forerun.serve.tools import Tools, plain_messages, read_tools

SMALLEST_TOP_P = 1e-9
"""Stands for 0, which keeps the likeliest token alone."""
DEFAULT_COMPLETION = 16
"""OpenAI's own."""
LONGEST_GRAMMAR = 1 << 16
"""Characters of a grammar, or of schemas as JSON. Rules that lead to rules are followed by calls inside calls, and the
threads that do it have room for so many (`server.STACK`)."""


@dataclass(frozen=True)
class Served:
    """What this server offers."""

    model: LoadedModel
    name: str
    drafters: list[str]
    """The default one first."""
    context_length: int
    limits: Limits


@dataclass(frozen=True)
class Order:
    """One request, read."""

    chat: bool
    prompts: list[list[int]]
    params: SamplingParams
    draft: DraftOptions
    drafter: str
    seconds: float
    stream: bool = False
    include_usage: bool = False
    trace: bool = False
    echoed: list[str] = field(default_factory=list)
    """The texts of the prompts, where they are to be repeated."""
    nothing_more: bool = False
    """Only the prompts are wanted back."""
    tools: Tools | None = None

    @property
    def scores_prompts(self) -> bool:
        return bool(self.echoed) and self.params.logprobs is not None

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.params.n


def read_completion(body: Any, served: Served) -> Order:
    asked = _asked(body, COMPLETION, served)
    echo = bool(asked.get("echo"))
    longest = asked.get("max_tokens", DEFAULT_COMPLETION)
    if longest == 0 and not echo:
        raise refused("max_tokens is 0: ask for at least 1 token, or for the prompt back with echo", "max_tokens")
    if asked.get("best_of", asked.get("n", 1)) != asked.get("n", 1):
        raise refused("best_of is not n: leave it out, every text that is written is returned", "best_of")
    if asked.get("suffix"):
        raise refused("suffix is not supported: leave it out", "suffix")
    with _naming("prompt"):
        given, _ = as_prompts(asked["prompt"])
        _refuse_many(asked, len(given), served.limits)
        prompts = [to_tokens(prompt, served.model.tokenizer, chat=False) for prompt in given]
    most = served.model.target.vocab_size - 1
    if max(max(prompt, default=0) for prompt in prompts) > most:
        raise refused(f"the prompt names a token that there is not: ids end at {most}", "prompt")
    more = {
        "echoed": [_text(prompt, served) for prompt in given] if echo else [],
        "nothing_more": longest == 0,
    }
    return _order(asked, prompts, served, chat=False, longest=max(1, longest), logprobs=asked.get("logprobs"), **more)


def read_chat(body: Any, served: Served) -> Order:
    asked = _asked(body, CHAT, served)
    _refuse_many(asked, 1, served.limits)
    tools = read_tools(asked.get("tools"), asked.get("tool_choice"), _form(asked))
    messages: list[Message] = plain_messages(asked["messages"], tools)
    with _naming("messages"):
        prompt = to_tokens(messages, served.model.tokenizer, chat=True)
    longest = asked.get("max_completion_tokens", asked.get("max_tokens"))
    top = asked.get("top_logprobs", 0)
    if top and not asked.get("logprobs"):
        raise refused("top_logprobs is given and logprobs is not true: set it", "top_logprobs")
    logprobs = top if asked.get("logprobs") else None
    return _order(asked, [prompt], served, chat=True, longest=longest, logprobs=logprobs, tools=tools)


def _asked(body: Any, table: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """Checked, without what is null."""
    if not isinstance(body, dict):
        raise refused("the body is no object: send the parameters as one")
    asked = {key: value for key, value in check(body, table).items() if value is not None}
    if asked["model"] != served.name:
        raise ApiError(
            404,
            f"there is no model {asked['model'][:60]!r} here: use {served.name!r}",
            param="model",
            code="model_not_found",
        )
    return asked


def _order(
    asked: dict[str, Any],
    prompts: list[list[int]],
    served: Served,
    *,
    chat: bool,
    longest: int | None,
    logprobs: int | None,
    tools: Tools | None = None,
    **more: Any,
) -> Order:
    limits = served.limits
    _refuse_long(asked, prompts, served)
    most = min(served.context_length, limits.output_tokens or served.context_length)
    if longest is not None and limits.output_tokens is not None and longest > limits.output_tokens:
        raise refused(
            f"max_tokens is {longest} and this server writes {limits.output_tokens}: ask for less", "max_tokens"
        )
    speculation = {key: value for key, value in asked.get("speculation", {}).items() if value is not None}
    with _naming(None):
        params = SamplingParams(
            **_sampling(asked),
            max_tokens=most if longest is None else longest,
            logprobs=logprobs,
            **_grammar(asked, tools, served),
        )
    return Order(
        chat=chat,
        prompts=prompts,
        params=params,
        draft=_draft(speculation),
        drafter=_drafter(speculation, served),
        seconds=min(limits.seconds, asked.get("timeout", limits.seconds)),
        stream=asked.get("stream", False),
        include_usage=bool(asked.get("stream_options", {}).get("include_usage")),
        trace=bool(speculation.get("trace")),
        tools=tools,
        **more,
    )


def _refuse_many(asked: dict[str, Any], prompts: int, limits: Limits) -> None:
    """Before any of them is read."""
    texts = prompts * asked.get("n", 1)
    if texts > limits.texts:
        raise refused(f"the request asks for {texts} texts and may ask for {limits.texts}: lower n", "n")


def _refuse_long(asked: dict[str, Any], prompts: list[list[int]], served: Served) -> None:
    most = min(served.limits.prompt_tokens or served.context_length, served.context_length - 1)
    longest = max(len(prompt) for prompt in prompts)
    if longest > most:
        raise refused(
            f"the prompt has {longest} tokens and may have {most}: shorten it",
            "messages" if "messages" in asked else "prompt",
            "context_length_exceeded",
        )


def _sampling(asked: dict[str, Any]) -> dict[str, Any]:
    same = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "ignore_eos")
    read: dict[str, Any] = {name: asked[name] for name in same if name in asked}
    if "top_p" in asked:
        read["top_p"] = max(SMALLEST_TOP_P, asked["top_p"])
    if "top_k" in asked:
        read["top_k"] = max(0, asked["top_k"])
    if "seed" in asked:
        read["seed"] = asked["seed"] % 2**63
    stop = asked.get("stop", [])
    read["stop"] = tuple([stop] if isinstance(stop, str) and stop else stop)
    read["stop_token_ids"] = tuple(asked.get("stop_token_ids", ()))
    read["logit_bias"] = {_token(key): value for key, value in asked.get("logit_bias", {}).items()}
    return read


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        raise refused(f"logit_bias names {key[:40]!r}, which is no token id: give numbers", "logit_bias")
    return int(key)


def _drafter(speculation: dict[str, Any], served: Served) -> str:
    name: str = speculation.get("drafter", served.drafters[0])
    if name != PLAIN and name not in served.drafters:
        raise refused(
            f"there is no drafter {name!r} here: use one of {', '.join([PLAIN, *served.drafters])}",
            "speculation.drafter",
        )
    return name


def _draft(speculation: dict[str, Any]) -> DraftOptions:
    """How far the drafter may go. A tree bounds how many tokens are drafted, and how deep."""
    if speculation.get("off") or speculation.get("drafter") == PLAIN:
        return DraftOptions(nodes=0)
    nodes = depth = speculation.get("length")
    if "tree" in speculation:
        with _naming("speculation.tree"):
            spec = TreeSpec.parse(speculation["tree"])
        nodes, depth = spec.size, spec.depth if depth is None else min(depth, spec.depth)
    elif nodes:
        nodes = None  # a tree may be as wide as its drafter likes
    return DraftOptions(nodes, depth)


def _form(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that the text must fit."""
    asked_for = asked.get("response_format", {"type": "text"})
    if asked_for["type"] == "json_schema":
        schema: dict[str, Any] = asked_for["json_schema"]["schema"]
        return schema
    return {"type": "object"} if asked_for["type"] == "json_object" else None


def _grammar(asked: dict[str, Any], tools: Tools | None, served: Served) -> dict[str, Any]:
    """Of the ways to ask for a form; tools know of a response_format beside them."""
    form = _form(asked)
    given = [
        *(["tools"] if tools is not None else []),
        *(["response_format"] if form is not None else []),
        *(["grammar"] if "grammar" in asked else []),
    ]
    if not given:
        return {}
    if len(given) > 1 and "grammar" in given:
        raise refused(f"{' and '.join(given)} all say what the text must be: leave grammar out", "grammar")
    from forerun.engine import grammar

    tokenizer = served.model.tokenizer
    with _naming(given[0]):
        if tools is not None and tools.choice == "required":
            made = grammar.json_schema(_of_length(json.dumps(tools.call_schema)), tokenizer)
        elif tools is not None:
            made = grammar.lark(_of_length(tools.lark), tokenizer)
        elif form is not None:
            made = grammar.json_schema(_of_length(json.dumps(form)), tokenizer)
        else:
            wanted = asked["grammar"]
            text, kind = (wanted, "lark") if isinstance(wanted, str) else (wanted["grammar"], wanted["type"])
            made = (grammar.regex if kind == "regex" else grammar.lark)(_of_length(text), tokenizer)
    return {"grammar": made}


def _of_length(text: str) -> str:
    if len(text) > LONGEST_GRAMMAR:
        raise ValueError(f"the grammar has {len(text)} characters and may have {LONGEST_GRAMMAR}: make it plainer")
    return text


def _text(prompt: Prompt, served: Served) -> str:
    if isinstance(prompt, str):
        return prompt
    return served.model.tokenizer.decode([token for token in prompt if isinstance(token, int)], skip_special=False)


@contextmanager
def _naming(param: str | None) -> Iterator[None]:
    """What the parts below refuse is the client's to put right."""
    try:
        yield
    except ValueError as error:
        raise refused(str(error), param) from None
