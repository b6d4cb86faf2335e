"""A tiny model from a folder, and a server for it that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.engine.loaded import LoadedModel
from forerun.serve.limits import Limits
from forerun.serve.server import Settings
from tests.serve.house import NAME, House, opened
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / NAME)


@pytest.fixture(scope="session")
def model(folder: Path) -> LoadedModel:
    return LoadedModel.load(folder, dtype="float32", device="cpu", offline=True)


@pytest.fixture(scope="module")
def house(model: LoadedModel) -> Iterator[House]:
    settings = Settings(
        NAME,
        "ngram",
        {"min_match": 1},
        max_batch=4,
        cache_tokens=2048,
        adaptive=False,
        limits=Limits(queue=16, texts=8),
    )
    with opened(model, settings) as house:
        yield house
        assert house.eventually(lambda: house.idle)
        house.check_integrity()
