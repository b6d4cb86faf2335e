"""`forerun rules`: the list, the measurement, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.bench import synthetic
from forerun.bench.rules import ENTRIES
from forerun.cli.main import app
from forerun.verify.rule import all_rules
from tests.cli.conftest import Terminal

QUICK = ("rules", "--measure", "--vocabulary", "64", "--samples", "60", "--depth", "3")


@pytest.fixture(autouse=True)
def rough_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed matters here, not how well the distances are met."""
    monkeypatch.setattr(synthetic, "_CALIBRATION", 1 << 14)


def test_the_list_names_every_rule_and_the_lossy_one(run: Terminal) -> None:
    ended = run("rules")
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    lines = ended.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for name, rule in all_rules().items():
        (place,) = (number for number, line in enumerate(lines) if line.split()[:1] == [name])
        assert lines[place].split()[1] == ("yes" if rule.lossless else "NO")
        assert lines[place + 1].strip() == rule.summary
    (greedy,) = (line for line in lines if line.startswith("greedy"))
    assert "at temperature 0" in greedy
    (block,) = (line for line in lines if line.startswith("block"))
    assert block.endswith("sampled, a chain")


def test_a_lossy_rule_is_red(monkeypatch: pytest.MonkeyPatch, run: Terminal) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mNO" in run("rules").out


def test_the_list_as_json(run: Terminal) -> None:
    listed = run.json("rules")
    assert [rule["name"] for rule in listed] == list(all_rules())
    assert [rule["name"] for rule in listed if not rule["lossless"]] == ["typical"]
    assert {rule["name"] for rule in listed if rule["chain_only"]} == {"block", "chain_rejection"}
    assert [rule["name"] for rule in listed if rule["greedy_only"]] == ["greedy"]
    assert next(rule for rule in listed if rule["name"] == "k_seq")["drawings"] == ["iid"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("distances", ["0.1,0.2,0.33,0.5", "0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4,0.45"])
def test_the_table_fits(run: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, distances: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ended = run(*QUICK, "--distance", distances)
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    assert "…" not in ended.out
    lines = ended.out.splitlines()
    assert all(len(line) <= columns for line in lines)
    count = distances.count(",") + 1
    (traversal,) = {line.split()[0] for line in lines if line.startswith(" traversal")}
    assert traversal == "traversal"
    assert sum(line.count("±") for line in lines if line.startswith(" k_seq")) == count
    assert sum(line.count("±") for line in lines if line[:2] == "0.") == 3 * count
    for part in ("trees 2·2·1 (11 rows)", "chains of 3 (4 rows)", "gumbel, 2 candidates", "1 − TV", "60 steps each"):
        assert part in ended.out


def test_measurement_as_json(run: Terminal) -> None:
    answer = run.json(*QUICK, "--distance", "0.4,0.1,0.4", "--seed", "7", "--spread", "2")
    assert [level["distance"] for level in answer["levels"]] == [0.1, 0.4]
    assert [row["label"] for row in answer["levels"][0]["rules"]] == [entry.label for entry in ENTRIES]
    settings = {"distances": [0.1, 0.4], "vocabulary": 64, "samples": 60, "depth": 3, "spread": 2.0, "seed": 7}
    assert answer["settings"] == answer["provenance"]["arguments"] == settings


def test_out_writes_all_or_nothing(run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "rules.json"
    target.write_text("older")
    ended = run(*QUICK, "--distance", "0.2", "--out", str(target))
    assert ended.code == 0
    assert "Written:" in ended.out
    answer: Any = json.loads(target.read_text())
    assert set(answer["provenance"]) >= {"forerun", "git", "torch", "cpu", "time", "arguments"}
    assert str(tmp_path) not in target.read_text()
    assert list(tmp_path.iterdir()) == [target]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = target.read_text()
    monkeypatch.setattr("os.replace", full)
    ended = run(*QUICK, "--distance", "0.2", "--out", str(target))
    assert ended.code == 1
    assert "No space left" in ended.err
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--samples", "10"), "--samples is about measuring: add --measure"),
        (("--distance", "0.1"), "--distance is about measuring: add --measure"),
        (("--out", "rules.json"), "--out is about measuring: add --measure"),
        (("--measure", "--distance", "1.5"), "distance is 1.5: give a total variation between 0.01 and 0.9"),
        (("--measure", "--distance", "near"), "--distance is 'near': give numbers"),
        (("--measure", "--samples", "1"), "samples is 1: give 2 or more"),
        (("--measure", "--vocabulary", "1"), "vocabulary is 1: give 16 or more"),
        (("--measure", "--depth", "99"), "depth is 99: give 16 or less"),
        (("--measure", "--out", "nowhere/rules.json"), "make the folder nowhere first"),
        (("--measure", "--out", "taken"), "cannot write taken: it is a folder"),
    ],
)
def test_what_a_user_gets_wrong(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    ended = run("rules", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert sentence in ended.err
    assert ended.err.startswith("forerun: ")
    assert ended.err.count("\n") == 1


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["rules", "--help"])
    assert result.exit_code == 0
    assert "forerun rules --measure" in result.output.split("Options")[0].split("Example")[1]
