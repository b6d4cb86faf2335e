"""A tiny target in a folder, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.engine.loaded import LoadedModel
from forerun.train.prompts import Prompt
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

PROMPTS = [Prompt(f"p{number}", (f"what is {number}?",)) for number in range(12)]
PROMPTS[3] = Prompt("p3", ("what is it?", "and then?", "the end?"))


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="package")
def loaded(folder: Path) -> LoadedModel:
    return LoadedModel.load(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="package")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"id": prompt.id, "turns": prompt.turns}) for prompt in PROMPTS]
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)
