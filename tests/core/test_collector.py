"""What stays is not looked through."""

from __future__ import annotations

import gc

import pytest

from forerun.core.collector import heap_stays


def test_what_is_there_is_left_alone_for_a_while() -> None:
    with heap_stays():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_also_after_an_error() -> None:
    with pytest.raises(RuntimeError), heap_stays():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
