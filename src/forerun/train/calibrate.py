"""A trained drafter's calibration: what `examine` finds, and the tree that writes fastest on this kind of device.

It is kept in the drafter's own folder, so that the drafter is used as it is best used from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from forerun.core.params import SamplingParams
from forerun.drafters import draft_model, parallel
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.kinds import FOLDED, NARROW_FLOATS, WIDE_FLOATS, kind_of
from forerun.drafters.trained_folder import Calibration, find_head
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.models.heads.files import read_head, update_manifest
from forerun.models.transformer import Transformer
from forerun.train.examine import Examined, Findings, examine
from forerun.train.methods.find import METHODS

Progress = Callable[[str, int, int], None]

DRAFT = "draft_model"
"""The drafter whose folders are made by a method of another name."""
DEPTH = 10
"""How far ahead the drafter is asked."""
ROUNDS = 3
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    NARROW_FLOATS: ("2", "dynamic:1,2,2", "dynamic:2,3,3", "dynamic:4,4,5", "dynamic:5,5,7", "dynamic:6,6,11"),
    FOLDED: ("1", "2", "dynamic:2,2,2", "dynamic:3,2,3", "dynamic:3,3,3", "dynamic:4,4,5", "dynamic:4,4,7"),
    WIDE_FLOATS: ("3", "dynamic:4,4,7", "dynamic:6,8,11", "dynamic:6,8,15", "dynamic:8,8,15", "dynamic:8,8,23"),
    "cpu": (
        "3",
        "5",
        "dynamic:3,3,8",
        "dynamic:4,4,12",
        "dynamic:4,5,16",
        "dynamic:6,5,24",
        "dynamic:6,6,31",
        "dynamic:8,6,47",
    ),
    "cuda": ("5", "dynamic:4,5,16", "dynamic:6,6,31", "dynamic:8,6,40", "dynamic:10,6,60", "dynamic:10,8,63"),
}
SIDE_CANDIDATES: Mapping[str, tuple[str, ...]] = {
    NARROW_FLOATS: ("1", "2", "3", "static:3", "static:5"),
    FOLDED: ("1", "2", "static:2", "static:3", "static:5", "static:7"),
    WIDE_FLOATS: ("2", "3", "static:5", "static:7", "static:11", "static:15"),
    "cpu": ("3", "static:7", "static:15", "static:24", "dynamic:5,4,15"),
    "cuda": ("3", "static:15", "static:31", "static:63", "dynamic:10,4,60"),
}


@dataclass(frozen=True)
class Timed:
    tree: str
    tokens_per_second: float
    tokens_per_pass: float


def answers(
    loaded: LoadedModel, prompts: Many[list[int]], max_tokens: int, tell: Progress
) -> list[tuple[list[int], int]]:
    """What the target says itself, and where it begins to."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    longest = max(map(len, prompts)) + max_tokens
    with LLM(loaded, max_batch=8, cache_tokens=8 * (longest + 32)) as llm:
        told = llm.generate(list(prompts), params, progress=lambda done, total: tell("Answering prompts", done, total))
    return [(prompt + own.token_ids, len(prompt) - 1) for prompt, own in zip(prompts, told, strict=True)]


def find_out(loaded: LoadedModel, method: str, folder: Path, texts: Many[tuple[list[int], int]]) -> Findings:
    target = loaded.target
    assert isinstance(target, Transformer)
    longest = max(len(text) for text, _ in texts)
    setup = Setup(target, longest + 64, loaded.load_beside)
    drafter = make_drafter(method, setup, {option_of(method): str(folder), "tree": "1"})
    assert isinstance(drafter, Examined)
    return examine(drafter, target, texts, DEPTH)


def option_of(method: str) -> str:
    """How a drafter's folder is named to it."""
    return "model" if method == DRAFT else "path"


def candidates(method: str, device: str, depth: int) -> tuple[str, ...]:
    """Trees to try for a drafter that sees so far ahead. Parallel divides its rows by the accuracies, anew in every
    step, so there is no tree to be chosen for it."""
    if method == parallel.METHOD:
        return ()
    table = SIDE_CANDIDATES if method in ("medusa", "blockwise") else CANDIDATES
    return tuple(tree for tree in table.get(device, table["cuda"]) if not tree.isdigit() or int(tree) <= depth)


def time_trees(
    loaded: LoadedModel,
    method: str,
    folder: Path,
    prompts: Many[list[int]],
    trees: Many[str],
    max_tokens: int,
    tell: Progress,
) -> list[Timed]:
    """Each tree on the same prompts, one text at a time, in turns: whatever else the machine does hits all alike."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    slots = max(map(len, prompts)) + max_tokens + 128
    speeds: dict[str, list[float]] = {tree: [] for tree in trees}
    per_pass: dict[str, float] = {}
    for turn in range(1 + ROUNDS):  # the first warms up
        for place, tree in enumerate(trees):
            tell("Timing trees", turn * len(trees) + place, (1 + ROUNDS) * len(trees))
            chosen = {option_of(method): str(folder)}
            with LLM(loaded, method, drafter_options=chosen, tree=tree, cache_tokens=slots) as llm:
                start = time.perf_counter()
                tokens = sum(
                    len(llm.generate(prompt, params).token_ids) for prompt in (prompts[:1] if turn == 0 else prompts)
                )
                if turn:
                    speeds[tree].append(tokens / (time.perf_counter() - start))
                    per_pass[tree] = llm.statistics.tokens_per_pass
    return [Timed(tree, median(own), per_pass[tree]) for tree, own in speeds.items()]


def calibrate(
    loaded: LoadedModel,
    method: str,
    path: str,
    prompts: Many[list[int]],
    *,
    max_tokens: int = 96,
    trees: Many[str] | None = None,
    tell: Progress = lambda doing, done, total: None,
) -> dict[str, Any]:
    """Find out, and write it into the folder; what was written comes back, with the times of all trees. Where none are
    to be timed the one that is stored stays."""
    made_by = draft_model.METHOD if method == DRAFT else method
    if made_by not in METHODS:
        raise ValueError(f"{method} is nothing that is trained: calibrate one of {', '.join(METHODS)}")
    method = DRAFT if made_by == draft_model.METHOD else method
    if method == parallel.METHOD and trees:
        raise ValueError("parallel makes its own trees, from the accuracies: leave --tree out")
    setup = Setup(loaded.target, 16, loaded.load_beside)
    found, target = find_head(made_by, path, setup)
    assert found.path is not None
    folder = found.path
    device = kind_of(target)
    texts = answers(loaded, prompts, max_tokens, tell)
    tell("Asking the drafter", 0, 0)
    findings = find_out(loaded, method, folder, texts)
    known = Calibration.of(found.manifest)
    fresh: dict[str, Any] = {**findings.kept(), "trees": dict(known.trees)}
    update_manifest(folder, calibration=fresh)  # static trees are built from it
    few = sorted(prompts, key=len)[: max(4, len(prompts) // 4)]
    wanted = candidates(method, device, len(findings.accuracies)) if trees is None else trees
    timed = time_trees(loaded, method, folder, few, wanted, max_tokens, tell)
    if timed:
        best = max(timed, key=lambda each: each.tokens_per_second)
        fresh["trees"] = {**known.trees, device: best.tree}
        update_manifest(folder, calibration=fresh)
        assert Calibration.of(read_head(folder).manifest).trees[device] == best.tree
    return {**fresh, "timed": [vars(replace(each)) for each in timed], "folder": str(folder)}
