"""Token for token: at temperature 0, and with seeds, drafted text is plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from forerun.certify.partings import Parting, parting
from forerun.certify.subject import Subject, Told, Written, write
from forerun.certify.target_laws import TargetLaws
from forerun.core.params import SamplingParams
from forerun.engine.request import Request


@dataclass(frozen=True)
class Identity:
    texts: int
    tokens: int
    drafted: int
    refused: int
    partings: list[Parting]
    irregular: int

    @property
    def identical(self) -> int:
        return self.texts - len(self.partings)

    @property
    def failures(self) -> int:
        return sum(not each.tie for each in self.partings)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.irregular


def requests(prompts: Sequence[list[int]], params: SamplingParams, seed: int, rule: str | None) -> list[Request]:
    """A request for each prompt; those that sample have seeds of their own."""
    each = [params if params.greedy else replace(params, seed=seed + place) for place in range(len(prompts))]
    return [Request(prompt, own, rule=rule) for prompt, own in zip(prompts, each, strict=True)]


def plain_texts(subject: Subject, asked: Sequence[Request], told: Told) -> list[Written]:
    return write(
        subject.plain, [replace(each, rule=None) for each in asked], lambda done, of: told("Writing plainly", done, of)
    )


def compare(
    subject: Subject, laws: TargetLaws, asked: Sequence[Request], plain: Sequence[Written], what: str, told: Told
) -> Identity:
    drafted = write(subject.engine, asked, lambda done, of: told(what, done, of))
    found = [
        parting(laws, number, request.prompt, right.tokens, own.tokens, request.params)
        for number, (request, right, own) in enumerate(zip(asked, plain, drafted, strict=True))
    ]
    return Identity(
        len(asked),
        sum(len(text.tokens) for text in drafted),
        sum(text.drafted for text in drafted),
        sum(text.refused for text in drafted),
        [each for each in found if each is not None],
        sum(text.irregular for text in drafted),
    )


def foreign_share(laws: TargetLaws, asked: Sequence[Request], texts: Sequence[Written]) -> float:
    """The share of tokens that the target would not have taken at temperature 0, each after the text as it stands."""
    foreign = total = 0
    for request, text in zip(asked, texts, strict=True):
        p = laws.along(request.prompt, text.tokens[:-1], request.params)  # one-hot
        foreign += int((p.gather(1, torch.tensor(text.tokens)[:, None]) == 0).sum())
        total += len(text.tokens)
    return foreign / total
