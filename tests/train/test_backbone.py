"""Medusa-2: heads and the model below them learn together, and what comes out says what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer
from forerun.train.answers import AnswerOptions
from forerun.train.calibrate import answers as own_answers
from forerun.train.calibrate import find_out
from forerun.train.dense import states
from forerun.train.loop import Loop, LoopOptions
from forerun.train.measure import held_back_tokens
from forerun.train.methods.backbone import LAMBDA, BackboneMethod, apart
from forerun.train.methods.method import Task
from forerun.train.methods.side import SideMethod, SideOptions
from forerun.train.processes import Processes
from forerun.train.prompts import hold_back
from forerun.train.run import Run, Settings
from forerun.train.texts import TextBatch
from tests.cli.conftest import Terminal
from tests.models.rows import tiny
from tests.train.conftest import PROMPTS
from tests.train.test_methods import HF, TARGET, texts

FLAGS = ("--heads", "2", "--steps", "30", "--every", "15", "--batch", "8", "--held-back", "3", "--max-tokens", "24",
         "--learning-rate", "1e-2", "--device", "cpu", "--offline", "--backbone")  # fmt: skip


@pytest.fixture
def flags(folder: Path, prompts: Path) -> tuple[str, ...]:
    return ("train", "medusa", "--target", str(folder), "--prompts", str(prompts), *FLAGS)


def method(target: Transformer, rate: float = 0.25) -> BackboneMethod:
    task = Task(target, HF, Path(), texts(), seed=1)
    return BackboneMethod(SideMethod("medusa", SideOptions(heads=2, draft_vocabulary=64), task), rate, task)


def test_it_begins_as_the_original_and_the_heads_come_in_later() -> None:
    target = tiny(TARGET, dtype=torch.float32)
    learner, batch = method(target), TextBatch.pack(texts())
    learner.proceed(0.0)
    assert float(learner.loss(batch).total.detach()) == pytest.approx(0, abs=1e-4)
    weights = []
    for done in (0.25, 0.5, 1.0):
        learner.proceed(done)
        loss = learner.loss(batch)
        weights.append(float(loss.total.detach()) / float(loss.figures["heads"]))
    assert weights == sorted(weights)
    assert weights[-1] == pytest.approx(LAMBDA, rel=1e-3)
    assert weights[0] < 0.5 * LAMBDA


def test_what_learns() -> None:
    """Heads at the full rate, layers and norms at a part of it; matrices that all share stay, and the original does."""
    target = tiny(TARGET, dtype=torch.float32)
    before = {key: weight.clone() for key, weight in target.state_dict().items()}
    learner = method(target)
    learner.proceed(1.0)
    learner.loss(TextBatch.pack(texts())).total.backward()  # type: ignore[no-untyped-call]
    for name, weight in learner.module.named_parameters():
        shared = "lm_head" in name or "embed_tokens" in name
        assert (weight.grad is None) == (not weight.requires_grad) == shared, name
        assert learner.pace(name) == (0.25 if name.startswith("backbone.") else 1.0)
    assert all(torch.equal(weight, before[key]) for key, weight in target.state_dict().items())


def test_half_precision_is_close() -> None:
    """As on an accelerator: the original in bfloat16, what learns in float32, products in bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        learner = method(tiny(TARGET, dtype=dtype))
        learner.proceed(1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = learner.loss(TextBatch.pack(texts()))
        loss.total.backward()  # type: ignore[no-untyped-call]
        learning = [weight for weight in learner.module.parameters() if weight.requires_grad]
        assert all(weight.dtype == torch.float32 for weight in learning)
        found.append((float(loss.total.detach()), torch.cat([weight.grad.flatten() for weight in learning])))  # type: ignore[union-attr]
        assert learner.stored().dtype == dtype
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)
    assert float(torch.cosine_similarity(found[0][1], found[1][1], 0)) > 0.95


def test_the_distance_is_that_of_the_laws() -> None:
    target, other = tiny(TARGET, dtype=torch.float32), tiny(TARGET, seed=5, dtype=torch.float32)
    same = apart(target, target, texts())
    assert same.mean_kl == pytest.approx(0, abs=1e-5)
    assert same.greedy_differs == 0
    found = apart(target, other, texts())
    assert found.places == sum(len(text.answer) for text in texts())
    batch = TextBatch.pack(texts())
    p, q = (
        (batch.at(states(model, batch.tokens).normed) @ model.lm_head.weight.T).log_softmax(-1).detach()
        for model in (target, other)
    )
    assert found.mean_kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.greedy_differs == pytest.approx(float((p.argmax(-1) != q.argmax(-1)).float().mean()), abs=1e-5)


