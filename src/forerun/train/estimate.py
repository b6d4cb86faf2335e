"""What a run will take, from a small part of the run itself: a few prompts answered, a few steps, a measurement."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import mean

import torch

from forerun.train.answers import CPU_BATCH, GPU_BATCH, converse, open_llm
from forerun.train.distil import Distil
from forerun.train.loop import Loop
from forerun.train.run import DraftRun
from forerun.train.texts import Text

STEPS = 4
"""The first does not count."""
TOKENS = 16
"""Of the answers that are timed."""


@dataclass(frozen=True)
class Estimate:
    prompts: int
    held_back: int
    texts: int
    """Turns of all conversations."""
    answer_tokens: int
    """At most: answers may end earlier."""
    steps: int
    weights: int
    """Of the student."""
    answer_seconds: float
    step_seconds: float
    """Of one step."""
    measures: int
    measure_seconds: float
    """Of one measurement."""
    seconds: float
    """Of the whole run."""
    memory_bytes: int
    """The most in use while the part ran, on the device that trains."""


def estimate(run: DraftRun) -> Estimate:
    options = run.settings.loop
    texts = sum(len(prompt.turns) for prompt in run.learned)
    tokens = texts * run.settings.answers.max_tokens
    per_second, some = _answering(run)
    step_seconds, measure_seconds = _learning(run, some)
    measures = 1 + -(-options.steps // options.every)
    return Estimate(
        prompts=len(run.learned),
        held_back=len(run.questions),
        texts=texts,
        answer_tokens=tokens,
        steps=options.steps,
        weights=sum(weight.numel() for weight in run.student.parameters()),
        answer_seconds=tokens / per_second,
        step_seconds=step_seconds,
        measures=measures,
        measure_seconds=measure_seconds,
        seconds=tokens / per_second + options.steps * step_seconds + measures * measure_seconds,
        memory_bytes=_memory(run.target.device),
    )


def _answering(run: DraftRun) -> tuple[float, list[Text]]:
    """Tokens in a second, and texts as long as they may become."""
    options = run.settings.answers
    batch = GPU_BATCH if run.target.device.type == "cuda" else CPU_BATCH
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in run.learned[:batch]]
    short = replace(options, max_tokens=min(TOKENS, options.max_tokens))
    with open_llm(run.loaded, options.longest) as llm:
        converse(llm, prompts[:1], replace(options, max_tokens=2))
        start = time.perf_counter()
        entries = converse(llm, prompts, short)
        seconds = time.perf_counter() - start
    turns = [entry["turns"][0] for entry in entries if entry["turns"]]
    if not turns:
        raise ValueError("no prompt leaves room for an answer: give shorter ones")
    texts = [Text(tuple(turn["prompt"]), tuple(islice(cycle(turn["answer"]), options.max_tokens))) for turn in turns]
    fitting = [Text(text.prompt, text.answer[: run.longest - len(text.prompt)]) for text in texts]
    return sum(len(turn["answer"]) for turn in turns) / seconds, fitting


def _learning(run: DraftRun, texts: list[Text]) -> tuple[float, float]:
    """Seconds of a step and of a measurement."""
    told: list[float] = []
    measured: list[float] = []

    def measure() -> float:
        start = time.perf_counter()
        value = run.measure()
        measured.append(time.perf_counter() - start)
        return value

    with tempfile.TemporaryDirectory() as folder:
        options = replace(run.settings.loop, steps=STEPS, every=STEPS)
        place = Path(folder) / "checkpoint.pt"
        method = Distil(run.student, run.target)
        Loop(method, texts, options, measure, place, run.processes, lambda news: told.append(time.perf_counter())).run()
    return mean(later - earlier for earlier, later in pairwise(told)), measured[-1]


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
