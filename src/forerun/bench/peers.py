"""Other systems as contestants, each through its public API: transformers, vLLM, OpenVINO GenAI.

They get the same token ids as our engine and answer with token ids, which are counted as ours are. One that is not
installed, or cannot do what is asked, says so when it is started, and that is its row. They take closed batches only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from forerun.bench.cases import Setting
from forerun.bench.contestants import Contestant, Messages, prompt_tokens
from forerun.bench.measures import Answer, Work
from forerun.core.params import SamplingParams
from forerun.engine.statistics import Statistics
from forerun.models.tokenizer import Tokenizer

LOOKUP = 10
"""Tokens that prompt lookup copies."""

PEERS: dict[str, str] = {
    "transformers": "transformers",
    "transformers-lookup": "transformers",
    "transformers-assistant": "transformers",
    "vllm": "vllm",
    "vllm-lookup": "vllm",
    "openvino": "openvino-genai",
    "openvino-lookup": "openvino-genai",
}
"""Names that stand beside drafters, and the package each needs."""
OPTIONS = {
    "transformers-assistant": ("model",),
    "openvino": ("model",),
    "openvino-lookup": ("model",),
    "vllm": ("memory",),
    "vllm-lookup": ("memory",),
}
"""model: the assistant, or the model in OpenVINO's own format (a folder, or a GGUF file, in whatever precision).
memory: the share of the device that vLLM may take."""
VLLM_SHARE = 0.3
"""Twice, with and without lookup, and our own engine is on the same device."""

OPENVINO_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def versions(names: Sequence[str]) -> dict[str, str]:
    """Of the peers' packages that are installed."""
    found = {}
    for package in dict.fromkeys(PEERS[name] for name in names):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass
class Peers:
    """What peers are started with; models stay in memory over rounds."""

    folder: Path | None
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    _loaded: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def start(self, name: str, setting: Setting) -> Contestant:
        package = PEERS[name]
        if setting.arrivals is not None:
            raise ValueError(f"{name} is measured in closed batches only")
        try:
            import_module(package.replace("-", "_"))
        except ImportError:
            raise ValueError(f"{name} is not installed: pip install {package}") from None
        if self.folder is None:
            raise ValueError(f"{name} needs the model in a folder")
        if package == "transformers":
            return self._transformers(name, setting.batch)
        return self._vllm(name, setting.batch) if package == "vllm" else self._openvino(name, setting.batch)

    def _option(self, name: str, key: str, what: str) -> str:
        value = self.options.get(name, {}).get(key)
        if value is None:
            raise ValueError(f"{name} needs {what}: name it with --drafter-option {name}.{key}=…")
        return value

    def _transformers(self, name: str, batch: int) -> Contestant:
        more: dict[str, Any] = {}
        if name != "transformers":
            _one_by_one(name, batch)
        if name == "transformers-lookup":
            more["prompt_lookup_num_tokens"] = LOOKUP
        if name == "transformers-assistant":
            more["assistant_model"] = self._model(self._option(name, "model", "an assistant"), "assistant")
        return Transformers(self._model(str(self.folder)), self.tokenizer, batch, more)

    def _model(self, folder: str, role: str = "target") -> Any:
        """One object for all that use it in that role: passes of the target are counted, those of an assistant not."""
        key = (role, folder)
        if key not in self._loaded:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, local_files_only=True)
            self._loaded[key] = model.to(self.device)
        return self._loaded[key]

    def _vllm(self, name: str, batch: int) -> Contestant:
        """Only those of one batch are there at a time: each takes its share of the device, whatever it needs."""
        key = ("vllm", name, str(batch))
        if key not in self._loaded:
            share = self._share(name)
            for other in [other for other in self._loaded if other[0] == "vllm" and other[2] != str(batch)]:
                del self._loaded[other]
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            vllm = import_module("vllm")
            more: dict[str, Any] = {}
            if name == "vllm-lookup":
                more["speculative_config"] = {
                    "method": "ngram",
                    "num_speculative_tokens": LOOKUP,
                    "prompt_lookup_max": 4,
                    "prompt_lookup_min": 2,
                }
            self._loaded[key] = vllm.LLM(
                model=str(self.folder),
                dtype=str(self.dtype).removeprefix("torch."),
                max_num_seqs=batch,
                disable_log_stats=False,
                gpu_memory_utilization=share,
                **more,
            )
        return Vllm(self._loaded[key], self.tokenizer, batch)

    def _share(self, name: str) -> float:
        told = self.options.get(name, {}).get("memory", str(VLLM_SHARE))
        try:
            share = float(told)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{name}.memory is {told!r}: give a share of the device, such as 0.4")
        return share

    def _openvino(self, name: str, batch: int) -> Contestant:
        _one_by_one(name, batch)
        key = (name,)
        if key not in self._loaded:
            genai = import_module("openvino_genai")
            folder = self._option(name, "model", "the model in OpenVINO's format, or as GGUF")
            place = "GPU" if self.device.type == "cuda" else "CPU"
            more: dict[str, Any] = {"prompt_lookup": True} if name == "openvino-lookup" else {}
            more["INFERENCE_PRECISION_HINT"] = OPENVINO_PRECISIONS[self.dtype]
            self._loaded[key] = genai.LLMPipeline(folder, place, **more)
        lookup = {"num_assistant_tokens": LOOKUP, "max_ngram_size": 4} if name == "openvino-lookup" else {}
        return OpenVino(self._loaded[key], self.tokenizer, lookup)


