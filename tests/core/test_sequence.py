"""Committing a step's tokens: the text ends where plain decoding would have ended it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sequence import Sequence

EOS = 0
STOP = [3, 3]


def has_stop(output: list[int]) -> bool:
    return output[-2:] == STOP


def make(max_tokens: int = 100, **options: object) -> Sequence:
    return Sequence([7, 8, 9], max_tokens, frozenset({EOS}), has_stop, **options)  # type: ignore[arg-type]


def test_tokens_and_position() -> None:
    sequence = make()
    assert (sequence.tokens, sequence.position) == ([7, 8, 9], 2)
    assert sequence.commit([4, 5]) == 2
    assert (sequence.tokens, sequence.position) == ([7, 8, 9, 4, 5], 4)
    assert sequence.prompt == [7, 8, 9]
    assert sequence.finish_reason is None
    assert sequence.commit([]) == 0


@pytest.mark.parametrize(
    ("committed", "kept", "reason"),
    [
        ([1, EOS, 2], [1, EOS], "stop"),  # EOS inside the path, and it stays
        ([EOS], [EOS], "stop"),
        ([1, 3, 3, 2], [1, 3, 3], "stop"),  # a stop string inside the path
        ([1, 2, 4, 5, 6], [1, 2, 4, 5], "length"),
        ([1, 2, 4, EOS, 6], [1, 2, 4, EOS], "stop"),  # both at once: it would have stopped anyway
        ([1, 2, 3, 3, 6], [1, 2, 3, 3], "stop"),
        ([1, 2, 4], [1, 2, 4], None),
        ([1, 2, 4, 5], [1, 2, 4, 5], "length"),
    ],
)
def test_a_path_is_cut_where_the_text_ends(committed: list[int], kept: list[int], reason: str | None) -> None:
    sequence = make(max_tokens=4)
    assert sequence.commit(committed) == len(kept)
    assert sequence.output == kept
    assert sequence.finish_reason == reason


def test_the_end_may_span_two_steps() -> None:
    sequence = make()
    assert sequence.commit([1, 3]) == 2
    assert sequence.commit([3, 5]) == 1
    assert sequence.output == [1, 3, 3]
    assert sequence.finish_reason == "stop"


def test_prompt_does_not_end_the_text() -> None:
    sequence = Sequence([EOS, 3], 9, frozenset({EOS}), has_stop)
    assert sequence.commit([3, 1]) == 2
    assert sequence.finish_reason is None


def test_without_eos_and_stop_only_length_ends_it() -> None:
    sequence = Sequence([1], 5)
    assert sequence.commit([EOS, 3, 3]) == 3
    assert sequence.commit([EOS, 3, 3]) == 2
    assert sequence.finish_reason == "length"


def test_a_step_takes_any_iterable() -> None:
    assert make().commit(token for token in (1, 2, EOS, 4)) == 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=6),
    st.integers(1, 12),
)
def test_however_the_text_is_cut_into_steps_it_ends_the_same(chunks: list[list[int]], max_tokens: int) -> None:
    by_steps, one_by_one = make(max_tokens), make(max_tokens)
    for chunk in chunks:
        if by_steps.finish_reason is None:
            kept = by_steps.commit(chunk)
            assert kept == len(chunk) or by_steps.finish_reason is not None
    for token in (token for chunk in chunks for token in chunk):
        if one_by_one.finish_reason is None:
            one_by_one.commit([token])
    assert by_steps.output == one_by_one.output
    assert by_steps.finish_reason == one_by_one.finish_reason
    assert len(by_steps.output) <= max_tokens


def test_two_sequences_share_nothing() -> None:
    one, other = Sequence([1], 5), Sequence([1], 5)
    one.commit([2])
    assert other.output == []


def test_a_finished_sequence_takes_no_more() -> None:
    sequence = make()
    sequence.commit([EOS])
    with pytest.raises(AssertionError, match="finished"):
        sequence.commit([1])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        Sequence([], 5)
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"max_tokens is {bad}"):
            Sequence([1], bad)
