"""States that wait: picked out of the tensors of several steps, in order."""

from __future__ import annotations

import pytest
import torch

from forerun.drafters.waiting_states import CUT_OUT, Fused, Piece, Waiting, joined


@pytest.mark.parametrize("texts", [1, 3, 2 * CUT_OUT])
def test_pieces_come_in_their_order(texts: int) -> None:
    """Few are cut out, many are picked at once: the same rows either way."""
    steps = [Fused(torch.randn(4 * texts, 5)) for _ in range(3)]
    waiting = []
    for text in range(texts):
        own = Waiting()
        for step, rows in zip(steps, (4, 1, 2), strict=True):
            own.add(Piece(step, 4 * text, 4 * text + rows))
        waiting.append(own)
    taken = [piece for own in waiting for piece in own.first(6)]
    parts = []
    for text in range(texts):
        first, second, third = (step.fused[4 * text :] for step in steps)
        parts += [first[:4], second[:1], third[:1]]
    assert joined(taken).equal(torch.cat(parts))


def test_the_first_rows_and_those_behind_them_are_all() -> None:
    step = Fused(torch.arange(12.0)[:, None])
    own = Waiting()
    for start in (0, 5, 8):
        own.add(Piece(step, start, start + 3))
    before, head = joined(own.states), joined(own.first(4))
    own.drop(4)
    assert own.rows == 5
    assert torch.cat([head, joined(own.states)]).equal(before)
    assert own.first(0) == []
