"""The commands as a user meets them: what they print and what they leave behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forerun
from forerun.cli.main import app
from forerun.cli.plan import EXAMPLE
from forerun.theory import closed_form
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

CHECKS = [(0.7, 1, 1.70), (0.7, 4, 2.7731), (0.7, 5, 2.9412), (0.7, 6, 3.0588), (0.9, 4, 4.0951), (0.5, 4, 1.9375)]
CHECKS += [(0.95, 8, 7.3950)]


@pytest.mark.parametrize(("alpha", "gamma", "tokens"), CHECKS)
def test_simulate_reproduces_the_known_values(run: Terminal, alpha: float, gamma: int, tokens: float) -> None:
    answer = run.json("simulate", "--alpha", str(alpha), "--gamma", str(gamma), "--rounds", "50000")
    assert answer["expected_tokens"] == pytest.approx(tokens, abs=5e-5)
    assert answer["accepted_drafts"] == pytest.approx(tokens - 1, abs=5e-5)
    assert 0 < answer["standard_error"] < 0.02
    assert abs(answer["simulated_tokens"] - answer["expected_tokens"]) <= 3 * answer["standard_error"]
    assert sum(answer["histogram"].values()) == answer["rounds"] == 50_000
    assert set(answer["histogram"]) == {str(count) for count in range(1, gamma + 2)}


def test_simulate_speedups(run: Terminal) -> None:
    answer = run.json("simulate", "--alpha", "0.7", "--gamma", "4", "--draft-cost", "0.1", "--rounds", "100")
    assert answer["speedup"] == pytest.approx(1.98, abs=5e-3)
    assert (answer["best_gamma"], answer["best_speedup"]) == (4, answer["speedup"])
    answer = run.json("simulate", "--alpha", "0.95", "--gamma", "8", "--rounds", "100")
    assert answer["speedup"] == pytest.approx(4.11, abs=5e-3)
    assert answer["best_gamma"] == 15
    costly = run.json("simulate", "--gamma", "4", "--verify-cost", "2", "--rounds", "100")
    assert costly["speedup"] == pytest.approx(2.7731 / 2.4)


def test_simulate_follows_its_seed(run: Terminal) -> None:
    first, again, other = (run.json("simulate", "--rounds", "5000", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first["histogram"] != other["histogram"]


def test_simulate_shows_a_timeline_and_a_histogram(run: Terminal) -> None:
    ended = run("simulate", "--alpha", "0.7", "--gamma", "4", "--rounds", "1000")
    assert ended.code == 0
    assert "\x1b" not in ended.out  # no colour codes in a file
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    for part in ("2.7731", "1.98×", "■■■■◆", "✗···", "accepted", "corrected", "bonus", "simulated", "theory"):
        assert part in ended.out


def test_simulate_timeline_adds_up(run: Terminal) -> None:
    out = run("simulate", "--alpha", "0.6", "--gamma", "3", "--rounds", "50").out
    lines = [line for line in out.splitlines() if "token" in line and line.strip()[0].isdigit()]
    total = 0
    for line in lines[:8]:
        marks, tokens = line.split()[1:3]
        assert marks.count("■") + 1 == int(tokens)
        assert marks.count("◆") + marks.count("✗") == 1
        assert ("◆" in marks) == (int(tokens) == 4)
        total += int(tokens)
    assert f"8 passes wrote {total} tokens" in out


def test_simulate_grid(run: Terminal) -> None:
    arguments = ("simulate", "--alpha", "0.5,0.7,0.9", "--gamma", "1,2,4,8", "--rounds", "200")
    answer = run.json(*arguments)
    assert [(row["alpha"], row["gamma"]) for row in answer["rows"]] == [
        (alpha, gamma) for alpha in (0.5, 0.7, 0.9) for gamma in (1, 2, 4, 8)
    ]
    for row in answer["rows"]:
        assert row["speedup"] == closed_form.speedup(row["alpha"], row["gamma"], 0.1)
    out = run(*arguments).out
    assert [line.split("★")[1].split()[0] for line in out.splitlines() if "★" in line] == ["1.46×", "1.98×", "3.40×"]


def test_simulate_tree(run: Terminal) -> None:
    arguments = ("simulate", "--tree", "3,2,1", "--ranks", "0.6,0.2,0.1", "--rounds", "50000")
    answer = run.json(*arguments)
    # 1 + 0.9 + 0.9·0.8 + 0.9·0.8·0.6: the widths take the first three, two and one acceptances.
    assert answer["expected_tokens"] == pytest.approx(1 + 0.9 + 0.72 + 0.432)
    assert answer["speedup"] == pytest.approx(answer["expected_tokens"] / 1.3)
    assert (answer["nodes"], answer["depth"]) == (1 + 3 + 6 + 6, 3)
    assert abs(answer["simulated_tokens"] - answer["expected_tokens"]) <= 3 * answer["standard_error"]
    assert "15 drafts, 3 deep" in run(*arguments).out


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_simulate_draws_a_picture(run: Terminal, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"speedup.{suffix}"
    ended = run("simulate", "--alpha", "0.6,0.9", "--gamma", "2", "--rounds", "100", "--plot", str(picture))
    assert ended.code == 0
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert picture.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [picture]  # nothing half-written beside it


def test_a_missing_matplotlib_is_named_with_its_remedy(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = run("simulate", "--rounds", "100", "--plot", str(tmp_path / "a.png"))
    assert ended.code == 1
    assert "pip install 'forerun[bench]'" in ended.err
    monkeypatch.chdir(tmp_path)
    shown = run("demo", "--model", str(save_tiny_model(tmp_path / "model")))
    assert shown.code == 0  # the demo goes on without its picture
    assert "pip install 'forerun[bench]'" in shown.out


def test_plan_from_the_example(run: Terminal, tmp_path: Path) -> None:
    example = run("plan", "--example")
    measured = tmp_path / "measurements.json"
    measured.write_text(example.out)
    assert json.loads(example.out) == EXAMPLE
    plans = run.json("plan", str(measured))["recommendations"]
    assert [each["batch"] for each in plans] == [1, 8, 32]
    assert [each["speculate"] for each in plans] == [True, True, False]
    assert plans[0]["best"]["kind"] == "tree"
    assert plans[0]["best"]["rows"] == len(plans[0]["best"]["parents"])
    assert plans[2]["best"]["speedup"] == 1.0
    out = run("plan", str(measured), "--batch", "32").out
    assert "Do not speculate" in out
    assert "Batch size 8" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_demo(run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("demo", "--model", str(save_tiny_model(tmp_path / "model")))
    assert ended.code == 0
    assert (tmp_path / "demo" / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert str(Path("demo") / "speedup.png") in ended.out
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert "…" not in ended.out  # nothing is cut at 80 columns
    for _, _, tokens in CHECKS:
        # By hand and from the closed form: the same digits, twice in one line.
        assert any(line.split().count(f"{tokens:.4f}") == 2 for line in ended.out.splitlines())


@pytest.mark.parametrize("command", ["simulate", "plan", "demo", "generate", "chat", "models"])
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"forerun {command}" in result.output.split("Options")[0].split("Example")[1]


def test_version(run: Terminal) -> None:
    assert run("--version").out == f"forerun {forerun.__version__}\n"
