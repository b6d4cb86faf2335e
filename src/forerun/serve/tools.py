"""Tools: how a model is told of functions, held to their arguments, and read when it calls one.

Models without a form of their own for this are told in a system message, in the form that Hermes made common: a call is
`<tool_call>{"name": …, "arguments": …}</tool_call>`. Where a call is required the text is that object alone, by its
schema. Where the model may choose, the text is free, or of the form that is asked for, unless it begins with the tag,
and from there on a grammar holds it to the schema of one of the functions.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.engine.grammar import LAYOUT
from forerun.serve.errors import refused

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
Choice = Literal["auto", "required"]


@dataclass(frozen=True)
class Tools:
    functions: list[dict[str, Any]]
    """Those that may be called."""
    choice: Choice
    form: dict[str, Any] | None = None
    """The JSON schema of a text that is no call, if it has to fit one."""

    @property
    def call_schema(self) -> dict[str, Any]:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": function.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in self.functions
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    @property
    def lark(self) -> str:
        """Free text, or a call; a text that begins like the tag and goes on otherwise is free text."""
        call = f'call: "{OPEN_TAG}" body "{CLOSE_TAG}"\nbody: %json {_on_one_line(self.call_schema)}\n'
        if self.form is not None:
            return f"start: form | call\nform: %json {_on_one_line(self.form)}\n{call}"
        free = [rf"{re.escape(OPEN_TAG[:place])}[^{OPEN_TAG[place]}](.|\n)*" for place in range(len(OPEN_TAG))]
        begun = [re.escape(OPEN_TAG[:place]) for place in range(len(OPEN_TAG))]
        pattern = "|".join([*free, *begun]).replace("/", r"\/")
        return f"start: TEXT | call\nTEXT: /{pattern}/\n{call}"

    @property
    def told(self) -> str:
        """For the system message."""
        listed = "\n".join(json.dumps({"type": "function", "function": each}) for each in self.functions)
        return (
            "You may call these functions:\n<tools>\n"
            f"{listed}\n</tools>\n"
            f"To call one, answer with nothing but\n{OPEN_TAG}\n"
            '{"name": <function-name>, "arguments": <args-dict>}'
            f"\n{CLOSE_TAG}"
        )


def _on_one_line(schema: dict[str, Any]) -> str:
    """As schemas are read elsewhere, unless this one says otherwise: a text does not go on with blanks for ever."""
    return json.dumps({"x-guidance": LAYOUT, **schema})


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, form: dict[str, Any] | None = None
) -> Tools | None:
    """None where no function may be called."""
    functions = [{key: value for key, value in tool["function"].items() if value is not None} for tool in tools or []]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise refused("two tools have the same name: name each once", "tools")
    if not functions:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice asks for a call and there are no tools: give some", "tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, Mapping):
        wanted = choice["function"]["name"]
        if wanted not in names:
            raise refused(f"tool_choice names {wanted}, which is none of the tools: name one", "tool_choice")
        return Tools([functions[names.index(wanted)]], "required")
    return Tools(functions, "required" if choice == "required" else "auto", form)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def read_call(text: str, tools: Tools) -> Call | None:
    """The call that a text is; cut short, as far as it goes. None for a text that is no call."""
    tagged = text.startswith(OPEN_TAG)
    if tools.choice == "auto" and not tagged:
        return None
    body = text.removeprefix(OPEN_TAG).removesuffix(CLOSE_TAG).strip() if tagged else text
    try:
        call = json.loads(body)
        return Call(call["name"], json.dumps(call["arguments"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError, RecursionError):
        begun = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*', body)
        return Call(begun[1], body[begun.end() :]) if begun else None


def may_become_call(text: str) -> bool:
    """Whether a text that is not over may be a call, so that it must be held back."""
    return text.startswith(OPEN_TAG) or OPEN_TAG.startswith(text)


# --- messages ------------------------------------------------------------------------------------------------


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> list[dict[str, str]]:
    """Messages with a role and a text each, which every chat template understands."""
    plain = [_plain(message) for message in messages]
    if tools is None:
        return plain
    if plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{tools.told}"}, *plain[1:]]
    return [{"role": "system", "content": tools.told}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    content = message.get("content")
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    match message["role"]:
        case "assistant":
            calls = [each["function"] for each in message.get("tool_calls") or []]
            tagged = [
                f'{OPEN_TAG}\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n{CLOSE_TAG}'
                for call in calls
            ]
            return {"role": "assistant", "content": "\n".join([*([text] if text else []), *tagged])}
        case "tool":
            return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        case "developer":
            return {"role": "system", "content": text}
        case role:
            return {"role": role, "content": text}
