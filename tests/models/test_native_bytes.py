"""The pass in C with weights in bytes: near to float32, and a row is the same however it is read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from forerun.models.batch import Batch
from forerun.models.config import ModelConfig
from forerun.models.native.shelf import PANELS, TILES, Order, Shelf, rounded
from forerun.models.transformer import Transformer
from tests.models.rows import (
    CONFIGS,
    IN_C,
    NARROW,
    NEAR_IN_BYTES,
    SLOTS,
    VOCABULARY,
    Case,
    Seen,
    chain,
    each_pass,
    error,
    in_pytorch,
    pass_in,
    read,
    round_matrices,
    shuffled,
    threads,
    tiny,
    together,
)
from tests.models.test_native import differ

SHAPES = {
    name: replace(CONFIGS[name], hidden_size=192, intermediate_size=320)
    for name in ("one head each", "two share, tied", "three share, biases", "eight share, normed, wide")
}
each_model = pytest.mark.parametrize(
    ("dtype", "name"),
    [pass_in(dtype, name) for dtype in IN_C for name in (SHAPES | NARROW if dtype == torch.float32 else SHAPES)],
)


def bound(dtype: torch.dtype) -> float:
    """How near to float32 with the same weights: in float32 the rows have 16 bits where that is fast, else all."""
    return NEAR_IN_BYTES if dtype == torch.float32 else 0.03


def drafting(shape: ModelConfig, dtype: torch.dtype) -> Transformer:
    made = tiny(shape, dtype=dtype)
    made.only_drafts = True
    return made


@cache
def model(dtype: torch.dtype, name: str) -> Transformer:
    made = drafting((SHAPES | NARROW)[name], dtype)
    made.prepare()
    assert made.in_c is not None
    assert made.in_c.in_bytes
    return made


def in_float32(name: str, dtype: torch.dtype) -> Transformer:
    """With the weights that are left when they are rounded for a pass of such numbers."""
    return round_matrices(tiny((SHAPES | NARROW)[name], dtype=torch.float32), dtype)


# --- matrices ------------------------------------------------------------------------------------------------


def test_a_weight_is_rounded_by_half_a_step_at_most() -> None:
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix[5] = 0
    matrix[7, 3] = 100
    whole, scales = rounded(matrix)
    assert whole.dtype == torch.int8
    assert bool((whole.abs().amax(1)[[0, 7, 63]] == 127).all())
    wrong = (whole * scales[:, None] - matrix.float()).abs()
    assert bool((wrong <= 0.5001 * scales[:, None]).all())
    assert not whole[5].any()


@pytest.mark.parametrize(
    ("order", "dtype"),
    [(TILES, torch.bfloat16), (PANELS, torch.float32), (TILES, torch.int8), (PANELS, torch.int8)],
    ids=["tiles", "panels", "tiles in bytes", "panels in bytes"],
)
def test_a_matrix_comes_back_in_its_own_order(order: Order, dtype: torch.dtype) -> None:
    shelf = Shelf(3 * 96 * 128, order, dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        matrix = torch.randn(96, 128, generator=generator)
        matrix = matrix.bfloat16() if order == TILES else matrix
        place = shelf.put(matrix)
        assert place.address % 64 == 0
        assert (place.scales is not None) == (dtype == torch.int8)
    assert error(shelf.last(), matrix.float()) < (0.01 if dtype == torch.int8 else 1e-9)


# --- right ---------------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_it_is_near_to_float32(dtype: torch.dtype, name: str, rows: int) -> None:
    text = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(rows))
    slots = torch.arange(rows)
    right, own = (
        read(each, each.new_storage(128), [chain(text, slots[:0], slots)])[0]
        for each in (in_pytorch(in_float32(name, dtype)), model(dtype, name))
    )
    for field in ("logits", "hidden", "cached"):
        assert error(vars(own)[field], vars(right)[field]) < bound(dtype)


@each_pass
def test_an_outlier_among_the_states_leaves_the_others_as_they_are(dtype: torch.dtype) -> None:
    """Rows have two bytes for each number: one would give small numbers beside a large one next to no digits."""
    shape = SHAPES["one head each"]
    made, right = drafting(shape, dtype), tiny(shape, dtype=torch.float32)
    for each in (made, right):
        each.model.norm.get_parameter("weight").data[3] = 2000.0
        each.lm_head.weight.data[:, 3] = 0
    in_pytorch(round_matrices(right, dtype))
    text = torch.arange(20)
    found, expected = (
        read(each, each.new_storage(32), [chain(text, text[:0], text)])[0].logits for each in (made, right)
    )
    assert error(found, expected) < max(0.01, bound(dtype))


@each_pass
def test_what_is_no_number_spoils_its_own_row_only(dtype: torch.dtype) -> None:
    made = drafting(SHAPES["one head each"], dtype)
    made.model.embed_tokens.weight.data[7, 5] = torch.nan
    made.model.embed_tokens.weight.data[8, 5] = torch.inf
    text = torch.tensor([1, 7, 2, 8, 3])
    batch = Batch.pack([chain(text[i : i + 1], text[:0], torch.tensor([i])) for i in range(5)])
    logits = made.forward_rows(batch, made.new_storage(16)).logits
    assert logits.isfinite().all(1).tolist() == [True, False, True, False, True]


# --- the same ------------------------------------------------------------------------------------------------


@each_model
def test_a_tree_is_plain_decoding_of_each_path(dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    made = [Case.random(generator, longest=70, most=20, unread=40) for _ in range(3)]
    expected: list[Seen] = [case.plain(model(dtype, name)) for case in made]
    for count in (1, 2, 3):
        with threads(count):
            assert not differ(together(model(dtype, name), made, shuffled(16, generator)), expected)
    assert not differ(together(model(dtype, name), made, torch.arange(SLOTS)), expected)


# --- which models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner"), [pass_in(torch.bfloat16, 96, 320), pass_in(torch.bfloat16, 192, 96)]
)
def test_odd_sizes_stay_in_bfloat16(dtype: torch.dtype, hidden: int, inner: int) -> None:
    shape = replace(SHAPES["one head each"], hidden_size=hidden, intermediate_size=inner)
    made = drafting(shape, dtype)
    text = torch.arange(20)
    found = read(made, made.new_storage(32), [chain(text, text[:0], text)])[0]
    assert made.in_c is not None
    assert not made.in_c.in_bytes
    plain = tiny(shape)
    assert found.same(read(plain, plain.new_storage(32), [chain(text, text[:0], text)])[0])


@each_pass
def test_a_target_is_never_rounded(dtype: torch.dtype) -> None:
    made = tiny(SHAPES["one head each"], dtype=dtype)
    made.prepare()
    assert made.in_c is not None
    assert not made.in_c.in_bytes
