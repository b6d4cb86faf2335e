"""A model is told from others in every form, and only from others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.models.batch import Batch
from forerun.models.identity import files_digest, weights_identity
from tests.models.rows import CONFIGS, chain, tiny


@pytest.mark.parametrize("name", ["two share, tied", "eight share, normed, wide"])
def test_it_is_the_same_in_every_form(name: str) -> None:
    shape = CONFIGS[name]
    exact = weights_identity(tiny(shape, dtype=torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(shape, dtype=dtype)
        assert weights_identity(model) == exact
        tokens = torch.arange(4)
        model.forward_rows(Batch.pack([chain(tokens, tokens[:0], tokens)]), model.new_storage(64))
        assert model.prepared
        assert weights_identity(model) == exact
    named = replace(shape, family="other", eos=(1,), context_length=17)
    assert weights_identity(tiny(named, dtype=torch.float32)) == exact


def test_others_have_another_one() -> None:
    shape = CONFIGS["two share, tied"]
    exact = weights_identity(tiny(shape, dtype=torch.float32))
    assert weights_identity(tiny(shape, seed=1, dtype=torch.float32)) != exact
    assert weights_identity(tiny(replace(shape, norm_eps=1e-6), dtype=torch.float32)) != exact
    changed = tiny(shape, dtype=torch.float32)
    changed.get_parameter("model.norm.weight").data[3] += 0.5
    assert weights_identity(changed) != exact
    changed = tiny(shape, dtype=torch.float32)
    changed.model.embed_tokens.weight.data[0, 0] += 0.5
    assert weights_identity(changed) != exact


def test_files_are_told_apart_by_weights_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(5000))
    exact = files_digest(folder)
    (folder / "README.md").write_text("what else lies there says nothing")
    folder = folder.rename(tmp_path / "moved")
    assert files_digest(folder) == exact
    for name, content in (("config.json", b"[]"), ("model.safetensors", bytes(4999) + b"1"), ("more.bin", b"")):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(content)
        assert files_digest(folder) != exact
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)
    assert files_digest(folder) == exact
    assert files_digest(folder / "model.safetensors") != exact
    # Of a large file pieces are read: the first bytes of each hundred here.
    monkeypatch.setattr("forerun.models.identity.PIECE", 10)
    monkeypatch.setattr("forerun.models.identity.PIECES", 50)
    exact = files_digest(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(bytes(4910) + b"1" + bytes(89))
    assert files_digest(folder / "model.safetensors") == exact
    (folder / "model.safetensors").write_bytes(bytes(4900) + b"1" + bytes(99))
    assert files_digest(folder / "model.safetensors") != exact
