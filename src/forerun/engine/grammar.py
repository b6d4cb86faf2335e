"""Grammars for texts, by llguidance: JSON schemas, Lark grammars and regular expressions.

    params = SamplingParams(grammar=json_schema(schema, llm.model.tokenizer))

A grammar is compiled once. Every text has a state of its own in it, which goes down a drafted path and comes back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forerun.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs write it, on one line: what stands between two values is forced, and no text goes on with
blanks for ever. A schema's own "x-guidance" may say otherwise."""
LONGEST_REASON = 200
"""Letters of what the library says about a grammar that is wrong."""

_tables: WeakKeyDictionary[Tokenizer, LLTokenizer] = WeakKeyDictionary()
"""Making one takes a second."""


class Grammar:
    """Compiled for one tokenizer. It never changes, and any number of texts may share it."""

    def __init__(self, matcher: LLMatcher, table: LLTokenizer) -> None:
        self._matcher, self._table = matcher, table

    def start(self) -> State:
        return State(self._matcher, self._table)


class State:
    """Where a text stands in its grammar."""

    def __init__(self, origin: LLMatcher, table: LLTokenizer) -> None:
        self._origin, self._matcher = origin, origin.deep_copy()
        self._vocabulary, self._ends = table.vocab_size, frozenset(table.eos_tokens)
        self._taken: list[int] = []

    def take(self, token: int) -> bool:
        if not 0 <= token < self._vocabulary or token in self._ends:
            return False
        if self._matcher.try_consume_tokens([token]) == 1:
            self._taken.append(token)
            return True
        self._recover()
        return False

    def back(self, count: int) -> None:
        assert 0 <= count <= len(self._taken), "what was taken can be taken back"
        if count:
            del self._taken[len(self._taken) - count :]
            self._matcher.rollback(count)
            self._recover()

    def allowed(self, width: int) -> Tensor:
        """A model may have more columns than its tokenizer has tokens, and those are never allowed."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._recover()
        allowed = np.zeros(width, np.bool_)
        known = min(width, self._vocabulary)
        allowed[:known] = bits[:known]
        allowed[[end for end in self._ends if end < width]] = False
        return torch.from_numpy(allowed)

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._recover()
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def must_end(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _recover(self) -> None:
        """A matcher that met one of its limits, on some drafted path perhaps, says no to everything from then on."""
        if self._matcher.is_error():
            self._matcher = self._origin.deep_copy()
            self._matcher.consume_tokens(self._taken)


def json_schema(schema: Mapping[str, Any] | str, tokenizer: Tokenizer) -> Grammar:
    """Texts that are JSON and fit the schema, given as a mapping or as JSON."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong("JSON schema", str(error)) from None
    if not isinstance(schema, Mapping):
        raise _wrong("JSON schema", f"it is {schema!r} and no object")
    matcher = _library().LLMatcher
    try:
        text = matcher.grammar_from_json_schema(json.dumps(dict(schema)), defaults=LAYOUT)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong("JSON schema", str(error)) from None
    return _compiled("JSON schema", text, tokenizer)


def json_object(tokenizer: Tokenizer) -> Grammar:
    """Texts that are any one JSON object."""
    return json_schema({"type": "object"}, tokenizer)


def lark(text: str, tokenizer: Tokenizer) -> Grammar:
    """Texts of a Lark grammar, as llguidance reads it: https://github.com/guidance-ai/llguidance (docs/syntax.md)."""
    return _compiled("Lark grammar", _library().LLMatcher.grammar_from_lark(_text("Lark grammar", text)), tokenizer)


def regex(text: str, tokenizer: Tokenizer) -> Grammar:
    """Texts that a regular expression matches as a whole."""
    made = _library().LLMatcher.grammar_from_regex(_text("regular expression", text))
    return _compiled("regular expression", made, tokenizer)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError("grammars need llguidance, which is not installed: pip install 'forerun[serve]'") from None
    return llguidance


def _text(kind: str, text: object) -> str:
    if not isinstance(text, str):
        raise _wrong(kind, f"it is {text!r} and no text")
    return text


def _compiled(kind: str, text: str, tokenizer: Tokenizer) -> Grammar:
    table = _table(tokenizer)
    matcher: LLMatcher = _library().LLMatcher(table, text, log_level=0)
    if matcher.is_error():
        raise _wrong(kind, matcher.get_error())
    grammar = Grammar(matcher, table)
    state = grammar.start()
    if not bool(state.allowed(table.vocab_size).any()):
        raise _wrong(kind, "it allows the empty text alone" if state.may_end else "it allows no text at all")
    return grammar


def _table(tokenizer: Tokenizer) -> LLTokenizer:
    if tokenizer not in _tables:
        _library()
        from llguidance.hf import from_tokenizer

        ends = sorted(tokenizer.eos)
        try:
            _tables[tokenizer] = from_tokenizer(tokenizer.in_transformers, eos_token=ends or None)
        except ValueError as error:
            raise ValueError(
                f"grammars cannot read this model's tokenizer ({_short(str(error))}): use another"
            ) from None
    return _tables[tokenizer]


def _wrong(kind: str, reason: str) -> ValueError:
    return ValueError(f"the {kind} cannot be used ({_short(reason)}): correct it")


def _short(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= LONGEST_REASON else words[:LONGEST_REASON] + "…"
