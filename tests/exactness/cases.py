"""What the proof covers: every rule × drawing × tree shape × law setting, found by listing the folders."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import forerun.trees
from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.shape import TreeShape
from forerun.verify.rule import VerificationRule, all_rules, why_not

from .toy import MergedToyEngine, ToyEngine, ToyPair

SETTINGS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "cool": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.6),
    "min_p": SamplingParams(min_p=0.5),
    "penalties": SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.8),
    "bias": SamplingParams(logit_bias={0: 1.5, 1: float("-inf")}),
    "mask": SamplingParams(temperature=0.9),
    "greedy_penalties": SamplingParams(temperature=0, presence_penalty=2.0),
}
MASKS: dict[str, tuple[bool, ...]] = {"mask": (True, False, True, True, True)}


def tree_shapes() -> dict[str, TreeShape]:
    """The examples of every module in `forerun.trees`, each shape once, and the root alone."""
    shapes = {TreeShape.chain(0): "root"}
    for module in pkgutil.iter_modules(forerun.trees.__path__):
        examples = import_module(f"forerun.trees.{module.name}").examples()
        for number, shape in enumerate(examples):
            shapes.setdefault(shape, f"{module.name}{number}")
    return {name: shape for shape, name in shapes.items()}


STARS = {"paths2x1": (2, 1), "paths2x2": (2, 2), "paths3x1": (3, 1)}
"""Merged drafts: so many paths of so many tokens."""


def star(paths: int, length: int) -> TreeShape:
    parents = [-1] + [0] * paths
    for level in range(1, length):
        parents += [1 + paths * (level - 1) + path for path in range(paths)]
    return TreeShape(tuple(parents))


@dataclass(frozen=True)
class Case:
    rule: VerificationRule
    drawing: Drawing
    shape_name: str
    setting: str

    def __str__(self) -> str:
        return f"{self.rule.name}-{self.drawing.value}-{self.shape_name}-{self.setting}"

    @property
    def merged(self) -> bool:
        return self.shape_name in STARS

    @property
    def shape(self) -> TreeShape:
        return star(*STARS[self.shape_name]) if self.merged else tree_shapes()[self.shape_name]

    def engine(self, pair: ToyPair) -> ToyEngine:
        kind = MergedToyEngine if self.merged else ToyEngine
        mask = MASKS.get(self.setting)
        return kind(
            pair,
            self.rule,
            self.drawing,
            self.shape,
            SETTINGS[self.setting],
            mask=None if mask is None else mask[: pair.vocabulary],
        )


def fits(rule: VerificationRule, drawing: Drawing, shape: TreeShape, setting: str) -> bool:
    greedy = SETTINGS[setting].greedy
    return why_not(rule, drawing, chain=shape.is_chain, greedy=greedy) is None


def all_cases(*, lossless: bool = True) -> Iterator[Case]:
    """Every combination that `pair` does not refuse."""
    shapes = tree_shapes()
    for rule in all_rules().values():
        if rule.lossless is not lossless:
            continue
        for drawing in Drawing:
            for setting in SETTINGS:
                for name, shape in shapes.items():
                    if fits(rule, drawing, shape, setting):
                        yield Case(rule, drawing, name, setting)
                if drawing is not Drawing.WITHOUT_REPLACEMENT:
                    for name, size in STARS.items():
                        if fits(rule, drawing, star(*size), setting):
                            yield Case(rule, drawing, name, setting)
