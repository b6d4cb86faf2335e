"""The cache against a plain list of tokens per sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels.step import move_rows
from forerun.models.cache import CacheFullError, KVCache
from forerun.models.storage import LayerShape, Storage, padded

BLOCK = 4


def make(blocks: int) -> KVCache:
    return KVCache(Storage.make([LayerShape(1, 2, 3)] * 2, blocks * BLOCK, torch.float32, "cpu"), BLOCK)


def write(cache: KVCache, sequence: int, numbers: list[int]) -> None:
    _, slots = cache.slots(sequence)
    for layer in (0, 1):
        keys = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 1, 2) + layer
        values = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 1, 3) - layer
        cache.storage.write(layer, slots, keys, values)


def read(cache: KVCache, sequence: int) -> list[int]:
    slots, _ = cache.slots(sequence)
    keys = [cache.storage.keys[layer][slots, 0, 0] - layer for layer in (0, 1)]
    values = [cache.storage.values[layer][slots, 0, 2] + layer for layer in (0, 1)]
    for other in (keys[1], *values):
        assert torch.equal(keys[0], other)
    return [int(number) for number in keys[0].tolist()]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_it_holds_what_was_kept_and_nothing_else(data: st.DataObject) -> None:
    cache = make(blocks=12)
    texts: dict[int, list[int]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 25))):
        chosen = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
        action = data.draw(st.sampled_from(["pass", "pass", "pass", "free", "trim", "abandon"]))
        if action == "free":
            cache.free(chosen[0])
            texts.pop(chosen[0], None)
        elif action == "trim" and chosen[0] in texts:
            left = data.draw(st.integers(0, len(texts[chosen[0]])))
            cache.trim(chosen[0], left)
            del texts[chosen[0]][left:]
        else:
            kept: dict[int, list[int]] = {}
            for sequence in chosen:
                rows = data.draw(st.integers(1, 9))
                before = cache.free_blocks
                needed = cache.blocks_for(sequence, rows)
                try:
                    cache.reserve(sequence, rows)
                except CacheFullError:
                    assert needed > before
                    assert cache.free_blocks == before
                    continue
                assert cache.free_blocks == before - needed
                write(cache, sequence, list(range(number, number + rows)))
                kept[sequence] = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
                if action == "pass":
                    texts.setdefault(sequence, []).extend(number + row for row in kept[sequence])
                number += rows
            cache.check_integrity()
            if action == "pass":
                cache.commit(kept)
            else:
                cache.abandon()
        cache.check_integrity()
        unused = cache.unused_slots()
        for tensor in (*cache.storage.keys, *cache.storage.values):
            tensor[unused] = -1.0
        for sequence, text in texts.items():
            assert read(cache, sequence) == text
            assert cache.committed(sequence) == len(text)
        assert cache.holders >= set(texts)
    for sequence in list(cache.holders):
        cache.free(sequence)
    assert cache.free_blocks == cache.total_blocks
    assert cache.used == 0


def test_spare_rows_fit_and_one_more_does_not() -> None:
    cache = make(blocks=5)
    cache.reserve(0, 6)
    cache.commit({0: range(6)})
    for rows in range(1, 5):
        free = cache.free_blocks - cache.blocks_for(0, rows)
        for blocks in range(free + 1):
            spare = cache.spare_rows(0, rows, blocks)
            assert cache.blocks_for(0, rows + spare) == cache.blocks_for(0, rows) + blocks
            assert cache.blocks_for(0, rows + spare + 1) == cache.blocks_for(0, rows) + blocks + 1


def test_damage_is_seen() -> None:
    cache = make(blocks=4)
    cache.reserve(0, 5)
    cache.commit({0: range(5)})
    cache.check_integrity()
    entry = cache._entries[0]
    entry.blocks.append(cache._free[-1])
    with pytest.raises(AssertionError, match="two"):
        cache.check_integrity()
    entry.blocks.pop()
    cache._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        cache.check_integrity()


def test_a_cache_needs_a_block() -> None:
    with pytest.raises(ValueError, match="too small"):
        KVCache(Storage.make([LayerShape(1, 1, 1)], 3, torch.float32, "cpu"), BLOCK)


@pytest.mark.parametrize("longest", [3, 20])
def test_a_device_moves_the_same_rows_in_groups_of_few_sizes(longest: int) -> None:
    shape = LayerShape(2, 4, 4)
    storage = Storage.make([shape] * 3, 200, torch.float32, "cpu")
    assert storage.whole is not None
    storage.whole.copy_(torch.randn(storage.whole.shape))
    texts = [
        ([5, 7, 8], [4, 5, 6]),
        ([50], [40]),
        (list(range(101, 101 + longest)), list(range(100, 100 + longest))),
    ]
    groups = torch.tensor(padded(texts))
    assert groups.shape == (2, 3, 16 if longest <= 16 else 32)
    moved = storage.whole.clone()
    move_rows(moved, *groups)
    storage.move(texts)
    assert storage.whole.equal(moved)
