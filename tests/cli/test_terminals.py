"""Odd terminals, odd names, and work without end: nothing is lost, obeyed or waited for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.cli.plan import EXAMPLE
from tests.cli.conftest import Terminal

COMMAND = f"{sys.executable} -m forerun.cli.main"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", ["simulate --rounds 100", "plan --example", "simulate --rounds 100 --json"])
def test_without_standard_output(arguments: str) -> None:
    ended = shell(f"{COMMAND} {arguments} >&-")
    assert ended.returncode == 1
    assert ended.stderr.startswith("forerun: there is no standard output")
    assert ended.stderr.count("\n") == 1


def test_nothing_at_all_is_open() -> None:
    ended = shell(f"{COMMAND} simulate --rounds 100 <&- >&- 2>&-")
    assert (ended.returncode, ended.stderr) == (1, "")


def test_without_standard_input() -> None:
    ended = shell(f"{COMMAND} plan - <&-")
    assert (ended.returncode, ended.stderr) == (1, "forerun: cannot read standard input: it is closed\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", ["simulate --rounds 100", "plan --example"])
def test_a_full_standard_output(arguments: str) -> None:
    ended = shell(f"{COMMAND} {arguments} > /dev/full")
    assert ended.returncode == 1
    assert ended.stderr == "forerun: cannot write standard output: No space left on device\n"


def measured(path: Path, name: str = "small", rows: int = 8) -> str:
    data: dict[str, Any] = json.loads(json.dumps(EXAMPLE))
    data["drafters"][0]["name"] = name
    for passes in data["target"]["passes"]:
        passes["rows"], passes["ms"] = [1, rows], [20.0, 21.0]
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize("name", ["[bold]x[/nope]", "[/]", ":smile:", "a" * 200])
def test_a_name_is_no_markup(run: Terminal, tmp_path: Path, name: str) -> None:
    ended = run("plan", measured(tmp_path / "m.json", name))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count(name[:6]) > 0
    assert "…" not in ended.out


@pytest.mark.parametrize("sign", ["\x1b[31m", "\r", "\x9b", "\u202e", "\n", "\ud800"])
def test_control_characters_do_not_reach_the_terminal(run: Terminal, tmp_path: Path, sign: str) -> None:
    ended = run("plan", measured(tmp_path / "m.json", f"x{sign}y"))
    assert (ended.code, ended.out) == (1, "")
    assert "drafters[0].name is 'x\\" in ended.err
    assert sign not in ended.err.rstrip("\n")
    (tmp_path / "key.json").write_text(json.dumps({**EXAMPLE, f"x{sign}y": 1}))
    ended = run("plan", str(tmp_path / "key.json"))
    assert "measurements.'x\\" in ended.err
    ended = run("plan", "absent\x1b[31m.json")
    assert "cannot open absent\\x1b[31m.json" in ended.err


NARROW = {"COLUMNS": "40", "LINES": "20"}


def test_the_grid_keeps_its_columns_in_a_narrow_terminal() -> None:
    gammas = range(1, 15)
    arguments = ["simulate", "--rounds", "50", "--alpha", "0.5,0.75", "--gamma", ",".join(map(str, gammas))]
    shown = CliRunner().invoke(app, arguments, env=NARROW).output
    assert "…" not in shown
    (head,) = (line for line in shown.splitlines() if "best γ" in line)
    assert [head.count(part) for part in ("α", "γ =", "best γ")] == [1, len(gammas), 1]
    (line,) = (line for line in shown.splitlines() if line.split()[:1] == ["0.75"])
    assert line.count("×") == len(gammas)


def test_tables_keep_their_columns_in_a_narrow_terminal(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(EXAMPLE))
    for arguments in (["plan", str(tmp_path / "m.json")], ["simulate", "--rounds", "100"], ["rules"]):
        narrow, wide = (CliRunner().invoke(app, arguments, env={"COLUMNS": width}).output for width in ("40", "80"))
        assert narrow == wide
        assert "…" not in narrow


def test_a_narrow_terminal_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(EXAMPLE))
    planned = shell(f"COLUMNS=40 {COMMAND} plan {tmp_path / 'm.json'}").stdout
    for part in ("prompt lookup", "drafter", "setting", "tokens", "ms/step", "speedup"):
        assert planned.count(part) >= 3


def test_no_plan_takes_long(run: Terminal, tmp_path: Path) -> None:
    start = time.process_time()
    answer = run.json("plan", measured(tmp_path / "m.json", rows=100_000))
    assert time.process_time() - start < 6.0  # about one second; much more where the machine is busy
    settings = [each for plan in answer["recommendations"] for each in (plan["best"], *plan["alternatives"])]
    assert max(each["depth"] for each in settings if each["kind"] == "chain") <= 64
    assert max(each["rows"] for each in settings) <= 256
    help_text = " ".join(CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "up to 64 drafts" in help_text
    assert "up to 256 rows" in help_text


@pytest.mark.parametrize("more", [(), ("--tree", "2", "--ranks", "0.5,0.2"), ("--gamma", "1,2")])
def test_rounds_without_end_are_refused(run: Terminal, more: tuple[str, ...]) -> None:
    ended = run("simulate", "--rounds", "9" * 23, *more)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"forerun: rounds is {'9' * 23}: give 100000000 or less\n"
