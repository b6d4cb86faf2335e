"""`forerun models enlarge`, and a text from what it made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.models.enlarge import SHAPES, Shape
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

PROMPT = "the quick brown fox"


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "large", Shape(96, 112, 12, 3, 16, 5))
    monkeypatch.setitem(SHAPES, "shallow", Shape(96, 1024, 12, 3, 16, 1))


@pytest.fixture
def small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = save_tiny_model(tmp_path / "small")
    capsys.readouterr()  # transformers has drawn a bar
    return folder


def test_it_writes_the_same_text(run: Terminal, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "large"
    answer = run.json("models", "enlarge", str(small), "--like", "large", "--out", str(out), "--dtype", "float32")
    assert (answer["folder"], answer["layers"], answer["hidden_size"]) == (str(out), 5, 96)
    assert answer["bytes"] == 4 * answer["weights"]
    texts = [
        run("generate", "--model", str(model), "--dtype", "float32", "--max-tokens", "30", PROMPT).out
        for model in (small, out)
    ]
    assert texts[0] == texts[1] != ""


def test_a_folder_gives_the_shape(run: Terminal, small: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3}
    (tmp_path / "like" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    ended = run("models", "enlarge", str(small), "--like", str(tmp_path / "like"), "--out", str(tmp_path / "large"))
    assert (ended.code, ended.err) == (0, "")
    assert "3 layers 64 wide, 8 heads of 8" in ended.out
    assert "the vocabulary of 259 as before" in ended.out
    assert json.loads((tmp_path / "large" / "config.json").read_text())["dtype"] == "bfloat16"


def test_it_says_that_there_are_more_layers(run: Terminal, small: Path, tmp_path: Path) -> None:
    ended = run("models", "enlarge", str(small), "--like", "shallow", "--out", str(tmp_path / "large"))
    assert (ended.code, ended.err) == (0, "")
    assert "2 layers 96 wide" in ended.out
    assert "shallow has 1 layer with an MLP of 1024" in ended.out


def test_what_is_wrong_is_said(run: Terminal, small: Path, tmp_path: Path) -> None:
    def refused(like: str, out: Path, *more: str) -> str:
        ended = run("models", "enlarge", str(small), "--like", like, "--out", str(out), *more)
        assert (ended.code, ended.out) == (1, "")
        return ended.err

    assert "choose llama-3-1b or llama-3-8b or large" in refused("llama", tmp_path / "large")
    assert "small exists: delete it, or choose another --out" in refused("large", small)
    assert "is no number format" in refused("large", tmp_path / "large", "--dtype", "int4")
    assert {path.name for path in tmp_path.iterdir()} == {"small"}
