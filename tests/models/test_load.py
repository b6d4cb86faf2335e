"""From a name to a model: what a name can be, number formats, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forerun.models import precision
from forerun.models.builtin import BUILTINS
from forerun.models.load import identify, load_model, load_tokenizer, resolve
from forerun.models.precision import default_dtype, dtype_name, parse_dtype
from forerun.models.store import Store
from forerun.models.transformer import Transformer
from tests.models.checkpoints import make, save, write_gguf


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "named.bin").write_bytes(b"GGUF and more")
    (tmp_path / "wrong.gguf").write_bytes(b"something else")
    assert identify("owner/model")[0] == "folder"  # what is on disk goes first
    assert identify("smollm2-135m")[0] == "folder"
    assert identify("named.bin")[0] == "gguf"
    assert identify("wrong.gguf")[0] == "gguf"  # the reader says what is wrong with it
    assert identify("other/model")[0] == "hub"
    (tmp_path / "smollm2-135m").rmdir()
    assert identify("smollm2-135m")[0] == "built-in"


@pytest.mark.parametrize(
    "name", ["", "smollm", "a/b/c", "./missing", "missing.gguf", "folder/missing.gguf", "~nobody-of-this-name/model"]
)
def test_unknown_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no model") as refusal:
        identify(name)
    assert all(builtin in str(refusal.value) for builtin in BUILTINS)


def test_files_of_another_kind(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path / "model")
    with pytest.raises(ValueError, match="is not a GGUF file: name a GGUF file, or the folder"):
        resolve(str(folder / "model.safetensors"), dtype=torch.float32)
    renamed = tmp_path / "model.gguf"
    (folder / "model.safetensors").rename(renamed)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        resolve(str(renamed), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert not (tmp_path / "cache" / "converted").exists()


def test_revisions_are_for_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no revisions: leave --revision out"):
        resolve(str(tmp_path), dtype=torch.float32, revision="main")


def test_a_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = save(make("Qwen3", head_dim=16), tmp_path / "model")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    source = resolve(str(folder), dtype=torch.bfloat16, store=Store(tmp_path / "cache"))
    assert (source.kind, source.folder) == ("folder", folder)
    assert source.config is not None
    model = load_model(source, dtype=torch.bfloat16)
    assert isinstance(model, Transformer)
    assert model.eos == {257}
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(source)


@pytest.mark.parametrize("tied", [False, True])
def test_our_transformer_holds_the_weights(tied: bool, tmp_path: Path) -> None:
    theirs = make("Llama", tie_word_embeddings=tied)
    model = load_model(resolve(str(save(theirs, tmp_path)), dtype=torch.float32), dtype=torch.float32)
    assert isinstance(model, Transformer)
    ours = dict(model.named_parameters())
    assert set(ours) == {name for name, _ in theirs.named_parameters()}
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.named_parameters())
    assert not any(tensor.requires_grad for tensor in ours.values())
    assert not model.training
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_other_families_go_to_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.models import adapter

    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    source = resolve(str(tmp_path), dtype=torch.float32)
    assert source.config is None
    called = []
    monkeypatch.setattr(adapter, "load_adapter", lambda *given: called.append(given))
    load_model(source, dtype=torch.float32)
    assert called == [(tmp_path, torch.float32, torch.device("cpu"))]


def test_nothing_heavy_is_imported_for_a_model_in_the_cache(tmp_path: Path) -> None:
    """transformers takes seconds to import, and a converted model does not need it until its tokenizer does."""
    path = write_gguf(make("Llama"), tmp_path / "model.gguf")
    store = Store(tmp_path / "cache")
    resolve(str(path), dtype=torch.float32, store=store)
    code = f"""
import sys, torch
from pathlib import Path
from forerun.models.load import load_model, resolve
from forerun.models.store import Store
load_model(resolve({str(path)!r}, dtype=torch.float32, store=Store(Path({str(store.root)!r}))), dtype=torch.float32)
heavy = ("transformers", "gguf", "huggingface_hub", "tokenizers", "sympy")
print([name for name in heavy if name in sys.modules])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (process.stdout, process.returncode) == ("[]\n", 0), process.stderr


# --- number formats -------------------------------------------------------------------------------------------


def test_number_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_dtype("bfloat16") == torch.bfloat16
    assert parse_dtype("float16", "cuda") == torch.float16
    with pytest.raises(ValueError, match="'int4' is no number format: choose auto, float32, bfloat16, float16"):
        parse_dtype("int4")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda native=native: native)
        assert parse_dtype("auto") == default_dtype("cpu") == expected
    assert default_dtype("cuda") == torch.bfloat16
    assert dtype_name(torch.float16) == "float16"


def test_what_the_processor_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": True})
    assert precision.cpu_multiplies_bfloat16()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "avx2": True})
    assert not precision.cpu_multiplies_bfloat16()
