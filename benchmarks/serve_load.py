"""A server under load: many requests at once with random settings, some of which are given up, and a small cache.

    python -m benchmarks.serve_load --requests 2000 --clients 32 --model smollm2-135m

What is looked for: a request that is lost or hangs, an answer of a seeded request that is not the same as when it is
asked alone, memory that grows, cache that is not given back. Ends in one JSON line, and in exit code 1 if anything of
this was found. The result is kept if the sources are those of a commit.

Memory is told by quarters of the load, and may not grow from the second to the last; the first makes the engines. A
model whose bfloat16 products are oneDNN's (any that the pass in C does not know) grows for longer and then no more:
oneDNN keeps a program of half a megabyte for every number of rows and every matrix, up to 1,024 of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from forerun.bench.provenance import git_state, provenance
from forerun.engine.loaded import find_device

DRAFTERS = ("none", "ngram", "suffix", "recycling", "lookahead")
WORDS = ("the", "a", "river", "runs", "to", "sea", "and", "one", "two", "three", "cat", "dog", "says", "hello", "again")
PATIENCE = 300.0
"""Seconds after which a request counts as hung."""
SAMPLES = 5
"""Of the memory, in each quarter of the load."""


@dataclass(frozen=True)
class Ask:
    """One request, and after how many events its client leaves; None stays to the end."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None


def asks(count: int, model: str, seed: int, cancelled: float, longest: int) -> list[Ask]:
    """The same ones for the same seed. All are greedy or have a seed of their own, so their answers are known."""
    draw = random.Random(seed)
    return [_ask(draw, model, cancelled, longest) for _ in range(count)]


def _ask(draw: random.Random, model: str, cancelled: float, longest: int) -> Ask:
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 24)))
    chat = draw.random() < 0.5
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": draw.randint(1, longest),
        "temperature": draw.choice([0, 0, 0.3, 0.8, 1.0]),
        "seed": draw.randrange(2**31),
        "stream": draw.random() < 0.6,
        "n": draw.choice([1, 1, 1, 1, 2, 3]),
        "speculation": {"drafter": draw.choice(DRAFTERS)},
    }
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    for name, values in (
        ("top_p", [0.7, 0.95]),
        ("top_k", [1, 20]),
        ("min_p", [0.05]),
        ("presence_penalty", [0.5]),
        ("frequency_penalty", [-0.5, 0.5]),
        ("repetition_penalty", [1.2]),
        ("stop", [[" the"], ["e", "zz"]]),
        ("logit_bias", [{"5": -100, "7": 3}]),
        ("logprobs", [True if chat else 2]),
        ("ignore_eos", [True]),
    ):
        if draw.random() < 0.15:
            body[name] = draw.choice(values)
    if draw.random() < 0.3:
        body["speculation"]["length"] = draw.randint(0, 6)
    if draw.random() < 0.1:
        body["speculation"]["trace"] = True
    if draw.random() < 0.05:
        body["grammar"] = {"type": "regex", "grammar": "(yes|no)( yes| no){0,8}"}
    leaves = draw.randint(0, 6) if draw.random() < cancelled else None
    return Ask(f"/v1/{'chat/' if chat else ''}completions", body, leaves)


