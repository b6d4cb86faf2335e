"""What the target itself says to the prompts: the text that a drafter learns to foresee.

A line of JSON for each conversation, written as soon as its last turn is answered. A run that was interrupted goes on
behind the last whole line. Whether a prompt is answered greedily or with a seed depends on its id and the run's seed
only, so an interruption does not change the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel, default_slots
from forerun.train.files import told_when_full
from forerun.train.prompts import Prompt
from forerun.train.texts import Text

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

CPU_BATCH, GPU_BATCH = 8, 64
ROUND = 4
"""Conversations that are answered before they are written, in batches: so that few places of a batch stay empty."""
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

    def params(self, prompt: Prompt, room: int) -> SamplingParams:
        number = int.from_bytes(hashlib.sha256(f"{self.seed} {prompt.id}".encode()).digest()[:7], "big")
        greedy = number % 1000 >= round(1000 * self.sampled)
        return SamplingParams(
            temperature=0.0 if greedy else SAMPLED,
            seed=None if greedy else number,
            max_tokens=min(self.max_tokens, room),
        )


def open_llm(loaded: LoadedModel, longest: int, drafter: str = "none", **more: Any) -> LLM:
    """With a cache for a batch of such texts, if the memory has room for it."""
    batch = GPU_BATCH if loaded.target.device.type == "cuda" else CPU_BATCH
    slots = min(batch * longest, default_slots(loaded.target, batch))
    return LLM(loaded, drafter, max_batch=batch, cache_tokens=slots, **more)


def answer_prompts(
    loaded: LoadedModel, prompts: Sequence[Prompt], path: Path, options: AnswerOptions, tell: Progress
) -> None:
    """Write the answers that the file does not have yet."""
    done = _answered(path)
    waiting = [prompt for prompt in prompts if prompt.id not in done]
    tell("Answering prompts", len(prompts) - len(waiting), len(prompts))
    if not waiting:
        return
    some = ROUND * (GPU_BATCH if loaded.target.device.type == "cuda" else CPU_BATCH)
    with open_llm(loaded, options.longest) as llm, told_when_full(path):
        for start in range(0, len(waiting), some):
            entries = converse(llm, waiting[start : start + some], options)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))
            asked = len(prompts) - len(waiting[start + some :])
            tell("Answering prompts", asked, len(prompts))


def converse(llm: LLM, prompts: Sequence[Prompt], options: AnswerOptions) -> list[dict[str, Any]]:
    """All turns of the conversations, one turn of all at a time. A model without a chat template gets the first turn
    only, as the beginning of a text."""
    chats = llm.model.tokenizer.has_chat_template
    talks: list[list[dict[str, str]]] = [[] for _ in prompts]
    entries: list[dict[str, Any]] = [{"id": prompt.id, "turns": []} for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts) if chats else 1):
        asked, tokens, params = [], [], []
        for index, prompt in enumerate(prompts):
            if turn >= len(prompt.turns) or len(entries[index]["turns"]) < turn:
                continue
            talks[index].append({"role": "user", "content": prompt.turns[turn]})
            own = llm.tokens(talks[index] if chats else prompt.turns[0])
            room = min(options.longest, llm.context_length) - len(own)
            if room > 0:
                asked.append(index)
                tokens.append(own)
                params.append(options.params(prompt, room))
        if not asked:
            break
        for index, own, told in zip(asked, tokens, llm.generate(tokens, params), strict=True):
            entries[index]["turns"].append({"prompt": own, "answer": told.token_ids})
            talks[index].append({"role": "assistant", "content": told.text})
    return entries


def read_answers(path: Path, prompts: Sequence[Prompt]) -> list[Text]:
    """The texts of these prompts, in their order, whatever the order in the file."""
    found = {entry["id"]: entry["turns"] for entry in _entries(path)}
    turns = [turn for prompt in prompts for turn in found.get(prompt.id, [])]
    texts = [Text(tuple(turn["prompt"]), tuple(turn["answer"])) for turn in turns]
    if not texts:
        raise ValueError("no prompt leaves room for an answer: give shorter ones")
    return texts


def _answered(path: Path) -> set[str]:
    """The ids of the conversations in the file. A last line that was torn by an interruption is cut off."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return {entry["id"] for entry in _entries(path)}


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
                yield {"id": str(entry["id"]), "turns": list(entry["turns"])}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"line {number} of {path} is damaged: delete it, and it is answered again") from None
