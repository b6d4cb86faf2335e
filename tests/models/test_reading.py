"""Rows for the pass in C, from plain numbers and from tensors: the same."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.models.batch import Batch, TextRows
from forerun.models.native.reading import Reading, Seen

BLOCK = 4


@st.composite
def texts(draw: st.DrawFn) -> TextRows:
    """A chain, a tree, or a tree behind a chain; blocks in any order."""
    before, chain = draw(st.integers(0, 11)), draw(st.integers(0, 5))
    nodes = draw(st.integers(0 if chain else 1, 7))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)] if nodes else None
    rows = chain + nodes
    blocks = draw(st.permutations(range(8)))[: -(-(before + rows) // BLOCK)]
    tokens = draw(st.lists(st.integers(0, 99), min_size=rows, max_size=rows))
    wanted = draw(st.sampled_from(sorted({0, 1, nodes, rows})))
    return TextRows(draw(st.integers(0, 9)), rows, tokens, parents, before, list(blocks), BLOCK, wanted)


def columns(reading: Reading) -> dict[str, object]:
    def listed(value: object) -> object:
        return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value

    own = {name.name: listed(getattr(reading, name.name)) for name in fields(Reading) if name.name != "seen"}
    return own | {name.name: listed(getattr(reading.seen, name.name)) for name in fields(Seen)}


@settings(max_examples=200, deadline=None)
@given(st.lists(texts(), min_size=1, max_size=3))
def test_plain_numbers_say_what_segments_do(listed: list[TextRows]) -> None:
    plain = Batch(texts=tuple(listed))
    segments = Batch.pack(plain.segments)
    assert plain.plain
    assert not segments.plain
    assert columns(Reading.of(plain)) == columns(Reading.of(segments))
    assert torch.equal(plain.tokens, segments.tokens)
    assert plain.on(torch.device("cpu")) is plain


def test_another_parent_is_another_reading() -> None:
    text = TextRows(0, 4, [1, 2, 3, 4], [-1, 0, 0, 1], 3, [0, 1], BLOCK, 4)
    found = [columns(Reading.of(Batch(texts=(each,)))) for each in (text, replace(text, parents=[-1, 0, 0, 2]))]
    assert found[0]["tail"] != found[1]["tail"]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"tail"}
