"""What a request may hold, as JSON schemas: OpenAI's parameters, and ours beside them."""

from __future__ import annotations

from typing import Any

from forerun.engine.engine import MAX_NODES

Table = dict[str, Any]

MOST_TOP = 20
"""Log probabilities of likeliest tokens."""
MOST_STOPS = 16
LONGEST_NAME = 64


def maybe(schema: Table) -> Table:
    """Or null, which is the same as leaving it out."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    both = {**schema, "type": [*kinds, "null"]}
    return both if "enum" not in schema else {**both, "enum": [*schema["enum"], None]}


def number(least: float, most: float, text: str, default: float | None = None) -> Table:
    return maybe({"type": "number", "minimum": least, "maximum": most, "description": text}) | _default(default)


def whole(least: int, most: int, text: str, default: int | None = None) -> Table:
    return maybe({"type": "integer", "minimum": least, "maximum": most, "description": text}) | _default(default)


def flag(text: str) -> Table:
    return maybe({"type": "boolean", "description": text}) | {"default": False}


def _default(value: float | None) -> Table:
    return {} if value is None else {"default": value}


def closed(properties: Table, *required: str, text: str = "") -> Table:
    """An object with just these."""
    made: Table = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": list(required)} if required else {}) | ({"description": text} if text else {})


TEXT: Table = {"type": "string"}
OPEN: Table = {"type": "object"}
NAME: Table = {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}
TOKEN: Table = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}

SPECULATION = maybe(
    closed(
        {
            "drafter": maybe({"type": "string", "description": "One of those that `/page/info` lists."}),
            "length": whole(0, MAX_NODES, "How many tokens ahead at most; 0 does not speculate."),
            "tree": maybe(
                {
                    "type": "string",
                    "maxLength": 1000,
                    "description": 'The most that a step drafts, as a tree: "5", "3,2,1".',
                }
            ),
            "off": flag("Plain decoding."),
            "trace": flag("Tell what every step did, in a field `forerun`."),
        },
        text="Ours: how this request is sped up. It changes no text that is greedy or has a seed, and no law.",
    )
)

RESPONSE_FORMAT = maybe(
    {
        "anyOf": [
            closed({"type": {"const": "text"}}, "type"),
            closed({"type": {"const": "json_object"}}, "type"),
            closed(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": closed(
                        {
                            "name": NAME,
                            "description": maybe(TEXT),
                            "schema": OPEN,
                            "strict": maybe({"type": "boolean"}),
                        },
                        "name",
                        "schema",
                    ),
                },
                "type",
                "json_schema",
            ),
        ],
        "description": "The form that the text must have.",
    }
)

GRAMMAR = maybe(
    {
        "anyOf": [
            {"type": "string", "minLength": 1, "description": "In llguidance's dialect of Lark."},
            closed(
                {"type": {"enum": ["lark", "regex"]}, "grammar": {"type": "string", "minLength": 1}}, "type", "grammar"
            ),
        ],
        "description": "Ours: a grammar that the text must follow.",
    }
)

SHARED: Table = {
    "model": {"type": "string", "description": "As `/v1/models` names it."},
    "temperature": number(0, 2, "0 takes the likeliest token.", 1),
    "top_p": number(0, 1, "Keep the likeliest tokens with this much probability.", 1),
    "top_k": whole(-1, 2**31 - 1, "Ours: keep the k likeliest tokens; 0 or -1 keeps all.", 0),
    "min_p": number(0, 1, "Ours: drop tokens less likely than this times the likeliest.", 0),
    "presence_penalty": number(-2, 2, "Against tokens that the text has.", 0),
    "frequency_penalty": number(-2, 2, "The same, for each time.", 0),
    "repetition_penalty": number(0.01, 10, "Ours: above 1, against tokens of prompt and text.", 1),
    "logit_bias": maybe(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "description": "By token id: added to the token's score.",
        }
    ),
    "seed": whole(-(2**63), 2**63 - 1, "The same seed gives the same text, whatever drafts it."),
    "stop": maybe(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_STOPS},
            ],
            "description": "The text ends before the first of these.",
        }
    ),
    "stop_token_ids": maybe({"type": "array", "items": TOKEN, "maxItems": 64, "description": "Ours."}),
    "ignore_eos": flag("Ours: go on to max_tokens."),
    "n": whole(1, 1024, "How many texts.", 1),
    "stream": flag("Server-sent events, as the text is written."),
    "stream_options": maybe(
        closed(
            {
                "include_usage": flag("A last chunk with the usage."),
                "include_obfuscation": maybe({"type": "boolean", "description": "Nothing is ever added."}),
            }
        )
    ),
    "timeout": number(0.001, 86400, "Ours: seconds after which the request is given up."),
    "response_format": RESPONSE_FORMAT,
    "grammar": GRAMMAR,
    "speculation": SPECULATION,
    "user": maybe(TEXT),
}

COMPLETION = closed(
    {
        **SHARED,
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": TOKEN, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": TOKEN, "minItems": 1}, "minItems": 1},
            ],
            "description": "A text, token ids, or a list of either.",
        },
        "max_tokens": whole(0, 2**31 - 1, "The longest text; 0 only with echo.", 16),
        "logprobs": whole(0, MOST_TOP, "Log probabilities, and those of so many likeliest tokens."),
        "echo": flag("Begin with the prompt."),
        "best_of": whole(1, 1024, "Must be n: every text that is written is returned."),
        "suffix": maybe({"type": "string", "maxLength": 0, "description": "Not supported."}),
    },
    "model",
    "prompt",
)

FUNCTION = closed(
    {"name": NAME, "description": maybe(TEXT), "parameters": maybe(OPEN), "strict": maybe({"type": "boolean"})}, "name"
)
TOOL = closed({"type": {"const": "function"}, "function": FUNCTION}, "type", "function")
CALL = closed(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": closed({"name": NAME, "arguments": TEXT}, "name", "arguments"),
    },
    "id",
    "type",
    "function",
)
CONTENT: Table = {
    "anyOf": [
        TEXT,
        {"type": "array", "items": closed({"type": {"const": "text"}, "text": TEXT}, "type", "text"), "minItems": 1},
    ]
}
ASSISTANT = closed(
    {
        "role": {"const": "assistant"},
        "content": maybe(CONTENT),
        "tool_calls": maybe({"type": "array", "items": CALL, "minItems": 1}),
        "refusal": maybe(TEXT),
        "name": maybe(TEXT),
    },
    "role",
)
MESSAGE: Table = {
    "anyOf": [
        closed(
            {"role": {"enum": ["system", "developer", "user"]}, "content": CONTENT, "name": maybe(TEXT)},
            "role",
            "content",
        ),
        ASSISTANT,
        closed(
            {"role": {"const": "tool"}, "content": CONTENT, "tool_call_id": TEXT}, "role", "content", "tool_call_id"
        ),
    ]
}

CHAT = closed(
    {
        **SHARED,
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
        "max_tokens": whole(1, 2**31 - 1, "The longest text; by default what the context holds."),
        "max_completion_tokens": whole(1, 2**31 - 1, "OpenAI's newer name for max_tokens."),
        "logprobs": flag("Log probabilities of the tokens."),
        "top_logprobs": whole(0, MOST_TOP, "And of so many likeliest ones."),
        "tools": maybe({"type": "array", "items": TOOL, "maxItems": 64, "description": "Functions to call."}),
        "tool_choice": maybe(
            {
                "anyOf": [
                    {"type": "string", "enum": ["none", "auto", "required"]},
                    closed(
                        {"type": {"const": "function"}, "function": closed({"name": NAME}, "name")}, "type", "function"
                    ),
                ]
            }
        ),
        "parallel_tool_calls": maybe({"type": "boolean", "description": "One call is made at a time."}),
        "store": maybe({"type": "boolean", "description": "Nothing is stored."}),
        "metadata": maybe(OPEN),
        "service_tier": maybe({"type": "string", "description": "There is one."}),
        "safety_identifier": maybe(TEXT),
        "prompt_cache_key": maybe({"type": "string", "description": "Any prompt finds what it shares."}),
    },
    "model",
    "messages",
)
