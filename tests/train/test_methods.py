"""The losses of all methods: what they begin with, and that they hold in the number formats of an accelerator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.models.config import Layer
from forerun.models.heads.feature_head import load_head
from forerun.models.heads.files import HeadFolder, read_head
from forerun.models.heads.shared_draft import frozen_shared_draft, new_shared_draft
from forerun.models.transformer import Transformer
from forerun.train.methods.draft import DraftMethod, SharedDraftMethod
from forerun.train.methods.feature import FeatureMethod
from forerun.train.methods.find import METHODS, method_options, new_method
from forerun.train.methods.method import Method, Task
from forerun.train.methods.parallel import ParallelMethod
from forerun.train.student import StudentShape
from forerun.train.texts import Text, TextBatch
from forerun.train.whole_texts import taught
from tests.models.rows import VOCABULARY, config, tiny

TARGET = config(4, 2, 16, layers=(Layer(), Layer(), Layer(), Layer()))
HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SOME = {"unroll": 3, "heads": 3, "draft_vocabulary": 64}


def texts() -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (6, 30), generator=generator).tolist()
    return [Text.of(row[: 3 + index], row[3 + index : 20 + index]) for index, row in enumerate(rows)]


def method(name: str, target: Transformer, **given: Any) -> Method:
    fitting = {key: value for key, value in SOME.items() if hasattr(METHODS[name], key)}
    return new_method(name, method_options(name, {**fitting, **given}), Task(target, HF, Path(), texts(), seed=1))


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_close(name: str) -> None:
    """As on an accelerator: the target in bfloat16, what learns in float32, products in bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        learner = method(name, tiny(TARGET, dtype=dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = learner.loss(TextBatch.pack(texts(), seed=3))
        loss.total.backward()  # type: ignore[no-untyped-call]
        learning = {key: weight for key, weight in learner.module.named_parameters() if weight.requires_grad}
        assert all(weight.dtype == torch.float32 and weight.grad is not None for weight in learning.values())
        gradient = torch.cat([weight.grad.flatten() for weight in learning.values() if weight.grad is not None])
        found.append((float(loss.total.detach()) / loss.count, gradient))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05, abs=0.02)
    assert float(torch.cosine_similarity(found[0][1], found[1][1], 0)) > 0.95


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bits", [6, 8, 16])
def test_one_may_go_on_from_another(name: str, bits: int, tmp_path: Path) -> None:
    """Also with texts by which it would have chosen another draft vocabulary."""
    target = tiny(TARGET, dtype=torch.float32)
    first = method(name, target)
    with torch.no_grad():
        for weight in first.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
    first.write(tmp_path / name, {}, bits)
    begun = read_head(tmp_path / name, name)
    fitting = {key: value for key, value in SOME.items() if hasattr(METHODS[name], key)}
    others = [Text.of([1, 2], [VOCABULARY - 1 - n for n in range(20)])]
    task = Task(target, HF, Path(), others, seed=9, begin=begun)
    second = new_method(name, method_options(name, fitting), task)
    second.write(tmp_path / "second", {}, 16)
    rows = read_head(tmp_path / "second", name).tensors
    first.write(tmp_path / "first", {}, 16)
    for key, before in read_head(tmp_path / "first", name).tensors.items():
        allowed = before.float().abs().amax(-1, keepdim=True) / (40 if bits == 6 else 80)
        assert bool(((rows[key].float() - before.float()).abs() <= allowed).all()), key


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_what_is_learned_of_sized_inputs_reads_them_as_they_are(name: str, tmp_path: Path) -> None:
    """States and embeddings are brought to one size by powers of two; the head that is written makes the same of what
    they were."""
    target = tiny(TARGET, dtype=torch.float32)
    with torch.no_grad():
        target.get_parameter("model.norm.weight").mul_(40)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            target.get_parameter(f"model.layers.1.{part}.weight").mul_(40)
    learner = method(name, target, attention_heads=6)
    assert isinstance(learner, FeatureMethod)
    assert learner._louder > 1 if name == "eagle" else len(set(learner._sizes.values())) > 1
    states = taught(target, TextBatch.pack(texts()).tokens, learner.head.taps).behind
    sized = [float((states[tap] / size).square().mean().sqrt()) for tap, size in learner._sizes.items()]
    assert all(0.4 < size < 2.5 for size in sized)
    learner.write(tmp_path / "head", {}, 16)
    written = load_head(read_head(tmp_path / "head"), target)
    assert (written.config.heads, written.config.kv_heads) == (6, 6)
    embedding = target.embed(torch.arange(6))
    state = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    if name == "eagle3":
        found = (
            written.fuse(states),
            learner.head.fuse({tap: state / learner._sizes[tap] for tap, state in states.items()}),
        )
    else:
        found = written.combine(embedding, state)[0], learner.head.combine(learner._louder * embedding, state)[0]
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2 * float(found[0].std()))


def test_a_draft_with_its_own_matrices_cannot_go_on_from_another() -> None:
    target = tiny(TARGET, dtype=torch.float32)
    task = Task(target, HF, Path(), texts(), begin=HeadFolder("draft", {}, {}))
    with pytest.raises(ValueError, match="leave it out"):
        new_method("draft", StudentShape(own_matrices=True), task)


