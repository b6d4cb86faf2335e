"""The distance of laws and its gradient in two passes, against the plain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels import laws_apart as module
from forerun.kernels.laws_apart import laws_apart


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row has several."""
    monkeypatch.setattr(module, "TILE", 128)


def given(places: int, steps: int, size: int, device: torch.device, scale: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(size + steps)
    target = torch.randn(places, size, generator=generator) * scale
    scores = target[:, None] + torch.randn(places, steps, size, generator=generator)
    weights = torch.rand(places, steps, generator=generator)
    weights[1::3] = 0
    labels = torch.randint(-1, size, (places,), generator=generator)
    labels[::4] = -1
    return tuple(each.to(device) for each in (scores, target, weights, labels))


def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert got[1].dtype == expected[1].dtype
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=2e-6)
    step = 1e-5 if got[1].dtype == torch.float32 else 8e-3  # one of the last place
    torch.testing.assert_close(got[1], expected[1], rtol=step, atol=2e-7)


@pytest.mark.parametrize(("steps", "size"), [(1, 3), (5, 128), (1, 515), (5, 300)])
@pytest.mark.parametrize("soft", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_as_plainly(
    steps: int, size: int, soft: float | None, dtype: torch.dtype, built: Callable[..., Any], device: torch.device
) -> None:
    scores, target, weights, labels = given(9, steps, size, device)
    own, share = (None, 1.0) if soft is None else (labels, soft)
    found = built(laws_apart)(scores, target, weights, own, share, dtype)
    close(found, laws_apart.plain(scores, target, weights, own, share, dtype))
    assert not found[1][1::3].any(), "without a weight there is nothing to learn"


@pytest.mark.parametrize("soft", [None, 0.0, 0.3])
def test_laws_that_are_sure(soft: float | None, built: Callable[..., Any], device: torch.device) -> None:
    """Logits of ±80, so that most shares are 0 in float32; and both laws may be sure of different tokens."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.where(torch.rand(6, 2, 300, generator=generator) < 0.01, 80.0, -80.0).to(device)
    target = torch.where(torch.rand(6, 300, generator=generator) < 0.01, 80.0, -80.0).to(device)
    target[0], scores[0] = -80.0, 80.0  # flat
    target[1, 299], scores[1, 0, 299], scores[1, 1, 0] = 90.0, 90.0, 90.0
    labels = None if soft is None else torch.tensor([0, 299, -1, 5, 128, 127], device=device)
    share = 1.0 if soft is None else soft
    weights = torch.full((6, 2), 0.5, device=device)
    found = built(laws_apart)(scores, target, weights, labels, share, torch.float32)
    assert all(each.isfinite().all() for each in found)
    close(found, laws_apart.plain(scores, target, weights, labels, share, torch.float32))


def test_the_gradient_is_that_of_the_distance(built: Callable[..., Any], device: torch.device) -> None:
    scores, target, weights, labels = given(5, 3, 200, device)
    scores.requires_grad_()
    laws_apart.plain(scores, target, weights, labels, 0.3, torch.float32)[0][0].sum().backward()  # type: ignore[no-untyped-call]
    found = built(laws_apart)(scores.detach(), target, weights, labels, 0.3, torch.float32)[1]
    torch.testing.assert_close(found, scores.grad, rtol=1e-4, atol=1e-6)


def test_of_equally_likely_tokens_the_first_counts(built: Callable[..., Any], device: torch.device) -> None:
    scores, target = torch.zeros(3, 1, 300, device=device), torch.zeros(3, 300, device=device)
    scores[0, 0, [5, 290]] = 1.0
    target[0, [5, 6]] = 1.0
    scores[1, 0, [5, 290]] = 1.0
    target[1, 290] = 1.0
    figures, _ = built(laws_apart)(scores, target, torch.ones(3, 1, device=device), None, 1.0, torch.float32)
    assert figures[1].tolist() == [2.0]


def test_weights_and_labels_need_not_lie_together(built: Callable[..., Any], device: torch.device) -> None:
    scores, target, _, labels = given(8, 2, 140, device)
    weights = torch.tensor([[0.25], [0.75]], device=device).expand(2, 8).T
    apart = torch.stack([labels, labels + 1], 1)[:, 0]
    given_so = (scores, target, weights, apart, 0.5, torch.float32)
    close(built(laws_apart)(*given_so), laws_apart.plain(*given_so))


def test_of_nothing(built: Callable[..., Any], device: torch.device) -> None:
    scores, target, weights, _ = given(0, 2, 40, device)
    figures, gradient = built(laws_apart)(scores, target, weights, None, 1.0, torch.bfloat16)
    assert not figures.any()
    assert (figures.shape, gradient.shape) == ((3, 2), (0, 2, 40))
