"""The pass in C with weights in bytes: near to float32, and a row is the same however it is read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from forerun.models.batch import Batch
from forerun.models.config import ModelConfig
from forerun.models.native import amx
from forerun.models.native.shelf import Shelf, rounded
from forerun.models.transformer import Transformer
from tests.models.rows import CONFIGS, SLOTS, VOCABULARY, Case, Seen, chain, read, shuffled, threads, tiny, together
from tests.models.test_native import differ, error

SHAPES = {
    name: replace(CONFIGS[name], hidden_size=192, intermediate_size=320)
    for name in ("one head each", "two share, tied", "three share, biases", "eight share, normed, wide")
}
needs_amx = pytest.mark.skipif(amx.library() is None, reason="no AMX, or no compiler")


def drafting(shape: ModelConfig) -> Transformer:
    made = tiny(shape)
    made.only_drafts = True
    return made


@cache
def model(name: str) -> Transformer:
    made = drafting(SHAPES[name])
    made.prepare()
    assert made.amx is not None
    assert made.amx.in_bytes
    return made


def in_float32(name: str) -> Transformer:
    """With the weights that are left when they are rounded."""
    made = tiny(SHAPES[name], dtype=torch.float32)
    for part in list(made.modules()):
        if isinstance(part, nn.Linear):
            whole, scales = rounded(part.weight.data)
            part.weight = nn.Parameter(whole * scales[:, None], requires_grad=False)
    return made


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


@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_matrix_comes_back_in_its_own_order(in_bytes: bool) -> None:
    shelf = Shelf(3 * 96 * 128, in_bytes=in_bytes)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        matrix = torch.randn(96, 128, generator=generator).bfloat16()
        address, scales = shelf.put(matrix)
        assert address % 64 == 0
        assert (scales is not None) == in_bytes
    assert error(shelf.last(96, 128), matrix.float()) < (0.01 if in_bytes else 1e-9)


# --- right ---------------------------------------------------------------------------------------------------


@needs_amx
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_it_is_near_to_float32(name: str, rows: int) -> None:
    text = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(rows))
    slots = torch.arange(rows)
    right, own = (
        read(each, each.new_storage(128), [chain(text, slots[:0], slots)])[0]
        for each in (in_float32(name), model(name))
    )
    for field in ("logits", "hidden", "cached"):
        assert error(vars(own)[field], vars(right)[field]) < 0.03


@needs_amx
def test_an_outlier_among_the_states_leaves_the_others_as_they_are() -> None:
    """Rows have two bytes for each number: one would give small numbers beside a large one next to no digits."""
    name = "one head each"
    made, right = drafting(SHAPES[name]), in_float32(name)
    for each in (made, right):
        each.model.norm.get_parameter("weight").data[3] = 2000.0
        each.lm_head.weight.data[:, 3] = 0
    text = torch.arange(20)
    found, expected = (
        read(each, each.new_storage(32), [chain(text, text[:0], text)])[0].logits for each in (made, right)
    )
    assert error(found, expected) < 0.03


@needs_amx
def test_what_is_no_number_spoils_its_own_row_only() -> None:
    made = drafting(SHAPES["one head each"])
    made.model.embed_tokens.weight.data[7, 5] = torch.nan
    made.model.embed_tokens.weight.data[8, 5] = torch.inf
    text = torch.tensor([1, 7, 2, 8, 3])
    batch = Batch.pack([chain(text[i : i + 1], text[:0], torch.tensor([i])) for i in range(5)])
    logits = made.forward_rows(batch, made.new_storage(16)).logits
    assert logits.isfinite().all(1).tolist() == [True, False, True, False, True]


# --- the same ------------------------------------------------------------------------------------------------


@needs_amx
@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_is_plain_decoding_of_each_path(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    made = [Case.random(generator, longest=70, most=20, unread=40) for _ in range(3)]
    expected: list[Seen] = [case.plain(model(name)) for case in made]
    for count in (1, 2, 3):
        with threads(count):
            assert not differ(together(model(name), made, shuffled(16, generator)), expected)
    assert not differ(together(model(name), made, torch.arange(SLOTS)), expected)


# --- which models --------------------------------------------------------------------------------------------


@needs_amx
@pytest.mark.parametrize(("hidden", "inner"), [(96, 320), (192, 96)])
def test_odd_sizes_stay_in_bfloat16(hidden: int, inner: int) -> None:
    shape = replace(SHAPES["one head each"], hidden_size=hidden, intermediate_size=inner)
    made = drafting(shape)
    text = torch.arange(20)
    found = read(made, made.new_storage(32), [chain(text, text[:0], text)])[0]
    assert made.amx is not None
    assert not made.amx.in_bytes
    plain = tiny(shape)
    assert found.same(read(plain, plain.new_storage(32), [chain(text, text[:0], text)])[0])


@needs_amx
def test_a_target_is_never_rounded() -> None:
    made = tiny(SHAPES["one head each"])
    made.prepare()
    assert made.amx is not None
    assert not made.amx.in_bytes
