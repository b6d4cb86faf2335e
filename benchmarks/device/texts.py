"""Texts of every drafter at batch 1 and in a large batch: how fast, how the step divides, and whether they are plain
decoding's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.models import SHORT, Measured
from forerun.bench.questions import Question
from forerun.core.collector import heap_stays
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.models.heads.files import method_of
from forerun.models.static.capture import capture_seconds, captured

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "combine": ("combine", {}),
    "recycling": ("recycling", {}),
    "lookahead": ("lookahead", {}),
    "layer_skip": ("layer_skip", {}),
    "draft_model, 4": ("draft_model", {"model": SHORT, "tree": "4"}),
    "draft_model, 3,2,1": ("draft_model", {"model": SHORT, "tree": "3,2,1"}),
    "multi_draft": ("multi_draft", {"models": SHORT, "samples": 2, "length": 3}),
}
TREES = {
    1: ("dynamic:10,6,60", "dynamic:10,7,63", "dynamic:8,9,63"),
    8: ("dynamic:4,6,15", "dynamic:4,8,15"),
    32: ("dynamic:4,4,7", "dynamic:3,3,3"),
    64: ("dynamic:3,3,3",),
}
"""Of trained drafters, by the number of texts in a batch: with the root they fill the rows of a captured pass."""
UNTRAINED = ("ngram", "suffix", "recycling", "lookahead", "combine", "layer_skip")
GROWING = ("eagle3", "eagle", "mtp")
"""Trained drafters that have no tree for an accelerator in their folders."""
WHOLE_TOO = ("ngram", "suffix", "recycling", "lookahead", "combine", *GROWING, "medusa", "blockwise", "parallel")
AT_A_TIME = 7
ADAPTIVE = ", adaptive"
AGAIN = "none, again"
"""A second engine of plain decoding: how far it is from the first is what the measurement cannot tell apart."""
MEETINGS = 3
"""At most, of each batch before the one that is timed."""
REMEMBER = ("suffix", "combine")
WARM = [
    "Say it again and again: " + "one two three four five six seven eight " * repeat for repeat in (1, 2, 4, 8, 16, 40)
]
"""So that passes of all sizes are captured before anything is timed. It has nothing to do with the questions."""


@dataclass
class Record:
    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    marks: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each answer that was written alone: how many tokens there were after so many seconds."""
    passes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    writing: float = 0.0
    """Seconds of the steps that read no prompt, and the tokens that they wrote."""
    written: int = 0
    captures: int = 0
    capturing: float = 0.0
    """How many there were in the time, and their seconds: what a longer run would not meet again."""

    @property
    def settled(self) -> float:
        """Seconds without those."""
        return sum(self.seconds) - self.capturing


