"""`forerun train draft` from prompts to a folder that drafts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.train.distil import Distil
from forerun.train.loop import Loop, Loss
from forerun.train.texts import TextBatch
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

SMALL = ("--layers", "1", "--steps", "40", "--batch", "8", "--every", "20", "--learning-rate", "3e-3",
         "--max-tokens", "24", "--held-back", "3", "--device", "cpu", "--offline")  # fmt: skip


@pytest.fixture
def flags(folder: Path, prompts: Path) -> tuple[str, ...]:
    return ("train", "draft", "--target", str(folder), "--prompts", str(prompts), *SMALL)


def curve(made: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in made["history"][1:]]


def test_from_prompts_to_a_drafter(run: Terminal, flags: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "draft"
    made = run.json(*flags, "--out", str(out))
    assert made["folder"] == str(out)
    assert (made["steps"], made["data"]["prompts"], made["data"]["held_back"]) == (40, 9, 3)
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"] >= 1
    assert curve(made)[1] < curve(made)[0]
    kept = json.loads((out / "forerun.json").read_text())
    assert {**kept, "folder": str(out)} == made
    assert (kept["method"], kept["target"]["name"]) == ("draft", folder.name)
    assert str(tmp_path) not in (out / "forerun.json").read_text()
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(folder, dtype="float32", device="cpu") as plain:
        expected = plain.generate("what is it?", params)
    drafted = run.json("generate", "what is it?", "--model", str(folder), "--drafter", "draft_model", "--draft-model",
                       str(out), "--dtype", "float32", "--max-tokens", "40")  # fmt: skip
    assert drafted["token_ids"] == expected.token_ids
    assert drafted["stats"]["tokens_per_pass"] > 1


def test_it_goes_on_after_an_interruption(
    run: Terminal, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    expected = run.json(*flags, "--out", str(whole))
    tell = Loop._tell

    def interrupt(self: Loop, seconds_left: float) -> None:
        tell(self, seconds_left)
        if self.standing.step == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_tell", interrupt)
    assert run(*flags, "--out", str(torn)).code == 130
    monkeypatch.undo()
    assert not torn.exists()
    refused = run(*flags, "--out", str(torn))
    assert (refused.code, "go on with --resume" in " ".join(refused.err.split())) == (1, True)
    changed = run(*flags, "--out", str(torn), "--resume", "--seed", "1", "--batch", "4")
    assert changed.code == 1
    assert "was begun with another --batch, --seed: give the same" in " ".join(changed.err.split())
    made = run.json(*flags, "--out", str(torn), "--resume")
    assert made["history"] == expected["history"]
    assert (torn / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_that_diverged_goes_on_with_a_lower_rate(
    run: Terminal, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, calls = Distil.loss, iter(range(1000))

    def broken(self: Distil, batch: TextBatch) -> Loss:
        loss = sound(self, batch)
        return loss if next(calls) < 25 else Loss(loss.total * math.nan, loss.count, loss.figures)

    monkeypatch.setattr(Distil, "loss", broken)
    out = tmp_path / "draft"
    ended = run(*flags, "--out", str(out))
    assert (ended.code, out.exists()) == (1, False)
    assert "the loss is nan at step 26" in " ".join(ended.err.split())
    assert "lower --learning-rate (0.003), and go on from step 20 with --resume" in " ".join(ended.err.split())
    monkeypatch.undo()
    made = run.json(*flags, "--out", str(out), "--resume", "--learning-rate", "1e-3")
    assert [row["step"] for row in made["history"]] == [0, 20, 40]


def test_two_processes_do_what_one_does(run: Terminal, flags: tuple[str, ...], tmp_path: Path) -> None:
    alone = run.json(*flags, "--out", str(tmp_path / "one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, "-m", "forerun.cli.main", *flags, "--out", str(tmp_path / "two"), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    together = json.loads(ended.stdout)
    assert curve(together) == pytest.approx(curve(alone), rel=1e-3)
    assert together["data"] == alone["data"]
    assert together["tokens_per_pass"]["after"] == pytest.approx(alone["tokens_per_pass"]["after"], rel=0.1)


def test_a_dry_run_makes_nothing(run: Terminal, flags: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "draft"
    expected = run.json(*flags, "--out", str(out), "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert (expected["prompts"], expected["held_back"], expected["steps"], expected["measures"]) == (9, 3, 40, 3)
    assert expected["answer_tokens"] == 24 * expected["texts"]
    parts = expected["answer_seconds"] + 40 * expected["step_seconds"] + 3 * expected["measure_seconds"]
    assert expected["seconds"] == pytest.approx(parts)
    assert expected["memory_bytes"] > 1e6
    shown = run(*flags, "--out", str(out), "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    for part in ("9 to learn from, 3 held back", "million weights", "memory", "min at most"):
        assert part in shown.out


def test_the_folder_refuses_another_target(run: Terminal, flags: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "draft"
    shown = run(*flags, "--out", str(out), "--steps", "1")
    assert (shown.code, shown.err) == (0, "")
    assert "tokens per pass on 3 prompts that were held back" in shown.out
    other = save_tiny_model(tmp_path / "other", words=("a stranger",))
    with pytest.raises(ValueError, match="have different tokenizers"):
        LLM(other, "draft_model", drafter_options={"model": str(out)}, dtype="float32")


def test_mistakes(run: Terminal, flags: tuple[str, ...], tmp_path: Path, folder: Path, prompts: Path) -> None:
    def complaint(*arguments: str) -> str:
        ended = run(*arguments)
        assert (ended.code, ended.out) == (1, "")
        return " ".join(ended.err.split())

    out, empty = tmp_path / "draft", tmp_path / "empty"
    empty.touch()
    rest = ("--prompts", str(prompts), "--out", str(out), "--offline")
    assert "no method 'eagle' to train: use one of draft" in complaint("train", "eagle", *rest)
    assert "there is no model" in complaint("train", "draft", "--target", "no such model", *rest)
    assert "cannot open" in complaint(*flags, "--out", str(out), "--prompts", str(tmp_path / "gone"))
    assert "has no prompts" in complaint(*flags, "--out", str(out), "--prompts", str(empty))
    assert "exists: delete it" in complaint(*flags, "--out", str(folder))
    assert "leave --resume out" in complaint(*flags, "--out", str(out), "--resume")
    assert "--learning-rate is 0" in complaint(*flags, "--out", str(out), "--learning-rate", "0")
    assert "--layers is 9" in complaint(*flags, "--out", str(out), "--layers", "9")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert run(*flags, "--out", str(out), "--batch", "0").code == 2
    assert "forerun train draft --target smollm2-135m" in run("train", "--help").out
