"""A run from prompts to a drafter: answer, learn, write.

While it lasts it lives in `NAME.training` beside the folder it will make: the settings, the answers and the checkpoint.
That folder stays, so that what was long in the making can be used again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.drafters.draft_model import DraftModel, load_draft
from forerun.drafters.find import Setup
from forerun.drafters.multi_draft import MultiDraft
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.loaded import LoadedModel
from forerun.models.checkpoint import read_config
from forerun.models.fields import read_json
from forerun.models.heads.files import HeadFolder, read_head
from forerun.models.heads.shared_draft import SharedDraft, draft_identity
from forerun.models.identity import weights_identity
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer
from forerun.train.answers import AnswerOptions, Progress, answer_prompts, read_answers
from forerun.train.calibrate import DEPTH
from forerun.train.calibrate import answers as own_answers
from forerun.train.examine import Examined, examine
from forerun.train.files import write_whole
from forerun.train.loop import Loop, LoopOptions, News, Standing
from forerun.train.measure import CHAIN, held_back_tokens, tokens_per_pass
from forerun.train.methods.backbone import FOLDER, BackboneMethod, apart
from forerun.train.methods.find import Options, new_method
from forerun.train.methods.method import Method, Task
from forerun.train.methods.side import SideMethod, SideOptions
from forerun.train.processes import Processes
from forerun.train.prompts import Prompt, emphasised, hold_back
from forerun.train.rounding import Rounding
from forerun.train.student import StudentShape, text_part
from forerun.train.texts import Text

MEASURED = 128
"""Tokens of each held-back answer, at most."""
EXAMINED = 16
"""Held-back prompts that a drafter is looked at with in the end."""


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
    emphasis: Mapping[str, int] = field(default_factory=dict)
    """How often answers to prompts of a category are learned, where others are learned once."""


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


def _digest(folder: HeadFolder) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(folder.tensors.items()):
        digest.update(name.encode() + tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _identity(draft: Transformer) -> str:
    return draft_identity(draft) if isinstance(draft, SharedDraft) else weights_identity(draft)


def _earlier(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the training that a drafter had before."""
    told = ("began", "steps", "learning_seconds", "data", "tokens_per_pass", "options", "provenance", "alone")
    return {name: manifest[name] for name in told if name in manifest}


