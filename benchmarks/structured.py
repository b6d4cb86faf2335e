"""Structured output with speculation: does every answer fit its schema, and how many tokens does a pass write?

    python -m benchmarks.structured --drafter eagle3 --out results/structured.json

Prompts over ten JSON schemas at temperature 1, without a seed, so that the rules that look at draws are the ones that
run. The same prompts run again without the grammar, with the grammar and no drafter (what is forced is still drafted),
and with the grammar and nothing drafted at all. A seeded part of them is compared token by token with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from benchmarks.schemas import SCHEMAS, prompt_for
from forerun.bench.provenance import provenance
from forerun.core.params import SamplingParams
from forerun.engine.completion import Completion
from forerun.engine.grammar import json_schema
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.engine.request import DraftOptions

MODEL = "smollm2-135m"
PLAIN = DraftOptions(nodes=0)


@dataclass(frozen=True)
class Arm:
    label: str
    drafter: str
    grammar: bool
    draft: DraftOptions | None = None


def fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def measure(arm: Arm, model: LoadedModel, names: Sequence[str], params: Sequence[SamplingParams]) -> dict[str, Any]:
    """All prompts of one arm, which run together."""
    prompts = [prompt_for(name, number // len(SCHEMAS)) for number, name in enumerate(names)]
    own = list(params) if arm.grammar else [replace(each, grammar=None) for each in params]
    with LLM(model, drafter=arm.drafter) as llm:
        began = time.perf_counter()
        answers = llm.generate(prompts, own, draft=arm.draft)
        seconds = time.perf_counter() - began
    texts = [choice for answer in answers for choice in answer.choices]
    tokens, passes = sum(text.stats.tokens for text in texts), sum(text.stats.target_passes for text in texts)
    valid = [fits(answer.text, SCHEMAS[name]) for answer, name in zip(answers, names, strict=True)]
    for answer, name, right in zip(answers, names, valid, strict=True):
        if arm.grammar and not right:
            print(f"{arm.label}: the answer to {name} does not fit: {answer.text!r}", file=sys.stderr)
    return {
        "arm": arm.label,
        "drafter": arm.drafter,
        "grammar": arm.grammar,
        "texts": len(texts),
        "parse": sum(parses(answer.text) for answer in answers),
        "fit": sum(valid),
        "tokens": tokens,
        "passes": passes,
        "tokens_per_pass": round(tokens / passes, 3),
        "drafted": sum(text.stats.drafted for text in texts),
        "accepted": sum(text.stats.accepted for text in texts),
        "seconds": round(seconds, 1),
    }


def same_text(model: LoadedModel, drafter: str, names: Sequence[str], params: Sequence[SamplingParams]) -> int:
    """How many seeded texts are, token for token, those of plain decoding."""
    seeded = [replace(each, seed=number) for number, each in enumerate(params)]
    prompts = [prompt_for(name, number // len(SCHEMAS)) for number, name in enumerate(names)]
    found: list[list[Completion]] = []
    for name, draft in (("none", PLAIN), (drafter, None)):
        with LLM(model, drafter=name) as llm:
            found.append(llm.generate(prompts, seeded, draft=draft))
    pairs = zip(*found, strict=True)
    return sum(one.choices[0].token_ids == other.choices[0].token_ids for one, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--drafter", default="recycling")
    parser.add_argument("--prompts", type=int, default=200, help="over all schemas together")
    parser.add_argument("--beside", type=int, default=40, help="prompts of the arms to compare with, and seeded ones")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    model = LoadedModel.load(arguments.model)
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(arguments.prompts)]
    grammars = {name: json_schema(schema, model.tokenizer) for name, schema in SCHEMAS.items()}
    params = [SamplingParams(max_tokens=arguments.max_tokens, grammar=grammars[name]) for name in names]
    few = min(arguments.beside, arguments.prompts)
    arms = [
        (Arm("speculation and grammar", arguments.drafter, True), len(names)),
        (Arm("speculation, no grammar", arguments.drafter, False), few),
        (Arm("forced tokens alone", "none", True), few),
        (Arm("plain decoding with the grammar", "none", True, PLAIN), few),
    ]
    rows = []
    for arm, count in arms:
        row = measure(arm, model, names[:count], params[:count])
        rows.append(row)
        print(
            f"{arm.label:32} {row['texts']:4} texts, {row['parse']} parse, {row['fit']} fit, "
            f"{row['tokens_per_pass']:.2f} tokens per pass, {row['seconds']} s",
            file=sys.stderr,
        )
    same = same_text(model, arguments.drafter, names[:few], params[:few])
    print(f"{same} of {few} seeded texts are those of plain decoding", file=sys.stderr)
    told = {"model": arguments.model, "drafter": arguments.drafter, "prompts": arguments.prompts}
    result = {"provenance": provenance(told, str(model.target.device)), "rows": rows, "seeded": few, "same": same}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    right = rows[0]["fit"] == rows[0]["texts"] and same == few
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
