"""Which rule may verify which drafts: wrong pairs are refused with the reason and with what would do."""

from __future__ import annotations

import itertools
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import forerun.verify
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree
from forerun.verify.rule import (
    HELPERS,
    VerificationRule,
    all_rules,
    lossless_rules,
    pair,
    strongest_rule,
    why_not,
)

SAMPLED = [drawing for drawing in Drawing if drawing.sampled]
BY_Q = {
    "block": set(SAMPLED),
    "chain_rejection": set(SAMPLED),
    "k_seq": {Drawing.IID},
    "recursive_iid": {Drawing.IID, Drawing.INDEPENDENT},
    "recursive_without_replacement": {Drawing.WITHOUT_REPLACEMENT},
    "traversal": {Drawing.WITHOUT_REPLACEMENT},
}
"""The rules that use q, and the drawings of trees they are right for."""
CHAIN_ONLY = {"block", "chain_rejection"}
ANYTHING = {"greedy", "gumbel", "recursive_fixed", "sample_match", "typical"}
"""The rules that do not care how drafts came about."""


def allowed(name: str, drawing: Drawing, *, chain: bool, greedy: bool) -> bool:
    """The table of the algorithms, written a second time."""
    if name == "greedy":
        return greedy
    if name in ANYTHING:
        return True
    if name in CHAIN_ONLY and not chain:
        return False
    return drawing.sampled if chain else drawing in BY_Q[name]


def test_the_rules_are_all_here() -> None:
    assert set(all_rules()) == set(BY_Q) | ANYTHING
    assert {name for name, rule in all_rules().items() if not rule.lossless} == {"typical"}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("drawing", Drawing)
def test_every_pair(drawing: Drawing, chain: bool, greedy: bool) -> None:
    fit = [n for n in all_rules() if n != "typical" and allowed(n, drawing, chain=chain, greedy=greedy)]
    assert lossless_rules(drawing, chain=chain, greedy=greedy) == fit
    for name, rule in all_rules().items():
        reason = why_not(rule, drawing, chain=chain, greedy=greedy)
        if allowed(name, drawing, chain=chain, greedy=greedy):
            assert reason is None
            assert pair(name, drawing, chain=chain, greedy=greedy) is rule
            continue
        assert reason is not None
        with pytest.raises(ValueError) as refusal:
            pair(name, drawing, chain=chain, greedy=greedy)
        message = str(refusal.value)
        assert message.startswith(reason)
        assert name in reason
        assert message.endswith("lossless here: " + ", ".join(fit))
        assert "typical" not in message


@pytest.mark.parametrize("drawing", Drawing)
@pytest.mark.parametrize("chain", [False, True])
def test_greedy_is_for_temperature_0(drawing: Drawing, chain: bool) -> None:
    with pytest.raises(ValueError, match="temperature 0 only"):
        pair("greedy", drawing, chain=chain, greedy=False)


@pytest.mark.parametrize("name", sorted(CHAIN_ONLY))
@pytest.mark.parametrize("drawing", SAMPLED)
def test_chain_rules_refuse_trees(name: str, drawing: Drawing) -> None:
    with pytest.raises(ValueError, match="verifies chains, and these drafts branch"):
        pair(name, drawing, chain=False, greedy=False)


@pytest.mark.parametrize("name", sorted(BY_Q))
@pytest.mark.parametrize("chain", [False, True])
def test_rules_that_use_q_refuse_fixed_drafts(name: str, chain: bool) -> None:
    with pytest.raises(ValueError, match=r"drawn fixed|these drafts branch") as refusal:
        pair(name, Drawing.FIXED, chain=chain, greedy=False)
    assert "recursive_fixed" in str(refusal.value)


@pytest.mark.parametrize("name", sorted(BY_Q))
@pytest.mark.parametrize("drawing", SAMPLED)
def test_one_draw_is_drawn_in_every_way(name: str, drawing: Drawing) -> None:
    """A single sample is i.i.d., independent and without replacement at once."""
    assert pair(name, drawing, chain=True, greedy=False).name == name


def test_a_reason_names_both_drawings() -> None:
    with pytest.raises(ValueError, match="for drafts drawn without_replacement, and these are drawn iid"):
        pair("traversal", Drawing.IID, chain=False, greedy=False)
    with pytest.raises(ValueError, match="for drafts drawn iid, and these are drawn independent"):
        pair("k_seq", Drawing.INDEPENDENT, chain=False, greedy=False)