def test_from_prompts_to_a_new_model(run: Terminal, flags: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "both"
    shown = run(*flags, "--out", str(out))
    assert (shown.code, shown.err) == (0, "")
    words = " ".join(shown.out.split())
    assert "is a new model and no longer target: its text is not the original's" in words
    kept: dict[str, Any] = json.loads((out / "forerun.json").read_text())
    about = json.loads((out / "backbone" / "forerun.json").read_text())
    assert about["about"].startswith("This is no longer target:")
    assert about["distance"] == kept["backbone"]["distance"]
    assert about["distance"]["places"] > 30
    assert 0 < about["distance"]["mean_kl"] < 1
    assert kept["heads_alone"]["steps"] == kept["steps"] == 30
    first, second = kept["heads_alone"]["tokens_per_pass"], kept["tokens_per_pass"]
    assert second["before"] == first["before"] < second["after"]
    assert second["after"] >= first["after"]
    assert str(tmp_path) not in (out / "forerun.json").read_text() + json.dumps(about)
    # It loads as any model does, and is told from the original.
    new = LoadedModel.load(out / "backbone", dtype="float32", device="cpu")
    old = LoadedModel.load(folder, dtype="float32", device="cpu")
    assert isinstance(new.target, Transformer)
    assert isinstance(old.target, Transformer)
    assert kept["target"]["identity"] == weights_identity(new.target) != weights_identity(old.target)
    assert about["original"]["identity"] == weights_identity(old.target)
    # What was measured of the heads is theirs on the new model.
    questions = held_back_tokens(new, hold_back(PROMPTS, 3, 0)[1], 512, 24)
    answers = own_answers(new, questions, 24, lambda doing, done, total: None)
    assert find_out(new, "medusa", out, answers).kept() == kept["calibration"]
    params = SamplingParams(temperature=0, max_tokens=30)
    with LLM(new) as plain, LLM(new, str(out), tree="static:5") as llm:
        assert llm.generate("what is it?", params).token_ids == plain.generate("what is it?", params).token_ids
        assert llm.statistics.tokens_per_pass > 1.2
    with pytest.raises(ValueError, match="was trained for another target"):
        LLM(old, str(out))


def test_it_goes_on_in_the_second_part(
    run: Terminal, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    expected = run.json(*flags, "--out", str(whole))
    tell = Loop._tell

    def interrupt(self: Loop, seconds_left: float) -> None:
        tell(self, seconds_left)
        if isinstance(self.method, BackboneMethod) and self.standing.step == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_tell", interrupt)
    assert run(*flags, "--out", str(torn)).code == 130
    monkeypatch.undo()
    made = run.json(*flags, "--out", str(torn), "--resume")
    assert (made["history"], made["heads_alone"]["history"]) == (
        expected["history"],
        expected["heads_alone"]["history"],
    )
    for name in ("model.safetensors", "backbone/model.safetensors"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes()


def test_a_dry_run_counts_both_parts(run: Terminal, flags: tuple[str, ...], tmp_path: Path) -> None:
    both = run.json(*flags, "--out", str(tmp_path / "both"), "--dry-run")
    assert list(tmp_path.iterdir()) == []
    alone = both["answer_seconds"] + 30 * both["step_seconds"] + 3 * both["measure_seconds"]
    assert both["seconds"] > 1.1 * alone


def test_a_target_with_experts_is_refused(loaded: LoadedModel) -> None:
    assert isinstance(loaded.target, Transformer)
    settings = Settings("medusa", SideOptions(backbone=True), AnswerOptions(), LoopOptions())
    before = loaded.target.config
    loaded.target.config = replace(before, layers=tuple(replace(layer, experts=True) for layer in before.layers))
    try:
        with pytest.raises(ValueError, match="--backbone: the target has experts"):
            Run(loaded, "some", PROMPTS, settings, Processes())
    finally:
        loaded.target.config = before
