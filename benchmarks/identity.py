"""Is the text the target's own? Against `transformers`, between drafters, in batches, with seeds and without.

    python -m benchmarks.identity --data FOLDER --out results/identity.json

FOLDER holds development sets as JSON lines in Spec-Bench's form. Every part is also there for one prompt set or part:
see --help. A draft model is needed that shares the tokenizer: the target's own first layers serve. They draft badly, so
most of what they propose is refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.short_model import first_layers
from forerun.bench.provenance import git_state, provenance
from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.drafters import datastore
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.engine.engine import Engine
from forerun.engine.prompt_files import read_entries
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment
from forerun.models.load import Source, load_model, load_tokenizer, resolve
from forerun.models.target import TargetModel

MODEL = "smollm2-135m"
SLOTS = 16_384
GREEDY = SamplingParams(temperature=0, max_tokens=64)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)
COMPANY = [
    SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=50),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=40, logprobs=2),
    SamplingParams(temperature=1.3, min_p=0.1, presence_penalty=0.5, max_tokens=20, n=2),
]
"""What runs beside the checked requests in a mixed batch."""


@dataclass(frozen=True)
class Method:
    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        tree = self.options.get("tree")
        model = self.options.get("model", self.options.get("models"))
        tree = tree or ("2 samples of 3" if "samples" in self.options else None)
        draft = "" if model is None else "first layers, "
        return self.name + (f" ({draft}{tree})" if tree else "")


def methods(short: Path, store: Path, trees: bool) -> list[Method]:
    """`short` is a draft model, `store` a datastore."""
    found = [
        Method("none", {}),
        *(Method(name, {}) for name in ("ngram", "suffix", "recycling", "lookahead", "layer_skip", "combine")),
        Method("retrieval", {"store": str(store)}),
        Method("draft_model", {"model": str(short), "tree": "3"}),
    ]
    slow = [
        Method("draft_model", {"model": str(short), "tree": "3,2,1"}),
        Method("multi_draft", {"models": str(short), "samples": 2, "length": 3}),
    ]
    return [*found, *slow] if trees else found


@dataclass(frozen=True)
class Bench:
    """A target in one precision, and what makes drafters for it."""

    source: Source
    target: TargetModel
    dtype: torch.dtype

    @classmethod
    def load(cls, dtype: torch.dtype) -> Bench:
        source = resolve(MODEL, dtype=dtype)
        return cls(source, load_model(source, dtype=dtype), dtype)

    def drafter(self, method: Method) -> Drafter:
        def load(name: str) -> TargetModel:
            return load_model(resolve(name, dtype=self.dtype), dtype=self.dtype)

        return make_drafter(method.name, Setup(self.target, SLOTS, load), method.options)

    def engine(self, method: Method, batch: int, rule: str | None = None) -> Engine:
        return Engine(self.target, self.drafter(method), slots=SLOTS, max_batch=batch, rule=rule)


def texts_of(engine: Engine, requests: list[Request], company: int = 0) -> list[list[int]]:
    """The tokens of each request; `company` other requests with other settings are mixed in."""
    ids = []
    for number, request in enumerate(requests):
        ids.append(engine.add(request))
        if number < company:
            engine.add(Request(request.prompt, COMPANY[number % len(COMPANY)]))
    texts: dict[int, list[int]] = {number: [] for number in ids}
    while engine.has_work:
        for update in engine.step():
            if update.request in texts:
                texts[update.request] += update.tokens
    engine.check_integrity()
    return [texts[number] for number in ids]


def prompts_of(folder: Path, count: int, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The first turns, taken from all sets in turn."""
    files = sorted(folder.glob("*_dev.jsonl"))
    if not files:
        sys.exit(f"no development sets (*_dev.jsonl) in {folder}")
    sets = [[entry.turns[0] for entry in read_entries(file)] for file in files]
    each = (text for row in zip(*sets, strict=False) for text in row)
    return [encode(text) for text in islice(each, count)]


def with_transformers(folder: Path, prompts: list[list[int]]) -> Iterator[list[int]]:
    """Greedy texts from `generate` in float32."""
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False
            )
        yield out[0, len(prompt) :].tolist()


def last_logits(target: TargetModel, tokens: list[int]) -> torch.Tensor:
    """[V] after the whole text, in one pass over an empty cache."""
    rows = torch.arange(len(tokens))
    empty = torch.tensor([], dtype=torch.int64)
    batch = Batch.pack([Segment(0, torch.tensor(tokens), rows, None, empty, rows, 1)])
    return target.forward_rows(batch, target.new_storage(len(tokens))).logits[0].float()


