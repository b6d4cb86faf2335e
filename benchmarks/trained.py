"""Tokens per pass of the trained drafters, on first turns of a development set, by category and tree.

    python -m benchmarks.trained --questions FILE --out results/trained.json

The drafters are those that come with Forerun, or with --drafters FOLDER those of its subfolders. At temperature 0 every
text is compared with plain decoding's, at temperature 1 every seeded one. The file is written after each case; those of
several runs side by side, of other cases or of other questions (--part 1/2 and 2/2), are joined with

    python -m benchmarks.trained --join PART PART … --out results/trained.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.bench.provenance import provenance
from forerun.bench.questions import Question, read_questions
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel

MODEL = "smollm2-135m"
SEED = 20_26


@dataclass(frozen=True)
class Case:
    method: str
    tree: str = ""
    rule: str = ""
    temperature: float = 0.0
    seeded: bool = False

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.method, self.tree, self.rule) if part)


GREEDY = (
    Case("eagle3", "dynamic:8,12,60"),
    Case("eagle3", "dynamic:6,11,60"),
    Case("eagle3", "dynamic:8,8,60"),
    Case("eagle3", "dynamic:10,6,60"),
    Case("eagle3", "dynamic:8,6,26"),
    Case("eagle3", "static:60"),
    Case("eagle3", "5"),
    Case("eagle", "dynamic:8,12,60"),
    Case("eagle", "dynamic:8,8,60"),
    Case("eagle", "dynamic:10,6,60"),
    Case("eagle", "static:60"),
    Case("eagle", "dynamic:8,6,26"),
    Case("eagle", "dynamic:8,12,26"),
    Case("eagle", "static:26"),
    Case("eagle", "5"),
    Case("mtp", "dynamic:10,6,60"),
    Case("mtp", "5"),
    Case("medusa", "static:60"),
    Case("medusa", "dynamic:10,4,60"),
    Case("medusa", "dynamic:24,4,60"),
    Case("blockwise", "static:60"),
    Case("blockwise", "static:26"),
    Case("blockwise", "3"),
    Case("parallel"),
    Case("draft", "5"),
    Case("draft", "8"),
    Case("draft", "dynamic:10,6,60"),
)
SAMPLED = (
    Case("eagle3", "dynamic:8,12,60", "", 1.0, True),
    Case("eagle3", "dynamic:8,8,60", "", 1.0, True),
    Case("eagle3", "dynamic:10,6,60", "", 1.0, True),
    Case("eagle3", "dynamic:10,6,60", "sample_match", 1.0),
    Case("eagle3", "dynamic:10,6,60", "recursive_fixed", 1.0),
    Case("eagle3", "sequoia:60,6", "traversal", 1.0),
    Case("eagle3", "sequoia:60,6", "recursive_without_replacement", 1.0),
    Case("eagle3", "sequoia:60,6", "", 1.0, True),
    Case("eagle3", "static:60", "", 1.0, True),
    Case("eagle3", "5", "block", 1.0),
    Case("eagle", "dynamic:10,6,60", "", 1.0, True),
    Case("mtp", "dynamic:10,6,60", "", 1.0, True),
    Case("medusa", "dynamic:10,4,60", "", 1.0, True),
    Case("draft", "5", "", 1.0, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="JSON lines in Spec-Bench's form")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, help="a folder with a trained drafter in each subfolder")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--batch", type=int, default=1, help="beside prompts others are not drafted for: 1 counts only drafts"
    )
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--limit", type=int, help="questions of each category")
    parser.add_argument("--part", default="1/1", help="of the questions: 1/3 is the first of every three")
    parser.add_argument("--methods", help="only these, with commas between")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument(
        "--cases",
        help='only these, by drafter, tree and rule, as "eagle3 static:60;parallel"; trees of yours at temperature 0',
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", help="files of runs on one commit, machine and set of questions"
    )
    args = parser.parse_args()
    if args.join:
        args.out.write_text(json.dumps(joined([json.loads(part.read_text("utf-8")) for part in args.join]), indent=1))
        return
    if args.questions is None:
        parser.error("give --questions")
    part, parts = map(int, args.part.split("/"))
    questions = read_questions(args.questions, per_category=args.limit)[part - 1 :: parts]
    loaded = LoadedModel.load(args.model, dtype=args.dtype, device=args.device)
    wanted = None if args.methods is None else args.methods.split(",")
    labels = None if args.cases is None else args.cases.split(";")
    known = {case.label for case in (*GREEDY, *SAMPLED)}
    others = [Case(*label.split()) for label in labels or () if label not in known]
    cases = [
        case
        for case in (*GREEDY, *others, *SAMPLED)
        if (wanted is None or case.method in wanted)
        and (labels is None or case.label in labels)
        and f"{case.temperature:g}" in args.temperatures.split(",")
    ]
    arguments = {"model": args.model, "dtype": args.dtype, "batch": args.batch, "max_tokens": args.max_tokens}
    result: dict[str, Any] = {
        "provenance": provenance({**arguments, "questions": len(questions)}, str(loaded.target.device)),
        "rows": [],
    }
    plain = {}
    for temperature in dict.fromkeys(case.temperature for case in cases):
        told = write(loaded, "none", {}, Case("none", temperature=temperature, seeded=True), questions, args)
        plain[temperature] = [own.token_ids for own in told]
    for case in cases:
        start = time.perf_counter()
        try:
            rows = measure(loaded, case, questions, plain[case.temperature], args)
        except ValueError as error:
            rows = [{**asdict(case), "label": case.label, "error": str(error)}]
        result["rows"] += rows
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        first = rows[0]
        told_of = f"{first['tokens_per_pass']:.2f}" if "error" not in first else first["error"]
        print(f"{case.label} at {case.temperature:g}: {told_of} ({time.perf_counter() - start:.0f} s)", file=sys.stderr)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several, whose rows are in the order of the cases. Rows of one case and category are of different
    questions, and are added up."""
    made_with = [_made_with(part) for part in parts]
    if any(other != made_with[0] for other in made_with):
        raise SystemExit("the parts were not measured alike: join runs of one commit, machine and set of questions")
    order = [(case.label, case.temperature, case.seeded) for case in (*GREEDY, *SAMPLED)]
    together: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        key = (row["label"], row["temperature"], row["seeded"], row.get("category"))
        together[key] = row if key not in together else _sum(together[key], row)
    places = {case: place for place, case in enumerate(order)}
    rows = list(together.values())
    rows.sort(key=lambda row: places.get((row["label"], row["temperature"], row["seeded"]), len(order)))
    made = {**parts[0]["provenance"], "joined": len(parts)}
    asked = max((row["questions"] for row in rows if "questions" in row), default=0)
    return {"provenance": {**made, "arguments": {**made["arguments"], "questions": asked}}, "rows": rows}


