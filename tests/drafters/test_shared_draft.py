"""A draft that shares the target's matrices drafts as the same layers would in a model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.find import make_drafter, read_options
from forerun.drafters.kinds import FLOATS
from forerun.drafters.run_ahead import RunAhead
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.heads.files import HeadFolder, write_head
from forerun.models.heads.shared_draft import (
    frozen_shared_draft,
    load_shared_draft,
    new_shared_draft,
    shared_hf_config,
    spread,
)
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer
from tests.drafters.models import setup, slow_logits, tiny
from tests.engine.tiny import drain, tiny_model
from tests.models.rows import in_pytorch, with_static_pass


def written(path: Path, target: Transformer, ids: torch.Tensor | None = None) -> str:
    draft = new_shared_draft(target, 2, ids=ids)
    about = {"target": {"name": "tiny", "identity": weights_identity(target)}}
    write_head(path, HeadFolder("draft", shared_hf_config(draft, {}), draft.trained(), about))
    return str(path)


def test_layers_are_spread() -> None:
    assert spread(1, 30) == [0]
    assert spread(3, 30) == [0, 14, 29]
    assert spread(2, 2) == [0, 1]


def test_all_layers_of_the_target_are_the_target() -> None:
    target = tiny()
    draft = new_shared_draft(target, 2)
    torch.testing.assert_close(slow_logits(draft, [3, 1, 4, 1, 5]), slow_logits(target, [3, 1, 4, 1, 5]))
    few = new_shared_draft(target, 2, ids=torch.tensor([1, 5, 39]))
    torch.testing.assert_close(slow_logits(few, [3, 39]), slow_logits(target, [3, 39])[[1, 5, 39]])


@pytest.mark.parametrize("tree", ["3", "fixed:2,2", "dynamic:3,3,7"])
def test_a_draft_that_is_the_target_is_always_right(tree: str) -> None:
    target = tiny_model()
    draft = frozen_shared_draft(new_shared_draft(target, 3), target)
    drafter = DraftModel(RunAhead(draft, 512), TreeSpec.parse(tree), target.vocab_size)
    engine = Engine(target, drafter, slots=512)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    drain(engine, [Request([7, 8, 9], params)])
    statistics = engine.statistics
    assert statistics.accepted_by_depth == statistics.offered_by_depth
    assert statistics.tokens_per_pass > 2


def test_through_a_folder(tmp_path: Path) -> None:
    target = tiny_model()
    path = written(tmp_path / "draft", target, torch.arange(0, 50, 2))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    asked = [Request([7, 8, 9, n], params) for n in range(3)]
    plain = drain(Engine(tiny_model(), make_drafter("none", setup()), slots=512), asked)
    engine = Engine(target, make_drafter(path, setup(target)), slots=512)
    assert drain(engine, asked) == plain
    assert engine.statistics.drafted > 0
    assert read_options(path).model == path


def test_a_chain_on_a_device_names_tokens_not_columns() -> None:
    """`write_ahead` feeds what was drafted back: by its id, not by its place in the draft vocabulary."""
    target = tiny()
    ids = torch.arange(1, 40, 2)
    expected = []
    for static in (False, True):
        draft = frozen_shared_draft(new_shared_draft(target, 2, ids=ids), target)
        draft = with_static_pass(draft) if static else in_pytorch(draft)
        drafter = DraftModel(RunAhead(draft, 512), TreeSpec.parse("5"), target.vocab_size)
        engine = Engine(target, drafter, slots=512)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        texts = drain(engine, [Request([7, 8, 9, 11], params)])
        expected.append((texts, engine.statistics.accepted, engine.statistics.drafted))
    assert expected[0] == expected[1]


def test_refusals(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", tiny_model())
    with pytest.raises(ValueError, match="trained for another target"):
        make_drafter(path, setup(tiny()))
    with pytest.raises(ValueError, match="give 1 to that many"):
        new_shared_draft(tiny(), 3)
    broken = HeadFolder("draft", {"num_hidden_layers": "two"}, {})
    with pytest.raises(ValueError, match="num_hidden_layers is 'two'"):
        load_shared_draft(broken, tiny())
    with pytest.raises(ValueError, match="is missing"):
        load_shared_draft(HeadFolder("draft", {"num_hidden_layers": 1}, {}), tiny())


def test_the_tree_is_the_one_that_was_found_for_this_device(tmp_path: Path) -> None:
    target = tiny()
    draft = new_shared_draft(target, 2)
    about = {
        "target": {"name": "tiny", "identity": weights_identity(target)},
        "calibration": {"trees": {FLOATS: "2", "cpu": "7"}},
    }
    write_head(tmp_path / "draft", HeadFolder("draft", shared_hf_config(draft, {}), draft.trained(), about))
    made = make_drafter("draft_model", setup(target), {"model": str(tmp_path / "draft")})
    assert isinstance(made, DraftModel)
    assert made.spec == TreeSpec.parse("2")
