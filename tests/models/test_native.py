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
from forerun.models.native import amx, reading
from forerun.models.transformer import Transformer
from tests.engine.tiny import drain
from tests.models.rows import (
    CONFIGS,
    SLOTS,
    VOCABULARY,
    Case,
    Seen,
    chain,
    garbage,
    levels,
    read,
    shuffled,
    threads,
    tiny,
    together,
)

pytestmark = pytest.mark.skipif(amx.library() is None, reason="no AMX, or no compiler")


@cache
def model(name: str) -> Transformer:
    made = tiny(CONFIGS[name])
    made.prepare()
    assert made.amx is not None
    return made


@cache
def in_pytorch(name: str, dtype: torch.dtype) -> Transformer:
    made = tiny(CONFIGS[name], dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "supports", lambda config: False)
        made.prepare()
    return made


def error(found: Tensor, right: Tensor) -> float:
    """The root mean square of what is wrong, as a part of what is right."""
    return float((found.float() - right).square().mean().sqrt() / right.square().mean().sqrt())


# --- right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunks", [[1], [100], [33, 1, 17, 40, 9], [16, 16, 16, 32]], ids=str)
def test_it_is_as_near_to_float32_as_pytorch_in_bfloat16(name: str, chunks: list[int]) -> None:
    text = torch.randint(VOCABULARY, (sum(chunks),), generator=torch.Generator().manual_seed(1))
    slots = torch.arange(text.shape[0])
    results = []
    for each in (in_pytorch(name, torch.float32), model(name), in_pytorch(name, torch.bfloat16)):
        storage = each.new_storage(128)
        ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
        parts = [chain(text[a:b], slots[:a], slots[a:b]) for a, b in pairwise(ends)]
        results.append(Seen.cat([read(each, storage, [part])[0] for part in parts]))
    right, own, theirs = results
    for field in ("logits", "hidden", "cached"):
        wrong = error(vars(own)[field], vars(right)[field])
        assert wrong < 0.03
        assert wrong < 1.5 * error(vars(theirs)[field], vars(right)[field])


@pytest.mark.parametrize("name", ["two share, tied", "eight share, normed, wide"])
def test_some_layers_only(name: str) -> None:
    text = torch.arange(40)
    batch = Batch.pack([chain(text, text[:0], text)])
    for only in ([0], [1], []):
        storages = [each.new_storage(64) for each in (model(name), in_pytorch(name, torch.float32))]
        own = model(name).forward_rows(batch, storages[0], layers=(1,), only=only)
        right = in_pytorch(name, torch.float32).forward_rows(batch, storages[1], layers=(1,), only=only)
        assert error(own.logits, right.logits) < 0.015
        assert list(own.features) == [1]
        assert error(own.features[1], right.features[1]) < 0.015
        for layer in range(len(CONFIGS[name].layers)):
            assert bool(storages[0].keys[layer].any()) == (layer in only), "a skipped layer writes nothing"


