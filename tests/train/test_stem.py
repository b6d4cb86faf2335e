"""Medusa's stem: by it the heads see the token that the state gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.trained import SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.loaded import LoadedModel
from forerun.models.heads.files import HeadFolder, read_head, write_head
from forerun.models.heads.side_heads import (
    SideHeads,
    frozen_side_heads,
    load_side_heads,
    new_side_heads,
    side_config,
)
from forerun.models.transformer import Transformer
from forerun.train.answers import AnswerOptions, answer_prompts
from forerun.train.methods.backbone import BackboneMethod
from forerun.train.methods.find import new_method
from forerun.train.methods.method import Task
from forerun.train.methods.side import SideMethod, SideOptions
from forerun.train.texts import TextBatch
from forerun.train.whole_texts import taught
from tests.cli.conftest import Terminal
from tests.models.rows import VOCABULARY, tiny
from tests.train.conftest import PROMPTS
from tests.train.test_methods import HF, TARGET, texts

WIDTH, HEADS = 24, 3


@pytest.fixture
def target() -> Transformer:
    return tiny(TARGET, dtype=torch.float32)


def shake(heads: SideHeads) -> SideHeads:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in heads.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return heads


def stemmed(target: Transformer) -> SideHeads:
    return shake(new_side_heads("medusa", target, HEADS, stem=WIDTH))


def some(target: Transformer) -> tuple[Tensor, Tensor]:
    """States and tokens."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, target.config.hidden_size, generator=generator)
    return x, torch.randint(VOCABULARY, (5,), generator=generator)


@torch.no_grad()
def test_what_it_computes(target: Transformer) -> None:
    heads, (x, tokens) = stemmed(target), some(target)
    assert heads.stem is not None
    e = target.model.embed_tokens.weight[tokens]
    e = e / e.square().mean(1, keepdim=True).sqrt()
    units = functional.silu(torch.cat([e, x], 1) @ heads.stem.inner.weight.T + heads.stem.inner.bias)
    changed = x + units @ heads.stem.outer.weight.T
    bare = {name: tensor for name, tensor in heads.state_dict().items() if not name.startswith("stem")}
    plain = new_side_heads("medusa", target, HEADS)
    plain.load_state_dict(bare)
    torch.testing.assert_close(heads.states(x, tokens), plain.states(changed, tokens))
    assert not torch.allclose(heads.states(x, tokens), plain.states(x, tokens), atol=0.1)


@torch.no_grad()
def test_it_begins_as_medusa_without_one(target: Transformer) -> None:
    x, tokens = some(target)
    made, plain = new_side_heads("medusa", target, HEADS, stem=WIDTH), new_side_heads("medusa", target, HEADS)
    assert torch.equal(made(x, tokens), plain(x, tokens))
    assert made.stem is not None
    assert float(made.stem.inner.weight.std()) > 0.01  # else neither of its matrices would ever learn


@torch.no_grad()
def test_a_wider_one_begins_as_the_narrow_one(target: Transformer, tmp_path: Path) -> None:
    heads, (x, tokens) = stemmed(target), some(target)
    write_head(tmp_path / "head", HeadFolder("medusa", side_config(heads, HF), heads.trained()))
    folder = read_head(tmp_path / "head")
    options = SideOptions(heads=HEADS, draft_vocabulary=0, stem=WIDTH + 8)
    made = new_method("medusa", options, Task(target, HF, Path(), texts(), begin=folder)).module
    assert isinstance(made, SideHeads)
    assert made.stem is not None
    torch.testing.assert_close(made.states(x, tokens), load_side_heads(folder, target).states(x, tokens))
    assert float(made.stem.inner.weight[WIDTH:].std()) > 0.01
    for narrower in (WIDTH - 8, 0):
        with pytest.raises(ValueError, match="has a stem of 24 units: give --stem 24, or more"):
            new_method("medusa", replace(options, stem=narrower), Task(target, HF, Path(), texts(), begin=folder))


def test_drafts_are_by_the_token(target: Transformer) -> None:
    """Of texts that differ in their last token alone, with the same state before it."""
    drafter = SideDrafter(stemmed(target), TreeSpec.parse("3"), VOCABULARY)
    state = torch.randn(1, target.config.hidden_size, generator=torch.Generator().manual_seed(4))
    greedy = SamplingParams(temperature=0.0)
    asked = [Sequence([5, 6, last], 100, id=last, params=greedy) for last in range(10, 30)]
    drafter.observe([Observation(text, [], {drafter.heads.layer: state}, 1) for text in asked])
    together = drafter.draft(asked, [Budget(3, 3)] * len(asked)).tokens.tolist()
    assert [row[0] for row in together] == list(range(10, 30))
    assert len({tuple(row[1:]) for row in together}) > 3
    for text, row in zip(asked, together, strict=True):
        assert drafter.draft([text], [Budget(3, 3)]).tokens.tolist() == [row]


@torch.no_grad()
def test_its_folder(target: Transformer, tmp_path: Path) -> None:
    heads, (x, tokens) = stemmed(target), some(target)
    config = side_config(heads, HF)
    assert (config["architectures"], config["stem"]) == (["ForerunMedusaStem"], WIDTH)
    write_head(tmp_path / "head", HeadFolder("medusa", config, heads.trained()))
    folder = read_head(tmp_path / "head")
    hidden = target.config.hidden_size
    assert folder.tensors["stem.inner.weight"].shape == (WIDTH, 2 * hidden)
    assert folder.tensors["stem.outer.weight"].shape == (hidden, WIDTH)
    assert not any("embed" in name for name in folder.tensors)
    loaded = load_side_heads(folder, target)
    for found in (loaded, frozen_side_heads(loaded, target)):
        assert found.stem_width == WIDTH
        torch.testing.assert_close(found(x, tokens), heads(x, tokens), rtol=0.03, atol=0.05)
    del folder.tensors["stem.inner.bias"]
    with pytest.raises(ValueError, match=r"stem\.inner\.bias is missing"):
        load_side_heads(folder, target)
    config = side_config(new_side_heads("medusa", target, HEADS), HF)
    assert config["architectures"] == ["MedusaModel"]
    assert "stem" not in config


