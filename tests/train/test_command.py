"""`forerun train` from prompts to a folder that drafts, for every method."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.train import _default_out
from forerun.core.params import SamplingParams
from forerun.drafters.trained_folder import Calibration
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.train.answer_file import AnswerFile
from forerun.train.answers import AnswerOptions, answer_prompts
from forerun.train.loop import Loop
from forerun.train.loss import Loss
from forerun.train.methods.draft import Distil
from forerun.train.texts import TextBatch
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model
from tests.train.conftest import PROMPTS

SMALL = ("--steps", "40", "--batch", "8", "--every", "20", "--held-back", "3")
ASKED = ("--max-tokens", "24", "--device", "cpu", "--offline")
METHODS = {
    "blockwise": ("--heads", "2", "--learning-rate", "2e-2", "--bits", "8"),
    "draft": ("--layers", "1", "--hidden", "24", "--learning-rate", "1e-2"),
    "eagle": ("--learning-rate", "3e-3"),
    "eagle3": ("--unroll", "3", "--learning-rate", "5e-3", "--draft-vocabulary", "192"),
    "medusa": ("--heads", "2", "--learning-rate", "2e-2", "--soft", "0.5"),
    "mtp": ("--unroll", "3", "--learning-rate", "5e-3", "--bits", "6", "--attention-heads", "3"),
    "parallel": ("--heads", "2", "--anchors", "8", "--learning-rate", "3e-2"),
}
Flags = Callable[[str], tuple[str, ...]]


@pytest.fixture(scope="module")
def told(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's answers, for all runs that need not ask."""
    path = tmp_path_factory.mktemp("answers") / "told"
    answer_prompts(loaded, PROMPTS, path, AnswerOptions(max_tokens=24), lambda doing, done, total: None)
    return path


@pytest.fixture
def asking(folder: Path, prompts: Path) -> Flags:
    return lambda method: (
        "train", method, "--target", str(folder), "--prompts", str(prompts), *ASKED, *SMALL, *METHODS[method]
    )  # fmt: skip


@pytest.fixture
def flags(asking: Flags, told: Path) -> Flags:
    return lambda method: (*asking(method), "--answers", str(told))


def curve(made: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in made["history"][1:]]