def _one_by_one(name: str, batch: int) -> None:
    if batch > 1:
        raise ValueError(f"{name} answers one prompt at a time")


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """In the words that transformers and OpenVINO share."""
    if params.greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}


class _Peer:
    """Shared by all rounds, so nothing is closed."""

    def close(self) -> None: ...


@dataclass
class Transformers(_Peer):
    model: Any
    tokenizer: Tokenizer
    batch: int
    options: dict[str, Any]
    _ends: list[float] = field(default_factory=list)
    """Of the passes of a call."""

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]:
        answers: list[Answer] = []
        total = Work(0.0)
        hook = self.model.register_forward_hook(self._count)
        try:
            for start in range(0, len(conversations), self.batch):
                own = list(self._together(conversations[start : start + self.batch], params))
                total += Work(own[0].seconds)
                answers += own
        finally:
            hook.remove()
        return answers, total

    def _together(self, talks: Sequence[Messages], params: SamplingParams) -> Iterator[Answer]:
        """Padded on the left, as its generation wants it."""
        started = time.perf_counter()
        prompts = [prompt_tokens(self.tokenizer, talk) for talk in talks]
        longest = max(map(len, prompts))
        end = min(self.tokenizer.eos)
        ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self._ends.clear()
        if params.seed is not None:
            torch.manual_seed(params.seed)
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=params.max_tokens,
                eos_token_id=sorted(self.tokenizer.eos),
                pad_token_id=end,
                **_sampling(params),
                **self.options,
            )
        texts = out[:, longest:].tolist()
        seconds = time.perf_counter() - started
        for tokens in texts:
            passes = len(self._ends) if self.batch == 1 else 0  # texts of a batch end before its last pass
            stats = Statistics(tokens=len(tokens), target_passes=passes)
            yield Answer(tokens, self.tokenizer.decode(tokens), seconds, self._ends[0] - started, stats)

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        if not self._ends and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # it is there when it is computed, not when asked for
        self._ends.append(time.perf_counter())


@dataclass
class Vllm(_Peer):
    llm: Any
    tokenizer: Tokenizer
    batch: int

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]:
        settings = import_module("vllm").SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop_token_ids=sorted(self.tokenizer.eos),
        )
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt_tokens(self.tokenizer, talk)} for talk in conversations]
        done = self.llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = []
        for output in done:
            tokens = list(output.outputs[0].token_ids)
            told = output.metrics
            first, whole = None, seconds * min(self.batch, len(done)) / len(done)  # where it does not tell
            if told is not None and getattr(told, "last_token_ts", None):
                first, whole = told.first_token_ts - told.scheduled_ts, told.last_token_ts - told.scheduled_ts
            answers.append(Answer(tokens, self.tokenizer.decode(tokens), whole, first))
        return answers, Work(seconds)


@dataclass
class OpenVino(_Peer):
    pipeline: Any
    tokenizer: Tokenizer
    options: dict[str, Any]

    def answer(
        self, conversations: Sequence[Messages], params: SamplingParams, arrivals: Sequence[float] | None = None
    ) -> tuple[list[Answer], Work]:
        import numpy as np

        tensor = import_module("openvino").Tensor
        answers = []
        total = Work(0.0)
        for talk in conversations:
            started = time.perf_counter()
            ids = np.array([prompt_tokens(self.tokenizer, talk)], dtype=np.int64)
            done = self.pipeline.generate(
                tensor(ids),
                max_new_tokens=params.max_tokens,
                stop_token_ids=set(self.tokenizer.eos),
                **({} if params.seed is None else {"rng_seed": params.seed}),
                **_sampling(params),
                **self.options,
            )
            seconds = time.perf_counter() - started
            tokens = list(done.tokens[0])
            first = done.perf_metrics.get_ttft().mean / 1000
            answers.append(Answer(tokens, self.tokenizer.decode(tokens), seconds, first))
            total += Work(seconds)
        return answers, total
