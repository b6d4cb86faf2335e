"""What a user can get wrong, and how the process ends: a sentence and a code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.cli.main import SMALLER, main
from forerun.cli.plan import EXAMPLE
from tests.cli.conftest import Terminal

BAD = [
    (("simulate", "--alpha", "1.5"), "alpha is 1.5: give a probability"),
    (("simulate", "--alpha", "nan"), "alpha is nan"),
    (("simulate", "--alpha", ""), "--alpha is '': give numbers"),
    (("simulate", "--alpha", "0.5,,0.7"), "--alpha is '0.5,,0.7'"),
    (("simulate", "--gamma", "-1"), "gamma is -1: give 0 or more"),
    (("simulate", "--gamma", "2.5"), "--gamma is '2.5': give whole numbers"),
    (("simulate", "--gamma", "1000000000"), "gamma is 1000000000: give 4096 or less"),
    (("simulate", "--draft-cost", "nan"), "draft_cost is nan"),
    (("simulate", "--draft-cost", "-0.1"), "draft_cost is -0.1"),
    (("simulate", "--rounds", "0"), "rounds is 0: give 2 or more"),
    (("simulate", "--seed", "-1"), "seed is -1"),
    (("simulate", "--tree", "3,2"), "--tree and --ranks go together"),
    (("simulate", "--tree", "3,2", "--ranks", "0.6,0.6"), "--ranks adds up to 1.2"),
    (("simulate", "--tree", "3,2", "--ranks", "0.6"), "add ranks or narrow the tree"),
    (("simulate", "--tree", "3,0", "--ranks", "0.6,0.1,0.1"), "widths[1] is 0"),
    (("simulate", "--tree", "99,99,99", "--ranks", "0.6"), "more than 4096 nodes"),
    (("simulate", "--tree", "2", "--ranks", "0.6,0.1", "--alpha", "0.5"), "--tree has no --alpha"),
    (("simulate", "--plot", "speedup.gif"), "end the name in .png, .svg or .pdf"),
    (("simulate", "--rounds", "9", "--plot", "nowhere/speedup.png"), "make the folder nowhere first"),
    (("simulate", "--rounds", "9", "--plot", "taken.png"), "cannot write taken.png"),
    (("plan",), "there are no measurements"),
    (("plan", "absent.json"), "cannot open absent.json: No such file"),
    (("plan", "taken.png"), "cannot open taken.png: Is a directory"),
    (("plan", "words.json"), "words.json: not valid JSON"),
    (("plan", "bytes.json"), "bytes.json is not text"),
    (("plan", "unknown.json"), "unknown.json: drafters[0].speed is unknown"),
    (("plan", "example.json", "--batch", "3"), "batch size 3 was not measured"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_a_user_gets_wrong_is_one_sentence(
    run: Terminal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.png").mkdir()
    Path("words.json").write_text("alpha: 0.7")
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    Path("example.json").write_text(json.dumps(EXAMPLE))
    drafter = {**EXAMPLE["drafters"][0], "speed": 3}
    Path("unknown.json").write_text(json.dumps({**EXAMPLE, "drafters": [drafter]}))
    before = sorted(Path().iterdir())
    ended = run(*arguments, *more)
    assert ended.code == 1
    assert ended.out == ""
    assert sentence in ended.err
    assert ended.err.startswith("forerun: ")
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("arguments", [("simulate", "--rounds", "many"), ("simulate", "--no-such"), ("fly",)])
def test_usage_errors_keep_their_own_code(run: Terminal, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""


def test_interruption_ends_with_130(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.simulate.compare_chain", interrupted)
    ended = run("simulate")
    assert ended.code == 130
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: torch.zeros(10**13), "there is not enough memory for another 37,252.9 GiB: "),
        (lambda: np.zeros(10**15), "there is not enough memory for another 7.11 PiB: "),
        (lambda: torch.zeros(1 << 62), "there is not enough memory: "),
        (
            lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")),
            "another 2.50 GiB: ",
        ),
        (lambda: _raise(MemoryError()), "there is not enough memory: "),
    ],
)
def test_memory_that_ran_out_is_one_sentence(
    run: Terminal, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object], told: str
) -> None:
    monkeypatch.setattr("forerun.cli.simulate.compare_chain", lambda *_: ask())
    monkeypatch.setitem(SMALLER, "simulate", "lower --rounds")
    ended = run("simulate")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert f"{told}lower --rounds" in ended.err


def _raise(error: Exception) -> None:
    raise error


def test_what_to_make_smaller_is_an_option(run: Terminal) -> None:
    for command, words in SMALLER.items():
        told = run(command, "--help").out
        assert all(name in told for name in re.findall(r"--[a-z-]+", words))


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("forerun.cli.simulate.compare_chain", broken)
    with pytest.raises(ZeroDivisionError):
        main(["simulate"])
    monkeypatch.setattr("forerun.cli.simulate.compare_chain", lambda *_: _raise(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["simulate"])


def shell(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forerun.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def test_as_a_module() -> None:
    good = shell("simulate", "--rounds", "1000", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["expected_tokens"] == pytest.approx(2.7731)
    bad = shell("simulate", "--alpha", "1.5")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == "forerun: alpha is 1.5: give a probability between 0 and 1\n"


def test_plan_reads_standard_input() -> None:
    result = shell("plan", "-", "--batch", "1", "--json", input=json.dumps(EXAMPLE))
    assert json.loads(result.stdout)["recommendations"][0]["speculate"] is True


def test_a_terminal_without_the_signs_gets_others() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = shell("simulate", "--rounds", "1000", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "2.7731" in result.stdout


@pytest.mark.parametrize("arguments", [("plan", "--example"), ("simulate", "--rounds", "100"), ("--help",)])
def test_a_closed_pipe_is_quiet(arguments: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "forerun.cli.main", *arguments]
    with os.fdopen(write_end, "wb") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert result.stderr == b""
    assert result.returncode in {0, 1}


def test_theory_and_commands_start_without_torch_or_matplotlib() -> None:
    program = "import forerun.cli.main, sys; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"