@pytest.mark.parametrize("method", METHODS)
def test_from_answers_to_a_drafter(run: Terminal, flags: Flags, folder: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "made" / method
    made = run.json(*flags(method), "--out", str(out))
    assert made["folder"] == str(out)
    assert (made["steps"], made["data"]["prompts"], made["data"]["held_back"]) == (40, 9, 3)
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"] >= 1
    assert curve(made)[1] < 0.9 * curve(made)[0]
    kept = json.loads((out / "forerun.json").read_text())
    assert {**kept, "folder": str(out)} == made
    assert (kept["method"], kept["target"]["name"]) == (method, folder.name)
    assert str(tmp_path) not in (out / "forerun.json").read_text()
    accuracies = Calibration.of(kept).accuracies
    assert sum(accuracies[0]) > 0.2
    assert len(accuracies) in ((2,) if method in ("blockwise", "medusa", "parallel") else range(3, 11))
    assert kept["calibration"]["confidence"]
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(folder, dtype="float32", device="cpu") as plain:
        expected = plain.generate("what is it?", params)
    name, option = ("draft_model", "model") if method == "draft" else (method, "path")
    drafted = run.json("generate", "what is it?", "--model", str(folder), "--drafter", name, "--drafter-option",
                       f"{option}={out}", "--tree", "2" if method == "parallel" else "static:6", "--dtype", "float32",
                       "--max-tokens", "40")  # fmt: skip
    assert drafted["token_ids"] == expected.token_ids
    assert drafted["stats"]["tokens_per_pass"] > 1


def test_one_goes_on_from_another(run: Terminal, flags: Flags, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    before = run.json(*flags("mtp"), "--out", str(first))
    after = run.json(*flags("mtp"), "--begin", str(first), "--out", str(second))
    assert after["tokens_per_pass"]["before"] == pytest.approx(before["tokens_per_pass"]["after"])
    assert curve(after)[0] < curve(before)[0]
    assert after["began"]["steps"] == 40
    refused = run(*flags("eagle3"), "--begin", str(first), "--out", str(tmp_path / "third"))
    assert (refused.code, "of the method mtp" in " ".join(refused.err.split())) == (1, True)


@pytest.mark.parametrize("method", METHODS)
def test_it_goes_on_after_an_interruption(
    run: Terminal, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    expected = run.json(*flags(method), "--out", str(whole))
    tell = Loop._tell

    def interrupt(self: Loop, seconds_left: float) -> None:
        tell(self, seconds_left)
        if self.standing.step == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_tell", interrupt)
    assert run(*flags(method), "--out", str(torn)).code == 130
    monkeypatch.undo()
    assert not torn.exists()
    refused = run(*flags(method), "--out", str(torn))
    assert (refused.code, "go on with --resume" in " ".join(refused.err.split())) == (1, True)
    changed = run(*flags(method), "--out", str(torn), "--resume", "--seed", "1", "--batch", "4")
    assert changed.code == 1
    assert "was begun with another --batch, --prompts" in " ".join(changed.err.split()).replace("--seed", "--prompts")
    made = run.json(*flags(method), "--out", str(torn), "--resume")
    assert made["history"] == expected["history"]
    assert (torn / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_draft_learns_what_another_misses(run: Terminal, flags: Flags, folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run.json(*flags("draft"), "--out", str(first), "--steps", "1", "--learning-rate", "1e-4")
    made = run.json(*flags("draft"), "--out", str(second), "--beside", str(first))
    assert made["beside"] == ["first"]
    assert all(0 < row["missed"] < 1 for row in made["history"][1:])
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"]
    drafted = run.json("generate", "what is it?", "--model", str(folder), "--drafter", "multi_draft", "--dtype",
                       "float32", "--drafter-option", f"models={first},{second}", "--max-tokens", "40")  # fmt: skip
    assert drafted["stats"]["tokens_per_pass"] > 1
    wrong = run(*flags("medusa"), "--out", str(tmp_path / "none"), "--beside", str(first))
    assert (wrong.code, "--beside is for drafts" in wrong.err) == (1, True)


def test_it_asks_by_itself(run: Terminal, asking: Flags, told: Path, tmp_path: Path) -> None:
    """And what is in OUT.training are answers like others, to be used again."""
    made = run.json(*asking("medusa"), "--out", str(tmp_path / "first"))
    again = run.json(
        *asking("medusa"), "--out", str(tmp_path / "second"), "--answers", str(tmp_path / "first.training" / "answers")
    )
    assert again["history"] == made["history"]
    assert again["data"] == made["data"]


def test_answers_alone(run: Terminal, told: Path, folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "told"
    flags = ("train", "answers", "--target", str(folder), "--prompts", str(prompts), "--out", str(out), *ASKED)
    made = run.json(*flags)
    assert (made["prompts"], made["texts"]) == (12, 14)
    assert [each.key for each in AnswerFile(out).conversations()] == [
        each.key for each in AnswerFile(told).conversations()
    ]
    again = run(*flags)
    assert (again.code, "add to it with --resume" in " ".join(again.err.split())) == (1, True)
    more = run.json(*flags, "--resume", "--times", "2")
    assert (more["texts"], more["answer_tokens"] > made["answer_tokens"]) == (28, True)
    wrong = run(*flags, "--resume", "--heads", "2")
    assert (wrong.code, "only makes answers" in " ".join(wrong.err.split())) == (1, True)


def test_a_run_that_diverged_goes_on_with_a_lower_rate(
    run: Terminal, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, calls = Distil.loss, iter(range(1000))

    def broken(self: Distil, batch: TextBatch) -> Loss:
        loss = sound(self, batch)
        return loss if next(calls) < 25 else Loss(loss.total * math.nan, loss.count, loss.figures)

    monkeypatch.setattr(Distil, "loss", broken)
    out = tmp_path / "draft"
    ended = run(*flags("draft"), "--out", str(out))
    assert (ended.code, out.exists()) == (1, False)
    assert "the loss is nan at step 26" in " ".join(ended.err.split())
    assert "lower --learning-rate (0.01), and go on from step 20 with --resume" in " ".join(ended.err.split())
    monkeypatch.undo()
    made = run.json(*flags("draft"), "--out", str(out), "--resume", "--learning-rate", "1e-3")
    assert [row["step"] for row in made["history"]] == [0, 20, 40]


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_do_what_one_does(run: Terminal, flags: Flags, tmp_path: Path, method: str) -> None:
    more = ("--steps", "12", "--every", "6", *(("--batch-tokens", "300") if method == "eagle3" else ()))
    alone = run.json(*flags(method), *more, "--out", str(tmp_path / "one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, "-m", "forerun.cli.main", *flags(method), *more, "--out", str(tmp_path / "two"), "--json"],
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


def test_a_dry_run_makes_nothing(run: Terminal, asking: Flags, told: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    expected = run.json(*asking("mtp"), "--out", str(out), "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert (expected["prompts"], expected["held_back"], expected["steps"], expected["measures"]) == (9, 3, 40, 3)
    assert expected["answer_tokens"] == 24 * expected["texts"]
    parts = expected["answer_seconds"] + 40 * expected["step_seconds"] + 3 * expected["measure_seconds"]
    assert expected["seconds"] == pytest.approx(parts)
    assert expected["memory_bytes"] > 1e6
    shown = run(*asking("draft"), "--out", str(out), "--dry-run", "--answers", str(told), "--time-limit", "1e-4")
    assert (shown.code, shown.err) == (0, "")
    for part in ("9 to learn from, 3 held back", "million weights", "memory", "0.0 min at most"):
        assert part in shown.out


def test_where_it_is_written_need_not_be_said(
    run: Terminal, flags: Flags, asking: Flags, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"medusa-{folder.name}"
    shown = run(*asking("medusa"), "--dry-run")
    assert (shown.code, shown.out.split()[:2], list(tmp_path.iterdir())) == (0, ["folder", name], [])
    assert run.json(*asking("medusa"), "--dry-run")["folder"] == name
    shown = run(*flags("medusa"), "--steps", "1")
    assert (shown.code, shown.err) == (0, "")
    begun, ended = shown.out.splitlines()
    assert begun == f"The drafter will be in {name}, and the run is in {name}.training."
    assert ended.startswith(f"{name} is written. It drafts ")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.training"]
    again = run(*flags("medusa"))
    assert (again.code, f"{name} exists: delete it, or choose another --out" in again.err) == (1, True)
    shutil.rmtree(name)
    again = run(*flags("medusa"))
    assert (again.code, f"{name}.training holds a run that was begun" in again.err) == (1, True)
    assert run.json(*flags("medusa"), "--steps", "1", "--resume")["folder"] == name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-1.7B", "SmolLM2-1.7B"),
        ("/models/llama/", "llama"),
        ("../my model (v2)/.", "my-model-v2"),
        ("q4/tiny.gguf", "tiny"),
        ("/", "model"),
    ],
)
def test_a_folder_is_named_after_method_and_target(target: str, name: str) -> None:
    assert _default_out("eagle3", target) == Path(f"eagle3-{name}")


def test_folders_refuse_another_target(run: Terminal, flags: Flags, told: Path, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "draft"
    shown = run(*flags("draft"), "--out", str(out), "--steps", "1")
    assert (shown.code, shown.err) == (0, "")
    assert "tokens per pass on 3 prompts that were held back" in shown.out
    head = tmp_path / "head"
    run.json(*flags("medusa"), "--out", str(head), "--steps", "1")
    other = save_tiny_model(tmp_path / "other", words=("a stranger",))
    with pytest.raises(ValueError, match="have different tokenizers"):
        LLM(other, "draft_model", drafter_options={"model": str(out)}, dtype="float32")
    with pytest.raises(ValueError, match="was trained for another target"):
        LLM(other, "medusa", drafter_options={"path": str(head)}, dtype="float32")
    wrong = run(*flags("medusa"), "--target", str(other), "--out", str(tmp_path / "none"))
    assert (wrong.code, "the answers of another target" in " ".join(wrong.err.split())) == (1, True)


def test_mistakes(run: Terminal, asking: Flags, tmp_path: Path, folder: Path, prompts: Path) -> None:
    def complaint(*arguments: str) -> str:
        ended = run(*arguments)
        assert (ended.code, ended.out) == (1, "")
        return " ".join(ended.err.split())

    out, empty = tmp_path / "draft", tmp_path / "empty"
    empty.touch()
    rest = ("--prompts", str(prompts), "--out", str(out), "--offline")
    flags = asking("draft")
    assert "no method 'falcon' to train: use one of blockwise, draft" in complaint("train", "falcon", *rest)
    assert "there is no model" in complaint("train", "draft", "--target", "no such model", *rest)
    assert "cannot open" in complaint(*flags, "--out", str(out), "--prompts", str(tmp_path / "gone"))
    assert "has no prompts" in complaint(*flags, "--out", str(out), "--prompts", str(empty))
    assert "exists: delete it" in complaint(*flags, "--out", str(folder))
    assert "leave --resume out" in complaint(*flags, "--out", str(out), "--resume")
    assert "--learning-rate is 0" in complaint(*flags, "--out", str(out), "--learning-rate", "0")
    assert "--time-limit is 0" in complaint(*flags, "--out", str(out), "--time-limit", "0")
    assert "--bits is 8: a draft with matrices of its own" in complaint(*flags, "--out", str(out), "--bits", "8")
    assert "--bits is 12: give 16, 8, 6 or 4" in complaint(*flags, "--out", str(out), "--bits", "12")
    assert "draft has no option --heads: it has --layers, --hidden" in complaint(
        *flags, "--out", str(out), "--heads", "2"
    )
    assert "eagle has no option --backbone" in complaint(*asking("eagle"), "--out", str(out), "--backbone")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert run(*flags, "--out", str(out), "--batch", "0").code == 2
    assert "forerun train draft --target smollm2-135m" in run("train", "--help").out
