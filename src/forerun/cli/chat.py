"""`forerun chat`: a conversation with a model, answers streamed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.conversation import Conversation, Message
from forerun.cli.model_options import ModelOptions, SamplingOptions, parse_value, takes
from forerun.cli.statistics import legend, line, panel
from forerun.cli.streaming import end_line, print_piece

if TYPE_CHECKING:
    from forerun.core.params import SamplingParams
    from forerun.engine.llm import LLM

SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
}
"""What /set changes."""


@takes(model=ModelOptions, sampling=SamplingOptions)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told before everything.")] = None,
    load: Annotated[Path | None, typer.Option(help="Go on with a conversation that /save wrote.")] = None,
    color: Annotated[bool, typer.Option("--color", help="Colour accepted, corrected and bonus tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each answer, and nothing else.")] = False,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. Answers stream; Ctrl-C stops the answer, Ctrl-D or /quit ends the conversation.

    Lines that begin with a slash are commands, /help lists them. When the conversation outgrows the model's context,
    the oldest messages are left out. Reads a pipe line by line as well.

    [bold]Examples[/]

    A conversation:  [green]forerun chat --drafter ngram[/]

    Livelier:  [green]forerun chat --temperature 0.7 --system "You are a pirate."[/]

    From a script:  [green]printf 'Hi!\\nWhat did I say?\\n' | forerun chat --json[/]
    """
    conversation = Conversation() if load is None else Conversation.load(load)
    if system is not None:
        conversation.system = system
    params = sampling.params()
    with model.open(max_batch=1) as llm:
        if not llm.model.tokenizer.has_chat_template:
            raise ValueError(f"{model.model} has no chat template: use `forerun generate --raw`, or an instruct model")
        talk = Talk(llm, conversation, params, color=color, as_json=as_json)
        if talk.watched:
            talk.note(f"{model.model}, drafter {model.drafter_name}. /help lists the commands.")
            if color:
                talk.console.print(legend())
        if not model.lossless:
            talk.note(f"{model.rule} is lossy: sampled text does not have the model's law.")
        for entry in _lines(talk):
            if not talk.take(entry):
                break
    if talk.failed and not talk.watched:
        raise typer.Exit(1)


def _lines(talk: Talk) -> Iterator[str]:
    """What the user enters, until the end of input."""
    if sys.stdin is None:
        raise ValueError("cannot read standard input: it is closed")
    if not talk.watched:
        try:
            yield from (entry.rstrip("\r\n") for entry in sys.stdin)
        except UnicodeDecodeError:
            raise ValueError("standard input is not text: give UTF-8") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for input()
    while True:
        try:
            yield input("› ")
        except EOFError:
            end_line()
            return
        except KeyboardInterrupt:
            talk.note("\n/quit or Ctrl-D ends the conversation.")


@dataclass
class Talk:
    """What a line does to a conversation."""

    llm: LLM
    conversation: Conversation
    params: SamplingParams
    color: bool = False
    as_json: bool = False
    failed: bool = False
    """Whether something that was asked for could not be done."""
    watched: bool = field(default_factory=lambda: sys.stdin is not None and sys.stdin.isatty())
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    def take(self, entry: str) -> bool:
        """Do what the line says; False ends the conversation."""
        entry = entry.strip()
        if not entry:
            return True
        word, _, rest = entry.partition(" ")
        try:
            if not entry.startswith("/"):
                self.ask(entry)
            elif word == "/quit":
                return False
            elif word in COMMANDS:
                COMMANDS[word].run(self, rest.strip())
            else:
                raise ValueError(f"there is no command {word}: /help lists them")
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            self.failed = True
            reason = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"cannot open {error.filename}: {error.strerror}"
            self.console.print(Text(" ".join(reason.split()), style="red"), soft_wrap=True)
        return True

    def ask(self, text: str) -> None:
        """Say something and stream the answer, as far as it gets. A message that is refused was never said."""
        self.conversation.say(text)
        context = self.llm.context_length
        room = context - min(self.params.max_tokens, context // 4)  # a large max_tokens is a limit, not a need
        try:
            messages, left_out = self.conversation.fitting(lambda told: len(self.llm.tokens(told)), room)
            if left_out:
                self.note(f"(the first {left_out} messages no longer fit and are left out)")
            self._answer(messages)
        except ValueError:
            self.conversation.take_back()
            raise

    def _answer(self, messages: list[Message]) -> None:
        writing = self.llm.start(messages, self.params)
        stopped = False
        try:
            for piece in writing.pieces():
                if not self.as_json:
                    print_piece(piece, color=self.color)
        except KeyboardInterrupt:
            stopped = True
        completion = writing.completion()
        self.conversation.answer(completion.text)
        if self.as_json:
            typer.echo(json.dumps(completion.as_dict(), allow_nan=False))
            return
        end_line()
        self.note(("stopped; " if stopped else "") + line(completion.stats))

    def note(self, text: str) -> None:
        if not self.as_json:
            self.console.print(Text(text, style="dim"), soft_wrap=True)

    # --- commands ----------------------------------------------------------------------------------------------

    def help(self, _: str) -> None:
        """list the commands"""
        for word, command in COMMANDS.items():
            self.note(f"{word} {command.takes}".ljust(18) + command.summary)
        self.note("/quit".ljust(18) + "end the conversation")

    def reset(self, _: str) -> None:
        """forget what was said; the system message stays"""
        self.conversation.messages.clear()
        self.note("Forgotten.")

    def set_system(self, text: str) -> None:
        """what the model is told before everything; nothing for none"""
        self.conversation.system = text or None
        self.note("Told." if text else "There is no system message now.")

    def save(self, path: str) -> None:
        """write the conversation to a file"""
        self.conversation.save(_named(path, "/save"))
        self.note(f"Saved to {path}.")

    def load(self, path: str) -> None:
        """go on with a saved conversation"""
        self.conversation = Conversation.load(_named(path, "/load"))
        self.note(f"{len(self.conversation.messages)} messages.")

    def stats(self, _: str) -> None:
        """what all answers together cost"""
        if not self.as_json:
            self.console.print(panel(self.llm.statistics, title="All answers"))

    def set(self, text: str) -> None:
        """change how to sample, as in /set temperature 0.7; alone, show it"""
        if not text:
            self.note("\n".join(f"{name} {getattr(self.params, name)}" for name in SETTINGS))
            return
        name, _, value = text.partition(" ")
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name}: use one of {', '.join(SETTINGS)}")
        value = value.strip()
        parsed = None if name == "seed" and value == "none" else parse_value(name, value, SETTINGS[name])
        changed: dict[str, Any] = {name: parsed}
        self.params = replace(self.params, **changed)
        self.note(f"{name} {parsed}")

    def retry(self, _: str) -> None:
        """answer the last message again"""
        self.ask(self.conversation.take_back())


def _named(path: str, command: str) -> Path:
    if not path:
        raise ValueError(f"{command} needs a file: name it, as in {command} talk.json")
    return Path(path).expanduser()


@dataclass(frozen=True)
class Command:
    run: Callable[[Talk, str], None]
    takes: str = ""

    @property
    def summary(self) -> str:
        return self.run.__doc__ or ""


COMMANDS = {
    "/help": Command(Talk.help),
    "/reset": Command(Talk.reset),
    "/system": Command(Talk.set_system, "TEXT"),
    "/save": Command(Talk.save, "FILE"),
    "/load": Command(Talk.load, "FILE"),
    "/stats": Command(Talk.stats),
    "/set": Command(Talk.set, "KEY VALUE"),
    "/retry": Command(Talk.retry),
}
