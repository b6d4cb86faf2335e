"""All figures of one accelerator, in one run:

    python -m benchmarks.device --data FOLDER --json results/device.json

FOLDER holds spec_bench_dev.jsonl and prompts_train.jsonl. The 8B model is the default model, enlarged: it writes the
same text at the cost of the larger shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import passes, peers, texts, throughput
from benchmarks.device.models import Measured, load
from forerun.bench.provenance import provenance
from forerun.bench.questions import Question, read_questions
from forerun.core.params import SamplingParams
from forerun.engine.prompt_files import read_entries

PARTS = ("passes", "texts", "batches", "seeded", "peers", "heads", "controller", "throughput", "sampled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sizes", default="8B,135M")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--drafters", default=";".join(texts.METHODS), help="separated by ;")
    parser.add_argument("--trained", default="", help="folders of trained drafters, separated by ;")
    parser.add_argument("--batches", default="1,8,32,64", help="of trained drafters")
    parser.add_argument("--questions", type=int, default=8, help="of summarization and of rag each")
    parser.add_argument(
        "--alone", type=int, default=20, help="questions at batch 1 of trained drafters and controllers"
    )
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--beside", default="1024,2048,4096", help="batches of transformers beside our throughput")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    parts, sizes = given.parts.split(","), given.sizes.split(",")
    names = list(dict.fromkeys(["none", *given.drafters.split(";")]))  # which all others are compared with
    started = time.perf_counter()
    arguments = {name: value for name, value in vars(given).items() if name not in ("data", "json")}
    arguments["trained"] = ";".join(Path(folder).name for folder in given.trained.split(";"))
    result: dict[str, Any] = {"provenance": provenance(arguments, "cuda")}
    speed = passes.copy_speed()
    result["copy_bytes_per_second"] = speed
    print(f"copy: {speed / 1e12:.2f} TB/s", flush=True)
    every = read_questions(given.data / "spec_bench_dev.jsonl", turns=1)
    chosen = [q for kind in ("summarization", "rag") for q in _of(every, kind)[: given.questions]]
    for size in sizes:
        measured = load(size, given.model, "cuda", given.dtype)
        _measure(result, measured, parts, names, every, chosen, given, speed)
        print(f"{size}: {time.perf_counter() - started:.0f} s since the start", flush=True)
        del measured
        gc.collect()
        torch.cuda.empty_cache()


def _training(data: Path, count: int) -> list[str]:
    return [entry.turns[0] for entry in read_entries(data / "prompts_train.jsonl")[:count]]


def _of(questions: list[Question], category: str) -> list[Question]:
    return [question for question in questions if question.category == category]


def _measure(
    result: dict[str, Any],
    measured: Measured,
    parts: list[str],
    names: list[str],
    every: list[Question],
    chosen: list[Question],
    given: argparse.Namespace,
    speed: float,
) -> None:
    def add(part: str, rows: list[dict[str, Any]]) -> None:
        result.setdefault(part, []).extend(rows)
        if given.json:  # what is measured stays, whatever comes after it
            given.json.write_text(json.dumps(result, indent=1) + "\n")

    if "passes" in parts:
        add("passes", passes.measure(measured, given.context, speed))
    others = [q for kind in ("summarization", "rag") for q in _of(every, kind)[-2:]]
    greedy = SamplingParams(temperature=0.0, max_tokens=given.tokens)
    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=64)
    if "texts" in parts:
        add(
            "texts", texts.measure(measured, chosen, others, names, [greedy, seeded] if "seeded" in parts else [greedy])
        )
    if "batches" in parts:
        some: list[str] = [name for name in ("none", "ngram", "suffix") if name in names]
        spread = every[:: max(1, len(every) // 64)]
        for batch in (8, 64):
            add("batches", texts.measure(measured, spread[:batch], others, some, [greedy], batch))
    if "peers" in parts:
        add("peers", peers.measure(measured, chosen[:: max(1, len(chosen) // 4)], given.tokens))
    if "heads" in parts and given.trained:
        sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=given.tokens)
        with tempfile.TemporaryDirectory() as place:
            heads = texts.trained(measured, [Path(folder) for folder in given.trained.split(";")], Path(place))
            for batch in map(int, given.batches.split(",")):
                count = min(len(every), {1: given.alone, 8: 48}.get(batch, 3 * batch))
                asked_of = every[:: len(every) // count][:count]
                add("heads", texts.with_heads(measured, asked_of, others, heads, greedy, sampled, batch))
    if "controller" in parts and given.trained:
        with tempfile.TemporaryDirectory() as place:
            heads = texts.trained(measured, [Path(folder) for folder in given.trained.split(";")], Path(place))
            warm = [Question(str(n), "training", (text,)) for n, text in enumerate(_training(given.data, 256))]
            for batch in map(int, given.batches.split(",")):
                count = min(len(every), {1: given.alone, 8: 64}.get(batch, 4 * batch))
                spread = every[:: len(every) // count][:count]
                turns = count if batch == 1 else 2
                groups = [spread[turn::turns] for turn in range(turns)]
                before = [[question] for question in warm[:6]]
                if batch > 1:
                    before = [warm[: 2 * batch], warm[2 * batch : 4 * batch]][: 1 if batch > 8 else 2]
                untrained = [name for name in texts.UNTRAINED if name in names]
                for rows in texts.controlled(measured, groups, before, heads, greedy, batch, untrained):
                    add("controller", rows)
    if measured.name == "135M":
        asked = _training(given.data, 4096)
        if "throughput" in parts:
            add("throughput", throughput.measure(measured, asked, given.beside))
        if "sampled" in parts:
            add("sampled", throughput.sampled(measured, asked))


if __name__ == "__main__":
    main()
