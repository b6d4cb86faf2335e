"""What speculation gains through HTTP, at several numbers of clients.

    python -m benchmarks.serve_speed --drafter suffix --clients 1,4,16 --out results/serve_speed.json

One server, and two ways to ask it: with the drafter, as a client that says nothing would have it, and with
`{"speculation": {"off": true}}`. The two take turns, round by round, so that whatever else the machine does meets both,
and no prompt comes twice. What is told is tokens per second of all clients together, the median over the rounds, and
the ratio of the two, the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from forerun.bench.provenance import provenance
from forerun.engine.loaded import find_device

TASKS = (
    "Write a short story about {}.",
    "Explain step by step what a beginner should know about {}.",
    "Write a Python class that models {}, with comments.",
    "List ten facts about {}.",
    "Write a letter to a friend about {}, and then say the same in one sentence.",
    "What are the advantages and disadvantages of {}?",
    "Give me a plan for a week that has to do with {}.",
    "Write five questions about {} and answer each of them.",
)
TOPICS = (
    "a lighthouse", "bread", "the planet Mars", "bicycles", "rivers", "chess", "a small library", "bees", "volcanoes",
    "trains", "winter", "a garden", "maps", "music", "clocks", "whales", "bridges", "the Roman empire", "photography",
    "coffee", "mountains", "robots", "a market", "swimming", "stamps", "the moon", "cheese", "forests", "sailing ships",
    "a school", "deserts", "painting", "cats", "tunnels", "paper", "earthquakes", "salt", "radio", "glass", "islands",
)  # fmt: skip


WARM = 3
"""Rounds of each kind before the first that counts: the engine learns what pays with so many texts."""


def prompts() -> Iterator[str]:
    """All different, so that nothing was ever written before: some drafters remember."""
    every = [task.format(topic) for topic in TOPICS for task in TASKS]
    random.Random(1).shuffle(every)
    yield from every
    for count in itertools.count(2):
        yield from (f"{prompt} Use {count} paragraphs." for prompt in every)


async def _one(client: httpx.AsyncClient, prompt: str, tokens: int, plain: bool) -> tuple[int, int, float]:
    """Tokens, passes and seconds of one answer."""
    body: dict[str, Any] = {
        "model": "measured",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"speculation": {"off": True}} if plain else {}
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage["completion_tokens"], usage["speculation"]["passes"], time.perf_counter() - started


async def _round(
    client: httpx.AsyncClient, clients: int, tokens: int, plain: bool, fresh: Iterator[str]
) -> tuple[float, float]:
    """Tokens per second of all clients together, each with two requests one after the other, and tokens per pass."""

    async def ask() -> list[tuple[int, int, float]]:
        return [await _one(client, next(fresh), tokens, plain) for _ in range(2)]

    started = time.perf_counter()
    found = [each for own in await asyncio.gather(*(ask() for _ in range(clients))) for each in own]
    seconds = time.perf_counter() - started
    written = sum(tokens for tokens, _, _ in found)
    return written / seconds, written / sum(passes for _, passes, _ in found)


async def measure(address: str, numbers: list[int], rounds: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    fresh = prompts()
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        for clients in numbers:
            for plain in (False, True) * WARM:
                await _round(client, clients, tokens, plain, fresh)
            drafted: list[tuple[float, float]] = []
            plainly: list[tuple[float, float]] = []
            for turn in range(rounds):
                for plain in (False, True) if turn % 2 else (True, False):
                    (plainly if plain else drafted).append(await _round(client, clients, tokens, plain, fresh))
            ratios = [fast / slow for (fast, _), (slow, _) in zip(drafted, plainly, strict=True)]
            rows.append(
                {
                    "clients": clients,
                    "drafted_tokens_per_second": round(statistics.median(rate for rate, _ in drafted), 1),
                    "plain_tokens_per_second": round(statistics.median(rate for rate, _ in plainly), 1),
                    "tokens_per_pass": round(statistics.median(each for _, each in drafted), 3),
                    "gain": round(statistics.median(ratios), 3),
                    "worst": round(min(ratios), 3),
                    "best": round(max(ratios), 3),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--clients", default="1,4,16", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "forerun.cli.main", "serve", "--model", options.model, "--port", "0"]
    command += ["--drafter", options.drafter, "--log-level", "error", "--max-batch", str(options.max_batch)]
    command += ["--name", "measured", *(["--device", options.device] if options.device else [])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"is served at (\S+)", process.stderr.readline())
            assert found, "the server did not start"
            numbers = [int(number) for number in options.clients.split(",")]
            rows = asyncio.run(measure(found[1], numbers, options.rounds, options.tokens))
        finally:
            process.terminate()
            process.wait(60)
    asked = {key: value for key, value in vars(options).items() if key not in {"out", "model"}}
    model = {"model": Path(options.model).name}
    result = {"rows": rows, "provenance": provenance({**model, **asked}, str(find_device(options.device)))}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
