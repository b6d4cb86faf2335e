"""What a verification rule is, and which rule may verify which drafts.

Losslessness belongs to the pair of a drawing and a rule, so the pair is checked once, when it is built, and a
wrong one never reaches a request.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

import forerun.verify
from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import LawTable
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row

ANY_DRAWING = frozenset(Drawing)


class BatchNoise(Protocol):
    """The noise of one step of B sequences; `StepNoise` is the one in use."""

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor: ...
    def final(self, depths: Tensor) -> Tensor: ...
    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor: ...
    def take(self, sequences: Tensor) -> BatchNoise: ...


Choose = Callable[[Tensor, BatchNoise, Tensor], Tensor]
"""From p [C, V], the noise of C sequences and the depths [C] of the nodes that p follows: the tokens [C]."""


@dataclass(frozen=True)
class VerificationRule:
    """`reference` judges one sequence and reads like the paper; `batched` judges a batch on its device. Both give
    the same verdict for the same noise. `verify` is `batched` behind a check that tree and laws fit."""

    name: str
    summary: str
    drawings: frozenset[Drawing]
    """The drawings under which the output has the target's law (for a lossy rule: those it accepts)."""
    reference: Callable[[PlainTree, list[Row], PlainNoise], PlainVerdict]
    batched: Callable[[DraftTree, Any, BatchNoise], Verdict]
    lossless: bool = True
    chain_only: bool = False
    greedy_only: bool = False
    """Only at temperature 0."""
    choose: Choose | None = None
    """Where a rule draws the target's token without a look at the drafts, and follows the draft that equals it: how it
    draws."""
    looks_along_the_path: bool = False
    """Needs the laws of the nodes it walks over only, and takes a `LawTable` for p."""

    def verify(self, tree: DraftTree, p: Tensor | LawTable, noise: BatchNoise) -> Verdict:
        """p [B, N, V] are the target's laws, one after the path to each node of the tree."""
        if len(p.shape) != 3 or p.shape[:2] != tree.tokens.shape:
            raise ValueError(
                f"p {tuple(p.shape)} does not fit a tree of {tuple(tree.tokens.shape)}: it must be [B, N, V]"
            )
        if tree.q is not None and tree.q.shape[2] != p.shape[2]:
            raise ValueError(
                f"p is over {p.shape[2]} tokens and q over {tree.q.shape[2]}: pad the smaller law with zeros"
            )
        reason = why_not(self, tree.drawing, chain=tree.width <= 1, greedy=self.greedy_only)
        if reason is not None:
            raise ValueError(reason)
        drafted = tree.tokens[:, 1:]
        if bool(((drafted < 0) | (drafted >= p.shape[2])).any()):
            raise ValueError(f"a drafted token lies outside the target's vocabulary of {p.shape[2]}")
        return self.batched(tree, p, noise)


HELPERS = frozenset({"batched", "plain", "rejection", "rule"})
"""Modules of this package that are not rules. Every other module must define RULE."""


@cache
def all_rules() -> dict[str, VerificationRule]:
    """Every rule of this package by name, found by listing the folder."""
    names = [module.name for module in pkgutil.iter_modules(forerun.verify.__path__)]
    modules = [import_module(f"forerun.verify.{name}") for name in sorted(names) if name not in HELPERS]
    return {module.RULE.name: module.RULE for module in modules}


def understands(rule: VerificationRule, drawing: Drawing, *, chain: bool) -> bool:
    """Whether drafts of that drawing are what `rule` takes them for."""
    one_draw = chain and drawing.sampled and any(d.sampled for d in rule.drawings)
    return drawing in rule.drawings or one_draw  # a single draw is i.i.d. and without replacement at once


def why_not(rule: VerificationRule, drawing: Drawing, *, chain: bool, greedy: bool) -> str | None:
    """The reason why `rule` must not verify such drafts, or None where it may."""
    if rule.greedy_only and not greedy:
        return f"{rule.name} follows the most likely token, which is the target's law at temperature 0 only"
    if rule.chain_only and not chain:
        return f"{rule.name} verifies chains, and these drafts branch"
    if not understands(rule, drawing, chain=chain):
        fit = ", ".join(sorted(d.value for d in rule.drawings))
        return f"{rule.name} keeps the target's law for drafts drawn {fit}, and these are drawn {drawing.value}"
    return None


def lossless_rules(drawing: Drawing, *, chain: bool, greedy: bool) -> list[str]:
    """The names of the rules that keep the target's law for such drafts."""
    return [
        name
        for name, rule in all_rules().items()
        if rule.lossless and why_not(rule, drawing, chain=chain, greedy=greedy) is None
    ]


_STRONGEST = {
    Drawing.FIXED: "gumbel",  # the drafter may rank by the target's noise; where it does not, this accepts as often
    Drawing.IID: "k_seq",
    Drawing.INDEPENDENT: "recursive_iid",
    Drawing.WITHOUT_REPLACEMENT: "traversal",
}


def strongest_rule(drawing: Drawing, *, chain: bool, greedy: bool, seeded: bool) -> str:
    """The rule to use where none is named: the coupling where a seed asks for reproducible text, else the
    lossless rule that accepts most (`forerun rules --measure` shows it). For fixed drafts that is the coupling too,
    with noise that nobody asked for."""
    if greedy:
        return "greedy"
    if seeded:
        return "gumbel"
    if chain and drawing.sampled:
        return "block"
    return _STRONGEST[drawing]


def pair(name: str, drawing: Drawing, *, chain: bool, greedy: bool) -> VerificationRule:
    """The rule of that name, for drafts of that drawing; refused with the reason where it would be wrong.

    A lossy rule is only ever had by its name.
    """
    rules = all_rules()
    if name not in rules:
        raise ValueError(f"there is no verification rule {name!r}: use one of {', '.join(rules)}")
    reason = why_not(rules[name], drawing, chain=chain, greedy=greedy)
    if reason is not None:
        fit = ", ".join(lossless_rules(drawing, chain=chain, greedy=greedy))
        raise ValueError(f"{reason}; lossless here: {fit}")
    return rules[name]