@pytest.mark.parametrize("name", METHODS)
def test_what_does_not_learn_stays(name: str) -> None:
    target = tiny(TARGET, dtype=torch.float32)
    before = {key: weight.clone() for key, weight in target.state_dict().items()}
    learner = method(name, target)
    frozen = {key: weight.clone() for key, weight in learner.module.named_parameters() if not weight.requires_grad}
    optimizer = torch.optim.SGD([weight for weight in learner.module.parameters() if weight.requires_grad], lr=0.1)
    learner.loss(TextBatch.pack(texts(), seed=3)).total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert all(torch.equal(weight, before[key]) for key, weight in target.state_dict().items())
    assert set(frozen) <= {"lm_head.weight"}
    for key, weight in frozen.items():
        assert torch.equal(learner.module.get_parameter(key), weight)


@pytest.mark.parametrize("name", ["eagle3", "mtp", "medusa"])
def test_tokens_outside_the_draft_vocabulary_are_not_learned(name: str) -> None:
    """With the tokens that were written as the only labels, texts of other tokens have nothing to learn from."""
    target = tiny(TARGET, dtype=torch.float32)
    learner = method(name, target, soft=0.0)
    ids = learner.module.ids
    assert isinstance(ids, torch.Tensor)
    assert ids.shape == (64,)
    outside = sorted(set(range(VOCABULARY)) - set(ids.tolist()))
    loss = learner.loss(TextBatch.pack([Text.of(outside[:4], outside[4:12])]))
    assert float(loss.total.detach()) == 0
    inside = learner.loss(TextBatch.pack([Text.of(outside[:4], ids.tolist()[:8])]))
    assert float(inside.total.detach()) > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_text_that_only_fills_a_batch_counts_nothing(name: str) -> None:
    learner = method(name, tiny(TARGET, dtype=torch.float32))
    filling = Text(texts()[0].tokens, len(texts()[0]))
    alone, beside = (learner.loss(TextBatch.pack(some, seed=3)) for some in (texts(), [*texts(), filling]))
    assert beside.count == alone.count
    assert float(beside.total.detach()) == pytest.approx(float(alone.total.detach()))
    for key, figure in beside.figures.items():
        assert float(figure) == pytest.approx(float(alone.figures[key])), key
    nothing = learner.loss(TextBatch.pack([filling]))
    assert (nothing.count, float(nothing.total.detach())) == (0, 0)


def test_every_anchor_looks_at_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where chance gives the largest number that it can."""
    largest = torch.tensor([[1 - 2.0**-52]], dtype=torch.float64)
    monkeypatch.setattr("forerun.train.methods.parallel.uniform", lambda key, index: largest.expand(len(key), -1))
    learner = method("parallel", tiny(TARGET, dtype=torch.float32))
    assert isinstance(learner, ParallelMethod)
    batch = TextBatch.pack(texts())
    anchors, reached = learner._anchors(batch)
    assert anchors[:, 0].tolist() == [end - 2 for _, end in batch.spans]
    assert reached[..., 0].all()


def test_a_draft_shares_the_targets_matrices_where_it_can() -> None:
    target = tiny(TARGET, dtype=torch.float32)
    shared = method("draft", target)
    assert isinstance(shared, SharedDraftMethod)
    assert shared.module.vocab_size == 64
    assert isinstance(method("draft", target, hidden=64), SharedDraftMethod)
    for given in ({"own_matrices": True}, {"hidden": 32}):
        own = method("draft", target, **given, draft_vocabulary=None)
        assert isinstance(own, DraftMethod)
        with pytest.raises(ValueError, match="--draft-vocabulary is for drafts that share"):
            method("draft", target, **given)
    experts = replace(TARGET, layers=(Layer(experts=True),), experts=4)
    assert not StudentShape().shares(experts)


def test_a_shared_draft_that_is_the_target_has_nothing_to_learn() -> None:
    target = tiny(TARGET, dtype=torch.float32)
    batch = TextBatch.pack(texts())
    assert float(method("draft", target, layers=4).loss(batch).total.detach()) == pytest.approx(0, abs=1e-4)
    assert float(method("draft", target, layers=2).loss(batch).total.detach()) > 0.1


def test_a_place_counts_by_what_the_others_miss() -> None:
    """Beside a draft that is the target nothing is missed, but for what it cannot say."""
    target = tiny(TARGET, dtype=torch.float32)
    batch = TextBatch.pack(texts())
    task = Task(target, HF, Path(), texts())
    found = {}
    for name, ids in {"whole": None, "half": torch.arange(0, VOCABULARY, 2)}.items():
        twin = frozen_shared_draft(new_shared_draft(target, 4, ids=ids), target)
        loss = new_method("draft", StudentShape(), replace(task, beside={"other": twin})).loss(batch)
        found[name] = float(loss.figures["missed"]) / loss.count
    assert found["whole"] == pytest.approx(0, abs=1e-5)
    assert 0.2 < found["half"] < 0.8


def test_noise_is_by_the_seed() -> None:
    learner = method("eagle", tiny(TARGET, dtype=torch.float32))
    losses = [float(learner.loss(TextBatch.pack(texts(), seed=seed)).total.detach()) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    parts = [TextBatch.pack(texts()[half::2], seed=1, numbers=range(half, 6, 2)) for half in (0, 1)]
    assert sum(float(learner.loss(part).total.detach()) for part in parts) == pytest.approx(losses[0], rel=1e-5)
    quiet = method("eagle", tiny(TARGET, dtype=torch.float32), noise=0.0)
    found = [float(quiet.loss(replace(TextBatch.pack(texts()), seed=seed)).total.detach()) for seed in (1, 2)]
    assert found[0] == found[1]
