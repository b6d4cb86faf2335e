"""Which layers draft: written by hand, guessed, or searched for and kept on disk for this very model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget
from forerun.drafters.find import make_drafter
from forerun.drafters.layer_choice import Choice, guessed, load, parse_layers, place, save, share, write_layers
from forerun.drafters.layer_search import Exam, calibrate, promise
from forerun.drafters.layer_skip import LayerSkip
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.cache import KVCache
from forerun.models.config import Layer
from forerun.models.store import Store
from forerun.models.transformer import Transformer
from tests.drafters.models import read_to_roots, setup, slow_logits, tiny
from tests.engine.tiny import CONFIG, VOCABULARY, tiny_model

FOUND = Choice((0,), 0.6, 32, 0.4, {1: 1.0, 4: 1.1}, 1.2)


def deep_model(layers: int, useless: set[int]) -> Transformer:
    """Useless layers add nothing to what passes through them."""
    model = Transformer(replace(CONFIG, layers=(Layer(),) * layers))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4 + ("norm" in name)
        if any(f"layers.{layer}." in name for layer in useless) and ("o_proj" in name or "down_proj" in name):
            parameter.data.zero_()
    return model.requires_grad_(False)


def some_texts(count: int = 4, length: int = 40) -> list[tuple[list[int], int]]:
    chosen = torch.Generator().manual_seed(1)
    return [(torch.randint(VOCABULARY, (length,), generator=chosen).tolist(), 5) for _ in range(count)]


def made_up(works: list[object], head: float, chain: float) -> list[float]:
    """Times of passes over 1, 2, 4, 8 and 16 rows and through no layer, or of a pass and a chain of four."""
    return [1.0] * 5 + [head] if len(works) == 6 else [1.0, chain]


def quiet(doing: str, done: int, total: int) -> None: ...


# --- written and guessed ----------------------------------------------------------------------------------------


def test_layers_are_written_as_ranges() -> None:
    assert parse_layers("0,1,5-9") == parse_layers(" 5-9, 0 ,1") == (0, 1, 5, 6, 7, 8, 9)
    assert write_layers((0, 1, 5, 6, 7, 9)) == "0-1,5-7,9"
    assert parse_layers(write_layers(range(30))) == tuple(range(30))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12, 30])
def test_a_guess_keeps_the_ends_and_some_between(count: int) -> None:
    config = replace(CONFIG, layers=(Layer(),) * count)
    layers = guessed(config).layers
    assert layers[0] == 0
    assert count / 2 <= len(layers) <= max(1, 0.8 * count)
    assert share(config, range(count)) == 1.0
    assert share(config, layers) < 1.0 or count == 1


# --- on disk ----------------------------------------------------------------------------------------------------


def test_what_was_found_is_kept_for_this_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    store = Store.default()
    assert load(tiny(), store) is None
    path = save(FOUND, tiny(), store, name="tiny")
    assert path.is_relative_to(tmp_path)
    assert json.loads(path.read_text("utf-8"))["name"] == "tiny"
    assert load(tiny(), store) == FOUND
    drafter = make_drafter("layer_skip", setup())
    assert isinstance(drafter, LayerSkip)
    assert drafter.choice == FOUND
    by_hand = make_drafter("layer_skip", setup(), {"layers": "1"})
    assert isinstance(by_hand, LayerSkip)
    assert by_hand.choice.layers == (1,)
    for other in (tiny(1), tiny(window=7), tiny().bfloat16()):
        assert load(other, store) is None
        drafter = make_drafter("layer_skip", setup(other))
        assert isinstance(drafter, LayerSkip)
        assert drafter.choice.weight < FOUND.weight
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_passes_do_not_change_who_a_model_is(tmp_path: Path) -> None:
    for model in (tiny(), tiny().bfloat16()):
        before = place(model, Store(tmp_path))
        slow_logits(model, [1, 2, 3])
        assert place(model, Store(tmp_path)) == before


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{",
        "{}",
        {"identity": "x"},
        {"layers": [0, 7]},
        {"layers": [1, 0]},
        {"layers": "0"},
        {"acceptance": 1.5},
        {"weight": 0},
        {"level_cost": None},
        {"row_costs": {"1": 0}},
        {"row_costs": []},
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, damage: object) -> None:
    path = save(FOUND, tiny(), Store(tmp_path))
    whole = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(whole | damage) if isinstance(damage, dict) else str(damage), "utf-8")
    if damage == {"layers": "0"}:  # read as the list it looks like
        assert load(tiny(), Store(tmp_path)) == FOUND
        return
    with pytest.raises(ValueError, match=r"no calibration of this model .*: delete it, or run `forerun calibrate"):
        load(tiny(), Store(tmp_path))


# --- the search -------------------------------------------------------------------------------------------------


def test_the_score_is_that_of_drafts_behind_the_whole_models_text() -> None:
    model = tiny_model()
    exam = Exam(model, some_texts())
    assert exam.score((0, 1, 2)).agreement == exam.score((0, 1, 2), final=True).agreement == 1.0
    assert exam.score((0,)).agreement < 1.0
    drafter = LayerSkip(model, Choice((0, 2)), TreeSpec("chain", (1,)), adaptive=False)
    places = [segment for batch, _ in exam.search for segment in batch.segments]
    right = 0
    for segment in places:  # one by one, as an engine would ask
        at = segment.context.shape[0]
        starts = [int(exam.cache.slots(number)[0][0]) for number in range(len(exam.texts))]
        number = starts.index(int(segment.context[0]))
        text = Sequence(exam.texts[number][: at + 1], 9, params=SamplingParams(temperature=0.0))
        cache = KVCache(model.new_storage(64))
        drafter.share(cache)
        read_to_roots(model, cache, [text])
        tree = drafter.draft([text], [Budget(1, 1)])
        right += int(tree.tokens[0, 1]) == int(slow_logits(model, text.tokens).argmax())
    assert right / len(places) == exam.score((0, 2)).agreement


def test_useless_layers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: a tiny model's say nothing."""
    model = deep_model(8, useless={1, 2, 4, 5, 6})
    monkeypatch.setattr(Exam, "relative_times", lambda self, works: made_up(works, head=0.1, chain=1.6))
    told: list[str] = []
    choice = calibrate(model, some_texts(), lambda doing, done, total: told.append(doing))
    assert choice.layers == (0, 3, 7)
    assert choice.level_cost == pytest.approx(1.6 / 4)
    assert choice.acceptance == 1.0
    assert choice.speedup == pytest.approx(promise(choice))
    assert choice.pays
    assert {"Timing passes", "Trying layers", "Timing drafts"} <= set(told)


def test_nothing_pays_where_the_head_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exam, "relative_times", lambda self, works: made_up(works, head=0.9, chain=3.9))
    choice = calibrate(tiny_model(), some_texts(), quiet)
    assert choice.speedup == 1.0
    assert not choice.pays
    assert choice.layers


def test_no_level_is_cheaper_than_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exam, "relative_times", lambda self, works: made_up(works, head=0.1, chain=0.001))
    choice = calibrate(deep_model(8, useless={1, 2, 4, 5, 6}), some_texts(), quiet)
    assert choice.level_cost == pytest.approx(3 / 8)


def test_one_layer_and_real_times() -> None:
    choice = calibrate(deep_model(1, set()), some_texts(), quiet)
    assert choice.layers == (0,)
    assert choice.level_cost > 0
    assert choice.row_costs[1] == 1.0
    with pytest.raises(ValueError, match="too little text"):
        calibrate(tiny_model(), [([1, 2], 5)], quiet)
