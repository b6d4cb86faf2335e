"""A tiny target in a folder, and prompts for it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import to_tokens
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.prompts import Prompt
from forerun.train.texts import Text, TextBatch
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

PROMPTS = [Prompt(f"p{number}", (f"what is {number}?",)) for number in range(12)]
PROMPTS[3] = Prompt("p3", ("what is it?", "and then?", "the end?"))


LETTERS = "nopeqrafghbijklcmd"


def teach(folder: Path, *, last_layer: bool = False) -> None:
    """Make the model say one letter behind another, in an order that never changes: something that can be foreseen.
    With `last_layer` that one alone knows it; else the embedding does."""
    loaded = LoadedModel.load(folder, dtype="float32", device="cpu")
    model = loaded.target
    assert isinstance(model, Transformer)
    generator = random.Random(0)
    texts = []
    for number in range(48):
        start = generator.randrange(len(LETTERS))
        said = (LETTERS * 4)[start : start + 40]
        prompt = to_tokens(f"what is {number}?", loaded.tokenizer, chat=None)
        texts.append(Text.of(prompt, loaded.tokenizer.encode(said)))
    learning = (model.model.layers[-1] if last_layer else model).requires_grad_(True)
    optimizer = torch.optim.AdamW(learning.parameters(), lr=4e-3)
    for _ in range(160):
        batch = TextBatch.pack(generator.sample(texts, 12))
        logits = batch.at(states(model, batch.tokens).normed) @ model.lm_head.weight.T
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny") / "target")
    teach(folder)
    return folder


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
