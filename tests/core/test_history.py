from __future__ import annotations

import pytest
import torch

from forerun.core.history import History
from forerun.core.law import Context
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence

PENALISED = SamplingParams(presence_penalty=0.5)


def text(number: int, prompt: list[int], params: SamplingParams = PENALISED) -> Sequence:
    return Sequence(prompt, 100, id=number, params=params)


def test_counts_grow_with_the_text_and_equal_a_fresh_count() -> None:
    history = History(8)
    one, plain, two = text(1, [1, 1, 2]), text(2, [3], SamplingParams()), text(3, [4, 5])
    rows, paths = torch.tensor([2, 0, 1, 0]), torch.tensor([[6, -1], [7, 7], [0, -1], [-1, -1]])
    for step in ([], [3, 3], [7]):
        one.commit(step)
        two.commit(step[:1])
        found = history.context([one, plain, two], rows, paths)
        assert found is not None
        wanted = Context.of([[1, 1, 2], [], [4, 5]], [one.output, [], two.output], 8, rows, paths)
        for got, want in zip(found.seen(), wanted.seen(), strict=True):
            assert got.tolist() == want.tolist()


def test_nobody_penalises() -> None:
    history = History(8)
    assert history.context([text(1, [1], SamplingParams())], torch.tensor([0]), torch.zeros(1, 0).long()) is None


def test_a_root_has_an_empty_path() -> None:
    found = History(8).context([text(1, [1])], torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64))
    assert found is not None
    assert found.seen()[0].tolist() == [[False, True, *[False] * 6]]


def test_forgetting_starts_anew() -> None:
    history, row, path = History(8), torch.tensor([0]), torch.tensor([[-1]])
    history.context([text(1, [1])], row, path)
    history.forget(text(1, [1]))
    found = history.context([text(1, [2])], row, path)
    assert found is not None
    assert found.prompt[1].nonzero().tolist() == [[2]]


def test_strange_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt token 9 is outside the vocabulary of 8: encode"):
        History(8).context([text(1, [9])], torch.tensor([0]), torch.tensor([[-1]]))
