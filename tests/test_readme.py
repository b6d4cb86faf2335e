"""README's own commands and code do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tables

from forerun.models.builtin import BUILTINS
from forerun.models.store import Store

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ \.venv/bin/forerun (.*)$", README, re.MULTILINE)


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) >= 5
    assert README.index("make demo") < README.index("make test") < README.index("## ")


REAL = ("generate", "models", "bench")
"""Commands that run a real model."""
FETCHED = BUILTINS["smollm2-135m"].path(Store.default()).exists()
needs_the_model = pytest.mark.skipif(not FETCHED, reason="run `forerun models fetch smollm2-135m`")


@needs_the_model
@pytest.mark.xdist_group("real model")
def test_the_commands_that_run_a_model_work(tmp_path: Path) -> None:
    generated = [command for command in COMMANDS if command.startswith(REAL)]
    assert len(generated) >= 4
    try_commands(generated, tmp_path)


def test_the_other_commands_work(tmp_path: Path) -> None:
    others = [command for command in COMMANDS if not command.startswith(REAL)]
    assert len(others) >= 5
    try_commands(others, tmp_path)
    assert (tmp_path / "speedup.png").stat().st_size > 10_000


def try_commands(commands: list[str], tmp_path: Path) -> None:
    """In their order: one writes what the next reads."""
    for command in commands:
        arguments, _, target = command.partition(" > ")
        ended = subprocess.run(
            [sys.executable, "-m", "forerun.cli.main", *shlex.split(arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        assert ended.stdout
        if target:
            (tmp_path / target).write_text(ended.stdout, encoding="utf-8")


CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@needs_the_model
@pytest.mark.xdist_group("real model")
def test_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(CODE[0], "README.md", "exec"), names)
    names["llm"].close()
    printed = capsys.readouterr().out
    assert "tokens per pass" in printed
    assert len(printed.splitlines()) >= 3


def test_the_core_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CODE) == 2
    exec(compile(CODE[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.fullmatch(r"tensor\(\[\[\s*\d+,\s*-?\d+\]\]\)\n", printed), printed


def test_tables_are_what_the_results_say() -> None:
    for page in tables.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "<!-- table" in text
        assert tables.render(text) == text, f"{page}: run make tables"
