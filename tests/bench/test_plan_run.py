"""Profiles, watched drafters and the whole plan, on a tiny model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from forerun.bench.cases import Case
from forerun.bench.contestants import Forerun, prompt_tokens
from forerun.bench.memory import Ledger
from forerun.bench.plan_drafters import Measured, Watch, default_drafters
from forerun.bench.plan_model import tokens_per_pass
from forerun.bench.plan_profile import PLAIN, engine_of, profile
from forerun.bench.plan_run import Planner
from forerun.bench.plan_sizes import options_for, variants
from forerun.bench.questions import Question
from forerun.core.params import SamplingParams
from forerun.drafters.find import Setup, make_drafter
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.engine.statistics import Statistics
from tests.tiny_folder import save_tiny_model

WORDS = ("one plus one is", "the the the the", "who is the one?", "say it again, the", "hello", "and the and the")
QUESTIONS = [Question(str(number), "chat", (text,)) for number, text in enumerate(WORDS)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel.load(save_tiny_model(tmp_path_factory.mktemp("plan") / "model"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    return [prompt_tokens(model.tokenizer, [{"role": "user", "content": text}]) for text in WORDS]


def watched(model: LoadedModel, prompts: list[list[int]], name: str, params: SamplingParams = PARAMS) -> list[Measured]:
    return Watch(model, prompts, params, [1, 6]).measure(name, {}, Ledger(torch.device("cpu")), lambda doing: None)


def written(
    model: LoadedModel, prompts: list[list[int]], name: str, options: Mapping[str, str], params: SamplingParams
) -> list[Statistics]:
    """All begin in one step: drafters that learn of one text for others learn in the same order each time."""
    drafter = make_drafter(name, Setup(model.target, 2048, model.load_beside), options)
    engine = engine_of(model.target, drafter, prompts, params, len(prompts))
    found: dict[int, Statistics] = {}
    while engine.has_work:
        found |= {update.request: update.statistics for update in engine.step()}
    return [found[request] for request in sorted(found)]


def test_steps_are_timed_by_rows(model: LoadedModel, prompts: list[list[int]]) -> None:
    found = profile(model.target, prompts, 3, 10, PARAMS, repeat=3)
    assert found.rows == [1, 2, 3, 5, 9, 16]  # the next one above ten, so that ten lies between
    assert len(found.rounds) == 3
    assert all(seconds > 0 for each in found.rounds for seconds in each.values())
    assert all(each[PLAIN] == each[1] for each in found.rounds)  # on a CPU they are the same
    assert found.reading > 0
    costs = found.costs().costs
    assert list(costs) == sorted(costs)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("ngram", 0.0), ("suffix", 0.0), ("combine", 0.0), ("lookahead", 0.0), ("layer_skip", 0.0), ("recycling", 1.0)],
)
def test_what_is_watched_is_what_the_engine_does(
    model: LoadedModel, prompts: list[list[int]], name: str, temperature: float
) -> None:
    """Asking a drafter several times in a step changes nothing: as many tokens per pass as without it."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    (found,) = watched(model, prompts, name, params)
    assert found.error is None
    whole = found.candidates[-1]
    done = written(model, prompts, name, {}, params)
    assert [own.steps for own in whole.walks] == [each.target_passes - 1 for each in done]  # the first reads the prompt
    assert [own.tokens for own in whole.walks] == [each.tokens - 1 for each in done]


def test_a_size_is_foreseen_as_it_then_is(model: LoadedModel, prompts: list[list[int]]) -> None:
    """Tokens per pass of smaller drafts, from watching the large ones, beside drafting so."""
    (found,) = watched(model, prompts, "ngram", SamplingParams(temperature=0.0, max_tokens=120))
    assert [each.size for each in found.candidates] == [1, 2, 4, 8]
    for each in found.candidates:
        done = written(model, prompts, "ngram", each.options, SamplingParams(temperature=0.0, max_tokens=120))
        tokens = sum(one.tokens - 1 for one in done)
        passes = sum(one.target_passes - 1 for one in done)
        assert tokens_per_pass(each.walks) == pytest.approx(tokens / passes, rel=0.1)