@pytest.mark.parametrize("backbone", [False, True])
def test_a_row_reads_the_token_behind_it(target: Transformer, backbone: bool) -> None:
    """The loss, place by place: what head k says of row i is asked of the law of row i + 1 + k."""
    options = SideOptions(heads=HEADS, draft_vocabulary=0, stem=WIDTH)
    task = Task(target, HF, Path(), texts(), seed=1)
    learner = SideMethod("medusa", options, task)
    shake(learner.heads)
    found = learner.loss(TextBatch.pack(texts())).total
    if backbone:
        both = BackboneMethod(learner, 0.1, task)
        found = both.loss(TextBatch.pack(texts())).figures["heads"]
    expected = 0.0
    with torch.no_grad():
        for text in texts():
            tokens = torch.from_numpy(text.tokens).long()
            normed = taught(target, tokens[None]).normed[0]
            laws = (normed @ target.head_rows().T).log_softmax(-1)
            for place in range(text.asked - 1, len(text) - 1):
                for k in range(min(HEADS, place)):
                    row = place - 1 - k
                    state = learner.heads.states(normed[row], tokens[row + 1])[k]
                    q, p = (state @ target.head_rows().T).log_softmax(-1), laws[place]
                    expected += 0.8**k * float((p.exp() * (p - q)).sum())
    assert float(found.detach()) == pytest.approx(expected, rel=1e-4)


def test_only_medusa_has_one(run: Terminal, folder: Path, prompts: Path, told: Path, tmp_path: Path) -> None:
    flags = ("--target", str(folder), "--prompts", str(prompts), "--answers", str(told), "--device", "cpu", "--offline",
             "--max-tokens", "24", "--held-back", "3", "--stem", "8", "--out", str(tmp_path / "out"))  # fmt: skip
    ended = run("train", "blockwise", *flags)
    assert ended.code == 1
    assert "blockwise has no option --stem: its heads read the state alone" in " ".join(ended.err.split())
    ended = run("train", "eagle3", *flags)
    assert ended.code == 1
    assert "eagle3 has no option --stem" in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()


def test_all_of_it_learns(target: Transformer) -> None:
    learner = SideMethod(
        "medusa", SideOptions(heads=HEADS, draft_vocabulary=64, stem=WIDTH), Task(target, HF, Path(), texts())
    )
    batch = TextBatch.pack(texts())
    optimizer = torch.optim.AdamW([weight for weight in learner.module.parameters() if weight.requires_grad], lr=1e-2)
    before = {name: weight.clone() for name, weight in learner.heads.named_parameters()}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = learner.loss(batch).total
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    for name, weight in learner.heads.named_parameters():
        assert torch.equal(weight, before[name]) == name.startswith("lm_head"), name
    assert target.model.embed_tokens.weight.grad is None


def test_half_precision_is_close() -> None:
    """As on an accelerator: the target in bfloat16, what learns in float32, products in bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        options = SideOptions(heads=HEADS, draft_vocabulary=64, stem=WIDTH)
        learner = SideMethod("medusa", options, Task(tiny(TARGET, dtype=dtype), HF, Path(), texts()))
        shake(learner.heads)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = learner.loss(TextBatch.pack(texts()))
        loss.total.backward()  # type: ignore[no-untyped-call]
        learning = [weight for weight in learner.heads.parameters() if weight.requires_grad]
        assert all(weight.dtype == torch.float32 for weight in learning)
        found.append((float(loss.total.detach()), torch.cat([weight.grad.flatten() for weight in learning])))  # type: ignore[union-attr]
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)
    assert float(torch.cosine_similarity(found[0][1], found[1][1], 0)) > 0.95


@pytest.fixture
def told(loaded: LoadedModel, tmp_path: Path) -> Path:
    """The target's answers."""
    path = tmp_path / "told"
    answer_prompts(loaded, PROMPTS, path, AnswerOptions(max_tokens=24), lambda doing, done, total: None)
    return path


def test_from_answers_to_a_drafter(run: Terminal, folder: Path, prompts: Path, told: Path, tmp_path: Path) -> None:
    flags = ("train", "medusa", "--target", str(folder), "--prompts", str(prompts), "--answers", str(told), "--device",
             "cpu", "--offline", "--max-tokens", "24", "--steps", "40", "--batch", "8", "--held-back", "3", "--every",
             "20", "--heads", "2", "--learning-rate", "2e-2", "--bits", "8")  # fmt: skip
    losses = {}
    for stem in ("0", "64"):
        out = tmp_path / stem
        made = run.json(*flags, "--stem", stem, "--out", str(out))
        losses[stem] = made["history"][-1]["loss"]
        assert made["options"]["options"]["stem"] == int(stem)
        assert ("stem.inner.weight" in read_head(out).tensors) == (stem == "64")
    assert losses["64"] < losses["0"]
    assert made["tokens_per_pass"]["after"] > made["tokens_per_pass"]["before"] >= 1
    drafted = run.json("generate", "what is it?", "--model", str(folder), "--drafter", "medusa", "--drafter-option",
                       f"path={out}", "--dtype", "float32", "--max-tokens", "40")  # fmt: skip
    assert drafted["stats"]["tokens_per_pass"] > 1
