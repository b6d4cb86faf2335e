"""The student's shape and first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.models.checkpoint import load_tensors
from forerun.models.hf_config import config_from_hf
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.student import StudentShape, frozen, new_student, student_hf_config
from tests.models.checkpoints import EXPERTS, make, save


def target_of(folder: Path, family: str, **changes: Any) -> tuple[Transformer, dict[str, Any]]:
    made = make(family, **changes)
    hf = made.config.to_dict()
    config = config_from_hf(hf)
    model = Transformer(config)
    tensors = load_tensors(save(made, folder), config, torch.float32)
    model.load_state_dict(tensors, strict=False)
    return model.requires_grad_(False), hf


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"num_hidden_layers": 5}),
        ("Mistral", {"num_hidden_layers": 3, "sliding_window": 8}),
        ("Qwen3", {"num_hidden_layers": 3, "head_dim": 8, "tie_word_embeddings": True}),
        ("Gemma3", {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8}),
    ],
)
def test_it_begins_as_parts_of_the_target(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    target, hf = target_of(tmp_path, family, **changes)
    made = student_hf_config(hf, target.config, StudentShape(layers=2))
    student = new_student(made, target, seed=0)
    assert (len(student.config.layers), student.config.family) == (2, target.config.family)
    first, last = student.model.layers[0].state_dict(), student.model.layers[1].state_dict()
    for name, weight in target.model.layers[0].state_dict().items():
        assert torch.equal(first[name], weight)
    for name, weight in target.model.layers[-1].state_dict().items():
        assert torch.equal(last[name], weight)
    assert torch.equal(student.lm_head.weight, target.lm_head.weight)
    assert all(weight.requires_grad for weight in student.parameters())


def test_as_deep_as_the_target_it_is_the_target(tmp_path: Path) -> None:
    target, hf = target_of(tmp_path, "Llama", num_hidden_layers=3)
    student = new_student(student_hf_config(hf, target.config, StudentShape(layers=3)), target, seed=0)
    tokens = torch.arange(24).view(2, 12)
    for model in (student, frozen(student, torch.float32)):
        assert torch.equal(states(model, tokens).normed, states(target, tokens).normed)
        assert torch.equal(model.lm_head.weight, target.lm_head.weight)


def test_another_width_begins_as_noise(tmp_path: Path) -> None:
    target, hf = target_of(tmp_path, "Llama", num_hidden_layers=3)
    made = student_hf_config(hf, target.config, StudentShape(layers=1, hidden=24))
    student = new_student(made, target, seed=0)
    assert (student.config.hidden_size, student.config.heads, student.config.kv_heads) == (24, 3, 1)
    assert student.config.intermediate_size == 36
    assert float(student.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(student.get_parameter("model.norm.weight"), torch.ones(24))
    same = new_student(made, target, seed=0)
    assert torch.equal(student.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(student.lm_head.weight, new_student(made, target, seed=1).lm_head.weight)


def test_a_target_with_experts_gets_a_dense_student(tmp_path: Path) -> None:
    target, hf = target_of(tmp_path, "Qwen3Moe", head_dim=8, **EXPERTS)
    student = new_student(student_hf_config(hf, target.config, StudentShape(layers=1)), target, seed=0)
    assert (student.config.family, student.config.experts) == ("qwen3", 0)
    assert torch.equal(student.model.embed_tokens.weight, target.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        (StudentShape(layers=4), "--layers is 4: the target has 3"),
        (StudentShape(hidden=30), "--hidden is 30: give a multiple of 8"),
    ],
)
def test_shapes_that_cannot_be(tmp_path: Path, shape: StudentShape, complaint: str) -> None:
    target, hf = target_of(tmp_path, "Llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match=complaint):
        student_hf_config(hf, target.config, shape)
