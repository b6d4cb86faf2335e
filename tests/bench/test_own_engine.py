"""Our own engine as a contestant, on a tiny model, and what its statistics add up to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun.bench.cases import Case, Setting
from forerun.bench.contest import Contest
from forerun.bench.contestants import Contestant, Forerun
from forerun.bench.measures import Cell
from forerun.bench.peers import PEERS, Peers, Vllm
from forerun.bench.questions import Question
from forerun.bench.rows import make_rows
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from tests.tiny_folder import save_tiny_model

QUESTIONS = [
    Question("1", "math", ("one plus one is",)),
    Question("2", "chat", ("the the the", "and the?")),
    Question("3", "chat", ("who is the one?",)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel.load(save_tiny_model(tmp_path_factory.mktemp("own") / "model"), dtype="float32", device="cpu")


def contest(model: LoadedModel, names: list[str], *settings: Setting) -> Contest:
    peers = Peers(model.folder, model.tokenizer, model.target.new_storage(16).keys[0].dtype, model.target.device)

    def start(case: Case, setting: Setting) -> Contestant:
        if case.drafter in PEERS:
            return peers.start(case.drafter, setting)
        return Forerun(
            LLM(model, case.drafter, tree=case.tree or None, rule=case.rule or None, max_batch=setting.batch)
        )

    params = SamplingParams(max_tokens=24, seed=5)
    cases = [Case(name) for name in names]
    return Contest(QUESTIONS, cases, settings, start, params, 1, ends=model.tokenizer.eos, warm_up=4)


def run(held: Contest) -> tuple[list[Cell], dict[tuple[str, Setting, str], dict[str, object]]]:
    cells: list[Cell] = []
    held.run(cells.append)
    rows = make_rows(cells, held.cases, held.settings, held.categories, seeded=True)
    keyed = {
        (row["method"], Setting(row["batch"], row["temperature"], row["arrivals"]), row["category"]): row
        for row in rows
    }
    return cells, keyed


def test_what_is_counted_adds_up(model: LoadedModel) -> None:
    settings = (Setting(1), Setting(3), Setting(3, 1.0), Setting(3, 0.0, 200.0))
    cells, rows = run(contest(model, ["none", "ngram", "suffix"], *settings))
    for cell in cells:
        assert cell.error is None
        assert cell.peak_bytes is not None
        assert cell.work.cache_bytes is not None
        assert cell.work.cache_bytes > 0
        for sums in cell.sums.values():
            assert sum(sums.accepted_by_depth) == sums.accepted <= sums.drafted
            assert all(a <= o for a, o in zip(sums.accepted_by_depth, sums.offered_by_depth, strict=True))
            assert len(sums.request_seconds) == len(sums.first_token_seconds) == len(sums.texts)
            firsts = zip(sums.first_token_seconds, sums.request_seconds, strict=True)
            assert all(0 < first <= whole for first, whole in firsts)
            assert all(0 <= sums.prompt_phases[name] <= spent for name, spent in sums.phases.items())
    for setting in settings:
        for name in ("none", "ngram", "suffix"):
            row = rows[name, setting, "overall"]
            assert (row["identical"], row["answers"]) == (4, 4)
            assert row["error"] is None
        assert rows["none", setting, "overall"]["tokens_per_pass"] == 1
        assert rows["none", setting, "overall"]["predicted_speedup"] == pytest.approx(1)
        assert rows["none", setting, "overall"]["rows_wasted"] == 0


def test_a_rule_that_does_not_fit_is_a_row_with_the_reason(model: LoadedModel) -> None:
    held = contest(model, ["none"], Setting(1, 1.0))
    wrong = Case("ngram", "block")  # which needs drafts that were sampled
    _, rows = run(Contest(QUESTIONS, [*held.cases, wrong], held.settings, held.start, held.params, 1))
    row = rows["ngram block", Setting(1, 1.0), "overall"]
    assert "lossless here" in str(row["error"])
    assert row["speedup"] is None


def test_transformers_writes_the_same_texts(model: LoadedModel) -> None:
    names = ["none", "transformers", "transformers-lookup"]
    settings = (Setting(1), Setting(2), Setting(2, 0.0, 50.0))
    _, rows = run(contest(model, names, *settings))
    for name in names[1:]:
        row = rows[name, Setting(1), "overall"]
        assert row["identical_to_plain"] is True
        assert row["tokens"] == rows["none", Setting(1), "overall"]["tokens"]
        assert row["first_token_seconds"] is not None
        assert row["peak_bytes"] is None  # it shares the process with our model
        for unknown in ("rows_verified", "rows_wasted", "outside_share", "shares", "predicted_tokens_per_pass"):
            assert row[unknown] is None
        assert "closed batches" in str(rows[name, settings[2], "overall"]["error"])
    assert rows["transformers", Setting(2), "overall"]["identical_to_plain"] is True
    assert "one prompt at a time" in str(rows["transformers-lookup", Setting(2), "overall"]["error"])


def test_peers_that_are_missing_say_so(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("vllm", "openvino_genai"):
        monkeypatch.setitem(sys.modules, package, None)  # also where it is installed
    _, rows = run(contest(model, ["none", "vllm", "openvino", "transformers-assistant"], Setting(1)))
    assert "pip install vllm" in str(rows["vllm", Setting(1), "overall"]["error"])
    assert "pip install openvino-genai" in str(rows["openvino", Setting(1), "overall"]["error"])
    assert "needs an assistant" in str(rows["transformers-assistant", Setting(1), "chat"]["error"])
    assert rows["none", Setting(1), "overall"]["speedup"] == pytest.approx(1)


def test_vllm_takes_its_share_of_the_device_for_one_batch_at_a_time(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    class Fake:
        def __init__(self, *, max_num_seqs: int, gpu_memory_utilization: float, **others: object) -> None:
            assert all(other == max_num_seqs for other in alive), "of another batch"
            assert gpu_memory_utilization == 0.25
            self.batch = max_num_seqs
            alive.append(max_num_seqs)

        def __del__(self) -> None:
            alive.remove(self.batch)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Fake))
    shares = {name: {"memory": "0.25"} for name in ("vllm", "vllm-lookup")}
    peers = Peers(Path("model"), model.tokenizer, torch.float32, torch.device("cpu"), shares)
    for batch in (1, 8, 8, 1):
        plain, lookup = (peers.start(name, Setting(batch)) for name in shares)
        assert isinstance(plain, Vllm)
        assert isinstance(lookup, Vllm)
        assert plain.llm is not lookup.llm
        assert alive == [batch, batch]
        del plain, lookup  # as a round does when it is over
    shares["vllm"]["memory"] = "half"
    with pytest.raises(ValueError, match=r"'half': give a share"):
        peers.start("vllm", Setting(2))
