"""Through the engine: no drafter changes what a request with a seed, or at temperature 0, gets; and a draft that is the
target itself is always right, whichever way its tokens are drawn and verified."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.drafters.find import Setup, make_drafter, names
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.drafters.contract import needed
from tests.engine.tiny import drain, tiny_model

TREES = ("3", "2,2,1", "fixed:2,2", "dynamic:3,3,8")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, needed(name, hidden=32)) for name in names() if name != "draft_model"),
    ("ngram", {"candidates": 3, "min_match": 1}),
    *(("draft_model", {"model": "other", "tree": tree}) for tree in TREES),
    *(("multi_draft", {"models": models, "samples": 3}) for models in ("tiny", "same,other")),
    ("multi_draft", {"models": "tiny,other,same", "samples": 1, "length": 7}),
]


def engine(name: str, options: dict[str, Any], slots: int = 512) -> Engine:
    target = tiny_model()
    models = {"tiny": tiny_model(2), "other": tiny_model(1), "same": target}
    return Engine(target, make_drafter(name, Setup(target, slots, models.__getitem__), options), slots=slots)


def requests() -> list[Request]:
    sampled = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(seed=5, max_tokens=24),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=24),
        SamplingParams(seed=6, temperature=0.8, top_p=0.8, presence_penalty=0.4, max_tokens=24),
        SamplingParams(seed=7, top_k=4, n=2, max_tokens=15),
    ]
    return [Request([7, 8, 9, 7, 8, number], params) for number, params in enumerate(sampled)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_text_does_not_depend_on_the_drafter(name: str, options: dict[str, Any]) -> None:
    plain = drain(engine("none", {}), requests())
    assert drain(engine(name, options), requests()) == plain
    assert drain(engine(name, options, slots=160), requests()) == plain  # with texts that step back


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        *((kind, tree) for kind in ("greedy", "seeded") for tree in TREES),
        *(("sampling", tree) for tree in TREES[:2]),  # a fixed tree holds a part of the law only
    ],
)
def test_the_target_as_its_own_draft_is_right(kind: str, tree: str) -> None:
    kinds: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"seed": 3}, "sampling": {}}
    params = SamplingParams(max_tokens=60, ignore_eos=True, presence_penalty=0.3, top_p=0.9, **kinds[kind])
    made = engine("draft_model", {"model": "same", "tree": tree})
    drain(made, [Request([4, 5, number], params) for number in range(3)])
    counts = made.statistics
    assert min(counts.acceptance_by_depth) > 0.97
    if not tree.startswith("dynamic"):  # there it may be wide instead of deep
        assert counts.tokens_per_pass > 0.93 * (1 + len(counts.offered_by_depth))  # the last step may be short
