"""`forerun calibrate layer_skip`: found once, kept, and used from then on."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.drafters.layer_skip import LayerSkip
from forerun.engine.llm import LLM
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def drafting_layers(model: str) -> tuple[tuple[int, ...], int]:
    with LLM(model, "layer_skip", dtype="float32", device="cpu", cache_tokens=64) as llm:
        drafter = llm._engine.drafter
        assert isinstance(drafter, LayerSkip)
        return drafter.choice.layers, drafter.choice.weight


def test_it_is_kept_and_used(run: Terminal, model: str, cache: Path) -> None:
    guessed = drafting_layers(model)
    answer = run.json("calibrate", "layer_skip", "--model", model, "--dtype", "float32", "--device", "cpu")
    assert Path(answer["file"]).is_relative_to(cache)
    assert answer["of_layers"] == 2
    assert 0 <= answer["acceptance"] <= 1
    assert answer["speedup"] >= 1
    assert answer["pays"] == (answer["speedup"] > 1)
    assert drafting_layers(model) == (tuple(answer["layers"]), 32) != guessed
    shown = run("calibrate", "layer_skip", "--model", model, "--dtype", "float32", "--device", "cpu")
    assert (shown.code, shown.err) == (0, "")
    assert "of 2 layers draft" in shown.out
    assert "does not pay" in shown.out or "times as fast" in shown.out


def test_a_text_of_ones_own(run: Terminal, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 120, "utf-8")
    chosen = ("calibrate", "layer_skip", "--model", model, "--text", str(text))
    assert run.json(*chosen)["layers"]
    text.write_text("the", "utf-8")
    ended = run(*chosen)
    assert ended.code == 1
    assert "has 3 tokens: give a text of at least some hundred words" in " ".join(ended.err.split())
    ended = run(*chosen[:-1], str(tmp_path / "gone.txt"))
    assert (ended.code, "cannot open" in ended.err) == (1, True)
    text.write_bytes(b"\xff\xfe\x00")
    assert "is not text: give UTF-8" in " ".join(run(*chosen).err.split())


def test_mistakes(run: Terminal) -> None:
    ended = run("calibrate", "layer_skip", "--model", "no/such/folder")
    assert ended.code == 1
    assert ended.err.startswith("forerun: ")
    assert run("calibrate", "ngram").code == 2
    assert "forerun calibrate layer_skip --model" in run("calibrate", "layer_skip", "--help").out
