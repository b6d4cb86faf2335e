"""Every drafter of the folder holds to the contract."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from forerun.drafters import kinds
from forerun.drafters.find import Setup, make_drafter, names
from forerun.drafters.kinds import CHEAP_NODES, FOLDED, MANY_NODES, NARROW_FLOATS, NODES, WIDE_FLOATS
from forerun.models.target import TargetModel
from tests.drafters.contract import fresh, live, needed
from tests.drafters.models import setup


def test_the_folder_is_the_list() -> None:
    assert {"none", "ngram", "draft_model"} <= set(names())
    assert not {"drafter", "find", "tree_spec", "run_ahead", "layer_choice"} & set(names())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_are_what_was_asked_for(name: str, seed: int) -> None:
    live(fresh(name), steps=14, seed=seed)


@pytest.mark.parametrize("name", names())
def test_the_same_history_gives_the_same_drafts(name: str) -> None:
    assert live(fresh(name), steps=8, seed=2) == live(fresh(name), steps=8, seed=2)


@pytest.mark.parametrize("name", names())
def test_options_are_frozen_and_explained(name: str) -> None:
    options: Any = import_module(f"forerun.drafters.{name}").Options
    assert is_dataclass(options)
    known = [field.name for field in fields(options)]
    make: Any = options  # a class, which the check above hides
    made = make(**needed(name))
    for field in known:
        with pytest.raises(FrozenInstanceError):
            setattr(made, field, None)


def test_an_unknown_drafter_or_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no drafter 'eegle': use one of .*ngram"):
        make_drafter("eegle", setup())
    with pytest.raises(ValueError, match="ngram has no option 'length': it has tokens"):
        make_drafter("ngram", setup(), {"length": 3})
    with pytest.raises(ValueError, match="none has no option 'length': it has none"):
        make_drafter("none", setup(), {"length": 3})


def test_numbers_may_come_as_text() -> None:
    assert vars(make_drafter("ngram", setup(), {"tokens": "3"}))["tokens"] == 3
    with pytest.raises(ValueError, match="option tokens is 'three': give a whole number"):
        make_drafter("ngram", setup(), {"tokens": "three"})


@pytest.mark.parametrize(("name", "option"), [("suffix", "tokens"), ("combine", "tokens")])
def test_trees_are_as_large_as_the_device_checks_cheaply(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target on an accelerator gets larger ones, one whose rows cost a smaller one, unless a size is named."""

    class Elsewhere:
        def __init__(self, target: TargetModel, device: str, dtype: torch.dtype) -> None:
            self.vocab_size, self.device, self.dtype = target.vocab_size, torch.device(device), dtype

    here = setup()

    def on(device: str, dtype: torch.dtype = torch.float32) -> Setup:
        elsewhere: Any = Elsewhere(here.target, device, dtype)
        return replace(here, target=elsewhere)

    def size(where: Setup, **options: str) -> int:
        made: Any = make_drafter(name, where, options)
        found: int = getattr(made.options, option)
        return found

    for kind in (NARROW_FLOATS, WIDE_FLOATS):
        monkeypatch.setattr(kinds, "FLOATS", kind)
        assert size(here) == NODES[kind]
    with monkeypatch.context() as patch:
        patch.setattr(type(here.target), "folded", True)
        assert size(here) == NODES[FOLDED]
    assert size(on("cpu", torch.bfloat16)) == CHEAP_NODES
    assert size(on("meta")) == MANY_NODES
    assert size(on("meta"), **{option: "9"}) == 9
