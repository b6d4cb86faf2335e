"""The part of the demo that runs a model."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from forerun.cli.demo_model import TASKS, three_answers
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model


@pytest.mark.parametrize("terminal", [False, True])
def test_three_answers(tmp_path: Path, terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=terminal, highlight=False)
    three_answers(console, str(save_tiny_model(tmp_path)))
    out = shown.getvalue()
    rows = re.findall(r"ngram +[\d.]+ +[\d.]+ +[\d.]+× +(\w+)", re.sub(r"\x1b\[[\d;]*m", "", out))
    assert rows == ["yes"] * len(TASKS)
    for task in TASKS:
        assert f"› {task.told or task.prompt}" in out
        assert task.name in out
    if not terminal:
        assert all(len(line) <= 80 for line in out.splitlines())
        assert "…" not in out
        assert re.search(r"^■ accepted", out, re.MULTILINE)


def test_without_a_model_the_demo_says_so(run: Terminal, tmp_path: Path) -> None:
    ended = run("demo", "--folder", str(tmp_path), "--model", str(tmp_path))
    assert ended.code == 1
    assert ended.err.startswith("forerun: ")
    assert ended.err.count("\n") == 1
