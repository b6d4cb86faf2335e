"""Texts side by side, and the order in which they are learned from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.train.batches import Batches
from forerun.train.texts import Text, TextBatch


def test_only_answers_are_learned() -> None:
    batch = TextBatch.pack([Text.of((5, 6, 7), (8, 9)), Text.of((1,), (2,)), Text.of((3, 4), ())])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0], [3, 4, 0, 0, 0]]
    assert list(zip(batch.text.tolist(), batch.place.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 0)]
    assert batch.labels.tolist() == [8, 9, 2]
    assert (batch.laws, batch.spans) == (3, ((2, 4), (0, 1), (1, 1)))


def test_states_at_places_and_before() -> None:
    batch = TextBatch.pack([Text.of((5, 6, 7), (8, 9)), Text.of((1,), (2,))])
    places = torch.arange(10).view(2, 5, 1)
    assert batch.at(places)[:, 0].tolist() == [2, 3, 5]
    assert batch.at(places, back=2)[:, 0].tolist() == [0, 1, 5]
    assert batch.reached(3).tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]


def test_every_text_has_its_turn() -> None:
    batches = Batches([5] * 10, texts=4, seed=1)
    taken = [index for step in range(64) for index in batches.at(step)]
    assert sorted(np.bincount(taken).tolist()) == [25] * 4 + [26] * 6
    assert batches.at(3) == taken[12:16], "going back"
    assert Batches([5] * 10, texts=4, seed=1).at(3) == taken[12:16], "going on after an interruption"
    assert Batches([5] * 10, texts=4, seed=2).at(3) != taken[12:16]


@pytest.mark.parametrize("tokens", [0, 2000])
def test_texts_of_like_length_are_together(tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 1000)
    batches = Batches(lengths.tolist(), texts=16, tokens=tokens, seed=1)
    chosen = [batches.at(step) for step in range(100)]
    padded = [len(batch) * lengths[batch].max() for batch in chosen]
    assert sum(padded) < 1.06 * sum(lengths[batch].sum() for batch in chosen)
    if tokens:
        assert max(padded) <= tokens
        assert sum(padded) > 0.85 * tokens * len(padded)
    else:
        assert {len(batch) for batch in chosen} == {16}
    assert len({tuple(batch) for batch in chosen}) == 100


def test_a_text_that_is_too_long_is_alone() -> None:
    batches = Batches([50, 5, 5], texts=1, tokens=20, seed=0)
    assert all(batch == [0] or set(batch) <= {1, 2} for batch in map(batches.at, range(20)))