def parting(prompt: list[int], one: list[int], other: list[int], half: Bench, full: Bench) -> dict[str, Any]:
    """Where two texts part: a tie if the two tokens are closer, in float32, than the coarse pass is off there. How far
    it is off is read from the fifty likeliest tokens: of two alone the error may be small by chance."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    context, a, b = prompt + one[:same], one[same], other[same]
    exact, coarse = last_logits(full.target, context), last_logits(half.target, context)
    error = float((exact - coarse).abs()[exact.topk(50).indices].max())
    gap = abs(float(exact[a] - exact[b]))
    return {"position": same, "gap": gap, "error": error, "tie": gap <= 2 * error}


def check_greedy(bench: Bench, prompts: list[list[int]], tried: list[Method]) -> dict[str, Any]:
    oracle = list(with_transformers(bench.source.folder, prompts))
    rows = []
    for method in tried:
        for batch in (1, 8):
            engine = bench.engine(method, batch)
            company = len(prompts) // 2 if batch > 1 else 0
            started = time.perf_counter()
            texts = texts_of(engine, [Request(prompt, GREEDY) for prompt in prompts], company)
            equal = sum(text == expected for text, expected in zip(texts, oracle, strict=True))
            rows.append(
                {
                    "drafter": method.label,
                    "batch": batch,
                    "prompts": len(prompts),
                    "company": company,
                    "identical": equal,
                    "tokens_per_pass": engine.statistics.tokens_per_pass,
                    "seconds": time.perf_counter() - started,
                }
            )
            say("greedy", rows[-1])
    return {"rows": rows, "tokens": sum(map(len, oracle))}


def check_half(
    half: Bench, full: Bench, prompts: list[list[int]], tried: list[Method], batches: list[int]
) -> dict[str, Any]:
    requests = [Request(prompt, GREEDY) for prompt in prompts]
    plain = texts_of(half.engine(tried[0], 1), requests)
    rows = []
    for method in tried:
        for batch in batches:
            if method is tried[0] and batch == 1:
                continue
            texts = texts_of(half.engine(method, batch), requests)
            pairs = zip(prompts, plain, texts, strict=True)
            parted = [parting(prompt, a, b, half, full) for prompt, a, b in pairs if a != b]
            ties = sum(part["tie"] for part in parted)
            rows.append(
                {
                    "drafter": method.label,
                    "batch": batch,
                    "prompts": len(prompts),
                    "identical": len(prompts) - len(parted),
                    "ties": ties,
                    "unexplained": len(parted) - ties,
                    "partings": parted,
                }
            )
            say("bfloat16", {key: value for key, value in rows[-1].items() if key != "partings"})
    return {"rows": rows}


def check_seeded(bench: Bench, prompts: list[list[int]], tried: list[Method]) -> dict[str, Any]:
    requests = [Request(prompt, replace(SEEDED, seed=1000 + i)) for i, prompt in enumerate(prompts)]
    plain = texts_of(bench.engine(tried[0], 1), requests)
    rows = []
    for method in tried:
        engine = bench.engine(method, 8)
        texts = texts_of(engine, requests, len(prompts) // 2)
        equal = sum(a == b for a, b in zip(texts, plain, strict=True))
        rows.append(
            {
                "drafter": method.label,
                "batch": 8,
                "prompts": len(prompts),
                "identical": equal,
                "tokens_per_pass": engine.statistics.tokens_per_pass,
            }
        )
        say("seeded", rows[-1])
    return {"rows": rows}


def check_law(bench: Bench, contexts: list[list[int]], tried: list[Method], samples: int) -> dict[str, Any]:
    """Chi-square of the first three tokens at each context; over all contexts the p-values must look uniform. The first
    token comes from the pass that reads the context, the others from steps that draft."""
    from scipy.stats import kstest

    params = SamplingParams(temperature=1.0, top_k=4, max_tokens=6, ignore_eos=True, n=samples)
    expected = [beginnings(bench.target, context, LawSettings.of([params])) for context in contexts]
    rows = []
    for method in tried:
        engine = bench.engine(method, 64)
        values = []
        for context, wanted in zip(contexts, expected, strict=True):
            counts = dict.fromkeys(wanted, 0)
            engine.add(Request(context, params))
            texts: dict[int, list[int]] = {}
            while engine.has_work:
                for update in engine.step():
                    texts.setdefault(update.index, []).extend(update.tokens)
            for text in texts.values():
                counts[tuple(text[:3])] += 1  # a beginning that cannot occur is a KeyError
            values.append(p_value(counts, wanted, samples))
        rows.append(
            {
                "drafter": method.label,
                "contexts": len(contexts),
                "samples": samples,
                "smallest_p": min(values),
                "uniform_p": float(kstest(values, "uniform").pvalue),
                "drafted": engine.statistics.drafted,
                "accepted": engine.statistics.accepted,
            }
        )
        say("law", rows[-1])
    return {"rows": rows}


Beginnings = dict[tuple[int, ...], float]


def beginnings(target: TargetModel, context: list[int], settings: LawSettings, length: int = 3) -> Beginnings:
    """The target's own law of the next tokens, from full passes."""
    p = law(last_logits(target, context)[None], settings)[0]
    found: Beginnings = {}
    for token in p.nonzero()[:, 0].tolist():
        rest = beginnings(target, [*context, token], settings, length - 1) if length > 1 else {(): 1.0}
        found |= {(token, *after): float(p[token]) * chance for after, chance in rest.items()}
    return found


