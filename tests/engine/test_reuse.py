"""What an ended text leaves in the cache: found by who begins alike, gone when its room is needed, never wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.drafters.drafter import Drafter
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.cache import CacheFullError, KVCache
from forerun.models.heads.feature_head import frozen_head, new_head
from forerun.models.heads.side_heads import new_side_heads
from forerun.models.storage import LayerShape, Storage
from forerun.models.transformer import Transformer
from tests.engine.tiny import Nothing, Oracle, RandomTrees, drain, tiny_model

BLOCK = 4


def cache_of(blocks: int) -> KVCache:
    cache = KVCache(Storage.make([LayerShape(1, 2, 2)] * 2, blocks * BLOCK, torch.float32, "cpu"), BLOCK)
    assert cache.storage.whole is not None
    return cache


def fill(cache: KVCache, sequence: int, tokens: list[int]) -> None:
    """Each row holds its token."""
    start = cache.committed(sequence)
    cache.reserve(sequence, len(tokens) - start)
    for layer in range(2):
        values = torch.tensor(tokens[start:], dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
        cache.storage.write(layer, cache.slots(sequence)[1], values, values)
    cache.commit({sequence: range(len(tokens) - start)})


def held(cache: KVCache, sequence: int) -> list[int]:
    slots = cache.slots(sequence)[0]
    for tensor in (*cache.storage.keys, *cache.storage.values):
        assert torch.equal(tensor[slots], cache.storage.keys[0][slots])
    return [int(value) for value in cache.storage.keys[0][slots][:, 0, 0]]


def test_a_text_goes_on_where_another_ended() -> None:
    cache = cache_of(8)
    fill(cache, 0, list(range(10)))
    cache.retire(0, [*range(10), 99])
    assert (cache.free_blocks, cache.holders) == (8, set())
    assert cache.adopt(1, [*range(10), 99, 5]) == 10
    assert held(cache, 1) == list(range(10))
    assert cache.free_blocks == 5
    cache.check_integrity()
    fill(cache, 1, [*range(10), 99, 5])
    assert held(cache, 1) == [*range(10), 99, 5]
    assert cache.adopt(2, [*range(10), 7]) == 0  # it is the other's now


def test_rows_past_the_end_of_a_text_are_not_kept() -> None:
    """An accepted path may run past an end token."""
    cache = cache_of(8)
    fill(cache, 0, list(range(12)))
    cache.retire(0, list(range(9)))
    cache.check_integrity()
    assert cache.adopt(1, list(range(12))) == 9
    assert held(cache, 1) == list(range(9))


def test_who_only_begins_alike_gets_a_copy() -> None:
    cache = cache_of(8)
    fill(cache, 0, list(range(10)))
    cache.retire(0, list(range(10)))
    for sequence in (1, 2):
        assert cache.adopt(sequence, [*range(6), 77, 78]) == 6
        cache.check_integrity()
    fill(cache, 1, [*range(6), 77, 78])
    fill(cache, 2, [*range(6), 88, 89])
    assert held(cache, 1) == [*range(6), 77, 78]
    assert held(cache, 2) == [*range(6), 88, 89]
    assert cache.adopt(3, [*range(10), 1]) == 10  # the first is still there, and is taken
    assert held(cache, 3) == list(range(10))


def test_the_last_token_is_never_found() -> None:
    cache = cache_of(8)
    fill(cache, 0, list(range(8)))
    cache.retire(0, list(range(8)))
    assert cache.adopt(1, list(range(8))) == 7
    cache.check_integrity()


def test_short_or_strange_beginnings_are_not_found() -> None:
    cache = cache_of(8)
    fill(cache, 0, list(range(8)))
    cache.retire(0, list(range(8)))
    assert cache.adopt(1, [0, 1, 2, 9, 9, 9, 9]) == 0
    fill(cache, 2, [5, 6])
    cache.retire(2, [5, 6])
    assert cache.adopt(3, [5, 6, 7]) == 0
    cache.check_integrity()


def test_what_was_left_goes_when_room_is_needed_the_oldest_first() -> None:
    cache = cache_of(6)
    for sequence, start in enumerate((0, 100, 200)):
        fill(cache, sequence, list(range(start, start + 8)))
        cache.retire(sequence, list(range(start, start + 8)))
    assert cache.free_blocks == 6
    fill(cache, 3, list(range(300, 310)))  # three blocks: two texts go
    assert cache.free_blocks == 3
    assert cache.adopt(4, [*range(8), 1]) == 0
    assert cache.adopt(5, [*range(100, 108), 1]) == 0
    assert cache.adopt(6, [*range(200, 208), 1]) == 8
    with pytest.raises(CacheFullError):
        cache.reserve(7, 5)
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)
    cache = cache_of(12)
    texts: dict[int, list[int]] = {}
    for number in range(300):
        if texts and (draw.random() < 0.4 or cache.free_blocks < 4):
            sequence = draw.choice(sorted(texts))
            assert held(cache, sequence) == texts[sequence]
            text = texts.pop(sequence)
            if draw.random() < 0.9:
                cache.retire(sequence, text)
            else:
                cache.free(sequence)
        else:
            text = [draw.randrange(2) for _ in range(draw.randint(1, 14))]
            found = cache.adopt(number, text)
            assert found < len(text)
            if found:
                assert held(cache, number) == text[:found]
            fill(cache, number, text)
            texts[number] = text
        cache.check_integrity()
        unused = set(cache.unused_slots().tolist())
        assert len(unused) >= cache.storage.slots - 14 * (len(texts) + 12)


def head_drafter(method: str, model: Transformer, slots: int) -> FeatureDrafter:
    head = frozen_head(new_head(method, model), model)
    generator = torch.Generator().manual_seed(2)
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):  # so that what a row sees counts
        weight = head.get_parameter(f"model.layers.0.self_attn.{part}.weight")
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return FeatureDrafter(head, slots, TreeSpec.parse("dynamic:2,3,5"), model.vocab_size)


def head_drafter_of(engine: Engine) -> FeatureDrafter:
    assert isinstance(engine.drafter, FeatureDrafter)
    return engine.drafter


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_head_drafts_as_if_it_had_read_all(method: str) -> None:
    """Of a conversation that goes on, of one that begins alike, and of one that is all there but for its last token."""
    model = tiny_model()
    first = list(range(5, 45))
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    told: list[dict[tuple[int, int], tuple[list[int], list[int]]]] = []
    for reuse in (True, False):
        trees: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

        def noted(record: StepRecord, trees: dict[tuple[int, int], tuple[list[int], list[int]]] = trees) -> None:
            for part in record.sequences:
                if len(part.tokens) > 1:
                    trees[part.request, part.position] = part.tokens, part.parents

        engine = Engine(model, head_drafter(method, model, 512), slots=512, trace=noted)
        engine.scheduler.reuse = reuse
        engine.scheduler.resume = head_drafter_of(engine).resume
        ((text,),) = drain(engine, [Request(list(first), params)])
        for talk in ([*first, *text, 7, 8, 9], [*first[:30], 3, 4], [*first, *text[:5]]):
            drain(engine, [Request(list(talk), params)])
            head_drafter_of(engine).ahead.cache.check_integrity()
        assert (engine.scheduler.reused > 80) == reuse
        told.append(trees)
    assert told[0] == told[1]
    assert len(told[0]) > 20


@pytest.mark.parametrize("slots", [1024, 160])
@pytest.mark.parametrize("drafts", ["none", "random", "right", "medusa", "eagle3"])
def test_a_conversation_reads_only_what_is_new(slots: int, drafts: str) -> None:
    """With a cache of 160 tokens texts have to step back for each other. Right drafts run past the ends of texts."""
    model = tiny_model()
    plain = Engine(model, Nothing(), slots=1024)
    hints: dict[tuple[int, ...], list[int]] = {}
    drafters: dict[str, Drafter] = {
        "none": Nothing(),
        "random": RandomTrees(1),
        "right": Oracle(hints, right=True),
        "medusa": SideDrafter(new_side_heads("medusa", model, 2), TreeSpec.parse("2"), model.vocab_size),
        "eagle3": head_drafter("eagle3", model, slots),
    }
    engine = Engine(model, drafters[drafts], slots=slots, max_batch=4)
    engine.scheduler.reuse = True
    if drafts == "eagle3":
        engine.scheduler.resume = head_drafter_of(engine).resume
    draw = random.Random(5)
    talks = [[draw.randrange(4, 50) for _ in range(20)] for _ in range(5)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    for turn in range(3):
        rows, drafted = engine.statistics.rows, engine.statistics.drafted
        longer = replace(params, max_tokens=20)
        for talk, (text,) in zip(talks, drain(plain, [Request(list(talk), longer) for talk in talks]), strict=True):
            hints[tuple(talk)] = text
        stops = tuple({text[9] for text in hints.values()}) if drafts == "right" else ()
        requests = [Request(list(talk), replace(params, stop_token_ids=stops)) for talk in talks]
        expected = drain(plain, requests)
        assert drain(engine, requests) == expected
        if turn and slots == 1024 and drafts == "none":
            assert engine.statistics.rows - rows <= 5 * (12 + 5)  # twelve tokens each, and five that are new
        assert (engine.statistics.drafted > drafted) == (drafts != "none")
        talks = [
            talk + text + [draw.randrange(4, 50) for _ in range(4)]
            for talk, (text,) in zip(talks, expected, strict=True)
        ]
    assert engine.scheduler.reused > (100 if slots == 1024 else 0)
