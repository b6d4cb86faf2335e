"""Modules for multi-token prediction in a target's own checkpoint, against the published formula in plain PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence as Many
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup, make_drafter
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.models.heads.checkpoint_mtp import read_mtp
from forerun.models.load import load_model, resolve
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of
from tests.engine.tiny import drain
from tests.models.checkpoints import make, save
from tests.tiny_folder import save_tiny_model

HIDDEN, HEADS, KEYS, SIZE, INNER, EPS, THETA = 32, 4, 2, 8, 40, 1e-2, 10_000.0
LAYOUTS = ("mimo", "qwen")
DEPTH = 4


class Module:
    """What is published: tensors by their names in the checkpoint, and what is computed with them."""

    def __init__(self, layout: str) -> None:
        self.mimo = layout == "mimo"
        self.model: Any = make(
            "Qwen2" if self.mimo else "Qwen3", rms_norm_eps=EPS, **({} if self.mimo else {"head_dim": SIZE})
        )
        generator = torch.Generator().manual_seed(7)
        self.tensors: dict[str, Tensor] = {}

        def add(name: str, *shape: int) -> None:
            weight = torch.randn(shape, generator=generator)
            self.tensors[name] = 1 + 0.5 * weight if "norm" in name else 0.25 * weight

        block = "" if self.mimo else "layers.0."
        for part, heads in (("q", HEADS), ("k", KEYS), ("v", KEYS)):
            add(f"{block}self_attn.{part}_proj.weight", heads * SIZE, HIDDEN)
            if self.mimo:
                add(f"{block}self_attn.{part}_proj.bias", heads * SIZE)
            elif part != "v":
                add(f"{block}self_attn.{part}_norm.weight", SIZE)
        add(f"{block}self_attn.o_proj.weight", HIDDEN, HEADS * SIZE)
        for part in ("gate", "up"):
            add(f"{block}mlp.{part}_proj.weight", INNER, HIDDEN)
        add(f"{block}mlp.down_proj.weight", HIDDEN, INNER)
        add(f"{block}input_layernorm.weight", HIDDEN)
        add(f"{block}post_attention_layernorm.weight", HIDDEN)
        for name in (
            ("token_layernorm", "hidden_layernorm", "final_layernorm")
            if self.mimo
            else (
                "pre_fc_norm_embedding",
                "pre_fc_norm_hidden",
                "norm",
            )
        ):
            add(f"{name}.weight", HIDDEN)
        add("input_proj.weight" if self.mimo else "fc.weight", HIDDEN, 2 * HIDDEN)

    @property
    def prefix(self) -> str:
        return "model.mtp_layers.0." if self.mimo else "mtp."

    def write(self, folder: Path, **more: Tensor) -> Path:
        """A target's folder with the module in it."""
        save(self.model, folder)
        weights = load_file(folder / "model.safetensors")
        for name, tensor in self.tensors.items():
            weights[self.prefix + name] = tensor
        save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        if self.mimo:
            config |= {"model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
        else:
            config["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    # --- the formula ------------------------------------------------------------------------------------------

    def states(self, text: list[int]) -> Tensor:
        """[T, H] of the target, as its output head reads them."""
        with torch.no_grad():
            hidden: Tensor = self.model.model(torch.tensor([text])).last_hidden_state[0]
        return hidden

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def heads(self, x: Tensor, part: str, count: int) -> Tensor:
        """[T, H] → [count, T, D], turned where they meet."""
        at = "self_attn." if self.mimo else "layers.0.self_attn."
        x = self.linear(x, f"{at}{part}_proj").view(-1, count, SIZE).transpose(0, 1)
        if part == "v":
            return x
        if not self.mimo:
            x = self.norm(x, f"{at}{part}_norm")
        turns = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def __call__(self, tokens: list[int], states: Tensor) -> Tensor:
        """Token i + 1 with the state at i, for all i → [T, H] what the output head reads."""
        block = "" if self.mimo else "layers.0."
        embedded = self.model.get_input_embeddings().weight.detach()[tokens]
        if self.mimo:
            both = [self.norm(states, "hidden_layernorm"), self.norm(embedded, "token_layernorm")]
        else:
            both = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(states, "pre_fc_norm_hidden")]
        x = self.linear(torch.cat(both, -1), "input_proj" if self.mimo else "fc")
        normed = self.norm(x, f"{block}input_layernorm")
        q, k, v = (self.heads(normed, part, count) for part, count in (("q", HEADS), ("k", KEYS), ("v", KEYS)))
        k, v = (each.repeat_interleave(HEADS // KEYS, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / SIZE**0.5 + torch.full((len(tokens),) * 2, -torch.inf).triu(1)
        seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + self.linear(seen, f"{block}self_attn.o_proj")
        normed = self.norm(x, f"{block}post_attention_layernorm")
        gated = functional.silu(self.linear(normed, f"{block}mlp.gate_proj")) * self.linear(
            normed, f"{block}mlp.up_proj"
        )
        x = x + self.linear(gated, f"{block}mlp.down_proj")
        return self.norm(x, "final_layernorm" if self.mimo else "norm")

    def drafts(self, text: list[int], count: int) -> list[int]:
        """A greedy chain: what the module made goes into its next row."""
        tokens, states = text[1:], self.states(text[:-1])
        drafted: list[int] = []
        for _ in range(count):
            made = self(tokens, states)[-1:]
            drafted.append(int((made @ self.model.lm_head.weight.detach().T).argmax()))
            tokens, states = [*tokens, drafted[-1]], torch.cat([states, made])
        return drafted


@cache
def module(layout: str) -> Module:
    return Module(layout)


def load(folder: Path) -> Transformer:
    model = load_model(resolve(str(folder), dtype=torch.float32), dtype=torch.float32)
    assert isinstance(model, Transformer)
    return model


def setup(target: Transformer, folder: Path | None) -> Setup:
    return Setup(target, 1024, lambda name: target, folder=folder)


class Compared:
    """The drafter, beside the formula."""

    def __init__(self, drafter: Drafter, formula: Module) -> None:
        self.own, self.formula = drafter, formula
        self.drawing, self.branches, self.layers, self.top = drafter.drawing, drafter.branches, drafter.layers, 0
        self.compared = 0

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tree = self.own.draft(sequences, budgets)
        for row, (text, budget) in enumerate(zip(sequences, budgets, strict=True)):
            length = min(DEPTH, budget.nodes, budget.depth)
            if tree.size > 1 and length:
                assert list(paths_of(tree, row)[-1]) == self.formula.drafts(text.tokens, length)
                self.compared += 1
        return tree

    def observe(self, observations: Many[Observation]) -> None:
        self.own.observe(observations)

    def forget(self, sequence: Sequence) -> None:
        self.own.forget(sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_formula(layout: str, tmp_path: Path) -> None:
    formula = module(layout)
    folder = formula.write(tmp_path / "target")
    target = load(folder)
    drafter = make_drafter("mtp", setup(target, folder), {"tree": str(DEPTH)})
    compared = Compared(drafter, formula)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asked = [Request([(7 * place + n) % 250 for place in range(n)], params) for n in (2, 9, 40)]
    plain = drain(Engine(target, make_drafter("none", setup(target, None)), slots=1024), asked)
    assert drain(Engine(target, compared, slots=1024), asked) == plain
    assert compared.compared >= 15


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_finds_it(layout: str, tmp_path: Path) -> None:
    folder = module(layout).write(tmp_path / "target")
    for file in save_tiny_model(tmp_path / "words").glob("*token*"):
        shutil.copy(file, folder)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts = {}
    for drafter in ("none", "mtp"):
        with LLM(folder, drafter, dtype="float32", device="cpu", cache_tokens=1024) as llm:
            texts[drafter] = llm.generate("the quick brown fox", params).token_ids
    assert texts["mtp"] == texts["none"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_several_modules_the_first_is_used(layout: str, tmp_path: Path) -> None:
    own = module(layout)
    second = {
        f"{own.prefix}{name}".replace("mtp_layers.0.", "mtp_layers.1.").replace(".layers.0.", ".layers.1."): tensor + 1
        for name, tensor in own.tensors.items()
        if layout == "mimo" or name.startswith("layers.0.")
    }
    few, many = own.write(tmp_path / "one"), own.write(tmp_path / "two", **second)
    target = load(many)
    heads = [read_mtp(folder, target.config) for folder in (few, many)]
    assert heads[0] is not None
    assert heads[1] is not None
    assert heads[0].tensors.keys() == heads[1].tensors.keys()
    assert all(torch.equal(tensor, heads[1].tensors[name]) for name, tensor in heads[0].tensors.items())


def test_what_has_no_module_is_told_to_train_one(tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path / "target")
    target = load(folder)
    assert read_mtp(folder, target.config) is None
    with pytest.raises(ValueError, match="no mtp drafter for this model comes with Forerun: train one"):
        make_drafter("mtp", setup(target, folder))
    with pytest.raises(ValueError, match="no mtp drafter"):  # the module is in files that nobody named
        make_drafter("mtp", setup(load(module("mimo").write(tmp_path / "mimo")), None))


def test_what_the_head_cannot_be_is_refused(tmp_path: Path) -> None:
    own = module("qwen")

    def refused(name: str, tensor: Tensor) -> str:
        folder = own.write(tmp_path / name.replace(".", "-"), **{f"mtp.{name}": tensor})
        target = load(folder)
        with pytest.raises(ValueError, match="choose another drafter, or train one") as error:
            make_drafter("mtp", setup(target, folder))
        return str(error.value)

    assert "has experts" in refused("layers.0.mlp.experts.3.up_proj.weight", torch.zeros(8, HIDDEN))
    gated = refused("layers.0.self_attn.q_proj.weight", torch.zeros(2 * HEADS * SIZE, HIDDEN))
    assert "has [64, 32] for layers.0.self_attn.q_proj.weight, and Forerun's for a qwen3 model has [32, 32]" in gated
    assert "has [288, 32] for embed_tokens.weight" in refused("embed_tokens.weight", torch.zeros(288, HIDDEN))
