"""`forerun models enlarge`, and a text from what it made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.models.enlarge import SHAPES, Shape
from forerun.models.heads.feature_head import new_head
from forerun.models.heads.files import HeadFolder, read_head, write_head
from forerun.models.identity import weights_identity
from tests.cli.conftest import Terminal
from tests.models.test_enlarge import open_model
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


# --- drafters -------------------------------------------------------------------------------------------------


def save_head(method: str, target: Path, folder: Path) -> Path:
    model = open_model(target, torch.bfloat16)
    tensors = new_head(method, model, seed=1).trained()
    manifest = {"target": {"name": target.name, "identity": weights_identity(model)}}
    write_head(folder, HeadFolder(method, {}, tensors, manifest))
    return folder


def test_drafters_come_along(run: Terminal, small: Path, tmp_path: Path) -> None:
    heads = [save_head("eagle3", small, tmp_path / "mine"), save_head("mtp", small, tmp_path / "other")]
    out = tmp_path / "large"
    asked = [part for head in heads for part in ("--drafter", str(head))]
    answer = run.json("models", "enlarge", str(small), "--like", "large", "--out", str(out), *asked)
    assert answer["drafters"] == {name: str(out / "drafters" / name) for name in ("mine", "other")}
    target = read_head(out / "drafters" / "mine", "eagle3").manifest["target"]
    assert target == {"name": "large", "identity": weights_identity(open_model(out))}
    options = ("--dtype", "float32", "--max-tokens", "30", PROMPT)
    plain = run("generate", "--model", str(out), *options)
    for folder in answer["drafters"].values():
        ended = run("generate", "--model", str(out), "--drafter", folder, *options)
        assert (ended.code, ended.out) == (0, plain.out)


def test_it_says_what_drafters_it_made(run: Terminal, small: Path, tmp_path: Path) -> None:
    head, out = save_head("eagle", small, tmp_path / "mine"), tmp_path / "large"
    ended = run("models", "enlarge", str(small), "--like", "large", "--out", str(out), "--drafter", str(head))
    assert (ended.code, ended.err) == (0, "")
    assert f"{out}/drafters/mine drafts for it what mine drafts for {small}." in ended.out


def test_a_drafter_that_cannot_be_is_told_before_anything_is_written(
    run: Terminal, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "stranger", seed=2)
    head = save_head("eagle", other, tmp_path / "head")
    mine, twin = save_head("eagle", small, tmp_path / "mine"), save_head("eagle", small, tmp_path / "twins" / "mine")
    capsys.readouterr()

    def refused(*drafters: Path | str) -> str:
        asked = [part for drafter in drafters for part in ("--drafter", str(drafter))]
        ended = run("models", "enlarge", str(small), "--like", "large", "--out", str(tmp_path / "large"), *asked)
        assert (ended.code, ended.out) == (1, "")
        assert not (tmp_path / "large").exists()
        return ended.err

    assert "was trained for another target (stranger)" in refused(head)
    assert "no eagle drafter for this model comes with Forerun" in refused("eagle")
    assert "ngram is not made for the width of one target" in refused("ngram")
    assert "there is no drafter" in refused("nothing")
    assert "two drafters are called mine" in refused(mine, twin)
