"""Who gets a certificate, who does not, and what is said of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Many
from itertools import pairwise

import pytest

from forerun.certify.certificate import PLAIN, Plan
from forerun.certify.contexts import choose_contexts
from forerun.certify.target_laws import TargetLaws
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Drafter
from forerun.engine.controller import Controller
from forerun.engine.experience import SIZES
from forerun.verify.rule import all_rules
from tests.certify.tiny_subject import GREEDY, KNOWN, MODEL, PROMPTS, SAMPLED, certified, draft_model
from tests.engine.tiny import Nothing, Oracle, RandomSamples, RandomTrees

RIGHT: dict[str, tuple[Drafter, str | None, tuple[SamplingParams, ...]]] = {
    "greedy": (RandomTrees(4, KNOWN), "greedy", (GREEDY,)),
    "chain rejection": (RandomSamples(5, paths=1), "chain_rejection", (SAMPLED,)),
    "block": (RandomSamples(5, paths=1), "block", (SAMPLED,)),
    "strongest for a fixed tree": (RandomTrees(4, KNOWN), None, (GREEDY, SAMPLED)),
    "recursive": (RandomSamples(5, paths=2), "recursive_iid", (SAMPLED,)),
    "without replacement": (draft_model("sampled:2"), "recursive_without_replacement", (SAMPLED,)),
    "traversal": (draft_model("sampled:2"), "traversal", (SAMPLED,)),
    "traversal of a chain": (draft_model("3"), "traversal", (SAMPLED,)),
    "gumbel": (RandomTrees(4, KNOWN), "gumbel", (SAMPLED,)),
    "penalties": (RandomTrees(4), "recursive_fixed", (SamplingParams(presence_penalty=1, repetition_penalty=1.2),)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_rule_is_certified(name: str) -> None:
    drafter, rule, settings = RIGHT[name]
    found = certified(drafter, *settings, rule=rule)
    assert found.verdict == "certified", found.as_dict()
    tests = {(each.temperature, each.test) for each in found.findings}
    law = {"all places", "whole texts", "allowed"}
    for params in settings:
        own = {test for temperature, test in tests if temperature == params.temperature}
        if params.greedy:
            assert own == {"greedy"}
        else:
            coupled = rule in {None, "gumbel"}  # which is the strongest for a fixed tree
            assert law <= own
            assert ("drafts" in own) == (not coupled)
            assert ("seeded" in own) == coupled
            assert ("uniform 0" in own) == (not coupled)
    for each in found.findings:
        if each.test == "all places":
            assert 0 < each.figures["visible_error"] < 0.25
            assert each.figures["samples_for_error"] > 10_000
            assert each.figures["control"]["p_value"] < 1e-6
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["verdict"] == "certified"


class Moody(Controller):
    """Chooses anything, text by text and step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)  # its own, so that the tests are the same in any order

    def limits(self, texts: Many[int]) -> list[int | None]:
        super().limits(texts)
        return [self.chance.choice(SIZES) for _ in texts]

    usual = limits


@pytest.mark.parametrize("name", ["strongest for a fixed tree", "block", "traversal"])
def test_however_much_is_drafted(name: str) -> None:
    drafter, rule, settings = RIGHT[name]
    found = certified(drafter, *settings, rule=rule, controller=Moody(), samples=80)
    assert found.verdict == "certified", found.as_dict()


@pytest.mark.parametrize("drafter", [Nothing(), Oracle(KNOWN, right=True)])
def test_a_control_that_does_not_fail_refuses_the_certificate(drafter: Drafter) -> None:
    """Where nothing is ever refused, a rule that keeps what was refused is as good as a right one."""
    found = certified(drafter, GREEDY)
    assert found.verdict == "refused"
    assert found.blind == [0]
    assert "could not even see a broken rule; raise --samples" in found.reason
    assert not found.failures


class Remembers(Oracle):
    """Drafts nonsense, and what is right from the second time on that a prompt is asked."""

    def __init__(self) -> None:
        super().__init__(KNOWN, right=False)

    def forget(self, sequence: Sequence) -> None:
        self.right = True


def test_who_remembers_the_right_texts_is_seen_before_it_does() -> None:
    assert certified(Remembers(), GREEDY).verdict == "certified"


def test_every_kind_of_test_must_see_the_broken_rule() -> None:
    found = certified(Nothing(), SAMPLED)
    assert found.verdict == "refused"
    assert found.blind == [1.0, 1.0]  # the law and the seeds


def test_a_lossy_rule_gets_a_distance() -> None:
    found = certified(draft_model("fixed:3,2"), GREEDY, SAMPLED, rule="typical", samples=60)
    assert found.verdict == "lossy"
    assert "the rule typical is lossy" in found.reason
    greedy, sampled = found.findings
    assert greedy.figures["total_variation"] == greedy.figures["noise"] == 0
    assert sampled.figures["total_variation"] > 1.5 * sampled.figures["noise"]


def test_plans_of_neighbouring_seeds_share_no_text() -> None:
    """Else one unlucky text would speak against a rule at seed after seed."""
    starts = [Plan((SAMPLED,), seed=seed).first_seed for seed in range(1000)]
    assert starts[0] == 0
    assert min(b - a for a, b in pairwise(sorted(starts))) > 1_000_000
    assert max(starts) < PLAIN - 1_000_000


def test_the_same_seed_gives_the_same_certificate() -> None:
    one, other = (certified(RandomSamples(5, paths=1), SAMPLED, rule="block", seed=3, samples=20) for _ in range(2))
    assert one == other


def test_a_pair_that_would_be_wrong_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="chain_rejection verifies chains"):
        certified(RandomTrees(4), SAMPLED, rule="chain_rejection")
    with pytest.raises(ValueError, match="at temperature 0"):
        certified(RandomTrees(4), SAMPLED, rule="greedy")


def test_contexts_are_places_of_the_answers() -> None:
    laws = TargetLaws(MODEL)
    answers = [KNOWN[tuple(prompt)][:24] for prompt in PROMPTS]
    contexts = choose_contexts(laws, PROMPTS, answers, SAMPLED, 7)
    assert len({tuple(context) for context in contexts}) == 7
    for number, context in enumerate(contexts):
        prompt, answer = PROMPTS[number % 3], answers[number % 3]
        assert context == [*prompt, *answer][: len(context)]
        assert len(context) >= len(prompt)
    with pytest.raises(ValueError, match="give more --prompts"):
        choose_contexts(laws, PROMPTS, answers, SAMPLED, 1000)


@pytest.mark.parametrize(("name", "value"), [("contexts", 0), ("samples", 19), ("length", 3)])
def test_a_plan_that_tests_nothing_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"--{name} is {value}: it must be at least"):
        Plan((SAMPLED,), **{name: value})


def test_the_broken_rule_is_no_rule_of_ours() -> None:
    assert not [name for name in all_rules() if "broken" in name]
