"""The pass in C: what it computes is right, and bit for bit the same however a row is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.drafters.find import Setup, make_drafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment
from forerun.models.native import reading
from forerun.models.transformer import Transformer
from tests.engine.tiny import drain
from tests.models.rows import (
    CONFIGS,
    NARROW,
    NEAR,
    SLOTS,
    VOCABULARY,
    Case,
    Seen,
    chain,
    each_model,
    each_pass,
    error,
    garbage,
    in_pytorch,
    levels,
    read,
    shuffled,
    threads,
    tiny,
    together,
)

SHAPES = CONFIGS | NARROW


@cache
def model(dtype: torch.dtype, name: str) -> Transformer:
    made = tiny(SHAPES[name], dtype=dtype)
    made.prepare()
    assert made.in_c is not None
    assert made.in_c.arithmetic.dtype == dtype
    return made


@cache
def plain_model(dtype: torch.dtype, name: str) -> Transformer:
    return in_pytorch(tiny(SHAPES[name], dtype=dtype))


# --- right ---------------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("chunks", [[1], [100], [33, 1, 17, 40, 9], [16, 16, 16, 32], [130]], ids=str)
def test_it_is_as_near_to_float32_as_pytorch(dtype: torch.dtype, name: str, chunks: list[int]) -> None:
    text = torch.randint(VOCABULARY, (sum(chunks),), generator=torch.Generator().manual_seed(1))
    slots = torch.arange(text.shape[0])
    results = []
    for each in (plain_model(torch.float32, name), model(dtype, name), plain_model(dtype, name)):
        storage = each.new_storage(160)
        ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
        parts = [chain(text[a:b], slots[:a], slots[a:b]) for a, b in pairwise(ends)]
        results.append(Seen.cat([read(each, storage, [part])[0] for part in parts]))
    right, own, theirs = results
    for field in ("logits", "hidden", "cached"):
        wrong = error(vars(own)[field], vars(right)[field])
        if dtype == torch.float32:
            assert wrong < NEAR
        else:
            assert wrong < 0.03
            assert wrong < 1.5 * error(vars(theirs)[field], vars(right)[field])


@each_pass
@pytest.mark.parametrize("name", ["two share, tied", "eight share, normed, wide"])
def test_some_layers_only(dtype: torch.dtype, name: str) -> None:
    text = torch.arange(40)
    batch = Batch.pack([chain(text, text[:0], text)])
    made, plain = model(dtype, name), plain_model(torch.float32, name)
    near = NEAR if dtype == torch.float32 else 0.015
    for only in ([0], [1], []):
        storages = [each.new_storage(64) for each in (made, plain)]
        own = made.forward_rows(batch, storages[0], layers=(1,), only=only)
        right = plain.forward_rows(batch, storages[1], layers=(1,), only=only)
        assert error(own.logits, right.logits) < near
        assert list(own.features) == [1]
        assert error(own.features[1], right.features[1]) < near
        for layer in range(len(CONFIGS[name].layers)):
            assert bool(storages[0].keys[layer].any()) == (layer in only), "a skipped layer writes nothing"


@each_pass
@pytest.mark.parametrize("wanted", [0, 1, 5, 40])
def test_only_the_wanted_rows_get_logits(dtype: torch.dtype, wanted: int) -> None:
    made = model(dtype, "one head each")
    text = torch.arange(40)
    whole = read(made, garbage(made), [chain(text, text[:0], text)])[0]
    part = replace(chain(text, text[:0], text), logits=wanted)
    other = replace(chain(text[:3], text[:0], text[:3] + 40), logits=2)
    storage = garbage(made)
    alone = made.forward_rows(Batch.pack([part]), storage)
    assert torch.equal(alone.logits, whole.logits[40 - wanted :])
    assert not alone.features
    assert storage.whole is not None
    assert torch.equal(storage.whole[:, :40].transpose(0, 1), whole.cached)
    both = made.forward_rows(Batch.pack([part, other]), garbage(made)).logits
    assert torch.equal(both, torch.cat([whole.logits[40 - wanted :], whole.logits[1:3]]))


@each_pass
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_likeliest_token(dtype: torch.dtype, count: int) -> None:
    """The first of equals, whichever threads found them; none where a row holds what is no number."""
    text = torch.arange(20)
    for broken in (None, 2, 50):
        made = tiny(CONFIGS["one head each"], seed=8, dtype=dtype)
        head = made.lm_head.weight.data
        head[48:] = head[:48]  # everything twice
        if broken is not None:
            head[broken] = torch.nan
        with threads(count):
            output = made.forward_rows(Batch.pack([chain(text, text[:0], text)]), made.new_storage(32))
        assert output.likeliest is not None
        if broken is None:
            assert torch.equal(output.likeliest, output.logits[:, :48].argmax(-1))
        else:
            assert output.likeliest.tolist() == [-1] * 20


@each_pass
def test_a_row_of_no_numbers(dtype: torch.dtype) -> None:
    """It has no likeliest token, and spoils no other text's rows."""
    made = tiny(CONFIGS["one head each"], dtype=dtype)
    made.model.embed_tokens.weight.data[7, 5] = torch.nan
    made.model.embed_tokens.weight.data[8, 5] = torch.inf
    text = torch.tensor([1, 7, 2, 8, 3])
    batch = Batch.pack([chain(text[i : i + 1], text[:0], torch.tensor([i])) for i in range(5)])
    for count in (1, 2, 3):
        with threads(count):
            output = made.forward_rows(batch, made.new_storage(16))
        assert output.likeliest is not None
        assert (output.likeliest >= 0).tolist() == [True, False, True, False, True]
        assert output.logits.isfinite().all(1).tolist() == [True, False, True, False, True]