@pytest.mark.parametrize("wanted", [0, 1, 5, 40])
def test_only_the_wanted_rows_get_logits(wanted: int) -> None:
    name = "one head each"
    text = torch.arange(40)
    whole = read(model(name), garbage(model(name)), [chain(text, text[:0], text)])[0]
    part = replace(chain(text, text[:0], text), logits=wanted)
    other = replace(chain(text[:3], text[:0], text[:3] + 40), logits=2)
    storage = garbage(model(name))
    alone = model(name).forward_rows(Batch.pack([part]), storage)
    assert torch.equal(alone.logits, whole.logits[40 - wanted :])
    assert not alone.features
    assert storage.whole is not None
    assert torch.equal(storage.whole[:, :40].transpose(0, 1), whole.cached)
    both = model(name).forward_rows(Batch.pack([part, other]), garbage(model(name))).logits
    assert torch.equal(both, torch.cat([whole.logits[40 - wanted :], whole.logits[1:3]]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_likeliest_token(count: int) -> None:
    """The first of equals, whichever threads found them; none where a row holds what is no number."""
    text = torch.arange(20)
    for broken in (None, 2, 50):
        made = tiny(CONFIGS["one head each"], seed=8)
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


def test_the_end_of_the_cache_is_read_no_further() -> None:
    """Keys in the last slots, where 16 of them would reach beyond the storage."""
    name = "three share, biases"
    text = torch.randint(VOCABULARY, (23,), generator=torch.Generator().manual_seed(2))
    first = read(model(name), garbage(model(name)), [chain(text, text[:0], torch.arange(23))])[0]
    last = read(model(name), garbage(model(name)), [chain(text, text[:0], torch.arange(SLOTS - 23, SLOTS))])[0]
    assert first.same(last)


# --- the same ------------------------------------------------------------------------------------------------


@cache
def cases(name: str, seed: int) -> tuple[list[Case], list[Seen]]:
    """Three texts and trees, and what plain decoding says of every row of theirs."""
    generator = torch.Generator().manual_seed(seed)
    made = [Case.random(generator) for _ in range(3)]
    return made, [case.plain(model(name)) for case in made]


def differ(found: list[Seen], expected: list[Seen]) -> list[int]:
    """The cases that are not as plain decoding has them."""
    return [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if not one.same(other)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_is_plain_decoding(name: str) -> None:
    """A path from root to leaf, read in one pass, in one pass behind its context, and with text to be read before."""
    made, expected = cases(name, 3)
    for case, plain in zip(made, expected, strict=True):
        path = case.path(len(case.parents) - 1)
        tokens = torch.cat([case.text, case.tokens[path]])
        length = case.text.shape[0]
        rows = [*range(length), *(length + node for node in path)]
        slots = torch.arange(tokens.shape[0])
        for held in {0, case.held, length}:
            storage = garbage(model(name))
            parts = [chain(tokens[:held], slots[:0], slots[:held])] if held else []
            parts += [chain(tokens[held:], slots[:held], slots[held:])]
            assert Seen.cat([read(model(name), storage, [part])[0] for part in parts]).same(plain[rows])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_tree_is_plain_decoding_of_each_path(name: str, seed: int) -> None:
    """Alone and beside others, with slots in one run and scattered, with text still to be read before the root."""
    made, expected = cases(name, seed)
    for case, plain in zip(made, expected, strict=True):
        assert not differ(together(model(name), [case], torch.arange(SLOTS)), [plain])
    for number, block in enumerate((SLOTS, 16, 4, 1)):
        order = shuffled(block, torch.Generator().manual_seed(seed))
        assert not differ(together(model(name), made, order, more=(50, 1)[: number % 3]), expected)


def test_slots_that_only_look_like_a_run() -> None:
    """The first and the last of 16 lie as if they were one, those between do not."""
    name = "one head each"
    text = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(5))
    order = torch.arange(40)
    order[[3, 9, 20, 30]] = order[[9, 3, 30, 20]]
    run = read(model(name), garbage(model(name)), [chain(text, text[:0], torch.arange(40))])
    assert not differ(read(model(name), garbage(model(name)), [chain(text, text[:0], order)]), run)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_nothing(count: int) -> None:
    for name in ("two share, tied", "eight share, normed, wide"):
        made, expected = cases(name, 3)
        with threads(count):
            assert not differ(together(model(name), made, shuffled(16, torch.Generator())), expected)
            assert made[0].plain(model(name)).same(expected[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_level_by_level_is_plain_decoding(name: str) -> None:
    made, expected = cases(name, 3)
    for chosen in ([0], [1], [0, 1, 2]):
        found = levels(model(name), [made[index] for index in chosen])
        for index, own in zip(chosen, found, strict=True):
            nodes = expected[index][slice(made[index].text.shape[0], None)]
            assert torch.equal(own.logits, nodes.logits)
            assert torch.equal(own.cached, nodes.cached)


def test_many_random_trees() -> None:
    """Small ones, at every distance from the borders of 16 and 32 keys."""
    name = "three share, biases"
    for seed in range(12):
        generator = torch.Generator().manual_seed(100 + seed)
        made = [Case.random(generator, longest=70, most=20, unread=40) for _ in range(3)]
        expected = [case.plain(model(name)) for case in made]
        assert not differ(together(model(name), made, shuffled((1, 16)[seed % 2], generator)), expected)


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


@pytest.mark.parametrize("fault", [with_a_sibling, without_the_parent, in_another_order])
def test_a_planted_fault_is_seen(fault: Callable[[Segment], Paths], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sixteen share, touchy"
    made, expected = cases(name, 3)
    assert not differ(together(model(name), made, torch.arange(SLOTS)), expected)
    monkeypatch.setattr(reading, "_path", fault)
    assert differ(together(model(name), made, torch.arange(SLOTS)), expected)


def test_a_key_too_few_in_a_prompt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "two share, tied"
    made, expected = cases(name, 3)
    monkeypatch.setattr(reading, "_path", one_key_short)
    case = max(made, key=lambda case: case.text.shape[0])
    text = case.text
    found = read(model(name), garbage(model(name)), [chain(text, text[:0], torch.arange(text.shape[0]))])
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
def plain_texts() -> list[list[list[int]]]:
    """Each alone and without drafts."""
    target = model("two share, tied")
    setup = Setup(target, SLOTS, lambda name: target)
    return [drain(Engine(target, make_drafter("none", setup), slots=SLOTS), [request])[0] for request in requests()]


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
def test_texts_in_a_batch_are_those_of_plain_decoding_alone(drafter: str, options: dict[str, Any]) -> None:
    """Not only alike: greedy texts need no tolerance, and seeded ones draw from the very same laws."""
    target = model("two share, tied")
    drafts = {"twin": target, "other": model("one head each")}
    setup = Setup(target, SLOTS, lambda name: drafts[name])
    steps: list[StepRecord] = []
    engine = Engine(target, make_drafter(drafter, setup, options), slots=SLOTS, max_batch=8, trace=steps.append)
    assert drain(engine, requests()) == plain_texts()
    if options.get("model") == "twin":
        assert len(steps) < 26, "what the target itself drafts is taken"
