"""A run from prompts to a drafter: answer, learn, write.

While it lasts it lives in `NAME.training` beside the folder it will make: the settings, the answers and the checkpoint.
That folder stays, so that what was long in the making can be used again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun.engine.loaded import LoadedModel
from forerun.models.checkpoint import read_config
from forerun.models.fields import read_json
from forerun.models.identity import weights_identity
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer
from forerun.train.answers import AnswerOptions, Progress, answer_prompts, read_answers
from forerun.train.files import write_whole
from forerun.train.loop import Loop, LoopOptions, News, Standing
from forerun.train.measure import CHAIN, held_back_tokens, tokens_per_pass
from forerun.train.methods.find import Options, new_method
from forerun.train.methods.method import Method, Task
from forerun.train.processes import Processes
from forerun.train.prompts import Prompt, hold_back
from forerun.train.student import text_part
from forerun.train.texts import Text

MEASURED = 128
"""Tokens of each held-back answer, at most."""


@dataclass(frozen=True)
class Settings:
    method: str
    options: Options
    """Of the method."""
    answers: AnswerOptions
    loop: LoopOptions
    held_back: int = 32
    """Prompts that are not learned from, to measure with."""
    bits: int = 16
    """In which matrices are stored."""
    compile: bool = True
    """Where there is an accelerator."""


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
    return loaded.target, text_part(read_config(loaded.folder))


def _teachable(name: str, model: TargetModel) -> Transformer:
    if not isinstance(model, Transformer):
        raise ValueError(f"{name} runs through an adapter, which cannot be learned beside: take one of `train draft`")
    return model


class Run:
    """A drafter for `loaded`, which the record calls `name`."""

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        prompts: list[Prompt],
        settings: Settings,
        processes: Processes,
        beside: Sequence[str] = (),
    ) -> None:
        """`beside` are draft models that were trained before, as names to load them by."""
        self.loaded, self.name, self.settings, self.processes = loaded, name, settings, processes
        self.target, self.hf = target_of(loaded, name)
        if not self.target.prepared:  # inference would, and what it makes cannot be learned through without copies
            self.target.prepare()
        self.identity = weights_identity(self.target)
        self.learned, self.held = hold_back(prompts, settings.held_back, settings.loop.seed)
        self.longest = min(settings.answers.longest, self.target.context_length)
        self.measured = min(MEASURED, settings.answers.max_tokens)
        self.questions = held_back_tokens(loaded, self.held, self.longest, self.measured)
        self.beside = {other: _teachable(other, loaded.load_beside(other)) for other in beside}

    def answer(self, work: Path, given: Path | None, tell: Progress) -> list[Text]:
        """The first process asks, unless answers are given; the others read what it wrote."""
        path = given or work / "answers"
        if self.processes.first:
            work.mkdir(parents=True, exist_ok=True)
            self._check_settings(work / "settings.json", given)
            if given is None:
                answer_prompts(self.loaded, self.learned, path, self.settings.answers, tell)
        self.processes.from_first(0.0, self.target.device)
        tell("Reading answers", 0, 0)
        return self.texts(path)

    def texts(self, path: Path) -> list[Text]:
        """Answers to the prompts that are learned from."""
        texts = read_answers(path, self.learned, self.identity)
        return [Text(text.tokens[: self.longest], text.asked) for text in texts if text.asked < self.longest]

    def new_method(self, texts: Sequence[Text]) -> Method:
        assert self.loaded.folder is not None
        settings = self.settings
        task = Task(self.target, self.hf, self.loaded.folder, texts, settings.loop.seed, settings.compile, self.beside)
        return new_method(settings.method, settings.options, task)

    def learn(self, method: Method, texts: list[Text], work: Path, tell: Callable[[News], None]) -> Standing:
        place = work / "checkpoint.pt"
        loop = Loop(method, texts, self.settings.loop, partial(self.measure, method), place, self.processes, tell)
        if place.exists():
            loop.resume()
        return loop.run()

    def measure(self, method: Method) -> float:
        return tokens_per_pass(
            self.loaded,
            partial(method.drafter, bits=self.settings.bits),
            self.questions,
            max_tokens=self.measured,
            longest=self.longest,
        )

    def train(
        self,
        out: Path,
        work: Path,
        about: Mapping[str, Any],
        ask: Progress,
        tell: Callable[[News], None],
        answers: Path | None = None,
    ) -> dict[str, Any]:
        """Everything. What the folder says of itself comes back; `about` is added to it."""
        start = time.perf_counter()
        texts = self.answer(work, answers, ask)
        method = self.new_method(texts)
        standing = self.learn(method, texts, work, tell)
        manifest = self._manifest(texts, standing)
        manifest |= {"last_session_seconds": time.perf_counter() - start, "provenance": dict(about)}
        if self.processes.first:
            method.write(out, manifest, self.settings.bits)
        return {"method": self.settings.method, **manifest}

    def _fixed(self, given: Path | None) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        asked = "\n".join(sorted(json.dumps(asdict(prompt)) for prompt in [*self.learned, *self.held]))
        settings = self.settings
        asking = {name: value for name, value in asdict(settings.answers).items() if name != "seed"}
        return {
            "method": settings.method,
            "target": self.identity,
            "device": self.target.device.type,
            "prompts": hashlib.sha256(asked.encode()).hexdigest(),
            "answers": None if given is None else [given.name, given.stat().st_size],
            "batch": settings.loop.batch,
            "batch_tokens": settings.loop.batch_tokens,
            "seed": settings.loop.seed,
            "held_back": settings.held_back,
            "beside": sorted(weights_identity(other) for other in self.beside.values()),
            **asking,
            **asdict(settings.options),
        }

    def _check_settings(self, path: Path, given: Path | None) -> None:
        """Note them where the run begins, and compare where it goes on."""
        fixed = self._fixed(given)
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
            "target": {
                "name": self.name,
                "identity": self.identity,
                "tokenizer": self.loaded.tokenizer.fingerprint,
            },
            "options": asdict(self.settings),
            "beside": [Path(other).name for other in self.beside],
            "steps": standing.step,
            "best_step": standing.best_step,
            "learning_seconds": standing.seconds,
            "data": {
                "prompts": len(self.learned),
                "held_back": len(self.questions),
                "texts": len(texts),
                "answer_tokens": sum(len(text.answer) for text in texts),
            },
            "tokens_per_pass": {"before": history[0]["tokens_per_pass"], "after": standing.best, "chain": CHAIN},
            "history": history,
        }