def start(measured: Measured, name: str, batch: int, others: list[Question], context: int = 2048) -> LLM:
    """Warmed up with other questions, so that all that has to be built or captured is there."""
    drafter, options = METHODS[name]
    llm = LLM(
        measured.model,
        drafter=drafter,
        drafter_options=options,
        max_batch=batch,
        cache_tokens=max(2048, batch * context),
        adaptive=name.endswith(ADAPTIVE),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    for text in [*WARM, *(question.turns[0] for question in others)] if batch == 1 else WARM[:1]:
        llm.generate(text, greedy)
    if batch > 1:
        texts = [*(question.turns[0] for question in others), *WARM]
        for _ in range(2):
            llm.generate([texts[i % len(texts)] for i in range(batch)], greedy)
    return llm


def trained(measured: Measured, folders: list[Path], place: Path) -> dict[str, dict[str, str]]:
    """The options of trained drafters, but for the tree, by what they are called."""
    found = {}
    for folder in folders:
        method = method_of(folder)
        if method == "draft":
            found["draft_model"] = {"model": str(folder)}
        else:
            found[method] = {"path": str(measured.drafter(folder, place))}
    return found


def with_heads(
    measured: Measured,
    questions: list[Question],
    others: list[Question],
    heads: dict[str, dict[str, str]],
    greedy: SamplingParams,
    sampled: SamplingParams,
    batch: int,
) -> list[dict[str, Any]]:
    """Trained drafters beside plain decoding, with several trees and with the budget as the engine chooses it; sampled
    with the first tree."""
    names, first = ["none"], ["none"]
    for name, options in heads.items():
        for tree in TREES[batch]:
            METHODS[f"{name}, {tree}"] = name, {**options, "tree": tree}
            names.append(f"{name}, {tree}")
        first.append(f"{name}, {TREES[batch][0]}")
        own = f"{name}{ADAPTIVE}"
        METHODS[own] = name, {**options, "tree": TREES[batch][0]}
        names.append(own)
    return measure(measured, questions, others, names, [greedy, sampled], batch, {1: first})


def controlled(
    measured: Measured,
    groups: list[list[Question]],
    before: list[list[Question]],
    heads: dict[str, dict[str, str]],
    settings: SamplingParams,
    batch: int,
    untrained: Sequence[str] = UNTRAINED,
) -> Iterator[list[dict[str, Any]]]:
    """What comes with Forerun, with the budget as the engine chooses it; alone the better ones also with all that they
    like to draft. Groups of questions are answered in turn by all, and others `before`: what is timed is how an engine
    goes on, not how it begins. Some at a time, each time beside plain decoding: they would not fit into memory all
    together."""
    drafters = (*untrained, *heads)
    METHODS[AGAIN] = METHODS["none"]
    for start_at in range(0, len(drafters), AT_A_TIME):
        names = ["none", AGAIN]
        for name in drafters[start_at : start_at + AT_A_TIME]:
            options = dict(heads.get(name, {}))
            if name in GROWING:
                options["tree"] = TREES[batch][0]
            if batch == 1 and name in WHOLE_TOO:
                METHODS[name] = name, options
                names.append(name)
            METHODS[name + ADAPTIVE] = name, options
            names.append(name + ADAPTIVE)
        llms = {name: start(measured, name, batch, before[0][:4], context=1024) for name in names}
        _meet(llms, names, before, settings)
        records = _meet(llms, names, groups, settings)
        questions = [question for group in groups for question in group]
        rows: list[dict[str, Any]] = []
        for name in names:
            rows.append(_row(measured, name, batch, records[name], records["none"], None, questions, settings))
            whole = records.get(name.removesuffix(ADAPTIVE))
            if batch == 1 and name.endswith(ADAPTIVE) and whole is not None:
                rows[-1]["shared"] = _where_same(records[name], whole, records["none"])
            print(_line(rows[-1]), flush=True)
        for llm in llms.values():
            llm.close()
        del llms
        gc.collect()
        torch.cuda.empty_cache()
        yield rows


def measure(
    measured: Measured,
    questions: list[Question],
    others: list[Question],
    names: list[str],
    settings: list[SamplingParams],
    batch: int = 1,
    some: dict[int, list[str]] | None = None,
) -> list[dict[str, Any]]:
    """By all methods in turn, or with the settings of that number by `some` of them."""
    llms, rows = {}, []
    for name in names:
        try:
            llms[name] = start(measured, name, batch, others)
        except ValueError as error:
            rows.append({"model": measured.name, "drafter": name, "batch": batch, "error": str(error)})
            print(f"batch {batch} {name}: {error}", flush=True)
    names = list(llms)
    # Alone, one after the other; else all at once, and whoever ends makes room for the next.
    groups = [[question] for question in questions] if batch == 1 else [questions]
    every = names
    for number, params in enumerate(settings):
        names = [name for name in (every if some is None else some.get(number, every)) if name in llms]
        # What was never met before is captured on the way: so all is met again, until there is nothing new; but whoever
        # remembers texts would have the answers by then.
        for _ in range(0 if batch == 1 else MEETINGS):
            before = _meet(llms, [name for name in names if name.partition(",")[0] not in REMEMBER], groups, params)
            if not any(record.captures for name, record in before.items() if not name.endswith(ADAPTIVE)):
                break
        records = _meet(llms, names, groups, params)
        plain, judge = records[names[0]], llms[names[0]]
        for name in names:
            rows.append(_row(measured, name, batch, records[name], plain, judge, questions, params))
            print(_line(rows[-1]), flush=True)
    for llm in llms.values():
        llm.close()
    return rows


def _meet(
    llms: dict[str, LLM], names: list[str], groups: list[list[Question]], params: SamplingParams
) -> dict[str, Record]:
    """All groups by all methods, in turn."""
    records = {name: Record() for name in names}
    for turn, group in enumerate(groups):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            _answer(llms[name], records[name], group, params)
    return records


def _answer(llm: LLM, record: Record, group: list[Question], settings: SamplingParams) -> None:
    before, known, capturing = _counted(llm), captured(), capture_seconds()
    with heap_stays():
        torch.cuda.synchronize()
        started = time.perf_counter()
        if len(group) == 1:
            marks = [(0, 0.0)]
            writing = llm.start(group[0].turns[0], settings)
            for piece in writing.pieces():
                marks.append((marks[-1][0] + len(piece.tokens), time.perf_counter() - started))
            record.marks.append(marks)
            done = [writing.completion()]
        else:
            done = llm.generate([question.turns[0] for question in group], settings)
        record.seconds.append(time.perf_counter() - started)
    record.tokens += [each.token_ids for each in done]
    record.captures += captured() - known
    record.capturing += capture_seconds() - capturing
    after = _counted(llm)
    record.passes += after["target_passes"] - before["target_passes"]
    record.writing += after["writing"] - before["writing"]
    record.written += after["written"] - before["written"]
    for phase, spent in after["seconds_by_phase"].items():
        record.phases[phase] = record.phases.get(phase, 0.0) + spent - before["seconds_by_phase"][phase]


def _counted(llm: LLM) -> dict[str, Any]:
    found = llm.statistics
    writing = {"writing": found.total_seconds - found.seconds_reading, "written": found.tokens - found.tokens_reading}
    return {**found.as_dict(), **writing}


def _row(
    measured: Measured,
    name: str,
    batch: int,
    record: Record,
    plain: Record,
    judge: LLM | None,
    questions: list[Question],
    settings: SamplingParams,
) -> dict[str, Any]:
    total = sum(map(len, record.tokens))
    spent = sum(record.phases.values())
    differences = [
        _difference(judge, question.turns[0], own, right) if judge is not None and settings.greedy else {"gap": None}
        for question, own, right in zip(questions, record.tokens, plain.tokens, strict=True)
        if own != right
    ]
    pairs = zip(record.seconds, plain.seconds, strict=True)
    return {
        "model": measured.name,
        "drafter": name,
        "tree": METHODS[name][1].get("tree"),
        "batch": batch,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "tokens": total,
        "tokens_per_second": total / sum(record.seconds),
        "tokens_per_pass": total / max(1, record.passes),
        "speedup": total / sum(record.seconds) / (sum(map(len, plain.tokens)) / sum(plain.seconds)),
        "speedup_writing": record.written / record.writing / (plain.written / plain.writing),
        "speedup_settled": total / record.settled / (sum(map(len, plain.tokens)) / plain.settled),
        "reading_seconds": spent - record.writing,
        "captures": record.captures,
        "capture_seconds": record.capturing,
        "median_ratio": statistics.median(b / a for a, b in pairs),
        "seconds": record.seconds,
        "shares": {phase: seconds / spent for phase, seconds in record.phases.items()},
        "identical": len(questions) - len(differences),
        "answers": len(questions),
        "differences": differences,
    }


def _where_same(own: Record, whole: Record, plain: Record) -> dict[str, float]:
    """Speedups of both up to where an adaptive engine and a fixed tree part, or to the end: from there on they write
    different texts, and one may be easier to foresee than the other."""
    tokens, seconds = 0, [0.0, 0.0, 0.0]
    for place, (one, other) in enumerate(zip(own.tokens, whole.tokens, strict=True)):
        shared = _parting(one, other)
        tokens += shared
        for which, record in enumerate((own, whole, plain)):
            seconds[which] += _until(record.marks[place], shared)
    adaptive, fixed, plainly = seconds
    speedups = {"speedup": plainly / adaptive, "speedup_whole": plainly / fixed} if tokens else {}
    return {"tokens": tokens, **speedups}


def _until(marks: list[tuple[int, float]], tokens: int) -> float:
    """Seconds until so many tokens were there; what is beyond the last takes as long as those before it."""
    for (fewer, before), (count, after) in pairwise(marks):
        if count >= tokens > fewer:
            return before + (after - before) * (tokens - fewer) / (count - fewer)
    count, seconds = marks[-1]
    return seconds * tokens / max(1, count)


def _parting(one: list[int], other: list[int]) -> int:
    """So many tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(judge: LLM, prompt: str, own: list[int], right: list[int]) -> dict[str, Any]:
    """Where two texts part, and how far apart the two tokens are there (the logarithms of their probabilities): with
    the text read as a prompt, and again with its end written token by token, to see how far rounding moves that."""
    place = _parting(own, right)
    if place >= min(len(own), len(right)):
        return {"place": place, "gap": None}
    gaps = []
    for back in (0, min(place, 4)):
        asked = judge.tokens(prompt) + right[: place - back]
        (seen,) = judge.generate([asked], SamplingParams(temperature=0.0, max_tokens=back + 1, logprobs=20))
        if (
            seen.logprobs is not None
            and len(seen.logprobs) > back
            and seen.token_ids[:back] == right[place - back : place]
        ):
            values = dict(seen.logprobs[back].top)
            if {own[place], right[place]} <= set(values):
                gaps.append(values[right[place]] - values[own[place]])
    return {"place": place, "gap": gaps[0] if gaps else None, "again": gaps[1] if len(gaps) > 1 else None}


def _line(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{phase} {100 * share:.1f}%" for phase, share in row["shares"].items())
    gaps = [None if each["gap"] is None else round(each["gap"], 3) for each in row["differences"]]
    same = row.get("shared")
    beside = ""
    if same is not None and same["tokens"]:
        beside = f" {same['speedup']:.3f}× of {same['speedup_whole']:.3f}× in the same {same['tokens']} tokens;"
    return (
        f"{row['model']:>5} batch {row['batch']:2} {row['drafter']:<19} {row['tokens_per_second']:8.1f} tokens/s, "
        f"{row['tokens_per_pass']:.2f} a pass, {row['speedup']:.2f}× ({row['speedup_settled']:.2f}× without captures, "
        f"{row['speedup_writing']:.2f}× between prompts, "
        f"{row['reading_seconds']:.2f} s of prompts, {row['captures']} captures in {row['capture_seconds']:.2f} s);"
        f"{beside} {row['identical']}/{row['answers']} identical, gaps {gaps}; {shares}"
    )
