"""An enlarged drafter drafts for an enlarged target what the small one drafts for the small target."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.parallel import Options, Parallel
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.enlarge import enlarge
from forerun.models.heads.checkpoint_mtp import read_mtp
from forerun.models.heads.enlarge_head import METHODS, TAPS, enlarge_head
from forerun.models.heads.feature_head import load_head, new_head
from forerun.models.heads.files import HeadFolder, read_head, write_head
from forerun.models.heads.side_heads import load_side_heads, new_side_heads
from forerun.models.identity import outline, weights_identity
from forerun.models.transformer import Transformer
from tests.drafters.test_checkpoint_mtp import LAYOUTS, module
from tests.drafters.test_heads import slow_logits
from tests.engine.tiny import drain
from tests.models.checkpoints import make, save
from tests.models.test_enlarge import CASES, LARGE, error, open_model

SIDE = ("blockwise", "medusa")
SHAPES = (
    "llama, groups split",
    "llama, heads four times as wide",
    "llama, tied",
    "llama, a large eps",
    "qwen2",
    "qwen3",
    "smollm3",
)
HEADS = 3


def trained(
    method: str,
    target: Transformer,
    *,
    inner: int | None = None,
    heads: int | None = None,
    ids: bool = True,
    stem: int = 0,
) -> HeadFolder:
    """A drafter whose weights are not those it begins with."""
    chosen = torch.arange(0, target.vocab_size, 2) if ids else None
    generator = torch.Generator().manual_seed(5)
    if method == "parallel":
        tensors = {"look_ahead.weight": torch.zeros(HEADS, target.config.hidden_size)}
    elif method in SIDE:
        tensors = new_side_heads(method, target, HEADS, ids=chosen, inner=inner, stem=stem).trained()
    else:
        tensors = new_head(method, target, ids=chosen, inner=inner, heads=heads).trained()
    noisy = {
        name: tensor if name == "d2t" else tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }
    config = {"num_heads": HEADS, "intermediate_size": inner or target.config.intermediate_size}
    if heads is not None:
        config |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    manifest = {
        "target": {"name": "small", "identity": weights_identity(target), "tokenizer": "t"},
        "calibration": {"accuracies": [[0.5]], "tau": 1.5, "trees": {"cpu": "3"}},
    }
    return HeadFolder(method, config, noisy, manifest)


class Recorded:
    """What was drafted."""

    def __init__(self, folder: HeadFolder, target: Transformer) -> None:
        spec = TreeSpec.parse("dynamic:3,3,7")
        self.own: Drafter
        if folder.method == "parallel":
            self.own = Parallel(Options(nodes=9), target, folder.tensors["look_ahead.weight"])
        elif folder.method in SIDE:
            self.own = SideDrafter(load_side_heads(folder, target), spec, target.vocab_size)
        else:
            self.own = FeatureDrafter(load_head(folder, target), 1024, spec, target.vocab_size)
        self.drawing, self.branches, self.layers = self.own.drawing, self.own.branches, self.own.layers
        self.top, self.observe, self.forget = self.own.top, self.own.observe, self.own.forget
        self.trees: list[tuple[list[list[int]], list[list[int]]]] = []

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tree = self.own.draft(sequences, budgets)
        self.trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree


def run(folder: HeadFolder, target: Transformer) -> tuple[list[list[list[int]]], Recorded]:
    drafter = Recorded(folder, target)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [Request([(7 * place + n) % 250 for place in range(n)], params) for n in (2, 9, 30)]
    return drain(Engine(target, drafter, slots=1024), asked), drafter


def said(folder: HeadFolder, target: Transformer, path: Many[int]) -> Tensor:
    head = load_side_heads(folder, target) if folder.method in SIDE else load_head(folder, target)
    return slow_logits(head, target, [5, 9, 200, 17, 5, 9, 33, 1], path)


def same_drafts(folder: HeadFolder, wide: HeadFolder, small: Transformer, large: Transformer) -> None:
    if folder.method != "parallel":
        for path in ((), (8,), (8, 12)):
            assert error(said(wide, large, path), said(folder, small, path)) < 1e-4
    text, drafter = run(folder, small)
    wide_text, wide_drafter = run(wide, large)
    assert wide_text == text
    assert wide_drafter.trees == drafter.trees
    assert max(len(tokens[0]) for tokens, _ in drafter.trees) > 1


@pytest.fixture(params=SHAPES)
def targets(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Transformer, Transformer]:
    family, changes, shape = CASES[request.param]
    folder = save(make(family, **changes), tmp_path / "small")
    return open_model(folder), enlarge(open_model(folder), shape, seed=1)


@pytest.mark.parametrize("method", METHODS)
def test_it_drafts_the_same(method: str, targets: tuple[Transformer, Transformer]) -> None:
    small, large = targets
    folder = trained(method, small)
    same_drafts(folder, enlarge_head(folder, small.config, large), small, large)


@pytest.fixture
def llamas(tmp_path: Path) -> tuple[Transformer, Transformer]:
    folder = save(make("Llama"), tmp_path / "small")
    return open_model(folder), enlarge(open_model(folder), LARGE)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_another_mlp_and_the_whole_vocabulary(method: str, llamas: tuple[Transformer, Transformer]) -> None:
    small, large = llamas
    for inner, wanted in ((80, 112), (120, 128)):  # the large model's, or more, in steps of 128
        folder = trained(method, small, inner=inner, ids=False)
        wide = enlarge_head(folder, small.config, large)
        assert wide.config["intermediate_size"] == wanted
        same_drafts(folder, wide, small, large)


def test_a_hidden_layer_of_another_width(llamas: tuple[Transformer, Transformer]) -> None:
    small, large = llamas
    folder = trained("blockwise", small, inner=40)
    same_drafts(folder, enlarge_head(folder, small.config, large), small, large)


def test_a_stem(targets: tuple[Transformer, Transformer]) -> None:
    """The embeddings that it brings to one size lie among zeros."""
    small, large = targets
    folder = trained("medusa", small, stem=40)
    wide = enlarge_head(folder, small.config, large)
    same_drafts(folder, wide, small, large)
    assert wide.config["stem"] == load_side_heads(wide, large).stem_width > 40


@pytest.mark.parametrize("heads", [3, 5, 20])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_other_heads_of_attention(method: str, heads: int, llamas: tuple[Transformer, Transformer]) -> None:
    """Fewer than the large target has, and more."""
    small, large = llamas
    folder = trained(method, small, heads=heads)
    wide = enlarge_head(folder, small.config, large)
    numbers = wide.config["num_attention_heads"], wide.config["num_key_value_heads"]
    assert numbers == {3: (12, 3), 5: (15, 5), 20: (20, 20)}[heads]
    same_drafts(folder, wide, small, large)


def test_the_layers_that_are_read_keep_their_numbers(llamas: tuple[Transformer, Transformer]) -> None:
    small, large = llamas
    folder = trained("eagle3", small)
    assert enlarge_head(folder, small.config, large).config[TAPS] == [1, 2]
    listed = replace(folder, config=folder.config | {TAPS: [0, 2]})
    wide = enlarge_head(listed, small.config, large)
    assert wide.config[TAPS] == [0, 2]
    assert load_head(wide, large).taps == (0, 2)


def test_an_output_head_of_its_own_comes_along(llamas: tuple[Transformer, Transformer]) -> None:
    small, large = llamas
    folder = trained("eagle3", small)
    folder.tensors["lm_head.weight"] = torch.randn(144, 32, generator=torch.Generator().manual_seed(2))
    same_drafts(folder, enlarge_head(folder, small.config, large), small, large)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_from_the_targets_own_checkpoint(layout: str, tmp_path: Path) -> None:
    """With biases, and with norms of queries and keys."""
    folder = module(layout).write(tmp_path / "small")
    small, large = open_model(folder), enlarge(open_model(folder), LARGE)
    own = read_mtp(folder, small.config)
    assert own is not None
    same_drafts(own, enlarge_head(own, small.config, large), small, large)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "parallel"])
def test_the_folder_knows_its_target(method: str, llamas: tuple[Transformer, Transformer], tmp_path: Path) -> None:
    small, large = llamas
    made = enlarge_head(trained(method, small), small.config, large, name="big", seed=3)
    write_head(tmp_path / "head", made)
    manifest = read_head(tmp_path / "head", method).manifest
    assert manifest["target"] == {"name": "big", "identity": weights_identity(large), "tokenizer": "t"}
    assert manifest["enlarged"]["target"]["identity"] == weights_identity(small)
    assert manifest["enlarged"]["seed"] == 3
    assert manifest["calibration"] == {"accuracies": [[0.5]], "tau": 1.5}  # the tree was the small model's
    setup = Setup(large, 512, lambda name: large)
    make_drafter(method, setup, {"path": str(tmp_path / "head")})
    with pytest.raises(ValueError, match="trained for another target"):
        make_drafter(method, replace(setup, target=small), {"path": str(tmp_path / "head")})


def test_an_outline_is_the_model_without_its_weights(tmp_path: Path) -> None:
    folder = save(make("Qwen3", head_dim=8), tmp_path / "small")
    whole = open_model(folder)
    part = outline(folder, whole.config)
    assert weights_identity(part) == weights_identity(whole)
    assert part.get_parameter("model.layers.1.mlp.up_proj.weight").is_meta


def test_what_cannot_be_enlarged_is_refused(llamas: tuple[Transformer, Transformer]) -> None:
    small, large = llamas
    eagle, medusa = trained("eagle", small), trained("medusa", small)
    with pytest.raises(ValueError, match="draft_model is not made for the width of one target"):
        enlarge_head(replace(eagle, method="draft_model"), small.config, large)
    with pytest.raises(ValueError, match="not the small one enlarged"):
        enlarge_head(eagle, replace(small.config, norm_eps=0.1), large)
    for folder, name in ((eagle, "fc.weight"), (medusa, "blocks.0.layers.0.weight")):
        damaged = replace(folder, tensors=folder.tensors | {name: torch.zeros(31, 31)})
        with pytest.raises(ValueError, match=f"{name} does not fit the small model"):
            enlarge_head(damaged, small.config, large)
    with pytest.raises(ValueError, match="has a tensor other, which cannot be enlarged"):
        enlarge_head(replace(medusa, tensors=medusa.tensors | {"other": torch.zeros(32)}), small.config, large)
