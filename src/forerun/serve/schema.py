"""JSON schemas for what comes in: the same tables check a request and stand in the OpenAPI document.

Only the words of JSON Schema that the tables use are understood; another one is a mistake in a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from forerun.serve.errors import ApiError, refused

Schema = Mapping[str, Any]

DEEPEST = 100
"""Lists and objects inside each other that a body may have: what looks at them goes down as deep."""

# fmt: off
KNOWN = {
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "items", "minItems",
    "maxItems", "properties", "required", "additionalProperties", "propertyNames", "anyOf", "description", "default",
}
# fmt: on
NAMES = {
    "null": "null",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}


def read_json(body: bytes) -> Any:
    """NaN, infinity and numbers without end are no JSON, though Python reads them."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        read = json.loads(body, parse_constant=refuse, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except (ValueError, UnicodeDecodeError):
        raise refused("the body is not valid JSON: send an object in UTF-8") from None
    level = [read]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise _too_deep()
    return read


def _inside(value: Any) -> list[Any]:
    """What a list or an object holds, as far as it can hold something itself."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in held if isinstance(each, dict | list)]


def _too_deep() -> ApiError:
    return refused(f"the body nests more than {DEEPEST} deep: send plainer JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number without end")
    return value


def check(value: Any, schema: Schema, where: str = "") -> Any:
    """The value, with whole numbers as such (2.0 is one in JSON); or a refusal that names the place."""
    assert set(schema) <= KNOWN, f"the schema of {where} uses words that are not known here"
    if "anyOf" in schema:
        return _any(value, schema["anyOf"], where)
    kinds = schema.get("type")
    if kinds is not None:
        kind = _kind(value)
        allowed = [kinds] if isinstance(kinds, str) else list(kinds)
        if kind == "number" and "integer" in allowed and value == int(value):
            value, kind = int(value), "integer"
        if kind not in allowed and not (kind == "integer" and "number" in allowed):
            raise _wrong(where, value, " or ".join(NAMES[name] for name in allowed))
    if "enum" in schema and value not in schema["enum"]:
        raise _wrong(where, value, f"one of {', '.join(json.dumps(each) for each in schema['enum'])}")
    if "const" in schema and value != schema["const"]:
        raise _wrong(where, value, json.dumps(schema["const"]))
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(value, schema, where)
    elif isinstance(value, str):
        _check_text(value, schema, where)
    elif isinstance(value, list):
        return _check_list(value, schema, where)
    elif isinstance(value, dict):
        return _check_object(value, schema, where)
    return value


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _any(value: Any, choices: list[Schema], where: str) -> Any:
    """The complaint is that of the choice that is meant, where that can be told."""
    errors = []
    for choice in choices:
        try:
            return check(value, choice, where)
        except ApiError as error:
            if _meant(value, choice):
                errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise refused(f"{where or 'the body'} is {_shown(value)}: none of the forms that it may have fits", where or None)


def _meant(value: Any, choice: Schema) -> bool:
    """Of the value's own kind and, of objects, with the role or type that the value names."""
    kinds = choice.get("type", [])
    if _kind(value) not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    properties = choice.get("properties", {})
    for tag in ("role", "type"):
        named = properties.get(tag, {})
        if isinstance(value, dict) and value.get(tag) not in named.get("enum", [named.get("const")]):
            return False
    return True


def _check_number(value: float, schema: Schema, where: str) -> None:
    if "minimum" in schema and value < schema["minimum"]:
        raise _wrong(where, value, f"at least {schema['minimum']}")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise _wrong(where, value, f"above {schema['exclusiveMinimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        raise _wrong(where, value, f"at most {schema['maximum']}")


def _check_text(value: str, schema: Schema, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(f"{where} has no character at place {error.start}: send valid Unicode", where) from None
    if len(value) < schema.get("minLength", 0):
        raise _wrong(where, value, f"at least {schema['minLength']} characters long")
    if len(value) > schema.get("maxLength", len(value)):
        raise _wrong(where, value, f"at most {schema['maxLength']} characters long")


def _check_list(value: list[Any], schema: Schema, where: str) -> list[Any]:
    if len(value) < schema.get("minItems", 0):
        raise _wrong(where, value, f"a list of at least {schema['minItems']}")
    if len(value) > schema.get("maxItems", len(value)):
        raise _wrong(where, value, f"a list of at most {schema['maxItems']}")
    items = schema.get("items", {})
    return [check(item, items, f"{where}[{place}]") for place, item in enumerate(value)]


def _check_object(value: dict[str, Any], schema: Schema, where: str) -> dict[str, Any]:
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    dot = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            raise refused(f"{dot}{name} is missing: give it", f"{dot}{name}")
    read = {}
    for name, each in value.items():
        _check_text(name, {}, where or "a name")
        own = properties.get(name)
        if own is None and more is False:
            raise refused(f"{dot}{name} is not known here: leave it out", f"{dot}{name}", "unknown_parameter")
        read[name] = check(each, own if own is not None else more if isinstance(more, Mapping) else {}, dot + name)
    return read


def _wrong(where: str, value: Any, wanted: str) -> ApiError:
    return refused(f"{where or 'the body'} is {_shown(value)}: it must be {wanted}", where or None)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
