"""README's own commands and code do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ \.venv/bin/forerun (.*)$", README, re.MULTILINE)


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) >= 5
    assert README.index("make demo") < README.index("make test") < README.index("## ")


def test_the_commands_work(tmp_path: Path) -> None:
    """In their order: one writes what the next reads."""
    for command in COMMANDS:
        arguments, _, target = command.partition(" > ")
        ended = subprocess.run(
            [sys.executable, "-m", "forerun.cli.main", *arguments.split()],
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
    assert (tmp_path / "speedup.png").stat().st_size > 10_000


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code) == 1
    exec(compile(code[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.fullmatch(r"tensor\(\[\[\s*\d+,\s*-?\d+\]\]\)\n", printed), printed


def test_tables_are_what_the_results_say() -> None:
    for page in tables.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "<!-- table" in text
        assert tables.render(text) == text, f"{page}: run make tables"