@dataclass
class Report:
    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    retried: int = 0
    wrong_status: list[str] = field(default_factory=list)
    hung: int = 0
    compared: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: list[list[float]] = field(default_factory=lambda: [[], [], [], []])
    """Megabytes of the server, by quarters of the load."""

    def watch_memory(self, memory: Callable[[], float]) -> None:
        """After every so many requests."""
        done, every = self.answered + self.cancelled, max(1, self.requests // (4 * SAMPLES))
        if done % every == 0:
            self.memory[min(3, 4 * (done - 1) // self.requests)].append(memory())

    @property
    def quarters(self) -> list[float]:
        """The median of each."""
        return [round(statistics.median(samples), 1) for samples in self.memory if samples]

    @property
    def growth(self) -> float:
        """Of the memory, from the second quarter to the last."""
        quarters = self.quarters
        return quarters[-1] / quarters[1] - 1 if len(quarters) > 2 else 0.0

    def faults(self, most_growth: float) -> list[str]:
        found = [*self.wrong_status, *self.different]
        if self.answered + self.cancelled != self.requests:
            found.append(f"{self.requests - self.answered - self.cancelled} requests were lost")
        if self.hung:
            found.append(f"{self.hung} requests hung")
        if self.growth > most_growth:
            found.append(f"memory grew by {100 * self.growth:.0f}%")
        return found


async def ask(client: httpx.AsyncClient, asked: Ask, report: Report) -> list[str] | None:
    """The texts of the answer; None for who left, or was not answered as it should be."""
    while True:
        events: list[str] = []
        async with client.stream("POST", asked.path, json=asked.body) as answer:
            if answer.status_code == 429:
                report.retried += 1
                await asyncio.sleep(min(2.0, float(answer.headers["retry-after"])) * random.uniform(0.2, 1))
                continue
            if answer.status_code != 200:
                report.wrong_status.append(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
                return None
            if not asked.body["stream"]:
                if asked.leaves_after is not None:
                    return None
                return _texts([json.loads(await answer.aread())])
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                if asked.leaves_after is not None and len(events) > asked.leaves_after:
                    return None
        if events[-1:] != ["[DONE]"]:
            report.wrong_status.append(f"a stream ended with {events[-1:]}")
            return None
        return _texts([json.loads(event) for event in events[:-1]])


def _texts(parts: list[dict[str, Any]]) -> list[str]:
    found: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            told = choice.get("message") or choice.get("delta") or {}
            found[choice["index"]] = found.get(choice["index"], "") + (choice.get("text") or told.get("content") or "")
    return [found[index] for index in sorted(found)]


async def load(address: str, many: list[Ask], clients: int, alone: int, memory: Callable[[], float]) -> Report:
    """All of them, `clients` at a time; then some once more, one by one. `memory` tells the server's megabytes."""
    report = Report(requests=len(many))
    answers: dict[int, list[str]] = {}
    places = iter(range(len(many)))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, limits=limits) as client:

        async def worker() -> None:
            for place in places:
                asked = many[place]
                try:
                    async with asyncio.timeout(PATIENCE):
                        if asked.leaves_after is not None and not asked.body["stream"]:
                            await _leave(client, asked, report)
                            texts = None
                        else:
                            texts = await ask(client, asked, report)
                except TimeoutError:
                    report.hung += 1
                    continue
                if texts is not None:
                    answers[place] = texts
                    report.answered += 1
                elif asked.leaves_after is not None:
                    report.cancelled += 1
                report.watch_memory(memory)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(clients)))
        report.seconds = round(time.perf_counter() - started, 2)
        chosen = random.Random(0).sample(sorted(answers), min(alone, len(answers)))
        for place in chosen:
            again = await ask(client, many[place], report)
            report.compared += 1
            if again != answers[place]:
                report.different.append(f"{json.dumps(many[place].body)}: {answers[place]} under load, {again} alone")
    return report


async def _leave(client: httpx.AsyncClient, asked: Ask, report: Report) -> None:
    """Of an answer that comes whole one leaves while waiting."""
    asking = asyncio.create_task(ask(client, asked, report))
    await asyncio.sleep(0.02 * (asked.leaves_after or 0))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def resident(process: int) -> float:
    """Megabytes."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cancel", type=float, default=0.1)
    parser.add_argument("--longest", type=int, default=24)
    parser.add_argument("--alone", type=int, default=200, help="answers that are asked for again, one by one")
    parser.add_argument("--cache-tokens", type=int, default=1024)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-growth", type=float, default=0.05, help="of memory, from the second quarter on")
    parser.add_argument("--out", type=Path, default=Path("results/serve-load.json"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "forerun.cli.main", "serve", "--model", options.model, "--port", "0"]
    command += ["--drafter", options.drafter, "--cache-tokens", str(options.cache_tokens), "--log-level", "error"]
    command += ["--max-batch", str(options.max_batch), "--name", "loaded"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"is served at (\S+)", process.stderr.readline())
            assert found, "the server did not start"
            many = asks(options.requests, "loaded", options.seed, options.cancel, options.longest)
            report = asyncio.run(load(found[1], many, options.clients, options.alone, lambda: resident(process.pid)))
            figures = httpx.get(f"{found[1]}/metrics").text
            health = httpx.get(f"{found[1]}/health").json()["status"]
        finally:
            process.terminate()
            process.wait(60)
    gauges = [line for line in figures.splitlines() if re.match(r"forerun_(cache_used_ratio|texts_inside)\b", line)]
    held = [line for line in gauges if float(line.rpartition(" ")[2]) > 0]
    faults = [*report.faults(options.most_growth), *(f"left over: {line}" for line in held)]
    faults += [] if health == "ok" else [f"health says {health}"]
    for fault in faults:
        print(fault, file=sys.stderr)
    told = {**asdict(report), "memory": report.quarters, "growth": round(report.growth, 4), "faults": len(faults)}
    keep(told, options)
    print(json.dumps(told))
    sys.exit(1 if faults else 0)


def keep(told: dict[str, Any], options: argparse.Namespace) -> None:
    """Only what a commit's sources gave, whatever it is."""
    state = git_state()
    if state is None or state["dirty"]:
        print(f"{options.out} is left as it is: the sources are not those of a commit", file=sys.stderr)
        return
    asked = {key: value for key, value in vars(options).items() if key not in {"out", "model"}}
    model = {"model": Path(options.model).name}
    result = {"provenance": provenance({**model, **asked}, str(find_device(None))), "result": told}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
