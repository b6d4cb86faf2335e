"""Trees that a draft over a part of the vocabulary grows, verified: the text has the target's law."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.drafters import growing
from forerun.drafters.growing import grow
from forerun.verify.rule import all_rules
from tests.drafters.test_growing import AMPLE, Table, spec_of, table, text

FEW = torch.tensor([0, 2, 3, 5])
"""The draft knows four tokens of six."""


def p_value(tree: str, rule: str, params: SamplingParams, count: int = 12_000) -> float:
    """Of the next two tokens, drafted and verified, under the target's law; a second token that the step did not reach
    is drawn from the target, as a next step would."""
    spec, target = spec_of(tree), table(6, 6, seed=1)
    texts = [text(number, params) for number in range(count)]
    drafts = Table((0.7 * target + 0.5 * table(6, 6, seed=2))[:, :, FEW], count, ids=FEW)
    drafted = grow(spec, 6, History(6), texts, drafts, [AMPLE] * count)
    assert drafted.q is not None
    settings = LawSettings.of([params] * 36)
    p = law(target.view(36, 6), settings).view(6, 6, 6)  # after two tokens
    above = drafted.tokens.gather(1, drafted.parents.clamp_min(0)).masked_fill_(drafted.parents < 0, 0)
    noise = StepNoise(torch.tensor([item.seed for item in texts]), torch.full((count,), 2))
    verdict = all_rules()[rule].verify(drafted, p[above, drafted.tokens], noise)
    first, second = verdict.committed(drafted.tokens)[:, :2].T
    generator = torch.Generator().manual_seed(3)
    after = torch.multinomial(p[1, first], 1, generator=generator)[:, 0]
    second = torch.where(second >= 0, second, after)
    accepted = verdict.lengths.double().mean()
    assert params.logit_bias or 0.3 < accepted < spec.depth - 0.1, "or nothing is tested"
    counts = torch.zeros(36).index_add_(0, 6 * first + second, torch.ones(count))
    wanted = (count * p[0, 1][:, None] * p[1]).flatten()
    assert bool((counts[wanted == 0] == 0).all())
    often = wanted >= 5
    observed = [*counts[often].tolist(), float(counts[~often].sum()) + 1e-9]
    expected = [*wanted[often].tolist(), float(wanted[~often].sum()) + 1e-9]
    return float(chisquare(observed, expected, sum_check=False).pvalue)


LAWS = [
    ("3,2", "recursive_without_replacement"),
    ("3,2", "traversal"),
    ("sequoia:14,4", "recursive_without_replacement"),
    ("sequoia:14,4", "traversal"),
    ("3", "chain_rejection"),
    ("3", "block"),
]


@pytest.mark.parametrize(("tree", "rule"), LAWS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=3),
        SamplingParams(logit_bias=dict.fromkeys(FEW.tolist(), float("-inf"))),
    ],
    ids=["plain", "top_k", "nothing_left"],
)
def test_the_law_is_the_targets(tree: str, rule: str, params: SamplingParams) -> None:
    assert p_value(tree, rule, params) > 1e-4


@pytest.mark.parametrize(("tree", "rule"), LAWS)
def test_laws_that_were_kept_in_columns_would_be_noticed(tree: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = growing._Step._kept

    def unnamed(step: growing._Step, *others: object) -> tuple[Tensor, Tensor]:
        q, rows = kept(step, *others)  # type: ignore[arg-type]
        return torch.nn.functional.pad(q[:, :, FEW], (0, 2)), rows

    monkeypatch.setattr(growing._Step, "_kept", unnamed)
    assert p_value(tree, rule, SamplingParams()) < 1e-6
