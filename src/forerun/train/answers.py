"""What the target itself says to the prompts: the text that a drafter learns to foresee.

Whether a prompt is answered greedily or with a seed depends on its id and the run's seed only, so an interruption does
not change the texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.params import SamplingParams
from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import to_tokens
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer
from forerun.train.answer_file import AnswerFile, Conversation
from forerun.train.files import told_when_full
from forerun.train.prompts import Prompt
from forerun.train.texts import Text
from forerun.train.writing import Writer

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

WRITTEN = 4
"""Conversations that are written to the file together, in batches."""
SAMPLED = 1.0
"""The temperature of the answers that are not greedy: the model's own law."""


@dataclass(frozen=True)
class AnswerOptions:
    max_tokens: int = 256
    sampled: float = 0.5
    """The share of prompts that are answered by sampling."""
    seed: int = 0
    longest: int = 2048
    """Tokens of prompt and answer together; a prompt that leaves no room for an answer is not asked."""
    times: int = 1
    """How often each prompt is asked. A greedy answer would be the same again: from the second time on all are
    sampled."""

    def params(self, prompt: Prompt, room: int, time: int = 0) -> SamplingParams:
        name = f"{self.seed} {prompt.id}" + (f" {time}" if time else "")
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        greedy = not time and number % 1000 >= round(1000 * self.sampled)
        return SamplingParams(
            temperature=0.0 if greedy else SAMPLED,
            seed=None if greedy else number,
            max_tokens=min(self.max_tokens, room),
        )


@dataclass
class Talk:
    """A conversation on its way."""

    prompt: Prompt
    time: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Text] = field(default_factory=list)

    @property
    def key(self) -> str:
        return answer_key(self.prompt, self.time)


def answer_key(prompt: Prompt, time: int) -> str:
    return f"{prompt.key} {time}"


def open_answers(path: Path, loaded: LoadedModel, options: AnswerOptions) -> AnswerFile:
    """The file to add answers to; one that was begun otherwise is refused."""
    about = {"target": target_identity(loaded), "options": asdict(options)}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return AnswerFile.create(path, about)
    file = AnswerFile(path)
    before = dict(file.about.get("options", {}))
    # What was answered stays right when more is asked for.
    changed = [name for name, value in asdict(options).items() if name != "times" and before.get(name) != value]
    if file.about.get("target") != about["target"]:
        changed.insert(0, "target")
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise ValueError(f"{path} was begun with another {flags}: give the same as before, or name another file")
    file.cut_torn()
    return file


def target_identity(loaded: LoadedModel) -> str:
    assert isinstance(loaded.target, Transformer)
    return weights_identity(loaded.target)


def answer_prompts(
    loaded: LoadedModel, prompts: Sequence[Prompt], path: Path, options: AnswerOptions, tell: Progress
) -> None:
    """Write the answers that the file does not have yet."""
    with told_when_full(path):
        file = open_answers(path, loaded, options)
        done = {conversation.key for conversation in file.conversations()}
        asked = [Talk(prompt, time) for time in range(options.times) for prompt in prompts]
        waiting = [talk for talk in asked if talk.key not in done]
        tell("Answering prompts", len(asked) - len(waiting), len(asked))
        if not waiting:
            return
        writer = Writer(loaded, options.longest)
        some: list[Conversation] = []
        with ThreadPoolExecutor(1) as aside:  # files are compressed while the next answers are written
            last: Future[None] | None = None
            for number, talk in enumerate(converse(writer, waiting, options), start=1):
                some.append(Conversation(talk.key, talk.turns))
                if len(some) == WRITTEN * writer.batch or number == len(waiting):
                    if last is not None:
                        last.result()
                    last, some = aside.submit(file.append, some), []
                    tell("Answering prompts", len(asked) - len(waiting) + number, len(asked))
            if last is not None:
                last.result()


def converse(writer: Writer, talks: Sequence[Talk], options: AnswerOptions) -> Iterator[Talk]:
    """Lead the conversations, and give each when it is over. A model without a chat template gets the first turn only,
    as the beginning of a text."""
    tokenizer = writer.loaded.tokenizer
    chats = tokenizer.has_chat_template
    openings: dict[str, list[int]] = {}
    on_way: dict[int, tuple[Talk, list[int]]] = {}

    def ask(talk: Talk) -> bool:
        """Whether there was something to ask, and room for an answer."""
        turn = len(talk.turns)
        if turn >= (len(talk.prompt.turns) if chats else 1):
            return False
        talk.messages.append({"role": "user", "content": talk.prompt.turns[turn]})
        known = openings.get(talk.prompt.key) if turn == 0 else None
        tokens = known or to_tokens(talk.messages if chats else talk.prompt.turns[0], tokenizer, chat=None)
        if turn == 0 and options.times > 1:
            openings[talk.prompt.key] = tokens
        room = writer.longest - len(tokens)
        if room < 1:
            return False
        on_way[writer.add(tokens, options.params(talk.prompt, room, talk.time))] = talk, tokens
        return True

    waiting = iter(talks)
    some_left = True
    while some_left or on_way:
        while some_left and writer.pending < 2 * writer.batch:
            talk = next(waiting, None)
            if talk is None:
                some_left = False
            elif not ask(talk):
                yield talk
        for request, written in writer.step() if on_way else ():
            talk, tokens = on_way.pop(request)
            talk.turns.append(Text.of(tokens, written))
            talk.messages.append({"role": "assistant", "content": tokenizer.decode(written)})
            if not ask(talk):
                yield talk


def read_answers(path: Path, prompts: Sequence[Prompt], target: str = "") -> list[Text]:
    """The texts of these prompts, in their order, whatever the order in the file. Answers of another target than the
    one named are refused."""
    file = AnswerFile(path)
    if target and file.about.get("target") != target:
        raise ValueError(f"{path} has the answers of another target: make some with `forerun train answers`")
    found: dict[str, list[tuple[int, list[Text]]]] = {}
    for conversation in file.conversations():
        key, _, time = conversation.key.rpartition(" ")
        found.setdefault(key, []).append((int(time), conversation.turns))
    texts = [text for prompt in prompts for _, turns in sorted(found.get(prompt.key, []), key=_time) for text in turns]
    if not texts:
        raise ValueError(
            f"{path} has no answers to these prompts: give the prompts that were asked, or shorter ones, which leave "
            "room for an answer"
        )
    return texts


def _time(entry: tuple[int, Any]) -> int:
    return entry[0]
