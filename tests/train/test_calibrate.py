"""`forerun calibrate trained`: what it finds goes into the folder, and the drafter uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.kinds import FLOATS
from forerun.engine.loaded import LoadedModel
from forerun.models.heads.feature_head import new_head
from forerun.models.heads.files import HeadFolder, update_manifest, write_head
from forerun.models.heads.side_heads import new_side_heads, side_config
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer
from forerun.train.calibrate import candidates
from tests.cli.conftest import Terminal


@pytest.fixture
def flags(folder: Path, prompts: Path) -> tuple[str, ...]:
    rest = ("--max-tokens", "24", "--limit", "4", "--dtype", "float32", "--device", "cpu", "--offline")
    return ("--model", str(folder), "--prompts", str(prompts), *rest)


def about(loaded: LoadedModel) -> dict[str, Any]:
    assert isinstance(loaded.target, Transformer)
    return {"target": {"name": "tiny", "identity": weights_identity(loaded.target)}}


def test_parallel(run: Terminal, loaded: LoadedModel, flags: tuple[str, ...], tmp_path: Path) -> None:
    """It gets accuracies, and no trees are timed: it makes its own from them."""
    out, target = tmp_path / "ahead", loaded.target
    assert isinstance(target, Transformer)
    weight = target.model.embed_tokens.weight.detach()[5:8].clone()
    write_head(out, HeadFolder("parallel", {}, {"look_ahead.weight": weight}, about(loaded)))
    shown = run("calibrate", "trained", str(out), *flags)
    assert (shown.code, shown.err) == (0, "")
    assert "tokens ahead" in shown.out
    assert "tokens/s" not in shown.out
    kept = json.loads((out / "forerun.json").read_text())["calibration"]
    assert len(kept["accuracies"]) >= 1
    assert all(0 <= share <= 1 for row in kept["accuracies"] for share in row)
    assert kept["trees"] == {}
    drafter: Any = make_drafter("parallel", Setup(target, 64, loaded.load_beside), {"path": str(out)})
    assert drafter.plan.values[(0,)] == kept["accuracies"][0][0]
    wrong = run("calibrate", "trained", str(out), *flags, "--tree", "3")
    assert (wrong.code, "parallel makes its own trees" in " ".join(wrong.err.split())) == (1, True)


def test_heads(run: Terminal, loaded: LoadedModel, flags: tuple[str, ...], tmp_path: Path) -> None:
    out, target = tmp_path / "heads", loaded.target
    assert isinstance(target, Transformer)
    heads = new_side_heads("medusa", target, 2)
    write_head(out, HeadFolder("medusa", side_config(heads, {}), heads.trained(), about(loaded)))
    shown = run("calibrate", "trained", str(out), *flags, "--tree", "2")
    assert (shown.code, "tokens/s" in shown.out) == (0, True)
    assert json.loads((out / "forerun.json").read_text())["calibration"]["trees"] == {FLOATS: "2"}


def test_the_tree_may_stay(run: Terminal, head: Path, flags: tuple[str, ...]) -> None:
    update_manifest(head, calibration={"trees": {FLOATS: "3", "cuda": "4"}})
    told = run.json("calibrate", "trained", str(head), *flags, "--keep-tree")
    assert told["timed"] == []
    kept = json.loads((head / "forerun.json").read_text())["calibration"]
    assert kept["trees"] == {FLOATS: "3", "cuda": "4"}
    assert (kept["tau"], kept["greedy_tau"]) == (told["tau"], told["greedy_tau"])
    assert kept["accuracies"]
    wrong = run("calibrate", "trained", str(head), *flags, "--keep-tree", "--tree", "2")
    assert (wrong.code, "exclude each other" in " ".join(wrong.err.split())) == (1, True)


@pytest.fixture
def head(loaded: LoadedModel, tmp_path: Path) -> Path:
    assert isinstance(loaded.target, Transformer)
    made = new_head("eagle", loaded.target)
    write_head(tmp_path / "head", HeadFolder("eagle", {}, made.trained(), about(loaded)))
    return tmp_path / "head"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_confidence_against_acceptance(
    run: Terminal, head: Path, flags: tuple[str, ...], tmp_path: Path, suffix: str
) -> None:
    picture = tmp_path / f"confidence.{suffix}"
    told = run.json("calibrate", "trained", str(head), *flags, "--tree", "2", "--plot", str(picture))
    assert told["plot"] == str(picture)
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])
    kept = json.loads((head / "forerun.json").read_text())["calibration"]["confidence"]
    assert kept == told["confidence"]
    seen = {way: sum(row["candidates"] for row in bins) for way, bins in kept.items()}
    assert seen["greedy"] == seen["coupled"] > 0
    for row in kept["greedy"] + kept["coupled"]:
        assert row["from"] <= row["confidence"] <= row["to"]
        assert 0 <= row["acceptance"] <= 1


def test_confidence_in_the_terminal(run: Terminal, head: Path, flags: tuple[str, ...]) -> None:
    shown = run("calibrate", "trained", str(head), *flags, "--tree", "2")
    assert (shown.code, shown.err) == (0, "")
    assert "temperature 0" in shown.out
    assert "temperature 1 with a seed, τ = " in shown.out
    kept = json.loads((head / "forerun.json").read_text())["calibration"]["confidence"]
    for row in kept["greedy"] + kept["coupled"]:
        numbers = [f"{row['candidates']:,}", f"{row['confidence']:.3f}", f"{row['acceptance']:.3f}"]
        assert any(line.split()[2:] == numbers for line in shown.out.splitlines())


def test_a_picture_that_cannot_be_is_refused_before_the_work(
    run: Terminal, head: Path, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run("calibrate", "trained", str(head), *flags, "--plot", str(tmp_path / "a.jpg"))
    assert (ended.code, "end the name in .png, .svg or .pdf" in " ".join(ended.err.split())) == (1, True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = run("calibrate", "trained", str(head), *flags, "--plot", str(tmp_path / "a.png"))
    assert (ended.code, "pip install 'forerun[bench]'" in " ".join(ended.err.split())) == (1, True)
    assert "calibration" not in json.loads((head / "forerun.json").read_text())


def test_what_is_not_trained_is_refused(run: Terminal, flags: tuple[str, ...]) -> None:
    ended = run("calibrate", "trained", "ngram", *flags)
    assert (ended.code, "ngram is nothing that is trained" in " ".join(ended.err.split())) == (1, True)
    for name in ("draft", "draft_model"):
        ended = run("calibrate", "trained", name, *flags)
        assert (ended.code, "no draft drafter for this model" in " ".join(ended.err.split())) == (1, True)


def test_trees_to_try() -> None:
    assert candidates("parallel", "cpu", 4) == ()
    assert "dynamic:4,4,12" in candidates("draft_model", "cpu", 8)
    assert "5" not in candidates("eagle3", "cpu", 4)
