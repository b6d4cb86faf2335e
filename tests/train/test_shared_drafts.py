"""`forerun train draft` where the draft reads and speaks with the target's own matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.drafters.confidence import Taus
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.kinds import FLOATS
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.models.heads.files import read_head
from forerun.train.loop import Loop
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model
from tests.train.conftest import teach

LEARNING = ("--layers", "1", "--draft-vocabulary", "192", "--learning-rate", "2e-2", "--steps", "40", "--batch", "8")
REST = ("--every", "20", "--held-back", "3", "--max-tokens", "24", "--device", "cpu", "--offline")
PARAMS = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of which the first layer, which the draft begins as, knows nothing."""
    folder = save_tiny_model(tmp_path_factory.mktemp("deep") / "target")
    teach(folder, last_layer=True)
    return folder


@pytest.fixture
def flags(deep: Path, prompts: Path) -> tuple[str, ...]:
    return ("train", "draft", "--target", str(deep), "--prompts", str(prompts), *LEARNING, *REST)


def test_from_prompts_to_a_draft(run: Terminal, flags: tuple[str, ...], deep: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    made = run.json(*flags, "--out", str(out), "--bits", "8")
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"] + 0.5
    folder = read_head(out, "draft")
    assert not [name for name in folder.tensors if "embed" in name or "lm_head" in name]
    assert folder.tensors["d2t"].shape == (192,)
    assert (out / "model.safetensors").stat().st_size < 20_000, "a layer of 8 bits"
    with LLM(deep, dtype="float32", device="cpu") as plain:
        expected = plain.generate("what is it?", PARAMS)
    for tree in (None, "static:6"):
        with LLM(deep, str(out), tree=tree, dtype="float32", device="cpu") as llm:
            assert llm.generate("what is it?", PARAMS).token_ids == expected.token_ids
            assert llm.statistics.tokens_per_pass > 1.5


def test_it_goes_on_after_an_interruption(
    run: Terminal, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    expected = run.json(*flags, "--out", str(whole))
    tell = Loop._tell

    def interrupt(self: Loop, seconds_left: float) -> None:
        tell(self, seconds_left)
        if self.standing.step == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_tell", interrupt)
    assert run(*flags, "--out", str(torn)).code == 130
    monkeypatch.undo()
    made = run.json(*flags, "--out", str(torn), "--resume")
    assert made["history"] == expected["history"]
    assert made["calibration"] == expected["calibration"]
    assert (torn / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_boosted(run: Terminal, flags: tuple[str, ...], deep: Path, tmp_path: Path) -> None:
    """A second draft beside one that has hardly learned; then both draft together."""
    first, second = tmp_path / "first", tmp_path / "second"
    run.json(*flags, "--out", str(first), "--steps", "6", "--learning-rate", "1e-3")
    made = run.json(*flags, "--out", str(second), "--beside", str(first), "--draft-vocabulary", "128")
    assert made["beside"] == ["first"]
    assert all(0 < row["missed"] < 1 for row in made["history"][1:])
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"] + 0.5
    assert made["calibration"]["accuracies"][0][0] > 0.5, "of the second alone"
    options = {"models": f"{first},{second}", "samples": "2"}
    for params in (PARAMS, SamplingParams(temperature=1, seed=5, max_tokens=30)):
        with LLM(deep, dtype="float32", device="cpu") as plain:
            expected = plain.generate("what is it?", params)
        with LLM(deep, "multi_draft", drafter_options=options, dtype="float32", device="cpu") as llm:
            assert llm.generate("what is it?", params).token_ids == expected.token_ids
            assert llm.statistics.tokens_per_pass > 1.5


def test_calibrated(run: Terminal, flags: tuple[str, ...], deep: Path, prompts: Path, tmp_path: Path) -> None:
    """The tree that was found best is drafted from then on."""
    out = tmp_path / "draft"
    run.json(*flags, "--out", str(out))
    fixed = ("--model", str(deep), "--prompts", str(prompts), "--max-tokens", "24", "--device", "cpu", "--offline")
    found = run.json(
        "calibrate", "trained", str(out), *fixed, "--dtype", "float32", "--tree", "static:5", "--limit", "6"
    )
    assert [row["tree"] for row in found["timed"]] == ["static:5"]
    kept = json.loads((out / "forerun.json").read_text())["calibration"]
    assert kept["trees"] == {FLOATS: "static:5"}
    assert kept["accuracies"] == found["accuracies"]
    loaded = LoadedModel.load(deep, dtype="float32", device="cpu")
    drafter: Any = make_drafter(str(out), Setup(loaded.target, 64, loaded.load_beside))
    assert (str(drafter.spec), drafter.spec.size, drafter.taus) == ("static:5", 5, Taus.of(found))
