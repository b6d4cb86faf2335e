"""`forerun plan --target` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.bench.plan_drafters import Watch
from forerun.bench.plan_probe import Probe
from forerun.bench.plan_profile import Profile, profile
from forerun.cli.plan import EXAMPLE
from forerun.models.target import TargetModel
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

PROMPTS = "one plus one\nthe the the\nwho is the one?\nand the\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("plan") / "model"))


@pytest.fixture
def asked(model: str, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS)
    options = ["--prompts", str(prompts), "--dtype", "float32", "--max-tokens", "24", "--concurrency", "2,1"]
    return ["plan", "--target", model, *options]


def test_a_report_and_a_file(run: Terminal, asked: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ended = run(*asked, "--drafters", "ngram", "--json", str(file))
    assert ended.code == 0, ended.err
    for part in ("1 at once", "2 at once", "predicted", "measured", "tokens per pass", "bootstrap"):
        assert part in ended.out
    assert "…" not in ended.out
    made = json.loads(file.read_text())
    assert [each["batch"] for each in made["recommendations"]] == [1, 2]
    for each in made["recommendations"]:
        (best, *_) = each["ranked"]
        assert each["speculate"] == each["advice"].startswith("Use ")
        assert best["low"] <= best["gain"] <= best["high"]
        (checked,) = each["check"]
        assert checked["measured_speedup"] > 0
        assert checked["holds"] or not each["speculate"]
        assert f"measured at {checked['measured_speedup']:.2f}×" in each["advice"] or not each["speculate"]
        assert checked["method"] == best["method"]
    assert [each["rows"][0] for each in made["target"]["passes"]] == [1, 1]
    assert made["drafters"][0]["sizes"][-1]["tokens_per_pass"] >= 1
    assert made["provenance"]["arguments"]["texts"] == 4
    assert str(tmp_path) not in file.read_text()  # where things lie is no part of a result


def test_a_drafter_that_fails_is_told_and_the_others_are_planned(run: Terminal, asked: list[str]) -> None:
    options = ["--drafter-option", "ngram.tokens=2", "--no-check", "--json"]
    ended = run(*asked, "--drafters", "ngram,medusa", *options)
    assert ended.code == 1
    assert "medusa: no medusa drafter for this model comes with Forerun" in ended.err
    made = json.loads(ended.out)
    assert {each["drafter"] for r in made["recommendations"] for each in r["ranked"]} <= {"ngram"}
    assert max(each["size"] for each in made["drafters"][0]["sizes"]) <= 2
    assert all(each["check"] == [] for each in made["recommendations"])


def test_what_was_measured_is_kept_where_memory_runs_out(
    run: Terminal, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two texts at once, when steps are timed; alone it is planned."""

    def timed(target: TargetModel, prompts: list[list[int]], batch: int, *arguments: Any, **more: Any) -> Profile:
        if batch == 2:
            torch.zeros(10**13)
        return profile(target, prompts, batch, *arguments, **more)

    monkeypatch.setattr("forerun.bench.plan_run.profile", timed)
    file = tmp_path / "plan.json"
    ended = run(*asked, "--drafters", "ngram", "--no-check", "--json", str(file))
    assert ended.code == 1
    assert ended.err == "2 at once: there is not enough memory for another 37,252.9 GiB\n"
    assert "1 at once" in ended.out
    made = json.loads(file.read_text())
    assert [each["batch"] for each in made["recommendations"]] == [1]
    assert made["target"]["errors"].keys() == {"2"}
    (drafter,) = made["drafters"]
    assert drafter["sizes"]
    assert drafter["error"] is None


def test_a_drafter_is_planned_for_as_many_texts_as_there_is_memory_for(
    run: Terminal, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_probe = Watch._run

    def watched(self: Watch, name: str, given: Any, batch: int, tell: Any, timed: Any = None) -> Probe:
        if batch == 2 and timed is not None:
            torch.zeros(10**13)
        return run_probe(self, name, given, batch, tell, timed)

    monkeypatch.setattr(Watch, "_run", watched)
    ended = run(*asked, "--drafters", "ngram", "--no-check", "--json")
    assert ended.code == 1
    assert ended.err == "ngram: 2 at once: there is not enough memory for another 37,252.9 GiB\n"
    ranked = {
        each["batch"]: [one["method"] for one in each["ranked"]] for each in json.loads(ended.out)["recommendations"]
    }
    assert ranked[1]
    assert not ranked[2]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--concurrency", "0"), "give numbers from 1 to 256"),
        (("--concurrency", "many"), "give whole numbers"),
        (("--drafters", "nobody"), "there is no drafter 'nobody'"),
        (("--drafters", "none"), "there is no drafter to plan with"),
        (("--drafters", "transformers"), "forerun bench --peers transformers"),
        (("--drafter-option", "ngram.length=3", "--drafters", "ngram"), "has no option 'length'"),
        (("--max-tokens", "2"), "give at least 8"),
        (("--limit", "0"), "--limit is 0"),
        (("--batch", "8"), "use --concurrency"),
        (("--example",), "use --concurrency"),
        (("out.json",), "leave out.json out, or write --json out.json"),
        (("--prompts", "absent.txt"), "cannot open absent.txt"),
        (("--json", "absent/folder/out.json"), "cannot write absent/folder/out.json"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    run: Terminal, model: str, more: tuple[str, ...], told: str
) -> None:
    ended = run("plan", "--target", model, *more)
    assert ended.code == 1
    assert told in " ".join(ended.err.split())


def test_options_of_a_measurement_need_a_target(run: Terminal, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(EXAMPLE))
    for more in (
        ["--drafters", "ngram"],
        ["--concurrency", "4"],
        ["--prompts", "p.txt"],
        ["--limit", "3"],
        ["--no-check"],
    ):
        ended = run("plan", str(tmp_path / "m.json"), *more)
        assert ended.code == 1
        assert "name it with --target" in ended.err
