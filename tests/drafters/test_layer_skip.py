"""Layers of the target draft in its own cache: nothing of it is changed, no text is, and all layers together are always
right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget, SharesCache
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.layer_choice import Choice
from forerun.drafters.layer_skip import LayerSkip, SomeLayers
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer
from tests.drafters.contract import REQUESTS
from tests.drafters.models import accept_some, paths_of, read_to_roots, sequence, setup, tiny
from tests.engine.tiny import drain, tiny_model

AMPLE = Budget(64, 16)
TREES = ("4", "2,2,1", "fixed:3,2", "dynamic:3,3,8")


def fixed_length(model: Transformer, layers: tuple[int, ...], tree: str = "4") -> LayerSkip:
    return LayerSkip(model, Choice(layers), TreeSpec.parse(tree), adaptive=False)


def texts_in_cache(model: Transformer, slots: int = 1024) -> tuple[list[Sequence], KVCache]:
    texts = [sequence(number, params, length=9 + 5 * number) for number, params in enumerate(REQUESTS)]
    cache = KVCache(model.new_storage(slots))
    read_to_roots(model, cache, texts)
    return texts, cache


def state(cache: KVCache) -> list[torch.Tensor]:
    held = torch.cat([cache.slots(number)[0] for number in sorted(cache.holders)])
    return [tensor[held].clone() for tensor in (*cache.storage.keys, *cache.storage.values)]


# --- the cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
def test_the_targets_cache_is_left_as_it_was(tree: str, layers: tuple[int, ...]) -> None:
    model = tiny()
    texts, cache = texts_in_cache(model)
    drafter = fixed_length(model, layers, tree)
    drafter.share(cache)
    before, free = state(cache), list(cache._free)
    tree_ = drafter.draft(texts, [AMPLE] * len(texts))
    assert tree_.size > 3
    cache.check_integrity()
    assert cache._free == free  # in their order: the target's pass gets the blocks that it would have had
    assert all(cache.slots(text.id)[1].numel() == 0 for text in texts)
    assert all(torch.equal(one, other) for one, other in zip(before, state(cache), strict=True))


def test_a_pass_that_breaks_off_gives_its_rows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    texts, cache = texts_in_cache(model)
    drafter = fixed_length(model, (0,))
    drafter.share(cache)

    def broken(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SomeLayers, "forward_rows", broken)
        with pytest.raises(KeyboardInterrupt):
            drafter.draft(texts, [AMPLE] * len(texts))
    cache.check_integrity()
    assert all(cache.slots(text.id)[1].numel() == 0 for text in texts)
    assert drafter.draft(texts, [AMPLE] * len(texts)).size == 5


def test_who_has_no_room_or_is_not_read_sits_out() -> None:
    model = tiny()
    one, two, three = (sequence(number, SamplingParams(temperature=0.0), length=16) for number in range(3))
    cache = KVCache(model.new_storage(48))  # three blocks
    read_to_roots(model, cache, [one, two])  # 15 rows each: a root fits, more needs a block
    drafter = fixed_length(model, (0, 1))
    drafter.share(cache)
    tree = drafter.draft([one, two, three], [AMPLE] * 3)
    assert [len(paths_of(tree, row)) for row in range(3)] == [5, 1, 1]
    tree = drafter.draft([one, two, three], [Budget(1, 1)] * 3)  # the root's row only
    assert [len(paths_of(tree, row)) for row in range(3)] == [2, 2, 1]
    cache.check_integrity()
    one.commit([4])  # the target has not read the token before
    tree = drafter.draft([one], [AMPLE])
    assert tree.size == 1


# --- what is drafted ------------------------------------------------------------------------------------------


def skipped_greedily(model: Transformer, layers: tuple[int, ...], text: list[int], count: int) -> list[int]:
    """Slowly: the whole model reads all but the last token, and the layers go on behind that."""
    storage = model.new_storage(len(text) + count)
    nothing, places = torch.zeros(0, dtype=torch.int64), torch.arange(len(text) + count)
    own = slice(0, len(text) - 1)
    segment = Segment(0, torch.tensor(text[:-1]), places[own], None, nothing, places[own], 0)
    model.forward_rows(Batch.pack([segment]), storage)
    written = list(text)
    for at in range(len(text) - 1, len(text) - 1 + count):
        token = torch.tensor(written[at : at + 1])
        row = Segment(0, token, places[at : at + 1], None, places[:at], places[at : at + 1], 1)
        written.append(int(model.forward_rows(Batch.pack([row]), storage, only=layers).logits.argmax()))
    return written[len(text) :]


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (0, 1, 2), ()])
def test_a_chain_is_what_these_layers_say(layers: tuple[int, ...]) -> None:
    model, chosen = tiny_model(), random.Random(1)
    texts = [sequence(number, SamplingParams(temperature=0.0), length=6 + 7 * number) for number in range(3)]
    cache = KVCache(model.new_storage(512))
    drafter = fixed_length(model, layers)
    drafter.share(cache)
    for _ in range(4):
        read_to_roots(model, cache, texts)
        tree = drafter.draft(texts, [AMPLE] * 3)
        for row, text in enumerate(texts):
            assert list(paths_of(tree, row)[-1]) == skipped_greedily(model, layers, text.tokens, 4)
            text.commit(accept_some(tree, row, chosen))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"seed": 3}])
def test_all_layers_are_always_right(tree: str, kind: dict[str, Any]) -> None:
    target = tiny_model()
    engine = Engine(target, fixed_length(target, (0, 1, 2), tree), slots=512)
    params = SamplingParams(max_tokens=60, ignore_eos=True, **kind)
    drain(engine, [Request([4, 5, number], params) for number in range(3)])
    assert engine.statistics.acceptance_by_depth[0] == 1.0
    assert min(engine.statistics.acceptance_by_depth) == 1.0 or tree.startswith(("fixed", "dynamic"))


# --- through the engine ---------------------------------------------------------------------------------------


def requests() -> list[Request]:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(seed=5, max_tokens=30),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=30),
        SamplingParams(seed=6, temperature=0.8, top_p=0.8, presence_penalty=0.4, max_tokens=30),
        SamplingParams(seed=7, top_k=4, n=2, max_tokens=20),
    ]
    return [Request([7, 8, 9, 7, 8, number], params) for number, params in enumerate(kinds)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layers", ["0,1", "0-2", "1"])
def test_texts_are_those_of_plain_decoding(tree: str, layers: str) -> None:
    target = tiny_model()
    plain = drain(Engine(target, make_drafter("none", Setup(target, 512, no_model)), slots=512), requests())
    for slots in (512, 144):  # in the small one texts step back
        for adaptive in (True, False):
            options = {"layers": layers, "tree": tree, "adaptive": adaptive}
            drafter = make_drafter("layer_skip", Setup(target, slots, no_model), options)
            engine = Engine(target, drafter, slots=slots)
            assert drain(engine, requests()) == plain
            assert engine.statistics.preemptions > 0 or slots == 512
            assert adaptive or engine.statistics.acceptance_by_depth


def test_an_adaptive_engine_alone_says_how_much_is_drafted() -> None:
    """Two that try now and then, and each only when the other does, would never learn anything."""
    for adaptive in (False, True):
        target = tiny_model()
        setup = Setup(target, 512, no_model, adaptive=adaptive)
        drafter = make_drafter("layer_skip", setup, {"layers": "1", "tree": "2"})  # a layer that is never right
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        engine = Engine(target, drafter, slots=512)
        drain(engine, [Request([4, 5], params)])
        offered = engine.statistics.offered_by_depth
        assert (sum(offered) > 100) == adaptive


def test_beside_another_drafter() -> None:
    target = tiny_model()
    plain = drain(Engine(target, make_drafter("none", Setup(target, 512, no_model)), slots=512), requests())
    options = {"first": "ngram", "second": "layer_skip", "second_options": "layers=0-2,tree=fixed:2,1,adaptive=false"}
    drafter = make_drafter("combine", Setup(target, 512, no_model), options)
    engine = Engine(target, drafter, slots=512)
    assert drain(engine, requests()) == plain
    assert engine.statistics.tokens_per_pass > 2  # its second drafter is always right


def no_model(name: str) -> TargetModel:
    raise AssertionError("it needs no other model")


def engine_with(layers: tuple[int, ...], cost: float, acceptance: float = 0.9, weight: int = 4) -> Engine:
    target = tiny_model()
    choice = Choice(layers, acceptance, weight, cost, {1: 1.0, 16: 1.1})
    return Engine(target, LayerSkip(target, choice, TreeSpec.parse("4")), slots=512)


def test_hopeless_layers_draft_nothing_in_the_end() -> None:
    engine = engine_with((1,), cost=0.5)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    drain(engine, [Request([4, 5], params)])
    first = sum(engine.statistics.offered_by_depth)
    steps = engine.statistics.target_passes
    drain(engine, [Request([6, 7], params)])
    assert first < 20
    assert sum(engine.statistics.offered_by_depth) - first <= 2 + (engine.statistics.target_passes - steps) // 8


def test_good_layers_are_found_out() -> None:
    engine = engine_with((0, 1, 2), cost=0.2, acceptance=0.1, weight=32)  # as if a calibration had been wrong
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    drain(engine, [Request([4, number], params) for number in range(5)])
    drain(engine, [Request([6, 7], params)])
    before = engine.statistics.target_passes
    drain(engine, [Request([8, 9], params)])
    assert engine.statistics.target_passes - before < 50


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "0,x"}, "layers is '0,x': write the layers that draft, as in \"0,1,5-9\""),
        ({"layers": "3-1"}, "layers is '3-1': write"),
        ({"layers": "0,,1"}, "layers is '0,,1': write"),
        ({"layers": "-1"}, "layers is '-1': write"),
        ({"layers": "0,0-1"}, "name each layer once"),
        ({"layers": "0-2"}, "names layer 2: the layers of this model are 0 to 1"),
        ({"tree": "0"}, "below 1"),
        ({"adaptive": "maybe"}, "adaptive is 'maybe': give true or false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("layer_skip", setup(), options)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the adapter for this model cannot: choose another drafter"):
        make_drafter("layer_skip", setup(SomeLayers(tiny(), (0,))))


def test_it_takes_the_targets_cache() -> None:
    assert isinstance(make_drafter("layer_skip", setup()), SharesCache)
    assert not isinstance(make_drafter("ngram", setup()), SharesCache)