def test_a_drafter_that_fails_is_told_with_its_error(model: LoadedModel, prompts: list[list[int]]) -> None:
    (found,) = watched(model, prompts, "retrieval")
    assert "needs a datastore" in str(found.error)
    assert found.candidates == []


def test_sizes_are_told_in_options(model: LoadedModel) -> None:
    setup = Setup(model.target, 256, model.load_beside)
    assert options_for("ngram", make_drafter("ngram", setup), 4) == {"tokens": "4"}
    assert options_for("recycling", make_drafter("recycling", setup), 2) == {"nodes": "2"}
    assert options_for("lookahead", make_drafter("lookahead", setup), 2) is None
    beside = Setup(model.target, 256, lambda name: model.target)
    for tree, size, said in (
        ("6", 3, "3"),
        ("dynamic:4,3,12", 5, "dynamic:4,3,5"),
        ("dynamic:4,3,12", 2, "dynamic:2,2,2"),
        ("fixed:3,2", 1, "1"),
        ("fixed:3,2", 4, None),
    ):
        drafter = make_drafter("draft_model", beside, {"model": "small", "tree": tree})
        assert options_for("draft_model", drafter, size) == (None if said is None else {"tree": said})
    assert variants("ngram", {}) == [{}]
    assert variants("draft_model", {"model": "x"}) == [{"model": "x"}, {"model": "x", "tree": "8"}]
    assert variants("draft_model", {"model": "x", "tree": "3"}) == [{"model": "x", "tree": "3"}]
    assert default_drafters(model)[:4] == ["ngram", "suffix", "recycling", "combine"]


def test_a_plan_recommends_and_checks(model: LoadedModel) -> None:
    parts: list[str] = []
    names = {"ngram": "ngram", "suffix": "suffix", "retrieval": "retrieval"}
    planner = Planner(model, names, {}, QUESTIONS, PARAMS, [3])
    made = planner.run(parts.append, lambda doing: None)
    assert len(parts) == planner.parts
    assert [each.batch for each in made.recommendations] == [3]
    for each in made.recommendations:
        gains = [one.gain for one in each.ranked]
        assert gains == sorted(gains, reverse=True)
        assert {one.candidate.drafter for one in each.ranked} == {"ngram", "suffix"}
        assert each.best is not None
        assert each.speculate == each.advice.startswith("Use ")
        assert not each.speculate or any(one.holds for one in each.checked)
        assert (each.use is None) == (not each.speculate)
        assert any(one.candidate.kind == "chain" for one in each.checked)
        for one in each.checked:
            assert one.error is None
            assert one.measured is not None
            assert one.off == pytest.approx(one.predicted / one.measured - 1)
            assert one.identical == one.texts  # the check writes the text of plain decoding
    assert [each.error is None for each in made.drafters] == [True, True, False]


def test_a_prompt_that_leaves_no_room_is_named(model: LoadedModel) -> None:
    long = Question("9", "chat", ("the " * 600,))
    with pytest.raises(ValueError, match=r"the prompt 9 has .* leave it out"):
        Planner(model, {"ngram": "ngram"}, {}, [long], PARAMS, [1]).run(lambda part: None, lambda doing: None)


def test_an_answer_longer_than_the_context_is_refused(model: LoadedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100_000)
    with pytest.raises(ValueError, match=r"--max-tokens is 100000, and the context holds .*: give less"):
        Planner(model, {"ngram": "ngram"}, {}, QUESTIONS, params, [1]).run(lambda part: None, lambda doing: None)


def test_an_adaptive_contestant_is_one_of_its_own(model: LoadedModel) -> None:
    """The engine chooses how much is drafted, and writes the same text."""
    case = Case("ngram", adaptive=True)
    assert case.label == "ngram adaptive"
    texts = []
    for adaptive in (False, True):
        contestant = Forerun(LLM(model, "ngram", adaptive=adaptive, max_batch=2))
        talks = [[{"role": "user", "content": question.turns[0]}] for question in QUESTIONS]
        answers, _ = contestant.answer(talks, PARAMS)
        texts.append([answer.token_ids for answer in answers])
        contestant.close()
    assert texts[0] == texts[1]