@each_pass
def test_the_end_of_the_cache_is_read_no_further(dtype: torch.dtype) -> None:
    """Keys in the last slots, where 16 of them would reach beyond the storage."""
    made = model(dtype, "three share, biases")
    text = torch.randint(VOCABULARY, (23,), generator=torch.Generator().manual_seed(2))
    first = read(made, garbage(made), [chain(text, text[:0], torch.arange(23))])[0]
    last = read(made, garbage(made), [chain(text, text[:0], torch.arange(SLOTS - 23, SLOTS))])[0]
    assert first.same(last)


# --- the same ------------------------------------------------------------------------------------------------


@cache
def cases(dtype: torch.dtype, name: str, seed: int) -> tuple[list[Case], list[Seen]]:
    """Three texts and trees, and what plain decoding says of every row of theirs."""
    generator = torch.Generator().manual_seed(seed)
    made = [Case.random(generator) for _ in range(3)]
    return made, [case.plain(model(dtype, name)) for case in made]


def differ(found: list[Seen], expected: list[Seen]) -> list[int]:
    """The cases that are not as plain decoding has them."""
    return [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if not one.same(other)]


@each_model
def test_a_chain_is_plain_decoding(dtype: torch.dtype, name: str) -> None:
    """A path from root to leaf, read in one pass, in one pass behind its context, and with text to be read before."""
    made, expected = cases(dtype, name, 3)
    for case, plain in zip(made, expected, strict=True):
        path = case.path(len(case.parents) - 1)
        tokens = torch.cat([case.text, case.tokens[path]])
        length = case.text.shape[0]
        rows = [*range(length), *(length + node for node in path)]
        slots = torch.arange(tokens.shape[0])
        for held in {0, case.held, length}:
            storage = garbage(model(dtype, name))
            parts = [chain(tokens[:held], slots[:0], slots[:held])] if held else []
            parts += [chain(tokens[held:], slots[:held], slots[held:])]
            assert Seen.cat([read(model(dtype, name), storage, [part])[0] for part in parts]).same(plain[rows])


@each_model
@pytest.mark.parametrize("seed", [3, 4])
def test_a_tree_is_plain_decoding_of_each_path(dtype: torch.dtype, name: str, seed: int) -> None:
    """Alone and beside others, with slots in one run and scattered, with text still to be read before the root."""
    made, expected = cases(dtype, name, seed)
    for case, plain in zip(made, expected, strict=True):
        assert not differ(together(model(dtype, name), [case], torch.arange(SLOTS)), [plain])
    for number, block in enumerate((SLOTS, 16, 4, 1)):
        order = shuffled(block, torch.Generator().manual_seed(seed))
        assert not differ(together(model(dtype, name), made, order, more=(50, 1)[: number % 3]), expected)


@each_pass
def test_slots_that_only_look_like_a_run(dtype: torch.dtype) -> None:
    """The first and the last of 16 lie as if they were one, those between do not."""
    name = "one head each"
    text = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(5))
    order = torch.arange(40)
    order[[3, 9, 20, 30]] = order[[9, 3, 30, 20]]
    run = read(model(dtype, name), garbage(model(dtype, name)), [chain(text, text[:0], torch.arange(40))])
    assert not differ(read(model(dtype, name), garbage(model(dtype, name)), [chain(text, text[:0], order)]), run)


@each_pass
@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_nothing(dtype: torch.dtype, count: int) -> None:
    for name in ("two share, tied", "eight share, normed, wide"):
        made, expected = cases(dtype, name, 3)
        with threads(count):
            assert not differ(together(model(dtype, name), made, shuffled(16, torch.Generator())), expected)
            assert made[0].plain(model(dtype, name)).same(expected[0])


@each_model
def test_level_by_level_is_plain_decoding(dtype: torch.dtype, name: str) -> None:
    made, expected = cases(dtype, name, 3)
    for chosen in ([0], [1], [0, 1, 2]):
        found = levels(model(dtype, name), [made[index] for index in chosen])
        for index, own in zip(chosen, found, strict=True):
            nodes = expected[index][slice(made[index].text.shape[0], None)]
            assert torch.equal(own.logits, nodes.logits)
            assert torch.equal(own.cached, nodes.cached)


