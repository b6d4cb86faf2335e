"""The loss in parts is the loss as it is written down, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.train import law_loss
from forerun.train.law_loss import Laws, distance, overlaps

W, K, H, V = 11, 3, 8, 20


def given() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = torch.rand(W, K, generator=generator)
    weights[2, 1] = 0
    return {"x": drawn(W, K, H), "head": drawn(V, H), "states": drawn(W, H), "taught": drawn(V, H), "weights": weights}


def plainly(x: Tensor, head: Tensor, laws: Laws, weights: Tensor) -> Tensor:
    p = torch.softmax(laws.states @ laws.head.T, -1)[:, None]
    log_q = torch.log_softmax(x @ head.T, -1)
    if laws.labels is None:
        return (weights * (p * (p.log() - log_q)).sum(-1)).sum()
    total = torch.zeros(())
    for w, label in enumerate(laws.labels.tolist()):
        aim = laws.soft * p[w, 0]
        if label >= 0:
            aim = aim + (1 - laws.soft) * torch.nn.functional.one_hot(torch.tensor(label), V)
        total = total + (weights[w] * (torch.xlogy(aim, aim) - aim * log_q[w]).sum(-1)).sum()
    return total


@pytest.mark.parametrize("soft", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("at_once", [1 << 22, 2 * K * V])
def test_loss_and_gradient(soft: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(law_loss.ELEMENTS, "cpu", at_once)
    labels = None if soft == 1 else torch.tensor([3, -1, 0, 19, 5, 5, -1, 2, 1, 7, 8])
    gradients = []
    for function in (plainly, lambda *parts: distance(*parts).total):
        parts = given()
        x, head = parts["x"].requires_grad_(), parts["head"].requires_grad_()
        total = function(x, head, Laws(parts["states"], parts["taught"], labels, soft), parts["weights"])
        (total / 7).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert head.grad is not None
        gradients.append((total.detach(), x.grad, head.grad))
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_figures() -> None:
    parts = given()
    laws = Laws(parts["states"], parts["taught"])
    found = distance(parts["x"], parts["head"], laws, parts["weights"])
    p = torch.softmax(parts["states"] @ parts["taught"].T, -1)[:, None]
    q = torch.softmax(parts["x"] @ parts["head"].T, -1)
    counted = parts["weights"] > 0
    torch.testing.assert_close(found.overlap, (torch.minimum(p, q).sum(-1) * counted).sum(0))
    assert found.agreed.tolist() == ((p.argmax(-1) == q.argmax(-1)) & counted).sum(0).tolist()
    itself = distance(parts["states"][:, None], parts["taught"], laws, torch.ones(W, 1))
    assert float(itself.total) == pytest.approx(0, abs=1e-5)
    assert (itself.agreed.tolist(), itself.overlap.tolist()) == ([W], [pytest.approx(W)])


def test_overlaps_of_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(law_loss.ELEMENTS, "cpu", 4 * V)
    parts = given()
    laws = Laws(parts["states"], parts["taught"])
    found = overlaps(parts["x"][:, 0], parts["head"], laws)
    assert found.shape == (W,)
    summed = distance(parts["x"], parts["head"], laws, torch.ones(W, K)).overlap[0]
    torch.testing.assert_close(found.sum(), summed)


def test_overlaps_of_a_draft_that_knows_some_tokens() -> None:
    """What it cannot say is never accepted: its law is compared with the shares of the target's whole law."""
    parts = given()
    ids = torch.tensor([1, 4, 5, 19])
    laws = Laws(parts["states"], parts["taught"])
    p = torch.softmax(parts["states"] @ parts["taught"].T, -1)
    q = torch.zeros(W, V)
    q[:, ids] = torch.softmax(parts["x"][:, 0] @ parts["head"][ids].T, -1)
    torch.testing.assert_close(overlaps(parts["x"][:, 0], parts["head"][ids], laws, ids), torch.minimum(p, q).sum(-1))


def test_nothing_to_learn_is_nothing() -> None:
    x = torch.zeros(0, 2, H, requires_grad=True)
    found = distance(x, torch.ones(V, H), Laws(torch.zeros(0, H), torch.ones(V, H)), torch.zeros(0, 2))
    found.total.backward()  # type: ignore[no-untyped-call]
    assert float(found.total.detach()) == 0
