"""Matrices in float32 that are kept in fewer bytes: the same numbers, and a pass gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from forerun.models.native import floats
from forerun.models.native.shelf import GROUP_BYTES, PANELS, Form, Shelf
from forerun.models.transformer import Transformer
from tests.models.rows import CONFIGS, VOCABULARY, Seen, chain, error, garbage, read, threads, tiny

pytestmark = pytest.mark.skipif(floats.library() is None, reason="no such processor, or no compiler")

Made = Callable[[Tensor], Tensor]


def as_in_a_file(kind: str) -> Made:
    def made(matrix: Tensor) -> Tensor:
        code = GGMLQuantizationType[kind]
        return torch.from_numpy(np.array(dequantize(quantize(matrix.numpy(), code), code), np.float32))

    return made


def bfloat16(matrix: Tensor) -> Tensor:
    return matrix.bfloat16().float()


def the_same(matrix: Tensor) -> Tensor:
    return matrix


MADE: dict[str, tuple[Made, Form]] = {
    "Q4_1": (as_in_a_file("Q4_1"), Form.NIBBLES),
    "Q4_0": (as_in_a_file("Q4_0"), Form.NIBBLES),
    "Q8_0": (as_in_a_file("Q8_0"), Form.EIGHTHS),
    "bfloat16": (bfloat16, Form.HALVES),
    "float32": (the_same, Form.UNFOLDED),
}


def drawn(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def folded(matrix: Tensor) -> tuple[Form, Tensor]:
    shelf = Shelf(matrix.numel(), PANELS, torch.float32, floats.library())
    place = shelf.put(matrix)
    return place.form, shelf.last()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e-4, 0.05, 1.0, 300.0])
@pytest.mark.parametrize("kind", MADE)
def test_a_matrix_is_folded_as_it_was_made(kind: str, size: float) -> None:
    """Where scales are small, those of a file have few bits."""
    made, form = MADE[kind]
    matrix = made(size * drawn(96, 160))
    found, again = folded(matrix)
    assert torch.equal(again, matrix)
    assert found == form or (found == Form.NIBBLES and not matrix.any())


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "float32"])
def test_one_other_number_is_enough(kind: str) -> None:
    made, form = MADE[kind]
    matrix = made(drawn(64, 96))
    near = torch.tensor(np.nextafter(matrix[40, 70].numpy(), np.float32(9)))
    matrix[40, 70] = near
    found, again = folded(matrix)
    assert found != form
    assert torch.equal(again, matrix)
    assert again[40, 70] == near


def test_numbers_that_are_none() -> None:
    for number in (float("inf"), -float("inf"), float("nan")):
        for made, _ in MADE.values():
            matrix = made(drawn(32, 64))
            matrix[3, 33] = number
            found, again = folded(matrix)
            assert found in (Form.HALVES, Form.UNFOLDED)
            assert torch.equal(again.view(torch.int32), matrix.view(torch.int32))


def test_groups_of_one_number() -> None:
    for number in (0.0, -0.0, 1.0, 3.14159274, -1e-42, 3e38):
        found, again = folded(torch.full((32, 32), number))
        assert found == Form.NIBBLES
        assert bool((again == number).all())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([*MADE]),
    st.integers(-140, 125),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_whatever_is_put_there_comes_back(
    panels: int, groups: int, kind: str, power: int, seed: int, sparse: bool
) -> None:
    if kind.startswith("Q"):  # scales of a file are in float16
        power = max(-40, min(12, power))
    matrix = MADE[kind][0](torch.ldexp(drawn(32 * panels, 32 * groups, seed), torch.tensor(power)))
    if sparse:
        matrix *= drawn(matrix.shape[0], matrix.shape[1], seed + 1) > 0.5
    shelf = Shelf(2 * matrix.numel(), PANELS, torch.float32, floats.library())
    first = shelf.put(matrix)
    again = shelf.last()
    second = shelf.put(drawn(*matrix.shape))
    assert second.address - first.address == matrix.numel() // 1024 * GROUP_BYTES[first.form]
    assert torch.equal(torch.nan_to_num(again), torch.nan_to_num(matrix))


def model(kind: str, name: str, *, folds: bool, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    made = tiny(CONFIGS[name], dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for part in made.modules():
        if isinstance(part, nn.Linear):
            own = 0.1 * torch.randn(part.weight.shape, generator=generator)
            part.weight.data = MADE[kind][0](own)
    if not folds:
        whole = floats.arithmetic()
        monkeypatch.setattr(floats, "arithmetic", lambda: replace(whole, folds=None))
    made.prepare()
    monkeypatch.undo()
    assert made.in_c is not None
    forms = {place.form for place in made.in_c.shelf.places}
    assert forms == ({MADE[kind][1]} if folds else {Form.UNFOLDED})
    return made


def whole(model: Transformer, rows: int) -> Seen:
    tokens = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(rows))
    slots = torch.arange(rows)
    return read(model, garbage(model), [chain(tokens, slots[:0], slots)])[0]


@pytest.mark.parametrize("name", ["one head each", "three share, biases"])
@pytest.mark.parametrize("kind", MADE)
def test_a_pass_gives_the_same_bits(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (model(kind, name, folds=folds, monkeypatch=monkeypatch) for folds in (True, False))
    for rows in (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 33, 48, 49, 100):
        for count in (1, 2):
            with threads(count):
                found, right = (whole(each, rows) for each in (one, other))
            assert found.same(right), rows
    assert torch.equal(one.head_rows(), other.head_rows())


# --- rows of 16 bits -----------------------------------------------------------------------------------------

needs_rounding = pytest.mark.skipif(not floats.rounds(), reason="a processor that does not multiply 16 bits in pairs")


def rounding(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "rounds", True)
        return model(kind, name, folds=True, monkeypatch=monkeypatch)


def rounded_rows(x: Tensor) -> Tensor:
    """What is left of them."""
    groups = x.view(-1, 32).double()
    steps = groups.abs().amax(1, keepdim=True) / 32767
    return ((groups / steps).round() * steps).view(x.shape)


@needs_rounding
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 50])
def test_a_product_is_that_of_the_rounded_rows(kind: str, rows: int) -> None:
    """The output head alone: no other matrix is folded."""
    made = tiny(CONFIGS["one head each"], dtype=torch.float32)
    for part in made.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = drawn(*part.weight.shape) / 8
    made.lm_head.weight.data = MADE[kind][0](0.1 * drawn(*made.lm_head.weight.shape))
    matrix = made.lm_head.weight.data.double()
    made.rounds = True
    text = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(rows))
    slots = torch.arange(rows)
    found = read(made, garbage(made), [chain(text, slots[:0], slots)])[0]
    assert made.in_c is not None
    assert [place.form for place in made.in_c.shelf.places][-2:] == [Form.UNFOLDED, MADE[kind][1]]
    normed = made.model.norm(found.hidden[:, -1])
    wrong = error(found.logits, rounded_rows(normed) @ matrix.T)
    assert wrong < 4e-6, "but for numbers half-way between two steps"
    assert error(found.logits, normed.double() @ matrix.T) > 4 * wrong, "rounded they are"


@needs_rounding
@pytest.mark.parametrize("name", ["one head each", "three share, biases"])
@pytest.mark.parametrize("kind", MADE)
def test_rounded_rows_have_the_same_bits_beside_others(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, exact = rounding(kind, name, monkeypatch), model(kind, name, folds=True, monkeypatch=monkeypatch)
    alone = whole(one, 100)
    for rows in (1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 48, 49):
        text = torch.randint(VOCABULARY, (100,), generator=torch.Generator().manual_seed(100))[:rows]
        slots = torch.arange(rows)
        for count in (1, 2):
            with threads(count):
                found = read(one, garbage(one), [chain(text, slots[:0], slots)])[0]
            assert torch.equal(found.logits, alone.logits[:rows]), rows
    wrong = error(alone.logits, whole(exact, 100).logits)
    if kind.startswith("Q"):
        assert 1e-7 < wrong < 3e-4
    else:
        assert wrong == 0, "where a matrix has more bits, so have rows"


@needs_rounding
def test_only_what_runs_in_the_usual_format_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Transformer.rounds
    made = model("Q4_1", "one head each", folds=True, monkeypatch=monkeypatch)
    assert made.in_c is not None
    assert not made.in_c.arithmetic.rounds


def test_a_target_says_whether_little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "one head each"
    found = {kind: model(kind, one, folds=True, monkeypatch=monkeypatch).folded for kind in MADE}
    assert found == {"Q4_1": True, "Q4_0": True, "Q8_0": True, "bfloat16": False, "float32": False}
    assert not model("Q4_1", one, folds=False, monkeypatch=monkeypatch).folded
