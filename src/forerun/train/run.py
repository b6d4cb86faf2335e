"""A run from prompts to a draft model: answer, learn, write.

While it lasts it lives in `NAME.training` beside the folder it will make: the settings, the answers and the checkpoint.
That folder stays, so that what was long in the making can be used again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.drafters.layer_choice import identity
from forerun.engine.loaded import LoadedModel
from forerun.models.checkpoint import read_config
from forerun.models.fields import read_json
from forerun.models.transformer import Transformer
from forerun.train.answers import AnswerOptions, Progress, answer_prompts, read_answers
from forerun.train.distil import Distil
from forerun.train.evaluate import CHAIN, held_back_tokens, tokens_per_pass
from forerun.train.files import write_whole
from forerun.train.folder import write_draft
from forerun.train.loop import Loop, LoopOptions, News, Standing
from forerun.train.processes import Processes
from forerun.train.prompts import Prompt, hold_back
from forerun.train.student import StudentShape, new_student, student_hf_config
from forerun.train.texts import Text

MEASURED = 128
"""Tokens of each held-back answer, at most."""


@dataclass(frozen=True)
class Settings:
    shape: StudentShape
    answers: AnswerOptions
    loop: LoopOptions
    held_back: int = 32
    """Prompts that are not learned from, to measure with."""


def work_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


def check_out(out: Path, resume: bool) -> None:
    """Refuse to overwrite something, and to go on with nothing."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: delete it, or choose another --out")
    work = work_folder(out)
    if resume and not work.is_dir():
        raise ValueError(f"there is no {work}, so there is nothing to go on with: leave --resume out")
    if work.exists() and not resume:
        raise ValueError(f"{work} holds a run that was begun: go on with --resume, delete it, or choose another --out")


def target_of(loaded: LoadedModel, name: str) -> tuple[Transformer, dict[str, Any]]:
    """The target as a teacher, and its config.json."""
    if not isinstance(loaded.target, Transformer) or loaded.folder is None:
        raise ValueError(f"{name} runs through an adapter, which cannot teach: take a Llama, Mistral, Qwen or Gemma")
    return loaded.target, read_config(loaded.folder)


class DraftRun:
    """A draft model for `loaded`, which the record calls `name`."""

    def __init__(
        self, loaded: LoadedModel, name: str, prompts: list[Prompt], settings: Settings, processes: Processes
    ) -> None:
        self.loaded, self.name, self.settings, self.processes = loaded, name, settings, processes
        self.target, hf = target_of(loaded, name)
        self.learned, self.held = hold_back(prompts, settings.held_back, settings.loop.seed)
        self.hf = student_hf_config(hf, self.target.config, settings.shape)
        self.student = new_student(self.hf, self.target, settings.loop.seed)
        self.longest = min(settings.answers.longest, self.target.context_length)
        self.measured = min(MEASURED, settings.answers.max_tokens)
        self.questions = held_back_tokens(loaded, self.held, self.longest, self.measured)

    def answer(self, work: Path, tell: Progress) -> list[Text]:
        """The first process asks; the others read what it wrote."""
        path = work / "answers.jsonl"
        if self.processes.first:
            work.mkdir(parents=True, exist_ok=True)
            self._check_settings(work / "settings.json")
            answer_prompts(self.loaded, self.learned, path, self.settings.answers, tell)
        self.processes.from_first(0.0, self.target.device)
        return read_answers(path, self.learned)

    def learn(self, texts: list[Text], work: Path, tell: Callable[[News], None]) -> Standing:
        method = Distil(self.student, self.target)
        place = work / "checkpoint.pt"
        loop = Loop(method, texts, self.settings.loop, self.measure, place, self.processes, tell)
        if place.exists():
            loop.resume()
        return loop.run()

    def measure(self) -> float:
        return tokens_per_pass(
            self.loaded, self.student, self.questions, max_tokens=self.measured, longest=self.longest
        )

    def train(
        self, out: Path, work: Path, about: Mapping[str, Any], ask: Progress, tell: Callable[[News], None]
    ) -> dict[str, Any]:
        """Everything. What the folder says of itself comes back; `about` is added to it."""
        start = time.perf_counter()
        texts = self.answer(work, ask)
        standing = self.learn(texts, work, tell)
        manifest = self._manifest(texts, standing)
        manifest |= {"last_session_seconds": time.perf_counter() - start, "provenance": dict(about)}
        if self.processes.first:
            assert self.loaded.folder is not None
            write_draft(out, self.student, self.hf, self.loaded.folder, manifest)
        return manifest

    def _fixed(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        asked = "\n".join(sorted(json.dumps(asdict(prompt)) for prompt in [*self.learned, *self.held]))
        return {
            "target": identity(self.target),
            "device": self.target.device.type,
            "prompts": hashlib.sha256(asked.encode()).hexdigest(),
            "batch": self.settings.loop.batch,
            "seed": self.settings.loop.seed,
            "held_back": self.settings.held_back,
            "max_tokens": self.settings.answers.max_tokens,
            "sampled": self.settings.answers.sampled,
            **asdict(self.settings.shape),
        }

    def _check_settings(self, path: Path) -> None:
        """Note them where the run begins, and compare where it goes on."""
        fixed = self._fixed()
        if not path.exists():
            write_whole(path, (json.dumps(fixed, indent=2) + "\n").encode())
            return
        before = read_json(path)
        changed = sorted(key.replace("_", "-") for key in fixed if before.get(key) != fixed[key])
        if changed:
            raise ValueError(
                f"the run in {path.parent} was begun with another {', '.join(f'--{key}' for key in changed)}: give the "
                "same as before, or begin anew with another --out"
            )

    def _manifest(self, texts: list[Text], standing: Standing) -> dict[str, Any]:
        history = [
            {("tokens_per_pass" if k == "measure" else k): v for k, v in row.items()} for row in standing.history
        ]
        return {
            "method": "draft",
            "target": {
                "name": self.name,
                "identity": identity(self.target),
                "tokenizer": self.loaded.tokenizer.fingerprint,
            },
            "options": asdict(self.settings),
            "steps": standing.step,
            "best_step": standing.best_step,
            "data": {
                "prompts": len(self.learned),
                "held_back": len(self.questions),
                "texts": len(texts),
                "answer_tokens": sum(len(text.answer) for text in texts),
            },
            "tokens_per_pass": {"before": history[0]["tokens_per_pass"], "after": standing.best, "chain": int(CHAIN)},
            "history": history,
        }
