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

from forerun.train.answers import Talk, converse
from forerun.train.loop import TENTHS, Loop, News
from forerun.train.methods.method import Method
from forerun.train.rounding import Rounding
from forerun.train.run import Run
from forerun.train.texts import Text
from forerun.train.writing import Writer

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
    """Of each part, where there are two; what follows is told of the second."""
    weights: int
    """That learn."""
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


def estimate(run: Run, given: list[Text] | None = None) -> Estimate:
    """`given` are answers that are there already."""
    options, answers = run.settings.loop, run.settings.answers
    if given is None:
        texts = answers.times * sum(len(prompt.turns) for prompt in run.learned)
        tokens = texts * answers.max_tokens
        per_second, some = _answering(run)
        answer_seconds = tokens / per_second
    else:
        texts, tokens, answer_seconds = len(given), sum(len(text.answer) for text in given), 0.0
        some = given
    method = run.new_method(some)
    second = run.second_method(method, some)
    trials = [_learning(run, part, some) for part in (method, second) if part is not None]
    measures = 1 + (TENTHS if options.every is None else -(-options.steps // options.every))
    learning = [options.steps * trial.step_seconds + measures * trial.measure_seconds for trial in trials]
    if options.time_limit is not None:
        learning = [min(seconds, options.time_limit) for seconds in learning]
    trial = trials[-1]
    return Estimate(
        prompts=len(run.learned),
        held_back=len(run.questions),
        texts=texts,
        answer_tokens=tokens,
        steps=options.steps,
        weights=trial.weights,
        answer_seconds=answer_seconds,
        step_seconds=trial.step_seconds,
        measures=measures,
        measure_seconds=trial.measure_seconds,
        seconds=answer_seconds + sum(learning),
        memory_bytes=_memory(run.target.device),
    )


def _answering(run: Run) -> tuple[float, list[Text]]:
    """Tokens in a second, and texts as long as they may become."""
    options = run.settings.answers
    short = replace(options, max_tokens=min(TOKENS, options.max_tokens), times=1)
    writer = Writer(run.loaded, options.longest)
    talks = [Talk(replace(prompt, turns=prompt.turns[:1]), 0) for prompt in run.learned[: writer.batch]]
    list(converse(writer, [replace(talks[0], messages=[], turns=[])], replace(options, max_tokens=2)))
    start = time.perf_counter()
    written = [text for talk in converse(writer, talks, short) for text in talk.turns]
    seconds = time.perf_counter() - start
    if not written:
        raise ValueError("no prompt leaves room for an answer: give shorter ones")
    longest = [
        Text.of(text.prompt.tolist(), list(islice(cycle(text.answer.tolist()), options.max_tokens))) for text in written
    ]
    fitting = [Text(text.tokens[: run.longest], text.asked) for text in longest]
    return sum(len(text.answer) for text in written) / seconds, fitting


@dataclass(frozen=True)
class _Trial:
    step_seconds: float
    measure_seconds: float
    weights: int


def _learning(run: Run, method: Method, texts: list[Text]) -> _Trial:
    """What a step and a measurement take."""
    told: list[float] = []
    measured: list[float] = []

    def measure() -> float:
        start = time.perf_counter()
        value = run.measure(method)
        measured.append(time.perf_counter() - start)
        return value

    def tell(news: News) -> None:
        told.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        options = replace(run.settings.loop, steps=STEPS, every=STEPS, time_limit=None)
        place = Path(folder) / "checkpoint.pt"
        rounding = Rounding(method.module, run.settings.bits)
        loop = Loop(method, texts, options, measure, place, run.processes, tell, look=1, rounding=rounding)
        loop.run()
    learns = sum(weight.numel() for weight in method.module.parameters() if weight.requires_grad)
    return _Trial(mean(later - earlier for earlier, later in pairwise(told)), measured[-1], learns)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
