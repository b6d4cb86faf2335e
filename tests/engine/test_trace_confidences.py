"""Confidences on their way into traces: by the default model's own heads, and where a step has nothing to tell."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.drafters.find import make_drafter
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.models.builtin import BUILTINS
from forerun.models.store import Store
from tests.drafters.models import setup
from tests.engine.tiny import drain, tiny_model

NAME = "smollm2-135m"


def test_prompts_roots_and_drafters_that_do_not_know() -> None:
    for name in ("suffix", "ngram"):
        steps: list[StepRecord] = []
        model = tiny_model()
        engine = Engine(model, make_drafter(name, setup(model)), slots=512, max_rows=16, trace=steps.append)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        drain(engine, [Request([5, 6, 7, 8] * 8, params), Request([9, 9, 9], params)])
        parts = [part for step in steps for part in step.sequences]
        assert any(not part.tokens for part in parts), "a prompt is read in chunks"
        assert all(part.confidences is None for part in parts if not part.tokens)
        drafted = [part for part in parts if len(part.tokens) > 1]
        assert len(drafted) >= 3
        for part in drafted:
            assert (part.confidences is None) == (name == "ngram")
            if part.confidences is not None:
                assert len(part.confidences) == len(part.tokens) == len(part.parents)
        assert all(json.loads(step.as_json())["sequences"][0].keys() >= {"confidences"} for step in steps)


@pytest.mark.skipif(
    not BUILTINS[NAME].path(Store.default()).exists(),
    reason=f"{NAME} is not in the cache: run `forerun models fetch {NAME}`",
)
@pytest.mark.xdist_group("real model")
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=3, temperature=0.8)], ids=str)
def test_a_trace_of_the_default_model_has_the_confidence_of_every_draft(tmp_path: Path, params: SamplingParams) -> None:
    file = tmp_path / "steps.jsonl"
    with LLM(NAME, "eagle3", device="cpu", offline=True, cache_tokens=1024, trace=file) as llm:
        text = llm.generate("Why is the sky blue?", replace(params, max_tokens=24, ignore_eos=True))
    assert len(text.token_ids) == 24
    parts = [part for line in file.read_text("utf-8").splitlines() for part in json.loads(line)["sequences"]]
    drafted = [part for part in parts if len(part["tokens"]) > 1]
    assert len(drafted) > 4
    for part in drafted:
        told = part["confidences"]
        assert len(told) == len(part["tokens"])
        assert told[0] == 1
        assert all(0 < chance <= 1 for chance in told)
        for node, parent in enumerate(part["parents"]):
            siblings = [chance for chance, other in zip(told, part["parents"], strict=True) if other == parent]
            assert math.fsum(siblings) < 1.001, f"node {node} and those beside it share what follows one path"
