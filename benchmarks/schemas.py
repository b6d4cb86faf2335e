"""JSON schemas that texts are written to, and a prompt for each."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _several(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(name=_text(24), age=_whole(0, 120), email=_text(30)),
    "weather": _object(
        city=_text(20),
        unit={"enum": ["celsius", "fahrenheit"]},
        temperature={"type": "number", "minimum": -60, "maximum": 60},
        sunny={"type": "boolean"},
    ),
    "recipe": _object(title=_text(30), minutes=_whole(1, 300), steps=_several(_text(40), 3)),
    "order": _object(
        number=_whole(1, 99999),
        items=_several(_object(product=_text(16), count=_whole(1, 99)), 3),
        paid={"type": "boolean"},
    ),
    "event": _object(
        title=_text(30), date={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}, guests=_whole(0, 500)
    ),
    "sentiment": _object(label={"enum": ["positive", "neutral", "negative"]}, reason=_text(50)),
    "book": _object(title=_text(40), author=_text(24), year=_whole(1400, 2030), genre={"type": ["string", "null"]})
    | {"required": ["title", "author", "year"]},
    "contact": _object(
        kind={"const": "contact"}, phone={"type": "string", "pattern": "^[+][0-9]{8,12}$"}, tags=_several(_text(10), 4)
    ),
    "shape": {
        "anyOf": [
            _object(shape={"const": "circle"}, radius=_whole(1, 100)),
            _object(shape={"const": "box"}, width=_whole(1, 100), height=_whole(1, 100)),
        ]
    },
    "tree": _object(
        root=_object(name=_text(12), left=_object(name=_text(12)), right=_object(name=_text(12))), depth=_whole(1, 9)
    ),
}
SCHEMAS["book"]["properties"]["genre"]["maxLength"] = 20

ASKED: dict[str, str] = {
    "person": "Invent a person who lives in {} and give the data as JSON.",
    "weather": "What is the weather in {} today? Answer in JSON.",
    "recipe": "Give me a short recipe from {} as JSON.",
    "order": "Write an order of things from a shop in {} as JSON.",
    "event": "Plan an event in {} and answer as JSON.",
    "sentiment": "Is this review positive? 'The hotel in {} was clean, but loud.' Answer in JSON.",
    "book": "Name a book that plays in {} as JSON.",
    "contact": "Give me a contact for a museum in {} as JSON.",
    "shape": "Describe the main square of {} as a shape in JSON.",
    "tree": "Draw a family tree of a family from {} as JSON.",
}
PLACES = (
    "Paris", "Rome", "Lima", "Oslo", "Cairo", "Tokyo", "Delhi", "Quito", "Accra", "Bergen", "Boston", "Sydney",
    "Vienna", "Zurich", "Havana", "Lisbon", "Prague", "Dublin", "Athens", "Nairobi",
)  # fmt: skip


def prompt_for(name: str, number: int) -> str:
    return ASKED[name].format(PLACES[number % len(PLACES)])
