"""Text to tokens and back, and chats to prompts: a small face on Hugging Face's tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_MARK = "forerun marks the end of a turn"


class Tokenizer:
    """Wraps a tokenizer of `transformers`."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._backend = _decoding_backend(wrapped)

    @property
    def in_transformers(self) -> Any:
        """The one that is wrapped, for libraries that read it themselves."""
        return self._wrapped

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        if not any((folder / name).exists() for name in FILES):
            raise ValueError(f"{folder} has no tokenizer: put the model's tokenizer.json there")
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except Exception as error:  # whatever a broken file makes the libraries raise
            reason = " ".join(str(error).split())[:160]
            raise ValueError(f"cannot read the tokenizer in {folder} ({reason}): fetch its files again") from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """`special`: with the start token, where the model wants one."""
        ids: list[int] = self._wrapped.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        else:
            text = self._wrapped.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The prompt after which the assistant speaks."""
        return self.encode(self._render(messages, prompt=True), special=False)

    def _render(self, messages: Sequence[dict[str, str]], *, prompt: bool) -> str:
        if not self.has_chat_template:
            raise ValueError("this model has no chat template: give plain text, or take an instruct model")
        try:
            text: str = self._wrapped.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program of the model's makers, and raises what it likes
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the model's chat template refuses these messages ({reason}): change them") from None
        return text

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token to id, the added ones included."""
        return dict(self._wrapped.get_vocab())

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly if their vocabularies are."""
        digest = hashlib.sha256()
        for token, index in sorted(self.vocab.items(), key=lambda entry: (entry[1], entry[0])):
            digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def bos(self) -> int | None:
        return _id(self._wrapped.bos_token_id)

    @cached_property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text: the end token, and the one with which the chat template closes a turn."""
        ends = {_id(self._wrapped.eos_token_id), self._turn_end()}
        return frozenset(end for end in ends if end is not None)

    def _turn_end(self) -> int | None:
        """The special token that the template puts behind what the assistant said."""
        if not self.has_chat_template:
            return None
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._render(talk, prompt=False)
        except ValueError:  # a template that wants other messages ends turns in a way of its own
            return None
        behind = text.rpartition(_MARK)[2]
        special = set(self._wrapped.all_special_ids) | set(self._wrapped.added_tokens_decoder)
        ids = self.encode(behind.lstrip(), special=False)
        return ids[0] if ids and ids[0] in special else None


def _decoding_backend(wrapped: Any) -> Any | None:
    """The tokenizer behind one of `transformers`, if that adds nothing to what it decodes but time: a token of every
    text is decoded in every step, and most of that time went into finding out what kind of list it is."""
    from transformers import PreTrainedTokenizerFast

    kind = type(wrapped)
    if not isinstance(wrapped, PreTrainedTokenizerFast):
        return None
    as_it_is = kind._decode is PreTrainedTokenizerFast._decode and kind.decode is PreTrainedTokenizerFast.decode
    return wrapped.backend_tokenizer if as_it_is else None


def _id(value: Any) -> int | None:
    return int(value) if value is not None else None
