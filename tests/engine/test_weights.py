"""What a drafter is read from, found without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.engine.loaded import LoadedModel
from forerun.engine.weights import drafter_digest, model_digest, named_digest
from forerun.models.builtin import BUILTINS
from forerun.models.identity import files_digest
from tests.engine.tiny import tiny_model
from tests.tiny_folder import save_tiny_model

TARGET = tiny_model()


def head(folder: Path, method: str = "medusa", weights: bytes = b"1") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "forerun.json").write_text(f'{{"method": "{method}"}}')
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_trained_drafter_is_told_by_its_weights(tmp_path: Path) -> None:
    """By its folder's name, or as an option; and by other weights in the same place."""
    folder = head(tmp_path / "mine")
    first = drafter_digest(str(folder), {}, TARGET)
    assert first == files_digest(folder) == drafter_digest("medusa", {"path": str(folder)}, TARGET)
    head(folder, weights=b"2")
    assert drafter_digest(str(folder), {}, TARGET) not in {first, None}


def test_so_is_one_that_comes_with_forerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {method: head(tmp_path / method, method, method.encode()) for method in ("eagle3", "draft")}
    monkeypatch.setattr("forerun.engine.weights.shipped_head", lambda method, identity: made.get(method))
    assert drafter_digest("eagle3", {}, TARGET) == files_digest(made["eagle3"])
    assert drafter_digest("draft_model", {}, TARGET) == files_digest(made["draft"])
    assert drafter_digest("ngram", {}, TARGET) is None


def test_drafters_that_have_others_in_them(tmp_path: Path) -> None:
    one, other = head(tmp_path / "one", "draft"), head(tmp_path / "other", "draft")
    for name, options in (
        ("multi_draft", {"models": f"{one},{other}"}),
        ("combine", {"first": "ngram", "second": "draft_model", "second_options": f"model={other},tree=fixed:2,2"}),
        ("retrieval", {"store": str(other / "model.safetensors")}),
    ):
        head(other, "draft", b"1")
        first = drafter_digest(name, options, TARGET)
        assert first == drafter_digest(name, options, TARGET)
        head(other, "draft", b"2")
        assert drafter_digest(name, options, TARGET) not in {first, None}


def test_what_has_no_files_of_its_own(tmp_path: Path) -> None:
    assert drafter_digest("ngram", {}, TARGET) is None
    assert drafter_digest("medusa", {"path": str(tmp_path / "nowhere")}, TARGET) is None
    assert named_digest(["~nobody/model"]) is None
    assert named_digest(["smollm2-135m"]) == BUILTINS["smollm2-135m"].sha256[:32]


def test_a_model_is_told_by_its_files(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    loaded = LoadedModel.load(folder, dtype="float32", device="cpu")
    first = model_digest(loaded)
    assert first == files_digest(folder)
    save_tiny_model(folder, seed=2)
    assert model_digest(loaded) not in {first, None}
    assert model_digest(LoadedModel(loaded.target, loaded.tokenizer)) is None
