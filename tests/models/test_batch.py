"""How rows are packed."""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.models.batch import KEYS, Batch, Segment


def chain(sequence: int, before: int, rows: int, logits: int = 1) -> Segment:
    context = torch.arange(before) + 1000 * sequence
    slots = torch.arange(before, before + rows) + 1000 * sequence
    positions = torch.arange(before, before + rows)
    return Segment(sequence, positions + 10, positions, None, context, slots, logits)


def test_a_long_prompt_does_not_pad_running_texts() -> None:
    batch = Batch.pack([chain(0, 40, 1), chain(1, 0, 300), chain(2, 7, 5, logits=5)])
    assert batch.rows == 306
    assert sorted(group.shape for group in batch.groups) == [(1, 300), (2, 5)]
    assert batch.wanted is not None
    assert batch.wanted.tolist() == [0, 300, 301, 302, 303, 304, 305]


def test_every_row_sees_its_past_and_itself() -> None:
    batch = Batch.pack([chain(1, 40, 1), chain(2, 7, 5)])
    (group,) = batch.groups
    assert group.rows is not None
    assert group.keys.shape[1] % KEYS == 0
    for member, (before, rows) in enumerate(((40, 1), (7, 5))):
        for row in range(rows):
            seen = group.keys[member, group.visible[member, row]].tolist()
            assert seen == [1000 * (member + 1) + key for key in range(before + row + 1)]
            distances = group.distance[member, row, group.visible[member, row]].tolist()
            assert distances == list(range(before + row, -1, -1))
    padding = group.rows == batch.rows
    assert padding.sum() == 4
    assert bool(group.visible.any(-1).all()), "a softmax over nothing is NaN"


def test_a_context_that_is_not_one_text() -> None:
    """Rows of earlier levels of a tree: what is seen of them, and where they lie, is said by the segment."""
    seen = torch.tensor([[True, True, False, True], [True, True, True, False]])
    segment = replace(
        chain(1, 4, 2),
        positions=torch.tensor([3, 3]),
        ancestors=torch.eye(2, dtype=torch.bool),
        context_visible=seen,
        context_positions=torch.tensor([0, 1, 2, 2]),
    )
    (group,) = Batch.pack([segment, chain(2, 9, 1)]).groups
    for row in (0, 1):
        visible = group.visible[0, row]
        assert visible[:4].tolist() == seen[row].tolist()
        assert group.keys[0, visible].tolist() == [*(1000 + seen[row].nonzero()[:, 0]).tolist(), 1004 + row]
        assert group.distance[0, row, visible].tolist() == [3, 2, 1, 0]


def test_equal_heights_need_no_index() -> None:
    batch = Batch.pack([chain(0, 3, 2, logits=2), chain(1, 9, 2, logits=2)])
    assert batch.wanted is None
    assert [group.rows for group in batch.groups] == [None]