@pytest.mark.parametrize("name", ["", "Block", "rejection", "plain", "rule", "speculative"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="there is no verification rule") as refusal:
        pair(name, Drawing.IID, chain=True, greedy=False)
    assert repr(name) in str(refusal.value)
    assert all(known in str(refusal.value) for known in all_rules())


CONDITIONS = list(itertools.product(Drawing, [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("drawing", "chain", "greedy", "seeded"), CONDITIONS)
def test_the_strongest_rule_is_a_lossless_one(drawing: Drawing, chain: bool, greedy: bool, seeded: bool) -> None:
    name = strongest_rule(drawing, chain=chain, greedy=greedy, seeded=seeded)
    assert pair(name, drawing, chain=chain, greedy=greedy).lossless
    assert name in lossless_rules(drawing, chain=chain, greedy=greedy)
    if seeded and not greedy:
        assert name == "gumbel"  # reproducible text
    if drawing is Drawing.FIXED and not greedy:
        assert name == "gumbel"  # the drafter may know the noise, and nothing is lost where it does not


def test_the_lossy_rule_is_had_by_its_name_only() -> None:
    conditions = [(d, chain, greedy) for d, chain, greedy, seeded in CONDITIONS if seeded]
    assert all("typical" not in lossless_rules(d, chain=chain, greedy=greedy) for d, chain, greedy in conditions)
    for drawing, chain, greedy in conditions:
        rule = pair("typical", drawing, chain=chain, greedy=greedy)
        assert not rule.lossless
        assert "LOSSY" in rule.summary


# --- the folder is the registry ----------------------------------------------------------------------------------


def test_every_module_is_a_rule_or_a_helper() -> None:
    modules = {module.name for module in pkgutil.iter_modules(forerun.verify.__path__)}
    assert modules >= HELPERS
    assert modules - HELPERS == set(all_rules())  # a rule's module has its name
    assert all(rule.name == name and rule.summary and rule.drawings for name, rule in all_rules().items())


def find_rules_with(module: str, text: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, VerificationRule]:
    """`all_rules`, looked up afresh, if the package also held this module."""
    (folder / f"{module}.py").write_text(text)
    patch.setattr(forerun.verify, "__path__", [*forerun.verify.__path__, str(folder)])
    patch.setattr(sys, "dont_write_bytecode", True)
    try:
        return all_rules.__wrapped__()
    finally:
        sys.modules.pop(f"forerun.verify.{module}", None)
        vars(forerun.verify).pop(module, None)


def test_a_new_rule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
from dataclasses import replace
from forerun.verify.sample_match import RULE as KNOWN
RULE = replace(KNOWN, name="planted_rule")
"""
    found = find_rules_with("planted_rule", text, tmp_path, monkeypatch)
    assert set(found) == {*all_rules(), "planted_rule"}


def test_a_module_without_a_rule_does_not_pass_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="RULE"):
        find_rules_with("planted_stray", "def help_out() -> None: ...\n", tmp_path, monkeypatch)


def chain_of(tokens: list[int], drawing: Drawing = Drawing.FIXED, **options: Tensor) -> DraftTree:
    return DraftTree.chain(torch.tensor([tokens]), torch.tensor([0]), drawing, **options)


@pytest.mark.parametrize("token", [3, 99])
@pytest.mark.parametrize("rule", ["recursive_fixed", "typical", "gumbel", "sample_match"])
def test_drafts_outside_the_vocabulary_are_refused(rule: str, token: int) -> None:
    """A drafter with a padded vocabulary must not read, or commit, what is not there."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    with pytest.raises(ValueError, match="outside the target's vocabulary of 3"):
        all_rules()[rule].verify(chain_of([0, token]), p, StepNoise(torch.tensor([1]), torch.tensor([1])))


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 3, 3), (2, 2, 3), (2, 3)])
def test_laws_that_do_not_fit_the_tree_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \[B, N, V\]"):
        all_rules()["sample_match"].verify(
            chain_of([0, 1]), torch.ones(shape) / 3, StepNoise(torch.tensor([1]), torch.tensor([1]))
        )


def test_laws_over_other_vocabularies_are_refused() -> None:
    tree = chain_of([0, 1], Drawing.IID, q=torch.ones(1, 1, 4) / 4)
    with pytest.raises(ValueError, match="p is over 3 tokens and q over 4"):
        all_rules()["block"].verify(tree, torch.ones(1, 2, 3) / 3, StepNoise(torch.tensor([1]), torch.tensor([1])))


def test_a_rule_looks_at_the_tree_it_gets() -> None:
    """`pair` believes what it is told about the drafts; the rule sees them."""
    q = torch.tensor([[[0.6, 0.3, 0.1]]]).expand(1, 3, 3)
    tree = DraftTree.build(
        torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 0]]), torch.tensor([0]), Drawing.WITHOUT_REPLACEMENT, q=q
    )
    p, noise = torch.ones(1, 3, 3) / 3, StepNoise(torch.tensor([1]), torch.tensor([1]))
    for name in ("chain_rejection", "block"):
        with pytest.raises(ValueError, match="these drafts branch"):
            pair(name, tree.drawing, chain=True, greedy=False).verify(tree, p, noise)
    with pytest.raises(ValueError, match="drawn iid, independent"):
        all_rules()["recursive_iid"].verify(tree, p, noise)
    assert all_rules()["traversal"].verify(tree, p, noise).lengths.shape == (1,)
