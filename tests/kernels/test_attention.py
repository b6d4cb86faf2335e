"""Tree attention: the plain form against the model's own attention, the Triton source against the plain form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.kernels.attention import Plan, mask_words, tree_attention
from forerun.models.attention import Attention
from forerun.models.batch import Batch, Segment
from forerun.models.storage import LayerShape, Storage
from tests.kernels.packing import BLOCK, HALF, Case, random_case

LENGTHS = [
    [(0, 1)],
    [(37, 1), (5, 1), (130, 1)],
    [(70, 9)],
    [(0, 7), (16, 1), (47, 20), (129, 3)],
    [(33, 64), (1, 5)],
]


def by_model(case: Case, window: int | None, chain: bool) -> torch.Tensor:
    """What `models/attention.py` makes of the same rows."""
    segments = []
    start = 0
    for b, seen in enumerate(case.visible):
        rows, context = seen.shape[0], int(case.packed.contexts[b])
        slots = case.slots[b]
        positions = case.packed.positions[start : start + rows]
        ancestors = None if chain else seen
        segments.append(
            Segment(
                b, torch.zeros(rows, dtype=torch.int64), positions, ancestors, slots[:context], slots[context:], rows
            )
        )
        start += rows
    kv_heads, size = case.keys.shape[1:]
    storage = Storage.make([LayerShape(kv_heads, size, size)], case.keys.shape[0], case.q.dtype, "cpu")
    storage.keys[0].copy_(case.keys.nan_to_num())
    storage.values[0].copy_(case.values.nan_to_num())
    batch = Batch.pack(segments)
    heads = torch.cat([case.q, case.keys[batch.slots], case.values[batch.slots]], 1)
    return Attention(batch, storage, case.q.dtype).attend(0, heads, window=window, scale=size**-0.5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("chain", [False, True])
def test_the_plain_form_is_the_models_attention(
    lengths: list[tuple[int, int]], window: int | None, chain: bool
) -> None:
    for seed, (heads, kv_heads, size) in enumerate([(4, 4, 64), (6, 2, 64), (4, 1, 128)]):
        case = random_case(lengths, heads=heads, kv_heads=kv_heads, size=size, chain=chain, seed=seed)
        got = tree_attention(case.q, case.keys, case.values, case.packed, scale=size**-0.5, window=window)
        torch.testing.assert_close(got, by_model(case, window, chain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "heads", "size", "window", "plan"),
    [
        (LENGTHS[0], (4, 4), 64, None, Plan(16, 64, 1, 4, 2)),
        (LENGTHS[1], (8, 2), 64, None, Plan(16, 32, 2, 4, 2)),
        (LENGTHS[1], (9, 3), 64, 20, Plan(16, 16, 4, 4, 2)),
        (LENGTHS[2], (4, 1), 128, None, Plan(16, 64, 1, 4, 2)),
        (LENGTHS[2], (4, 1), 128, 6, Plan(32, 16, 2, 4, 2)),
        (LENGTHS[3], (6, 2), 64, None, Plan(16, 32, 4, 4, 2)),
        (LENGTHS[3], (6, 2), 64, 50, Plan(64, 32, 1, 4, 2)),
        (LENGTHS[4], (4, 2), 64, None, Plan(128, 64, 2, 8, 2)),
        (LENGTHS[4], (4, 2), 64, 1, Plan(64, 64, 8, 8, 2)),
        ([(20, 70), (3, 66)], (2, 2), 64, None, Plan(64, 64, 1, 4, 2)),  # two words of mask
        ([(40, 5)], (4, 2), 80, None, Plan(16, 32, 2, 4, 2)),  # a head that is no power of two
    ],
)
def test_the_kernel_is_the_plain_form(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    plan: Plan,
    built: Callable[..., Any],
    device: torch.device,
) -> None:
    case = random_case(lengths, heads=heads[0], kv_heads=heads[1], size=size).to(device)
    given = (case.q, case.keys, case.values, case.packed)
    want = tree_attention.plain(*given, scale=0.1, window=window)
    got = built(tree_attention)(*given, scale=0.1, window=window, plan=plan)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_kernel_chooses_its_plan_and_takes_16_bits(built: Callable[..., Any], device: torch.device) -> None:
    case = random_case([(70, 9), (300, 2)], dtype=HALF, chain=True).to(device)
    given = (case.q, case.keys, case.values, case.packed)
    want = tree_attention.plain(*given, scale=0.125)
    torch.testing.assert_close(built(tree_attention)(*given, scale=0.125), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_is_left_alone(splits: int, built: Callable[..., Any], device: torch.device) -> None:
    """Sequences without rows, rows without a sequence, and keys and values that lie between others in a slot."""
    case = random_case([(40, 3), (9, 2), (20, 4)], spare_rows=2).to(device)
    counts = case.packed.counts.clone()
    counts[1] = 0
    packed = replace(case.packed, counts=counts, max_rows=8)
    both = torch.stack([case.keys, case.values], 1)
    out = torch.full((11, 4 * 64), 7.0, device=device)
    plan = Plan(16, 32, splits, 4, 2)
    built(tree_attention)(case.q, both[:, 0], both[:, 1], packed, scale=0.1, out=out, plan=plan)
    want = tree_attention.plain(case.q, case.keys, case.values, case.packed, scale=0.1)
    torch.testing.assert_close(out[:3], want[:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[5:9], want[5:9], rtol=1e-4, atol=1e-5)
    assert bool((out[3:5] == 7).all())
    assert bool((out[9:] == 7).all())


def test_a_row_that_sees_nothing_is_zero(built: Callable[..., Any], device: torch.device) -> None:
    case = random_case([(0, 3)]).to(device)
    packed = replace(case.packed, mask=torch.zeros_like(case.packed.mask))
    for form in (tree_attention.plain, built(tree_attention)):
        assert not form(case.q, case.keys, case.values, packed, scale=0.1).any()


def test_words_hold_the_bits_in_order() -> None:
    visible = torch.rand(5, 130, generator=torch.Generator().manual_seed(0)) < 0.5
    words = mask_words(visible).tolist()
    assert [len(row) for row in words] == [3] * 5
    for row, seen in zip(words, visible.tolist(), strict=True):
        assert [bool(row[j // 64] >> (j % 64) & 1) for j in range(130)] == seen


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("context", [0, 512, 32768])
def test_a_plan_fills_the_device_and_no_more(batch: int, rows: int, context: int) -> None:
    plan = Plan.choose(batch, 8, rows * 4, context, 128, 132)
    assert 64 % plan.tile_n == 0
    assert plan.tile_m in {16, 32, 64, 128}
    assert plan.splits & (plan.splits - 1) == 0
    programs = batch * 8 * -(-rows * 4 // plan.tile_m)
    assert plan.splits == 1 or programs * plan.splits < 4 * 132
    assert plan.splits * BLOCK <= max(context, BLOCK)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("form", ["plain", "kernel"])
def test_a_tree_can_be_read_level_by_level(
    form: str, window: int | None, built: Callable[..., Any], device: torch.device
) -> None:
    """The last rows of each tree alone, the others being in the cache from passes before: the same as in one pass."""
    attend = tree_attention.plain if form == "plain" else built(tree_attention)
    case = random_case([(70, 9), (16, 12), (0, 5)]).to(device)
    whole = tree_attention.plain(case.q, case.keys, case.values, case.packed, scale=0.1, window=window)
    later = torch.tensor([4, 1, 5], dtype=torch.int32, device=device)
    ends = case.packed.starts + case.packed.counts
    rows = torch.cat([torch.arange(int(end - n), int(end)) for end, n in zip(ends, later, strict=True)]).to(device)
    packed = replace(
        case.packed,
        starts=(later.cumsum(0) - later).int(),
        counts=later,
        mask=case.packed.mask[rows].contiguous(),
        positions=case.packed.positions[rows],
    )
    plan = Plan(16, 32, 2, 4, 2)
    got = attend(case.q[rows], case.keys, case.values, packed, scale=0.1, window=window, plan=plan)
    torch.testing.assert_close(got, whole[rows], rtol=1e-4, atol=1e-5)
