"""Folders of safetensors: whole ones load as transformers has them, broken ones are refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.models.checkpoint import INDEX, WEIGHTS, load_tensors, model_config, read_config
from forerun.models.hf_config import config_from_hf
from forerun.models.names import Place, expected_shapes, place
from tests.models.checkpoints import EXPERTS, make, save, weights

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0], "head_dim": 16}),
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_tensors(folder, model_config(folder, read_config(folder)), dtype)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_those_of_transformers(name: str, sharded: bool, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make(family, **changes)
    folder = save(model, tmp_path, max_shard_size="20KB" if sharded else "5GB")
    assert (folder / INDEX).exists() == sharded
    loaded, expected = load(folder), weights(model)
    assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == expected_shapes(
        model_config(folder, read_config(folder))
    )
    assert set(loaded) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(loaded[key], tensor), key


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_number_formats(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = make("Mixtral", num_local_experts=2)
    torch.nn.Module.to(model, stored)
    loaded = load(save(model, tmp_path), wanted)
    for key, tensor in weights(model).items():
        assert loaded[key].dtype == wanted
        assert torch.equal(loaded[key], tensor.to(wanted)), key


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path)
    told: list[tuple[str, int, int]] = []
    load_tensors(
        folder,
        model_config(folder, read_config(folder)),
        torch.float32,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1][1] == told[-1][2] == sum(tensor.numel() * 4 for tensor in load(folder).values())


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path)
    loaded = load(folder)
    before = {key: tensor.clone() for key, tensor in loaded.items()}
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(loaded[key], before[key]) for key in loaded)


# --- other spellings ------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        lambda t: {f"language_model.{key}": tensor for key, tensor in t.items()},
        lambda t: {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in t.items()},
        lambda t: {**t, "vision_tower.x.weight": torch.ones(4), "multi_modal_projector.y": torch.ones(4)},
    ],
)
def test_wrappers_and_buffers(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path) -> None:
    model = make("Llama")
    rewrite(save(model, tmp_path), change)
    loaded = load(tmp_path)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in weights(model).items())


def test_a_tied_checkpoint_may_store_its_head(tmp_path: Path) -> None:
    model = make("Llama", tie_word_embeddings=True)
    rewrite(save(model, tmp_path), lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    assert "lm_head.weight" not in load(tmp_path)


def test_a_base_model_of_a_tied_config(tmp_path: Path) -> None:
    model = make("Llama", tie_word_embeddings=True)
    rewrite(save(model, tmp_path), lambda t: {key.removeprefix("model."): tensor for key, tensor in t.items()})
    assert set(load(tmp_path)) == set(weights(model))


def test_stacked_experts_are_accepted(tmp_path: Path) -> None:
    model = make("Mixtral", num_local_experts=4)
    folder = save(model, tmp_path)
    save_file(weights(model), folder / WEIGHTS, {"format": "pt"})
    loaded = load(folder)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in weights(model).items())


def test_places() -> None:
    up = "model.layers.3.mlp.experts.gate_up_proj"
    assert place("model.layers.3.block_sparse_moe.experts.7.w3.weight") == Place(up, 7, 1)
    assert place("model.layers.3.mlp.experts.7.gate_proj.weight") == Place(up, 7, 0)
    assert place("model.layers.3.mlp.experts.7.down_proj.weight") == Place("model.layers.3.mlp.experts.down_proj", 7)
    assert place("model.layers.3.block_sparse_moe.gate.weight") == Place("model.layers.3.mlp.gate.weight")


# --- refusals -------------------------------------------------------------------------------------------------


def without(key: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Llama", without("lm_head.weight"), "lm_head.weight is missing"),
        ("Llama", without("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        ("Llama", lambda t: {**t, "model.layers.2.mlp.up_proj.weight": torch.ones(2)}, "has no place in a llama"),
        ("Llama", lambda t: {**t, "model.norm.weight": torch.ones(31)}, "model.norm.weight has the shape 31, not 32"),
        ("Llama", lambda t: {**t, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, "of the type I8"),
        ("Llama", lambda t: {**t, "norm.weight": torch.ones(32)}, "are the same tensor"),
        (
            "Mixtral",
            without("model.layers.1.block_sparse_moe.experts.5.w3.weight"),
            "expert 5 of model.layers.1.mlp.experts.gate_up_proj is missing",
        ),
        (
            "Mixtral",
            lambda t: {**t, "model.layers.0.block_sparse_moe.experts.8.w1.weight": torch.ones(48, 32)},
            "beyond the 8",
        ),
        (
            "Mixtral",
            lambda t: {**t, "model.layers.0.block_sparse_moe.experts.2.w1.weight": torch.ones(47, 32)},
            "47 × 32, not 48 × 32",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    family: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    rewrite(save(make(family), tmp_path), change)
    with pytest.raises(ValueError, match=message) as refusal:
        load(tmp_path)
    assert str(tmp_path) in str(refusal.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("Llama"), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.02, 0.5, 0.9999])
def test_truncated_weights(share: float, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="fetch it again"):
        load(folder)


def test_weights_that_are_too_long(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="bytes and should have"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [7], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"x": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',  # a hole
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "y": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',  # one in another
        b"\xff\xfe{}",
    ],
)
def test_garbage_headers(header: bytes, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


def test_a_gguf_named_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"model_type": []}', "family"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "family None"),
    ],
)
def test_garbage_configs(content: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_folders_that_lack_something(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=f"no {WEIGHTS} and no {INDEX}: fetch the model again"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is of another format"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json: name the folder"):
        load(folder)


def test_missing_and_strange_shards(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[1].name}"):
        load(folder)
    for content, message in (
        ({"weight_map": {}}, "lists no files"),
        ({"weight_map": {"a": "../other.safetensors"}}, "no file of this folder"),
        ({"weight_map": {"a": ".."}}, "lacks .., which its index names"),
        ({"weight_map": {"a": ""}}, "which its index names"),
        ({"weight_map": 3}, "an object"),
    ):
        (folder / INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_two_shards_with_one_tensor(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    with pytest.raises(ValueError, match="remove one of these files"):
        load(folder)


def test_shapes_follow_the_config() -> None:
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2}
    shapes = expected_shapes(config_from_hf(values))
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (3, 1536, 2048)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (3, 2048, 768)
    assert shapes["model.layers.0.mlp.gate.weight"] == (3, 2048)


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    config = model_config(folder, read_config(folder))

    def cut(what: str, done: int, total: int) -> None:
        os.truncate(folder / WEIGHTS, 2000)

    with pytest.raises(ValueError, match="became shorter while it was read"):
        load_tensors(folder, config, torch.float32, progress=cut)


def test_double_precision(tmp_path: Path) -> None:
    model = make("Llama")
    rewrite(save(model, tmp_path), lambda t: {key: tensor.double() for key, tensor in t.items()})
    loaded = load(tmp_path)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in weights(model).items())
