"""What a verdict commits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.verdict import Verdict


def verdict(paths: list[list[int]], last: list[int], depth: int) -> Verdict:
    return Verdict(
        nodes=torch.tensor([path + [-1] * (depth - len(path)) for path in paths]).view(len(paths), depth).long(),
        lengths=torch.tensor([len(path) for path in paths]),
        tokens=torch.tensor(last),
        stops=torch.tensor([path[-1] if path else 0 for path in paths]),
    )


def test_committed_by_hand() -> None:
    drafted = torch.tensor([[90, 11, 12, 13], [91, 21, 22, 23], [92, 31, 32, 33]])
    result = verdict([[1, 3], [], [2]], [7, 8, 9], depth=2).committed(drafted)
    assert result.tolist() == [[11, 13, 7], [8, -1, -1], [32, 9, -1]]


def test_plain_decoding_commits_one_token() -> None:
    assert verdict([[], []], [7, 8], depth=0).committed(torch.tensor([[1], [2]])).tolist() == [[7], [8]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_committed_equals_brute_force(data: st.DataObject) -> None:
    batch, depth, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)), 6
    paths = [sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=depth))) for _ in range(batch)]
    token = st.integers(0, 99)
    last = data.draw(st.lists(token, min_size=batch, max_size=batch))
    drafted = [data.draw(st.lists(token, min_size=size, max_size=size)) for _ in range(batch)]
    result = verdict(paths, last, depth).committed(torch.tensor(drafted))
    assert result.shape == (batch, depth + 1)
    for b, path in enumerate(paths):
        text = [drafted[b][node] for node in path] + [last[b]]
        assert result[b].tolist() == text + [-1] * (depth + 1 - len(text))
