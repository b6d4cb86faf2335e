"""An enlarged model computes what the small one does: the same logits, the same text, the same hidden states."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forerun.models import enlarge_folder as folders
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.checkpoint import INDEX, check
from forerun.models.config import Layer, ModelConfig, Rope
from forerun.models.enlarge import SHAPES, Shape, enlarge, enlarged_config, enlarged_tensors, fit
from forerun.models.enlarge_folder import find_shape
from forerun.models.load import Source, load_model, resolve
from forerun.models.names import expected_shapes
from forerun.models.target import Output
from forerun.models.transformer import Transformer
from forerun.models.widen import Axis, Noise, widen_matrix, widen_vector
from tests.models.checkpoints import EXPERTS, make, save
from tests.tiny_folder import save_tiny_model

SMALL = Shape(32, 48, 4, 2, 8, 2)
"""Of `make("Llama")`."""
LARGE = Shape(96, 112, 12, 3, 16, 5)
"""Wider in everything; four query heads share keys, and not two."""
LLAMA31 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "llama": ("Llama", {}, LARGE),
    "llama, the same shape": ("Llama", {}, SMALL),
    "llama, heads as wide": ("Llama", {}, dataclasses.replace(LARGE, head_dim=8)),
    "llama, heads four times as wide": ("Llama", {}, dataclasses.replace(LARGE, head_dim=32)),
    "llama, groups as large": ("Llama", {}, dataclasses.replace(LARGE, heads=6)),
    "llama, groups split": ("Llama", {}, dataclasses.replace(LARGE, heads=5, kv_heads=5)),
    "llama, groups of 3 in groups of 2": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
        dataclasses.replace(LARGE, heads=10, kv_heads=5),
    ),
    "llama, a head of keys per query": ("Llama", {"num_key_value_heads": 4}, dataclasses.replace(LARGE, kv_heads=6)),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, LARGE),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA31}, LARGE),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, LARGE),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}, dataclasses.replace(LARGE, head_dim=8)),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, LARGE),
    "llama, a large eps": ("Llama", {"rms_norm_eps": 0.3}, LARGE),
    "llama, fewer layers": ("Llama", {}, Shape(96, 1024, 12, 3, 16, 1)),
    "mistral": ("Mistral", {"sliding_window": 7}, LARGE),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, LARGE),
    "qwen3": ("Qwen3", {"head_dim": 8, "rms_norm_eps": 0.3}, LARGE),
    "qwen3, heads as wide": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 0.3}, LARGE),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}, LARGE),
}


def open_source(folder: Path) -> Source:
    return resolve(str(folder), dtype=torch.float32)


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    model = load_model(open_source(folder), dtype=dtype)
    assert isinstance(model, Transformer)
    return model


def read(model: Transformer, tokens: Tensor, layers: tuple[int, ...] = ()) -> Output:
    """One text in one pass."""
    count = tokens.shape[0]
    cache = KVCache(model.new_storage(-(-count // 16) * 16))
    cache.reserve(0, count)
    context, slots = cache.slots(0)
    segment = Segment(0, tokens, torch.arange(count), None, context, slots, count)
    return model.forward_rows(Batch.pack([segment]), cache.storage, layers)


def greedy(model: Transformer, tokens: Tensor, count: int) -> list[int]:
    for _ in range(count):
        tokens = torch.cat([tokens, read(model, tokens).logits[-1:].argmax(-1)])
    return tokens[-count:].tolist()


def text(count: int = 60, vocabulary: int = 288) -> Tensor:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(3))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# --- the same function ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same(case: str, tmp_path: Path) -> None:
    family, changes, shape = CASES[case]
    folder = save(make(family, **changes), tmp_path / "small")
    large, small = enlarge(open_model(folder), shape, seed=1), open_model(folder)
    width, layers = small.config.hidden_size, len(small.config.layers)
    wanted = {*range(layers + 1), len(large.config.layers)}
    expected, found = read(small, text(), tuple(range(layers + 1))), read(large, text(), tuple(wanted))
    assert error(found.logits, expected.logits) < 1e-5
    for index, state in found.features.items():
        assert error(state[:, :width], expected.features[min(index, layers)]) < 1e-5
        assert not state[:, width:].any()  # exactly zero
    assert greedy(large, text(9), 12) == greedy(small, text(9), 12)


def test_it_has_the_shape() -> None:
    config = ModelConfig(288, 32, 48, 4, 2, 8, (Layer(),) * 2, 256)
    wide = enlarged_config(config, LARGE)
    assert Shape.of(wide) == LARGE
    assert (wide.vocab_size, wide.context_length) == (288, 256)
    assert wide.norm_eps == pytest.approx(1e-5 * 32 / 96, rel=1e-12)
    assert enlarged_config(config, wide) == wide  # a whole config will do for a shape


def test_the_room_is_filled(tmp_path: Path) -> None:
    """A pass over zeros would not be one over weights."""
    small = open_model(save(make("Llama"), tmp_path / "small"))
    tensors = enlarge(small, LARGE).state_dict()
    at = "model.layers.{}.{}_proj.weight"
    for index in range(LARGE.layers):
        for name in ("self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            weight = tensors[at.format(index, name)]
            assert 0.01 < float(weight[-8:].std()) < 1
            assert 0.01 < float(weight[0, -40:].std()) < 1
    for name in ("self_attn.o", "mlp.down"):
        assert not tensors[at.format(LARGE.layers - 1, name)].any()


def test_a_seed_gives_the_same_model(tmp_path: Path) -> None:
    small = open_model(save(make("Llama"), tmp_path / "small"))
    first, again, other = (enlarge(small, LARGE, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_half_precision_rounds_about_as_the_small_model(tmp_path: Path) -> None:
    folder = save(make("Llama", initializer_range=0.1), tmp_path / "small")
    exact = read(open_model(folder), text()).logits
    rounded = read(open_model(folder, torch.bfloat16), text()).logits.float()
    large = enlarge(open_model(folder), LARGE, dtype=torch.bfloat16)
    assert large.dtype == torch.bfloat16
    output = read(large, text(), (5,))
    assert not output.features[5][:, 32:].any()
    noise = (rounded - exact).square().mean().sqrt()
    assert (output.logits.float() - exact).square().mean().sqrt() < 2 * noise


# --- shapes ---------------------------------------------------------------------------------------------------

SMOLLM2 = ModelConfig(49_152, 576, 1536, 9, 3, 64, (Layer(Rope(100_000.0)),) * 30, 8192, tied=True)


def weights_of(config: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in expected_shapes(config).values())


def test_llama_3_8b() -> None:
    wide = enlarged_config(SMOLLM2, SHAPES["llama-3-8b"])
    assert Shape.of(wide) == SHAPES["llama-3-8b"]
    assert wide.norm_eps == 1e-5 * 576 / 4096
    llama = dataclasses.replace(wide, vocab_size=128_256, tied=False)
    assert weights_of(llama) == 8_030_261_248  # as the model's own page counts them
    assert weights_of(wide) == weights_of(llama) - (2 * 128_256 - 49_152) * 4096


def test_llama_3_1b_has_its_weights_in_more_layers() -> None:
    like = SHAPES["llama-3-1b"]
    wide = enlarged_config(SMOLLM2, like)
    assert Shape.of(wide) == dataclasses.replace(like, layers=30, intermediate_size=3584)
    llama = dataclasses.replace(
        SMOLLM2, **dataclasses.asdict(like) | {"layers": (Layer(),) * 16, "vocab_size": 128_256}
    )
    assert weights_of(llama) == 1_235_814_400
    ours, theirs = weights_of(wide) - 49_152 * 2048, weights_of(llama) - 128_256 * 2048
    assert abs(ours / theirs - 1) < 0.005


def test_one_layer_of_llama_3_8b_is_where_it_should_be() -> None:
    """Heads of 64 in heads of 128, three query heads to a group of four: position by position, for real sizes."""
    small = dataclasses.replace(SMOLLM2, vocab_size=2, layers=SMOLLM2.layers[:1])
    wide = dataclasses.replace(enlarged_config(SMOLLM2, SHAPES["llama-3-8b"]), vocab_size=2, layers=small.layers)
    weights = {name: torch.ones(shape) for name, shape in expected_shapes(small).items()}
    made = enlarged_tensors(weights, small, wide, seed=0, dtype=torch.float32, device="cpu")
    tensors = {name.rpartition("layers.0.")[2]: tensor for name, tensor in made}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name.rpartition("layers.0.")[2]: shape for name, shape in expected_shapes(wide).items()
    }
    out = tensors["self_attn.o_proj.weight"].view(4096, 8, 4, 2, 64)  # channels, groups, heads, halves, pairs
    expected = torch.zeros_like(out)
    expected[:576, :3, :3, :, ::2] = 1
    assert torch.equal(out, expected)
    queries = tensors["self_attn.q_proj.weight"].view(8, 4, 2, 64, 4096)[:3, :3, :, :, :576]
    assert torch.equal(queries[:, :, :, ::2], torch.full_like(queries[:, :, :, ::2], 2**0.5))
    assert not queries[:, :, :, 1::2].any()
    assert float(tensors["input_layernorm.weight"][0]) == 3 / 8


def test_shapes_by_name_and_by_folder(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path / "small")
    assert find_shape("llama-3-8b") == SHAPES["llama-3-8b"]
    assert find_shape(str(folder)) == find_shape(str(folder / "config.json")) == SMALL
    with pytest.raises(ValueError, match="choose llama-3-1b or llama-3-8b, or name a folder"):
        find_shape("llama-9")
    with pytest.raises(ValueError, match="with experts has no single MLP"):
        find_shape(str(save(make("Qwen3Moe", **EXPERTS), tmp_path / "experts")))


# --- what does not fit ----------------------------------------------------------------------------------------

LLAMA = ModelConfig(288, 32, 48, 4, 2, 8, (Layer(),) * 2, 256)


@pytest.mark.parametrize(
    ("config", "shape", "said"),
    [
        (LLAMA, {"hidden_size": 24}, "a width of 24, and the model 32: choose a shape with at least that"),
        (LLAMA, {"intermediate_size": 47}, "an MLP of 47, and the model 48"),
        (LLAMA, {"head_dim": 4}, "heads of size 4, and the model 8"),
        (LLAMA, {"head_dim": 12}, "heads are 8 wide, or a multiple of it"),
        (LLAMA, {"heads": 3, "kv_heads": 3}, "4 heads need 4 of those: choose a shape with more"),
        (LLAMA, {"heads": 8, "kv_heads": 1}, "4 heads need 2 of those"),
        (LLAMA, {"layers": 1}, "too few weights for 2 layers.*choose a larger shape"),
        (dataclasses.replace(LLAMA, layers=(Layer(Rope(kind="yarn", factor=4.0, original_context=64)),)), {}, "yarn"),
        (dataclasses.replace(LLAMA, layers=(Layer(experts=True),)), {}, "take a model without experts"),
        (dataclasses.replace(LLAMA, sandwich_norms=True, family="gemma3_text"), {}, "gemma3_text cannot be enlarged"),
        (dataclasses.replace(LLAMA, norm_offset=1.0, family="gemma"), {}, "take a Llama, Mistral or Qwen"),
    ],
)
def test_what_does_not_fit_is_refused(config: ModelConfig, shape: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        enlarged_config(config, dataclasses.replace(LARGE, **shape))


def test_fewer_layers_keep_the_number_of_weights() -> None:
    like = Shape(1024, 4096, 16, 8, 64, 10)
    shape = fit(dataclasses.replace(SMALL, layers=20), like)
    assert (shape.layers, shape.hidden_size) == (20, 1024)
    assert shape.intermediate_size % 128 == 0
    assert shape.layers * shape.layer_weights == pytest.approx(like.layers * like.layer_weights, rel=0.05)


def test_a_model_that_has_run_is_refused(tmp_path: Path) -> None:
    model = open_model(save(make("Llama"), tmp_path / "small"))
    read(model, text(3))
    with pytest.raises(ValueError, match=r"has run.*load it again"):
        enlarge(model, LARGE)
    with torch.device("meta"):
        empty = Transformer(model.config)
    with pytest.raises(ValueError, match=r"no whole model\.embed_tokens\.weight: load it again"):
        enlarge(empty, LARGE)


# --- as a folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "llama, tied", "llama 3.1", "qwen2", "qwen3", "smollm3"])
def test_a_folder_that_everybody_reads(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and transformers; in several files."""
    monkeypatch.setattr(folders, "SHARD", 100_000)
    family, changes, shape = CASES[case]
    source = open_source(save(make(family, **changes), tmp_path / "small"))
    told: list[tuple[str, int, int]] = []
    made = folders.enlarge_folder(
        source, shape, tmp_path / "large", dtype=torch.float32, seed=1, progress=lambda *each: told.append(each)
    )
    assert len(list(made.folder.glob("model-*-of-*.safetensors"))) > 1
    assert told[-1] == ("Enlarging", made.bytes, made.bytes)
    large = open_source(made.folder)
    assert large.config is not None
    check(made.folder, large.config)
    expected = read(open_model(source.folder), text()).logits
    assert error(read(open_model(made.folder), text()).logits, expected) < 1e-5
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    with torch.no_grad():
        assert error(theirs(text()[None]).logits[0], expected) < 1e-5
    in_memory = enlarge(open_model(source.folder), shape, seed=1).state_dict()
    assert all(torch.equal(tensor, in_memory[name]) for name, tensor in open_model(made.folder).state_dict().items())


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return open_source(save_tiny_model(tmp_path / "small"))