@each_pass
def test_many_random_trees(dtype: torch.dtype) -> None:
    """Small ones, at every distance from the borders of 16 and 32 keys."""
    name = "three share, biases"
    for seed in range(12):
        generator = torch.Generator().manual_seed(100 + seed)
        made = [Case.random(generator, longest=70, most=20, unread=40) for _ in range(3)]
        expected = [case.plain(model(dtype, name)) for case in made]
        assert not differ(together(model(dtype, name), made, shuffled((1, 16)[seed % 2], generator)), expected)


# --- the tests above can fail --------------------------------------------------------------------------------

Paths = tuple[Tensor, Tensor, Tensor]
right_path = reading._path


def with_a_sibling(segment: Segment) -> Paths:
    """One node sees another that comes before it and is not above it."""
    if segment.ancestors is None:
        return right_path(segment)
    seen = segment.ancestors.clone()
    hidden = (~seen).tril(-1).nonzero()
    if len(hidden):
        seen[hidden[-1, 0], hidden[-1, 1]] = True
    return right_path(replace(segment, ancestors=seen))


def without_the_parent(segment: Segment) -> Paths:
    if segment.ancestors is None or len(segment.ancestors) == 1:
        return right_path(segment)
    seen = segment.ancestors.clone()
    seen[-1, int(seen[-1, :-1].nonzero()[-1, 0])] = False
    return right_path(replace(segment, ancestors=seen))


def in_another_order(segment: Segment) -> Paths:
    """The same keys, from the leaf up to the root: right but for the order of sums, of which few roundings tell."""
    prefix, counts, tail = right_path(segment)
    return prefix, counts, torch.cat([part.flip(0) for part in torch.split(tail, counts.tolist())])


def one_key_short(segment: Segment) -> Paths:
    prefix, counts, tail = right_path(segment)
    prefix = prefix.clone()
    prefix[: prefix.shape[0] // 2] -= (prefix[: prefix.shape[0] // 2] > 1).long()
    return prefix, counts, tail


@each_pass
@pytest.mark.parametrize("fault", [with_a_sibling, without_the_parent, in_another_order])
def test_a_planted_fault_is_seen(
    dtype: torch.dtype, fault: Callable[[Segment], Paths], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sixteen share, touchy"
    made, expected = cases(dtype, name, 3)
    assert not differ(together(model(dtype, name), made, torch.arange(SLOTS)), expected)
    monkeypatch.setattr(reading, "_path", fault)
    assert differ(together(model(dtype, name), made, torch.arange(SLOTS)), expected)


@each_pass
def test_a_key_too_few_in_a_prompt_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "two share, tied"
    made, expected = cases(dtype, name, 3)
    monkeypatch.setattr(reading, "_path", one_key_short)
    case = max(made, key=lambda case: case.text.shape[0])
    text = case.text
    found = read(model(dtype, name), garbage(model(dtype, name)), [chain(text, text[:0], torch.arange(text.shape[0]))])
    assert differ(found, [expected[made.index(case)][slice(0, text.shape[0])]])


# --- texts ---------------------------------------------------------------------------------------------------


def requests() -> list[Request]:
    """Four greedy and four seeded ones, with prompts that repeat themselves."""
    generator = torch.Generator().manual_seed(6)
    made = []
    for number in range(8):
        words = torch.randint(4, VOCABULARY, (3 + 4 * number,), generator=generator).tolist()
        greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=number == 2)
        drawn = SamplingParams(
            temperature=0.3 + 0.2 * number, top_k=(0, 20)[number % 4 // 2], seed=number, max_tokens=26
        )
        made.append(Request(words * 3, drawn if number % 2 else greedy))
    return made


@cache
def plain_texts(dtype: torch.dtype) -> list[list[list[int]]]:
    """Each alone and without drafts."""
    target = model(dtype, "two share, tied")
    setup = Setup(target, SLOTS, lambda name: target)
    return [drain(Engine(target, make_drafter("none", setup), slots=SLOTS), [request])[0] for request in requests()]


@each_pass
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("ngram", {"candidates": 3, "min_match": 1}),
        ("recycling", {}),
        ("draft_model", {"model": "twin", "tree": "fixed:3,2,1"}),
        ("draft_model", {"model": "twin", "tree": "3,2,2"}),
        ("draft_model", {"model": "other", "tree": "dynamic:6,4,30"}),
        ("draft_model", {"model": "twin", "tree": "5"}),
    ],
    ids=str,
)
def test_texts_in_a_batch_are_those_of_plain_decoding_alone(
    dtype: torch.dtype, drafter: str, options: dict[str, Any]
) -> None:
    """Not only alike: greedy texts need no tolerance, and seeded ones draw from the very same laws."""
    target = model(dtype, "two share, tied")
    drafts = {"twin": target, "other": model(dtype, "one head each")}
    setup = Setup(target, SLOTS, lambda name: drafts[name])
    steps: list[StepRecord] = []
    engine = Engine(target, make_drafter(drafter, setup, options), slots=SLOTS, max_batch=8, trace=steps.append)
    assert drain(engine, requests()) == plain_texts(dtype)
    if options.get("model") == "twin":
        assert len(steps) < 26, "what the target itself drafts is taken"
