"""Laws and tokens from C against the same in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.law import LawSettings, law
from forerun.core.native import choice
from forerun.core.noise import Purpose, first_arrival, row_key
from forerun.core.params import SamplingParams

pytestmark = pytest.mark.skipif(choice.library() is None, reason="no C compiler here")

MANY = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.0, 0.3, 1.0, 5.0)
    for top_k in (0, 1, 7, 10**6)
    for top_p in (1.0, 0.999999, 0.9, 0.05)
    for min_p in (0.0, 0.1)
]


@contextmanager
def in_pytorch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "library", lambda: None)
        yield


def scores(size: int, spread: float, seed: int) -> Tensor:
    """Steep and flat rows, with ties and forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(len(MANY), size, generator=generator) * spread
    found[::3] = found[::3].round(decimals=1)
    found[::5, 1::4] = -torch.inf
    return found


@pytest.mark.parametrize("size", [2, 15, 300, 5000])
@pytest.mark.parametrize("spread", [0.01, 2.0, 40.0])
def test_the_same_tokens_are_kept_with_the_same_probabilities(size: int, spread: float) -> None:
    logits = scores(size, spread, size)
    settings = LawSettings.of(MANY)
    p = law(logits, settings)
    with in_pytorch():
        expected = law(logits, settings)
    assert (p.double().sum(1) - 1).abs().max() < 1e-5
    differ = ((p > 0) != (expected > 0)).any(1)  # a token whose probability is the threshold but for rounding
    assert differ.sum() <= len(MANY) // 50
    assert torch.allclose(p[~differ], expected[~differ], rtol=2e-5, atol=1e-8)


def test_ties_stand_or_fall_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 2.0]])
    for params, kept in ((SamplingParams(top_k=2), 3), (SamplingParams(top_p=0.3), 3), (SamplingParams(min_p=0.9), 3)):
        assert int((law(logits, LawSettings.of([params])) > 0).sum()) == kept


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = scores(3000, 3.0, 1)
    together = law(logits, LawSettings.of(MANY))
    for row in (0, 5, 40, 127):
        assert torch.equal(law(logits[row : row + 1], LawSettings.of(MANY[row : row + 1])), together[row : row + 1])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_race_has_the_same_winner(top_p: float) -> None:
    logits = scores(5000, 2.0, 2)
    p = law(logits, LawSettings.of([SamplingParams(top_p=top_p)]).take(torch.zeros(len(MANY), dtype=torch.int64)))
    for seed in range(5):
        keys = row_key(torch.full((len(MANY),), seed), torch.arange(len(MANY)), Purpose.TOKEN)
        found = first_arrival(p, keys)
        with in_pytorch():
            assert torch.equal(first_arrival(p, keys), found)


def test_draws_are_the_same() -> None:
    weights = torch.softmax(scores(777, 2.0, 3), -1)
    generator = torch.Generator().manual_seed(4)
    uniforms = torch.rand(len(MANY), generator=generator, dtype=torch.float64)
    for u in (uniforms, torch.zeros_like(uniforms), torch.full_like(uniforms, 1 - 2**-52)):
        found = exact.draw(weights, u)
        with in_pytorch():
            assert torch.equal(exact.draw(weights, u), found)
    assert exact.draw(torch.zeros(1, 9), torch.zeros(1, dtype=torch.float64)).item() == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 300, 5000])
def test_tokens_from_logits_are_those_of_laws_and_races(dtype: torch.dtype, size: int) -> None:
    logits = scores(size, 3.0, 4).to(dtype)
    settings = LawSettings.of(MANY)
    columns = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    keys = row_key(torch.full((len(MANY),), 3), torch.arange(len(MANY)), Purpose.TOKEN)
    expected = first_arrival(law(logits, settings), keys)
    assert choice.chosen(logits, list(range(len(MANY))), keys.tolist(), *columns) == expected.tolist()
    some = [70, 3, 40]
    picked = [column[some] for column in columns]
    assert choice.chosen(logits, some, keys[some].tolist(), *picked) == expected[some].tolist()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_rows_have_no_token(broken: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    logits[1, 7] = broken
    logits[2] = -torch.inf
    one, none = torch.ones(3), torch.zeros(3)
    found = choice.chosen(logits, [0, 1, 2], [1, 2, 3], one, none, one, none)
    assert found[0] >= 0
    assert found[1:] == [-1, -1]
