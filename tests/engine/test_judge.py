"""Tokens straight from logits, where nothing but the settings of a law stands between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from torch import Tensor

from forerun.core.native import choice
from forerun.core.params import SamplingParams
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.engine.engine import Engine
from forerun.engine.laws import StepLaws
from forerun.engine.request import Request
from forerun.verify.rule import BatchNoise, VerificationRule
from tests.engine.test_engine import MODEL, by_hand, prompts
from tests.engine.tiny import RandomSamples, RandomTrees, drain

pytestmark = pytest.mark.skipif(choice.library() is None, reason="no C compiler here")

PLAIN = [
    SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=8, seed=6, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=7, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.1, seed=8, max_tokens=16, ignore_eos=True),
]
PROMPTS = prompts(len(PLAIN), seed=3)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes were asked about at once, each time."""
    found: list[int] = []
    winners = StepLaws.winners

    def counted(laws: StepLaws, nodes: list[tuple[int, int]], keys: list[int]) -> list[int] | None:
        found.append(len(nodes))
        return winners(laws, nodes, keys)

    monkeypatch.setattr(StepLaws, "winners", counted)
    return found


def texts(params: list[SamplingParams], max_batch: int) -> tuple[list[list[int]], list[list[int]]]:
    """What an engine writes with drafts that are right now and then, and what is right."""
    expected = [by_hand(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    hints = {tuple(prompt): text for prompt, text in zip(PROMPTS, expected, strict=True)}
    engine = Engine(MODEL, RandomTrees(5, hints), slots=1024, max_batch=max_batch)
    requests = [Request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    return [text for (text,) in drain(engine, requests)], expected


@pytest.mark.parametrize("max_batch", [1, 2, 4])
def test_sampled_texts_of_any_settings_race_together(max_batch: int, raced: list[int]) -> None:
    found, expected = texts(PLAIN, max_batch)
    assert found == expected
    assert max(raced) == max_batch
    assert min(raced) == 1, "texts go on down their own trees"


def test_a_law_that_sees_the_text_is_made_first(raced: list[int]) -> None:
    found, expected = texts([replace(PLAIN[0], frequency_penalty=0.5), *PLAIN[1:]], 4)
    assert found == expected
    assert max(raced) < 4, "not while that text is there"


@pytest.mark.parametrize("rule", ["traversal", "recursive_without_replacement", "recursive_iid", "k_seq", "block"])
def test_who_asks_for_a_rule_is_judged_by_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that was sampled is i.i.d. and without replacement at once, so each of these rules may judge it."""
    judged: Counter[str] = Counter()
    verify = VerificationRule.verify

    def counted(own: VerificationRule, tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
        judged[own.name] += int(tree.any_drafts)
        return verify(own, tree, p, noise)

    monkeypatch.setattr(VerificationRule, "verify", counted)
    engine = Engine(MODEL, RandomSamples(5, paths=1), slots=1024, max_batch=4)
    drain(engine, [Request(prompt, each, rule=rule) for prompt, each in zip(PROMPTS, PLAIN, strict=True)])
    assert judged[rule] > 5
    assert set(judged) == {rule}