def test_the_tokenizer_comes_along(source: Source, tmp_path: Path) -> None:
    made = folders.enlarge_folder(source, LARGE, tmp_path / "deep" / "large", dtype=torch.bfloat16)
    names = {path.name for path in made.folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert not {INDEX, "unfinished"} & names
    assert json.loads((made.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(made.folder.parent.glob("*.partial"))


def test_a_folder_that_exists_stays(source: Source, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    with pytest.raises(ValueError, match="large exists: delete it, or choose another --out"):
        folders.enlarge_folder(source, LARGE, tmp_path / "large", dtype=torch.bfloat16)
    part = tmp_path / "other.partial"
    part.mkdir()
    (part / "mine").touch()
    with pytest.raises(ValueError, match="in the way and not from here"):
        folders.enlarge_folder(source, LARGE, tmp_path / "other", dtype=torch.bfloat16)
    assert (part / "mine").exists()


def test_what_a_killed_process_left_is_made_anew(source: Source, tmp_path: Path) -> None:
    part = tmp_path / "large.partial"
    part.mkdir()
    for name in ("unfinished", "model.safetensors", "model-00001-of-00009.safetensors"):
        (part / name).write_bytes(b"half")
    made = folders.enlarge_folder(source, LARGE, tmp_path / "large", dtype=torch.bfloat16)
    assert not part.exists()
    assert not list(made.folder.glob("model-*"))
    assert open_model(made.folder, torch.bfloat16).config.hidden_size == 96


def test_nothing_is_left_of_what_failed(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.enlarge_folder(source, LARGE, tmp_path / "large", dtype=torch.bfloat16, progress=stop)
    assert {path.name for path in tmp_path.iterdir()} == {"small"}
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"large needs 0\.0 GB, and 0\.0 GB are free there"):
        folders.enlarge_folder(source, LARGE, tmp_path / "large", dtype=torch.bfloat16)
    assert {path.name for path in tmp_path.iterdir()} == {"small"}


def test_two_processes_do_not_write_one_folder(source: Source, tmp_path: Path) -> None:
    with folders._partial(tmp_path / "large") as part:
        with pytest.raises(ValueError, match="another process is writing"):
            folders.enlarge_folder(source, LARGE, tmp_path / "large", dtype=torch.bfloat16)
        assert os.listdir(part) == ["unfinished"]


# --- the pieces -----------------------------------------------------------------------------------------------


def test_widening_a_matrix() -> None:
    noise = Noise(0, torch.float32, "cpu")
    rows = Axis.of([None, 1, None, 0], [True, False, False, False])  # free, taken, zeros, taken
    columns = Axis.of([0, None, 1])
    wide = widen_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rows, columns, noise, scale=2.0)
    assert wide[[1, 3]][:, [0, 2]].tolist() == [[6.0, 8.0], [2.0, 4.0]]
    assert wide[0].all()
    assert not wide[2].any()
    assert wide[[1, 3], 1].all()
    closed = widen_matrix(torch.ones(2, 2), rows.closed(), columns.closed(), noise)
    assert closed.sum() == 4
    vector = widen_vector(torch.tensor([1.0, 2.0]), rows, noise, scale=2.0, spare=7.0)
    assert vector.tolist() == [7.0, 4.0, 7.0, 2.0]


def test_noise_looks_like_weights() -> None:
    block = Noise(0, torch.bfloat16, "cpu").block(200, 300, 0.5).float()
    assert float(block.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(block.mean())) < 0.02
    assert len({tuple(row) for row in block.tolist()}) == 200
