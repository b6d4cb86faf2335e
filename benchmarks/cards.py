"""A card for each drafter that comes with Forerun: what it is, how it was trained, and what was measured of it.

    python -m benchmarks.cards

writes README.md into the folders of drafters, from their manifests and what `benchmarks.trained`
measured. `--check` changes nothing and fails if one is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAINED = ROOT / "src" / "forerun" / "trained"
FILES = (
    "trained-alone-medusa",
    "trained-alone-eagle",
    "trained-alone-trees",
    "trained-alone",
    "trained",
    "trained-few-sampled",
    "trained-few",
)
"""Of all questions, one at a time and in batches, and of some on a CPU where that is all there is."""
RESULTS = [ROOT / "results" / f"{name}.json" for name in FILES]
PAPERS = {
    "blockwise": "blockwise parallel decoding (Stern et al., 2018)",
    "draft": "a small transformer distilled from the target, for `draft_model`",
    "eagle": "EAGLE (Li et al., 2024), with a static tree or EAGLE-2's dynamic one",
    "eagle3": "EAGLE-3 (Li et al., 2025)",
    "medusa": "Medusa-1 (Cai et al., 2024), with a stem by which its heads see the token that the state gave",
    "mtp": "multi-token prediction (DeepSeek-AI, 2024), one module that goes on from itself",
    "parallel": "PaSS (Monea et al., 2023)",
}


NAMES = {"draft": "draft_model"}


def folders() -> Iterator[Path]:
    yield from sorted(path.parent for path in TRAINED.glob("*/*/forerun.json"))


def card(folder: Path, results: list[Mapping[str, Any]]) -> str:
    manifest = json.loads((folder / "forerun.json").read_text("utf-8"))
    method, target = manifest["method"], manifest["target"]["name"]
    size = (folder / "model.safetensors").stat().st_size / 2**20
    parts = [
        f"# {method} for {target}",
        f"{PAPERS[method][:1].upper()}{PAPERS[method][1:]}. {size:.1f} MiB. Used by name:",
        f"    forerun generate '…' --model {target} --drafter {NAMES.get(method, method)}",
        "It changes how fast the model writes, not what.",
        "## How it was trained",
        _recipe(manifest),
        "## What was measured",
        "\n\n".join(_measured(manifest, each) for each in results) or "Nothing yet beside that.",
    ]
    return "\n\n".join(parts) + "\n"


def _recipe(manifest: Mapping[str, Any]) -> str:
    stages = []
    stage: Mapping[str, Any] | None = manifest
    while stage is not None:
        stages.append(stage)
        stage = stage.get("began")
    lines = []
    for number, each in enumerate(reversed(stages), start=1):
        options, loop, made = each["options"]["options"], each["options"]["loop"], each["provenance"]
        kept = ("draft_vocabulary",) if each.get("began") else ()  # of the one that it went on from
        told = {name: value for name, value in options.items() if value not in (None, False) and name not in kept}
        chosen = ", ".join(f"{name} {value}" for name, value in told.items())
        more = each["options"].get("emphasis") or {}
        chosen += "".join(f", {name} prompts {times} times as often" for name, times in dict(more).items())
        found = each["tokens_per_pass"]
        company = "" if each.get("alone") else ", beside other trainings"
        lines.append(
            f"{number}. {each['steps']:,} steps of {loop['batch_tokens'] or loop['batch']:,} "
            f"{'tokens' if loop['batch_tokens'] else 'texts'} in {each['learning_seconds']:.0f} s on one "
            f"{made['device']}{company}, on {each['data']['answer_tokens']:,} tokens of "
            f"{each['data']['texts']:,} answers{', repeats counted' if more else ''}; "
            f"{loop.get('optimizer', 'adamw')}, learning rate {loop['learning_rate']:g}; {chosen}. "
            f"With chains of {found['chain']} it drafted "
            f"{found['after']:.2f} tokens per pass on {each['data']['held_back']} prompts that were held back, "
            f"{found['before']:.2f} before. Commit {(made['git'] or {}).get('commit', 'unknown')[:9]}."
        )
    data = manifest["data"]
    source = (
        f"On what the target itself answered to {data['prompts']:,} prompts ([which](../DATA.md)), a part greedily and "
        f"the rest at temperature 1. Weights "
        f"are stored in {manifest.get('stored_bits', manifest['options']['bits'])} bits"
        f"{', ' + manifest['stored'] if 'stored' in manifest else ''}."
    )
    trained_in = manifest["options"]["bits"]
    if manifest.get("stored_bits", trained_in) != trained_in:
        source += f" What is said of its training was measured with {trained_in}."
    return "\n".join([source, "", *lines])


def _rows(method: str, result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["method"] == method and "error" not in row]


def _measured(manifest: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    own, made = _rows(manifest["method"], result), result["provenance"]
    git = made.get("git") or {}
    commit = git.get("commit", "unknown")[:9] + (" with changes" if git.get("dirty") else "")
    labels = list(dict.fromkeys((row["tree"], row["rule"], row["temperature"]) for row in own))
    heads = [f"{tree or 'its own tree'}{', ' + rule if rule else ''}, T {heat:g}" for tree, rule, heat in labels]
    lines = [f"| tokens per pass | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for category in dict.fromkeys(row["category"] for row in own):
        cells = []
        for label in labels:
            found = [r for r in own if (r["tree"], r["rule"], r["temperature"]) == label and r["category"] == category]
            cells.append(f"{found[0]['tokens_per_pass']:.2f}" if found else "")
        lines.append(f"| {category} | {' | '.join(cells)} |")
    questions = max(row["questions"] for row in own)
    batch = made["arguments"]["batch"]
    told = (
        f"First turns of {questions} questions of Spec-Bench's development half, up to "
        f"{made['arguments']['max_tokens']} tokens, {'one' if batch == 1 else batch} at a time, on {made['device']}; "
        f"made with commit {commit}{before_learning(manifest, result)}."
    )
    return "\n".join([*lines, "", told])


def before_learning(manifest: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What to say of figures that are older than the weights."""
    began = datetime.fromisoformat(manifest["provenance"]["time"])
    learnt = began + timedelta(seconds=manifest["last_session_seconds"])
    older = datetime.fromisoformat(result["provenance"]["time"]) < learnt
    return ", before the last of its trainings" if older else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a card is not what results and manifests say")
    given = parser.parse_args()
    found = [json.loads(path.read_text("utf-8")) for path in RESULTS if path.exists()]
    stale = []
    for folder in folders():
        method = json.loads((folder / "forerun.json").read_text("utf-8"))["method"]
        wanted, path = card(folder, [each for each in found if _rows(method, each)]), folder / "README.md"
        if path.exists() and path.read_text("utf-8") == wanted:
            continue
        stale.append(path.relative_to(ROOT))
        if not given.check:
            path.write_text(wanted, "utf-8")
    if given.check and stale:
        sys.exit(f"stale: {', '.join(map(str, stale))}: run python -m benchmarks.cards")


if __name__ == "__main__":
    main()
