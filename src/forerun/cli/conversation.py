"""A conversation: what was said, what of it still fits into the context, and how it is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forerun.cli.files import write_whole

Message = dict[str, str]


@dataclass
class Conversation:
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    """The user's and the assistant's, in turn."""

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> str:
        """The user's last message; it and what was answered are gone."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        raise ValueError("nothing was said yet: say something first")

    def fitting(self, length: Callable[[list[Message]], int], room: int) -> tuple[list[Message], int]:
        """The latest messages that take at most `room` tokens, the system's always among them, and how many were left
        out. The last message stays even if it does not fit: the engine says so better."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        start = 0
        last = max((place for place, message in enumerate(self.messages) if message["role"] == "user"), default=0)
        while start < last and length(head + self.messages[start:]) > room:
            start += 1
            while start < last and self.messages[start]["role"] != "user":
                start += 1  # a conversation begins with the user
        return head + self.messages[start:], start

    def save(self, path: Path) -> None:
        content = {"system": self.system, "messages": self.messages}
        write_whole(path, (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Conversation:
        try:
            content = json.loads(path.read_bytes().decode())
        except ValueError:
            raise ValueError(f"{path} holds no conversation: name a file that /save wrote") from None
        match content:
            case {"system": None | str() as system, "messages": list(messages)} if all(map(_is_message, messages)):
                return cls(system, messages)
        raise ValueError(f"{path} holds no conversation: name a file that /save wrote")


def _is_message(message: object) -> bool:
    match message:
        case {"role": "user" | "assistant", "content": str(), **more}:
            return not more
    return False
