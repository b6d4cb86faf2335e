"""The pass with fixed buffers, here without a graph and with the kernels' plain forms: the same text as the plain
pass, whoever drafts, and whether the host knows what was drafted or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Drafter
from forerun.drafters.layer_choice import by_hand
from forerun.drafters.layer_skip import LayerSkip
from forerun.drafters.ngram import NGram
from forerun.drafters.ngram import Options as NGramOptions
from forerun.drafters.none import NoDrafter
from forerun.drafters.recycling import Options as RecyclingOptions
from forerun.drafters.recycling import Recycling
from forerun.drafters.run_ahead import RunAhead
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine import packing
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment, TextRows
from forerun.models.config import Layer, ModelConfig
from forerun.models.static.buffers import Bucket
from forerun.models.transformer import Transformer
from tests.models.rows import CONFIGS, VOCABULARY, config, tiny, with_static_pass

SHAPES: dict[str, ModelConfig] = {
    **CONFIGS,
    "windows": config(4, 2, 64, layers=(Layer(window=9), Layer(), Layer(window=70))),
    "sandwich": config(2, 1, 64, sandwich_norms=True, norm_offset=1.0, embedding_scale=8.0, activation="gelu"),
}
DRAFTERS = ["none", "ngram", "recycling", "chain", "tree", "dynamic", "layer_skip"]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(1, 81)), [9]]


@cache
def models(name: str) -> tuple[Transformer, Transformer]:
    """The same weights with the plain pass and with the static one."""
    plain, static = (tiny(SHAPES[name], dtype=torch.float32) for _ in range(2))
    plain.prepare()
    return plain, with_static_pass(static)


def drafter(name: str, target: Transformer) -> Drafter:
    specs = {"chain": "3", "tree": "3,2,1", "dynamic": "dynamic:3,3,8"}
    if name in specs:
        return DraftModel(RunAhead(target, 1024), TreeSpec.parse(specs[name]), VOCABULARY)
    if name == "layer_skip":
        return LayerSkip(target, by_hand(target.config, (0,)), TreeSpec.parse("2"), adaptive=False)
    made: dict[str, Drafter] = {
        "none": NoDrafter(),
        "ngram": NGram(NGramOptions(min_match=1)),
        "recycling": Recycling(RecyclingOptions(), VOCABULARY),
    }
    return made[name]


def written(target: Transformer, drafts: Drafter, **params: object) -> list[list[int]]:
    engine = Engine(target, drafts, slots=1024, max_batch=4)
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params})  # type: ignore[arg-type]
    numbers = [engine.add(Request(list(prompt), settings)) for prompt in PROMPTS]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for update in engine.step():
            texts[update.request].extend(update.tokens)
        engine.check_integrity()
    return list(texts.values())


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("drafts", ["none", "tree"])
def test_every_kind_of_model_writes_the_same(name: str, drafts: str) -> None:
    plain, static = models(name)
    assert written(static, drafter(drafts, static)) == written(plain, NoDrafter())


@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"presence_penalty": 0.7}])
def test_every_drafter_writes_the_same(
    drafts: str, away: bool, params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`away`: trees count as being on a device, where the host does not see them before the verdict."""
    plain, static = models("two share, tied")
    expected = written(plain, NoDrafter(), **params)
    if away:
        monkeypatch.setattr(packing, "HOST", torch.device("meta"))
    assert written(static, drafter(drafts, static), **params) == expected


def test_hidden_states_are_those_of_the_plain_pass() -> None:
    plain, static = models("three share, biases")
    tokens = torch.arange(7)
    blocks = [3, 1]
    slots = torch.tensor([block * 16 + place for block in blocks for place in range(16)])
    segment = Segment(0, tokens, tokens, None, slots[:0], slots[:7], 2, blocks=blocks)
    layers = range(len(plain.config.layers) + 1)
    outputs = [
        model.forward_rows(Batch.pack([segment]), model.new_storage(64), tuple(layers)) for model in (plain, static)
    ]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    assert outputs[1].likeliest is not None
    assert outputs[1].likeliest.tolist() == outputs[0].logits.argmax(-1).tolist()
    for layer in layers:
        torch.testing.assert_close(outputs[1].features[layer], outputs[0].features[layer], rtol=1e-4, atol=1e-4)


