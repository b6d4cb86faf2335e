"""`forerun certify` where it cannot be done: a sentence that says why, and no certificate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.drafters.ngram import NGram
from tests.cli.conftest import Terminal, run
from tests.tiny_folder import CONTEXT, save_tiny_model

__all__ = ["run"]  # the fixture
FEW = ["--drafter", "ngram", "--contexts", "2", "--samples", "20", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("certify") / "model"))


@pytest.fixture
def asked(model: str, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello hello hello\nthe the the the\nabc abc abc\n")
    return ["certify", "--model", model, "--prompts", str(prompts), "--out", str(tmp_path / "certificate.json"), *FEW]


def refused(run: Terminal, arguments: list[str], tmp_path: Path) -> str:
    """What is told, and nothing else: no certificate either."""
    ended = run(*arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert not (tmp_path / "certificate.json").exists()
    return ended.err


def test_texts_that_are_longer_than_the_context(run: Terminal, asked: list[str], tmp_path: Path) -> None:
    told = refused(run, [*asked, "--length", "100000"], tmp_path)
    assert f"100,024 are written behind it, and the model's context holds {CONTEXT}: lower --length" in told


def test_a_prompt_that_is_longer_than_the_context(run: Terminal, asked: list[str], tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(f"hello\n{'x' * 3000}\n")
    told = refused(run, [*asked, "--prompts", str(long)], tmp_path)
    assert "the longest prompt has 3,0" in told
    assert f"context holds {CONTEXT}: lower --length, or leave long --prompts out" in told


def test_a_cache_that_is_larger_than_the_memory(
    run: Terminal, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.certify.subject.memory_of", lambda device: 1 << 20)
    assert "GiB of cache, and there are 0.0 GiB of memory: lower --length" in refused(run, asked, tmp_path)


def fails_after(calls: int, fail: Callable[[], object]) -> Callable[..., Any]:
    draft, left = NGram.draft, [calls]

    def drafts(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            fail()
        return draft(*arguments)

    return drafts


def on_fire() -> None:
    raise RuntimeError("the device\nis on fire")


@pytest.mark.parametrize(
    ("heat", "what"),
    [("0", "writing with the broken rule at temperature 0"), ("1", "writing with drafts at temperature 1")],
)
def test_a_drafter_that_fails(
    run: Terminal, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heat: str, what: str
) -> None:
    monkeypatch.setattr(NGram, "draft", fails_after(3, on_fire))
    told = refused(run, [*asked, "--temperature", heat], tmp_path)
    assert told == f"forerun: no certificate: {what} broke off with RuntimeError: the device is on fire\n"


def test_memory_that_runs_out(run: Terminal, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NGram, "draft", fails_after(3, lambda: torch.zeros(10**13)))
    told = refused(run, [*asked, "--temperature", "0"], tmp_path)
    assert "not enough memory for another 37,252.9 GiB: lower --length, give shorter --prompts" in told