def _made_with(part: dict[str, Any]) -> dict[str, Any]:
    made = part["provenance"]
    return {**made, "time": "", "arguments": {**made["arguments"], "questions": 0}}


def _sum(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if "error" in row or "error" in other:
        return row if "error" in row else other
    counts = ("questions", "tokens", "passes")
    both = row | {name: row[name] + other[name] for name in counts}
    same = None if row["identical"] is None else row["identical"] + other["identical"]
    return both | {"tokens_per_pass": both["tokens"] / both["passes"], "identical": same}


def write(
    loaded: LoadedModel,
    drafter: str,
    options: dict[str, Any],
    case: Case,
    questions: Sequence[Question],
    args: argparse.Namespace,
) -> list[Any]:
    with LLM(loaded, drafter, drafter_options=options, rule=case.rule or None, max_batch=args.batch) as llm:
        params = [
            SamplingParams(
                temperature=case.temperature,
                seed=SEED + place if case.seeded and case.temperature else None,
                max_tokens=args.max_tokens,
            )
            for place in range(len(questions))
        ]
        return llm.generate([question.turns[0] for question in questions], params)


def measure(
    loaded: LoadedModel,
    case: Case,
    questions: Sequence[Question],
    plain: list[list[int]],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for all questions, and one for each category."""
    options: dict[str, Any] = {} if not case.tree else {"tree": case.tree}
    own = {"draft": "draft_model"}.get(case.method, case.method)
    drafter = own if args.drafters is None else str(args.drafters / case.method)
    told = write(loaded, drafter, options, case, questions, args)
    groups: dict[str, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        groups["overall"].append(place)
        groups[question.category].append(place)
    compared = case.seeded or not case.temperature
    rows = []
    for category, places in groups.items():
        stats = [told[place].stats for place in places]
        tokens, passes = sum(s.tokens for s in stats), sum(s.target_passes for s in stats)
        same = sum(told[place].token_ids == plain[place] for place in places)
        rows.append(
            {
                **asdict(case),
                "label": case.label,
                "category": category,
                "questions": len(places),
                "tokens": tokens,
                "passes": passes,
                "tokens_per_pass": tokens / passes if passes else 0.0,
                "identical": same if compared else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