def with_backbone(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a training in two parts."""
    parts = ("steps", "best_step", "learning_seconds", "tokens_per_pass", "history")
    begun = first["tokens_per_pass"]["before"]
    return {
        **second,
        "tokens_per_pass": {**second["tokens_per_pass"], "before": begun},
        "heads_alone": {name: first[name] for name in parts},
    }


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
        begin: Path | None = None,
    ) -> None:
        """`beside` are draft models that were trained before, as names to load them by; `begin` is the folder of a
        drafter whose weights are the first ones."""
        self.loaded, self.name, self.settings, self.processes = loaded, name, settings, processes
        self.target, self.hf = target_of(loaded, name)
        self.target.learned_through = True
        if not self.target.prepared:  # inference would, and what it makes cannot be learned through without copies
            self.target.prepare()
        self.identity = weights_identity(self.target)
        self.learned, self.held = hold_back(prompts, settings.held_back, settings.loop.seed)
        self.longest = min(settings.answers.longest, self.target.context_length)
        self.measured = min(MEASURED, settings.answers.max_tokens)
        self.questions = held_back_tokens(loaded, self.held, self.longest, self.measured)
        setup = Setup(self.target, self.longest, loaded.load_beside)
        self.beside = {other: _teachable(other, load_draft(other, setup)) for other in beside}
        self._beside_identities = sorted(map(_identity, self.beside.values()))
        self.begin = None if begin is None else self._begun(begin)
        shape = settings.options
        if (
            isinstance(shape, SideOptions)
            and shape.backbone
            and any(layer.experts for layer in self.target.config.layers)
        ):
            raise ValueError("--backbone: the target has experts, through which its layers cannot learn: leave it out")
        if settings.bits < 16 and isinstance(shape, StudentShape) and not shape.shares(self.target.config):
            raise ValueError(
                f"--bits is {settings.bits}: a draft with matrices of its own is read as other models are, so give 16"
            )

    def _begun(self, path: Path) -> HeadFolder:
        folder = read_head(path, self.settings.method)
        if folder.target and folder.target != self.identity:
            raise ValueError(
                f"--begin: {path} was trained for another target: name one for {self.name}, or leave it out"
            )
        return folder

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
        texts = read_answers(path, emphasised(self.learned, self.settings.emphasis), self.identity)
        return [Text(text.tokens[: self.longest], text.asked) for text in texts if text.asked < self.longest]

    def new_method(self, texts: Sequence[Text]) -> Method:
        return new_method(self.settings.method, self.settings.options, self._task(texts))

    def second_method(self, first: Method, texts: Sequence[Text]) -> BackboneMethod | None:
        """What goes on where the first has ended, if something does."""
        options = self.settings.options
        if not isinstance(options, SideOptions) or not options.backbone:
            return None
        assert isinstance(first, SideMethod)
        return BackboneMethod(first, options.backbone_rate, self._task(texts))

    def _task(self, texts: Sequence[Text]) -> Task:
        assert self.loaded.folder is not None
        settings = self.settings
        return Task(self.target, self.hf, self.loaded.folder, texts, settings.loop.seed, self.beside, self.begin)

    def learn(
        self,
        method: Method,
        texts: list[Text],
        work: Path,
        tell: Callable[[News], None],
        checkpoint: str = "checkpoint.pt",
    ) -> Standing:
        place = work / checkpoint
        stored = method.first if isinstance(method, BackboneMethod) else method  # the layers stay in 16 bits
        rounding = Rounding(stored.module, self.settings.bits)
        measure = partial(self.measure, method)
        loop = Loop(method, texts, self.settings.loop, measure, place, self.processes, tell, rounding=rounding)
        if place.exists():
            loop.resume()
        # cuDNN's attention makes a plan for every shape it has not met, 90 ms each, and every batch has its own.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return loop.run()

    def measure(self, method: Method) -> float:
        return tokens_per_pass(
            self._drafts_for(method),
            partial(method.drafter, bits=self.settings.bits),
            self.questions,
            max_tokens=self.measured,
            longest=self.longest,
        )

    def _drafts_for(self, method: Method) -> LoadedModel:
        """The target, or what has become of it."""
        return replace(self.loaded, target=method.stored()) if isinstance(method, BackboneMethod) else self.loaded

    def calibration(self, method: Method) -> dict[str, Any]:
        """How right it is on what it drafts for says to prompts that were held back: static trees are made of that.
        Empty where the answers are too short to tell."""
        loaded = self._drafts_for(method)
        assert isinstance(loaded.target, Transformer)
        texts = own_answers(loaded, self.questions[:EXAMINED], self.measured, lambda doing, done, total: None)
        depth = min(DEPTH, max(len(text) - max(2, start) for text, start in texts) - 1)
        if depth < 1:
            return {}
        setup = Setup(loaded.target, max(len(text) for text, _ in texts) + 64, loaded.load_beside)
        drafter = method.drafter(setup, self.settings.bits)
        if isinstance(drafter, MultiDraft):  # the others have a calibration of their own
            drafter = DraftModel(drafter.ahead[0], TreeSpec.parse("1"), loaded.target.vocab_size)
        assert isinstance(drafter, Examined)
        return examine(drafter, loaded.target, texts, depth).kept()

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
        second = self.second_method(method, texts)
        if second is not None:
            standing = self.learn(second, texts, work, tell, "backbone.pt")
            manifest = with_backbone(manifest, self._manifest(texts, standing))
        if self.processes.first:
            ask("Looking at what was learned", 0, 0)
            manifest["calibration"] = self.calibration(second or method)
            manifest |= {"last_session_seconds": time.perf_counter() - start, "provenance": dict(about)}
            if second is None:
                method.write(out, manifest, self.settings.bits)
            else:
                manifest |= self._write_backbone(second, out, manifest)
        return {"method": self.settings.method, **manifest}

    def _write_backbone(self, method: BackboneMethod, out: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Heads and the new model below them; what the heads' folder says besides comes back."""
        stored = method.stored()
        told = own_answers(self.loaded, self.questions, self.measured, lambda doing, done, total: None)
        texts = [Text.of(text[: start + 1], text[start + 1 :]) for text, start in told]
        distance = asdict(apart(self.target, stored, texts))
        original = manifest["target"]
        about = {
            "target": {
                "name": f"{out.name}/{FOLDER}",
                "identity": weights_identity(stored),
                "tokenizer": original["tokenizer"],
            },
            "backbone": {"original": original, "distance": distance},
        }
        method.write(out, {**manifest, **about}, self.settings.bits)
        words = (
            f"This is no longer {self.name}: its layers went on learning together with the {method.name} heads in the "
            "folder above, and its text is its own."
        )
        provenance = manifest["provenance"]
        method.write_backbone(out, {"about": words, **about["backbone"], "provenance": provenance})
        return about

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
            "emphasis": dict(settings.emphasis),
            "beside": self._beside_identities,
            "begin": None if self.begin is None else _digest(self.begin),
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
            **({} if self.begin is None else {"began": _earlier(self.begin.manifest)}),
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
