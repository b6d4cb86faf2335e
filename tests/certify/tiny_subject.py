"""A tiny target with drafters whose drafts are partly right, and plans that take seconds."""

from __future__ import annotations

import torch

from forerun.certify.certificate import Certificate, Plan, certify
from forerun.certify.subject import Subject, slots_for
from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.engine.controller import Controller
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.engine.tiny import Nothing, drain, tiny_model

MODEL = tiny_model(seed=2, spread=0.4)
PROMPTS = [[1, 2, 4, 5], [7, 8, 9, 10, 11], [20, 21, 22]]
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
SIZES = {"contexts": 2, "samples": 40, "length": 8, "answer": 24}
KNOWN = {
    tuple(prompt): text
    for prompt, (text,) in zip(
        PROMPTS,
        drain(
            Engine(MODEL, Nothing(), slots=1024),
            [Request(p, SamplingParams(temperature=0, max_tokens=32)) for p in PROMPTS],
        ),
        strict=True,
    )
}
"""The plain texts at temperature 0."""


def draft_model(tree: str, apart: float = 0.1) -> Drafter:
    """One whose laws are near the target's: the same weights with some noise."""
    model = tiny_model(seed=2, spread=0.4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * apart)
    return make_drafter("draft_model", Setup(MODEL, 4096, lambda name: model), {"model": "near", "tree": tree})


def silent(doing: str, done: int, of: int) -> None: ...


def certified(
    drafter: Drafter,
    *settings: SamplingParams,
    rule: str | None = None,
    controller: Controller | None = None,
    **sizes: int,
) -> Certificate:
    subject = Subject(MODEL, drafter, rule=rule, slots=slots_for(PROMPTS, 64), controller=controller)
    return certify(subject, PROMPTS, Plan(settings, **(SIZES | sizes)), silent)
