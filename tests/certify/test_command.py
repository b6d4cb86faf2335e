"""`forerun certify` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from forerun.cli.certify import WORDS
from forerun.models.identity import files_digest
from tests.cli.conftest import Terminal, run
from tests.tiny_folder import save_tiny_model

__all__ = ["run"]  # the fixture
FEW = ["--contexts", "2", "--samples", "30", "--length", "8", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("certify") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("hello hello hello\nthe the the the\nabc abc abc\n")
    return str(file)


def test_a_table_and_a_file(run: Terminal, model: str, prompts: str, tmp_path: Path) -> None:
    result = tmp_path / "certificate.json"
    asked = ["--model", model, "--drafter", "recycling", "--prompts", prompts, "--temperature", "0,0.2", *FEW]
    ended = run("certify", *asked, "--out", str(result))
    content = json.loads(result.read_text())
    assert ended.code == (0 if content["verdict"] == "certified" else 1), ended.err
    assert WORDS[content["verdict"]][0] in ended.out
    table = " ".join(ended.out.split())
    for finding in content["findings"]:
        assert f"{finding['temperature']:g} {finding['test']} {finding['compared']}" in table
        assert finding["result"] in table
        assert finding["passed"]
    assert "would be seen with a chance of 95%" in table
    assert {finding["temperature"] for finding in content["findings"]} == {0, 0.2}
    assert content["drafter"] == "recycling"
    assert content["model"] == "model"
    assert model not in result.read_text()  # where things lie is no part of a result
    assert content["dtype"] == "float32"
    assert content["rules"] == {"0": "greedy", "0.2": "gumbel"}
    assert content["made_from"] is None
    weights = content["weights"]
    assert weights["model"] == files_digest(Path(model))
    assert f"weights: model {weights['model'][:8]}\n" in ended.out
    assert (weights["drafter"], weights["original"], len(weights["identity"])) == (None, None, 32)
    assert content["adaptive"] is False
    assert content["provenance"]["arguments"]["samples"] == 30
    assert content["provenance"]["arguments"]["prompts"] == 3


def test_as_a_server_drafts(run: Terminal, model: str, prompts: str) -> None:
    """On such a small model drafts may never pay: then there is nothing to certify, and it says so."""
    asked = ["--model", model, "--drafter", "recycling", "--prompts", prompts, "--temperature", "0", *FEW]
    ended = run("certify", *asked, "--adaptive", "--json")
    content = json.loads(ended.out)
    assert content["adaptive"] is True
    assert all(finding["passed"] for finding in content["findings"])
    assert ended.code == (0 if content["verdict"] == "certified" else 1)
    assert content["verdict"] in {"certified", "refused"}


def test_a_model_that_is_read_anew_in_every_pass(run: Terminal, prompts: str, tmp_path: Path) -> None:
    """What it keeps of a text are tokens: precision and rounding are those of its weights."""
    folder = save_tiny_model(tmp_path / "mamba")
    about = json.loads((folder / "config.json").read_text())
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3}
    sizes |= {name: about[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    torch.manual_seed(1)
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(folder)  # type: ignore[no-untyped-call]
    asked = ["--model", str(folder), "--drafter", "ngram", "--prompts", prompts, "--temperature", "0", *FEW]
    ended = run("certify", *asked, "--json")
    assert ended.code == 0, ended.err
    content = json.loads(ended.out)
    assert content["dtype"] == "float32"
    (finding,) = content["findings"]
    assert finding["passed"]
    assert any(parting["rounding"] > 0 for parting in finding["figures"]["control"]["partings"])


def test_json_alone_and_a_lossy_rule(run: Terminal, model: str, prompts: str) -> None:
    asked = ["--model", model, "--drafter", "ngram", "--rule", "typical", "--prompts", prompts, "--temperature", "0,1"]
    ended = run("certify", *asked, *FEW, "--json")
    assert ended.code == 1
    content = json.loads(ended.out)
    assert content["verdict"] == "lossy"
    assert content["reason"].startswith("no certificate: the rule typical is lossy")
    assert [finding["test"] for finding in content["findings"]] == ["distance", "distance"]


def test_a_certificate_says_of_which_weights_it_is(run: Terminal, model: str, prompts: str, tmp_path: Path) -> None:
    """Other weights in the same folder get another one."""
    draft, found = tmp_path / "draft", []
    asked = ["--model", model, "--draft-model", str(draft), "--prompts", prompts, "--temperature", "0", *FEW]
    for seed in (2, 3):
        save_tiny_model(draft, seed=seed)
        found.append(json.loads(run("certify", *asked, "--json").out)["weights"])
        assert found[-1]["drafter"] == files_digest(draft)
    first, second = found
    assert first["drafter"] != second["drafter"]
    assert first["model"] == second["model"]


def test_a_model_that_was_made_from_another_says_so(run: Terminal, prompts: str, tmp_path: Path) -> None:
    """As `train medusa --backbone` leaves it: its own text may be certified, and whose it is must be said."""
    folder = save_tiny_model(tmp_path / "tuned")
    (folder / "forerun.json").write_text(json.dumps({"about": "no longer it", "original": {"name": "the-first-one"}}))
    asked = ["--model", str(folder), "--drafter", "recycling", "--prompts", prompts, "--temperature", "0"]
    ended = run("certify", *asked, *FEW, "--out", str(tmp_path / "c.json"))
    assert "--original the-first-one measures how far" in " ".join(ended.out.split())
    assert json.loads((tmp_path / "c.json").read_text())["made_from"] == "the-first-one"


def test_the_distance_to_another_model(
    run: Terminal, model: str, prompts: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = str(save_tiny_model(tmp_path_factory.mktemp("certify") / "other", seed=2))
    asked = ["--model", model, "--drafter", "ngram", "--original", other, "--prompts", prompts, "--temperature", "0"]
    ended = run("certify", *asked, *FEW, "--json")
    assert ended.code == 1
    (finding,) = json.loads(ended.out)["findings"]
    assert finding["figures"]["total_variation"] > 0.5 > finding["figures"]["noise"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a drafter with --drafter"),
        (["--drafter", "nope"], "no drafter 'nope'"),
        (["--drafter", "ngram", "--drafter-option", "x=1"], "no option 'x'"),
        (["--drafter", "ngram", "--rule", "nope"], "no verification rule 'nope'"),
        (["--drafter", "ngram", "--temperature", "hot"], "give numbers with commas"),
        (["--drafter", "ngram", "--temperature", "-1"], "temperature is -1.0"),
        (["--drafter", "ngram", "--temperature", "nan"], "temperature is nan"),
        (["--drafter", "ngram", "--samples", "5"], "--samples is 5: it must be at least 20"),
        (["--drafter", "ngram", "--prompts", "/no/such/file"], "cannot open /no/such/file"),
        (["--drafter", "ngram", "--out", "/no/such/folder/x.json"], "make the folder"),
    ],
)
def test_mistakes_are_told_in_one_sentence(run: Terminal, arguments: list[str], words: str) -> None:
    ended = run("certify", "--model", "/no/such/model", *arguments)
    assert ended.code == 1
    assert words in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err