def p_value(counts: dict[tuple[int, ...], int], wanted: Beginnings, samples: int) -> float:
    """Outcomes expected less than five times are counted together."""
    from scipy.stats import chisquare

    observed, expected = [0.0], [0.0]
    for outcome, probability in wanted.items():
        if probability * samples < 5:
            observed[0] += counts[outcome]
            expected[0] += probability * samples
        else:
            observed.append(counts[outcome])
            expected.append(probability * samples)
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [value * scale for value in expected]).pvalue)


def check_batch(bench: Bench, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """Throughput of plain decoding, batch 8 against batch 1, in turns."""
    method = Method("none", {})
    requests = [Request(prompt, replace(GREEDY, ignore_eos=True)) for prompt in prompts]
    speeds: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(repeats):
        for batch, found in speeds.items():
            engine = bench.engine(method, batch)
            started = time.perf_counter()
            tokens = sum(map(len, texts_of(engine, requests)))
            found.append(tokens / (time.perf_counter() - started))
    medians = {batch: statistics.median(found) for batch, found in speeds.items()}
    result = {"one": medians[1], "eight": medians[8], "ratio": medians[8] / medians[1], "runs": repeats}
    say("batch", result)
    return result


def say(part: str, row: dict[str, Any]) -> None:
    print(part, json.dumps(row), file=sys.stderr, flush=True)


def joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Rows of drafters that this run did not try stay."""
    if before is None or "rows" not in now:
        return now
    tried = {row["drafter"] for row in now["rows"]}
    return now | {"rows": [*(row for row in before["rows"] if row["drafter"] not in tried), *now["rows"]]}


PARTS = ("greedy", "half", "seeded", "law", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with *_dev.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="results file; parts that are there are kept")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--contexts", type=int, default=20)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--batches", default="1,8", help="batch sizes in bfloat16")
    parser.add_argument("--no-trees", action="store_true", help="leave out the sampled tree, which is slow on a CPU")
    parser.add_argument("--drafters", help="only these, by name; results of others that are there are kept")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of: %(default)s")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    whole = arguments.drafters is None and set(parts) >= set(PARTS)
    result: dict[str, Any] = {} if whole or not arguments.out.exists() else json.loads(arguments.out.read_text())
    if result and result["provenance"]["git"] != git_state():
        sys.exit(f"{arguments.out} is from other sources, which one line of provenance cannot say: name another --out")
    full = Bench.load(torch.float32)
    half = Bench.load(torch.bfloat16)
    tokenizer = load_tokenizer(full.source)
    prompts = prompts_of(
        arguments.data, arguments.prompts, lambda text: tokenizer.apply_chat([{"role": "user", "content": text}])
    )
    contexts = prompts_of(arguments.data, arguments.contexts, lambda text: tokenizer.encode(text)[:16])
    with TemporaryDirectory() as folder:
        short = first_layers(full.source.folder, Path(folder) / "short", layers=20)
        store = Path(folder) / "prompts.store"
        texts = [tokenizer.encode(tokenizer.decode(prompt)) for prompt in prompts]
        datastore.build(store, texts, vocabulary=full.target.vocab_size, fingerprint=tokenizer.fingerprint)
        tried = methods(short, store, not arguments.no_trees)
        if arguments.drafters:
            chosen = arguments.drafters.split(",")
            tried = [tried[0], *(method for method in tried[1:] if method.name in chosen)]
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "greedy": lambda: check_greedy(full, prompts, tried),
            "half": lambda: check_half(half, full, prompts, tried, batches),
            "seeded": lambda: check_seeded(full, prompts, tried),
            "law": lambda: check_law(full, contexts, tried, arguments.samples),
            "batch": lambda: check_batch(half, prompts[:8], 3),
        }
        for part in parts:
            result[part] = joined(result.get(part), work[part]())
            result["provenance"] = provenance({"prompts": arguments.prompts, "samples": arguments.samples})
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
