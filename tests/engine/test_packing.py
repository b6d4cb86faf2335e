"""What a drafter may see of a pass: the states of the rows that stayed."""

from __future__ import annotations

import torch

from forerun.engine.packing import kept_states


def test_the_states_of_kept_rows() -> None:
    features = {layer: torch.randn(7, 4) for layer in (0, 3)}
    first, second = kept_states(features, [0, 4], [[0, 2], [0, 1]])
    for layer, states in features.items():
        assert torch.equal(first[layer], states[[0, 2]])
        assert torch.equal(second[layer], states[[4, 5]])


def test_where_all_rows_stay_nothing_is_copied() -> None:
    features = {layer: torch.randn(5, 4) for layer in (0, 3)}
    first, second = kept_states(features, [0, 3], [[0, 1, 2], [0, 1]])
    for layer, states in features.items():
        assert first[layer].data_ptr() == states.data_ptr()
        assert torch.equal(first[layer], states[:3])
        assert torch.equal(second[layer], states[3:])


def test_rows_that_stay_in_another_order_are_picked() -> None:
    features = {0: torch.randn(3, 4)}
    (found,) = kept_states(features, [0], [[0, 2, 1]])
    assert torch.equal(found[0], features[0][[0, 2, 1]])


def test_no_states_were_asked_for() -> None:
    (found,) = kept_states({}, [0], [[0, 1]])
    assert found.count == 2
    assert not found.whole