def test_buckets_are_few_and_hold_what_they_must() -> None:
    tokens = torch.zeros(5, dtype=torch.int64)
    segment = Segment(0, tokens, tokens, None, tokens[:0], tokens, 1, blocks=[0])
    seen = set()
    for blocks in range(1, 600):
        bucket = Bucket.of(Batch.pack([replace(segment, blocks=list(range(blocks)))] * 3), (), None)
        assert bucket.rows == 16
        assert bucket.sequences == 4
        assert bucket.tail == 16
        assert bucket.wanted == 4
        assert bucket.blocks >= blocks
        seen.add(bucket)
    assert len(seen) == 3
    kinds = set()
    for rows in range(1, 65):
        own = torch.zeros(rows, dtype=torch.int64)
        tree = Segment(0, own, own, None, own[:0], own, rows, blocks=list(range(8)))
        bucket = Bucket.of(Batch.pack([tree]), (), None)
        assert min(bucket.rows, bucket.tail, bucket.wanted) >= rows
        kinds.add(bucket)
    assert len(kinds) == 4
    sizes = set()
    for texts in range(8, 65):
        own = torch.zeros(5, dtype=torch.int64)
        tree = Segment(0, own, own, None, own[:0], own, 5, blocks=[0])
        bucket = Bucket.of(Batch.pack([tree] * texts), (), None)
        assert bucket.tail == 8
        assert 5 * texts <= bucket.rows == bucket.wanted < 2 * 5 * texts
        sizes.add(bucket.rows)
    assert sizes == {64, 96, 128, 192, 256, 320}


def test_a_broken_row_is_told_by_its_likeliest_token() -> None:
    broken = tiny(SHAPES["one head each"], dtype=torch.float32)
    broken.lm_head.weight.data[3] = torch.nan
    engine = Engine(with_static_pass(broken), NoDrafter(), slots=64)
    engine.add(Request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4)))
    with pytest.raises(ValueError, match="NaN"):
        engine.step()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"temperature": 1.0, "top_k": 1}]
)
@pytest.mark.parametrize("ahead", [2, 7, 64])
def test_runs_of_plain_decoding_write_the_same(params: dict[str, object], ahead: int) -> None:
    plain, static = models("two share, tied")
    texts = []
    for target, most in ((plain, 1), (static, ahead)):
        engine = Engine(target, NoDrafter(), slots=1024, max_batch=2, max_ahead=most)
        for prompt, tokens in zip(PROMPTS, (20, 9, 33), strict=True):
            settings = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, **params})  # type: ignore[arg-type]
            engine.add(Request(list(prompt), settings))
        found: dict[int, list[int]] = {}
        reasons = {}
        while engine.has_work:
            for update in engine.step():
                found.setdefault(update.request, []).extend(update.tokens)
                reasons[update.request] = update.finish_reason
            engine.check_integrity()
        assert engine.statistics.tokens == sum(map(len, found.values())) == engine.statistics.target_passes
        texts.append((found, reasons))
    assert texts[0] == texts[1]


def test_padding_never_leaves_the_positions() -> None:
    """Rows of an earlier, larger batch near the end of the context are still in the buffers of the next one."""
    config = replace(SHAPES["one head each"], context_length=64)
    target = with_static_pass(tiny(config, dtype=torch.float32))
    engine = Engine(target, NoDrafter(), slots=1024, max_batch=4)
    for prompts, tokens, ahead in ((4, 16, 2), (3, 56, 8)):
        engine.max_ahead = ahead  # short runs first, so that all places of the host's memory are used near the end
        for number in range(prompts):
            length = 48 if prompts == 4 else 4
            settings = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            engine.add(Request([1 + number] * length, settings))
        while engine.has_work:
            engine.step()
    assert target.static is not None
    found = target.static.captured[id(engine.cache.storage)].buckets
    (captured,) = [each for bucket, each in found.items() if bucket.feeds and bucket.rows == 4]
    assert int(captured.buffers.positions.max()) < 64


def test_a_cache_with_other_blocks_is_left_to_the_plain_pass() -> None:
    plain, static = models("one head each")
    assert static.static is not None
    text = TextRows(0, 3, [5, 6, 7], None, 0, [0], 8, 1)
    assert not static.static.takes(Batch(texts=(text,)))
    assert static.static.takes(Batch(texts=(replace(text, block_size=16),)))
    got = static.forward_rows(Batch(texts=(text,)), static.new_storage(16)).logits
    torch.testing.assert_close(got, plain.forward_rows(Batch(texts=(text,)), plain.new_storage(16)).logits)
