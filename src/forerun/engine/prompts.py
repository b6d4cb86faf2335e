"""The forms a prompt may have: a text, token ids, or the messages of a chat; one, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, cast

Message: TypeAlias = dict[str, str]
"""`role` and `content`."""
Prompt: TypeAlias = str | list[int] | list[Message]

_FORMS = "give a text, a list of token ids, a list of messages, or a list of these"


class PromptTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


def as_prompts(prompts: object) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether a single one was meant."""
    if _is_prompt(prompts):
        return [cast("Prompt", prompts)], True
    if not isinstance(prompts, list | tuple) or not prompts:
        raise ValueError(f"the prompt is {'empty' if prompts == [] else repr(prompts)}: {_FORMS}")
    for prompt in prompts:
        if not _is_prompt(prompt):
            raise ValueError(f"there is no prompt in {prompt!r}: {_FORMS}")
    return cast("list[Prompt]", list(prompts)), False


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    tokens = all(isinstance(item, int) and not isinstance(item, bool) for item in prompt)
    return tokens or all(isinstance(item, Mapping) for item in prompt)


def to_tokens(prompt: Prompt, tokenizer: PromptTokenizer, *, chat: bool | None) -> list[int]:
    """A text becomes a user's message if `chat`, or if it is None and the model has a template for chats."""
    if not _is_prompt(prompt):
        raise ValueError(
            f"there is no prompt in {prompt!r}: give a text, a list of token ids or a list of messages, one at a time"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: say something")
        _refuse_halves(prompt)
        if not (tokenizer.has_chat_template if chat is None else chat):
            return tokenizer.encode(prompt)
        return tokenizer.apply_chat([{"role": "user", "content": prompt}])
    if all(isinstance(item, int) for item in prompt):
        return list(cast("list[int]", prompt))
    return tokenizer.apply_chat([_message(message) for message in cast("list[Message]", prompt)])


def _message(message: Message) -> dict[str, str]:
    if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
        raise ValueError(f"the message {dict(message)!r} is not understood: give it a role and a content, both texts")
    for text in message.values():
        _refuse_halves(text)
    return dict(message)


def _refuse_halves(text: str) -> None:
    """Half a surrogate pair, as a terminal in another encoding leaves it, is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt has no character at place {error.start}: give valid Unicode") from None
