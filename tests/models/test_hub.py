"""The Hugging Face hub: what is asked of it, and one sentence for whatever it answers. No network is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from forerun.models.hub import fetch_from_hub, looks_like_hub_id
from forerun.models.load import resolve
from tests.models.checkpoints import make, save

http: Any = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
"""The library that the hub's one uses."""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def answer(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
    """A hub that gives a folder, or an error; returns what it is asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if isinstance(result, Exception):
            raise result
        for bar_name, count in (("hub", 10), ("hub.transfer", 7)):
            bar = options["tqdm_class"](total=count, unit="B", name=bar_name)
            bar.update(count)
            bar.refresh()
            bar.close()
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def failure(kind: type[errors.HfHubHTTPError], code: int = 404) -> errors.HfHubHTTPError:
    return kind("long\nand unreadable", response=http.Response(code, request=http.Request("GET", "https://hub")))


def test_a_snapshot_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save(make("Llama"), tmp_path)
    capfd.readouterr()
    asked = answer(monkeypatch, folder)
    told: list[tuple[str, int, int]] = []
    source = resolve("owner/model", dtype=torch.float32, revision="v2", progress=lambda *what: told.append(what))
    assert (source.kind, source.folder) == ("hub", folder)
    [(name, options)] = asked
    assert (name, options["revision"], options["local_files_only"]) == ("owner/model", "v2", False)
    assert "*.safetensors" in options["allow_patterns"]
    assert told[-1] == ("Fetching owner/model", 10, 10)
    assert capfd.readouterr() == ("", "")  # the hub draws no bars of its own


def test_a_model_in_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="owner/model has no safetensors files: take another copy"):
        fetch_from_hub("owner/model")


def test_what_is_left_out() -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    from forerun.models.hub import UNWANTED, WANTED

    files = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
        "tokenizer.model",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "README.md",
        "1_Pooling/config.json",
    ]
    kept = list(filter_repo_objects(files, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    assert kept == files[:10]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failure(errors.RepositoryNotFoundError), "there is no model 'owner/model' here or on the hub: check the name"),
        (failure(errors.GatedRepoError, 403), "accepted its terms: do so on its page"),
        (failure(errors.RevisionNotFoundError), "has no revision 'v2': choose another"),
        (failure(errors.HfHubHTTPError, 503), r"refused owner/model at revision v2 \(HTTP 503\): try again"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached and owner/model at revision v2 is not in its cache"),
        (
            http.ConnectError("x"),
            r"cannot be reached for owner/model at revision v2 \(ConnectError\): check the network",
        ),
        (ConnectionError("x"), r"\(ConnectionError\): check the network"),
        (errors.HFValidationError("x"), "write owner/model"),
    ],
)
def test_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, error)
    with pytest.raises(ValueError, match=message) as refusal:
        fetch_from_hub("owner/model", revision="v2")
    assert "\n" not in str(refusal.value)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        fetch_from_hub("owner/model")


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_offline(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, errors.LocalEntryNotFoundError("x"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by == "environment")
    switch = "HF_HUB_OFFLINE" if by == "environment" else "--offline"
    with pytest.raises(ValueError, match=f"owner/model is not in the hub's cache: run once without {switch}"):
        fetch_from_hub("owner/model", offline=by == "flag")
    assert asked[0][1]["local_files_only"]


def test_the_library_itself_offline(tmp_path: Path) -> None:
    """Not a double: the installed library with an empty cache and no network allowed."""
    code = "from forerun.models.hub import fetch_from_hub\nfetch_from_hub('owner/model')"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "ValueError: owner/model is not in the hub's cache: run once without HF_HUB_OFFLINE" in process.stderr


def test_names() -> None:
    assert looks_like_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert looks_like_hub_id("a/b.c_d-1")
    for name in ("model", "a/b/c", "/a", "a/", "../a", "./a", "a b/c", "~/model", "-a/b"):
        assert not looks_like_hub_id(name)
