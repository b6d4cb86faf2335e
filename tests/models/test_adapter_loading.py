"""From a folder to a target: what is loaded, what is tried out, what is refused and how that is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.utils import logging

from forerun.models.adapter import adapt, load_adapter
from forerun.models.adapter_passes import CachedPasses, RecomputedPasses
from forerun.models.batch import Batch
from forerun.models.target import TargetModel
from tests.models.test_adapter_models import (
    COMMON,
    CONFIGS,
    ENDS,
    PROMPT,
    VOCABULARY,
    WINDOW,
    Text,
    close,
    make,
    reference,
    tokens,
)


def saved(folder: Path, name: str, seed: int = 0) -> Any:
    model = make(name, seed=seed)
    model.save_pretrained(folder)
    return model


def greedy(target: TargetModel, count: int) -> list[int]:
    """The prompt in two pieces, then token by token, each with a draft of two behind it that is never kept."""
    reader = Text(target, target.new_storage(64))
    text = list(reader.start)
    pending = list(text)
    written: list[int] = []
    if len(pending) > 2:
        reader.read(pending[:2], wanted=0)
        pending = pending[2:]
    while len(written) < count and not target.eos & set(written):
        draft = [(7 * len(written)) % VOCABULARY, 5]
        segment = reader.segment(pending + draft, wanted=3, keep=False)
        best = target.forward_rows(Batch.pack([segment]), reader.storage).logits.argmax(dim=-1).tolist()
        reader.segment(pending)  # keeps the slots of what is certain; the draft's are free again
        pending = [best[0]]
        written.append(best[0])
    return written


@pytest.mark.parametrize(
    ("name", "seed"),
    [("gpt2", 4), ("gemma2", 5), ("mamba", 4), ("t5", 6), ("umt5", 0), ("bart", 6)],
)
def test_greedy_decoding_is_that_of_generate(name: str, seed: int, tmp_path: Path) -> None:
    """With seeds that make the models write more than one word."""
    model = saved(tmp_path, name, seed)
    target = load_adapter(tmp_path, torch.float32, "cpu")
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": 20, "pad_token_id": 0}
    right = model.generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)).long(), **settings)
    begun = 1 if model.config.is_encoder_decoder else len(PROMPT)
    written = greedy(target, 20)
    assert written == right[0, begun:].tolist()
    assert len(set(written)) > 1


def test_a_model_is_loaded_in_the_wanted_precision(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    target = load_adapter(str(tmp_path), torch.bfloat16, torch.device("cpu"))
    storage = target.new_storage(8)
    assert storage.keys[0].dtype == torch.bfloat16
    assert Text(target, storage).read([4, 5]).logits.dtype == torch.bfloat16
    assert target.branches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "branches"), [("mistral", True), ("gemma2", True), ("falcon-alibi", False)])
def test_trees_are_judged_alike_in_short_formats(dtype: torch.dtype, name: str, branches: bool) -> None:
    assert adapt(make(name, dtype)).branches == branches


def test_loading_is_quiet_and_leaves_the_settings_of_transformers_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, "mamba")
    settings: Any = logging
    before = settings.get_verbosity(), settings.is_progress_bar_enabled()
    capfd.readouterr()
    load_adapter(tmp_path, torch.float32, "cpu")
    assert capfd.readouterr() == ("", "")
    assert (settings.get_verbosity(), settings.is_progress_bar_enabled()) == before


def test_ends_come_from_the_generation_settings(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_adapter(tmp_path, torch.float32, "cpu").eos == {2, 9}


# --- trying out ------------------------------------------------------------------------------------------------


def test_windows_are_what_they_were_after_trying_them() -> None:
    for name in ("mistral", "gemma2"):
        model = make(name)
        passes = adapt(model).passes
        assert model.config.sliding_window == WINDOW
        assert passes.style is not None
        assert passes.style.window == WINDOW


def test_a_long_window_is_tried_without_a_long_text() -> None:
    """Masks that leave a window of 4096 out are right for every short text, and wrong all the same."""
    config = CONFIGS["mistral"]()
    config.sliding_window = 4096
    kind: Any = tf.AutoModelForCausalLM
    passes = adapt(kind.from_config(config)).passes
    assert passes.style is not None
    assert (passes.style.windowed, passes.style.window) == ("all", 4096)


def test_longrope_ends_where_its_first_range_does() -> None:
    """Beyond it all keys are turned otherwise, so that the length of a draft would change the text."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    settings: dict[str, Any] = {**COMMON, **ENDS, "pad_token_id": 0, "rope_parameters": rope}
    kind: Any = tf.AutoModelForCausalLM
    adapter = adapt(kind.from_config(tf.Phi3Config(**settings, original_max_position_embeddings=32)))
    assert adapter.branches
    assert adapter.context_length == 32


def test_attention_without_masks_is_replaced() -> None:
    model = make("mistral")
    model.set_attn_implementation("flex_attention")
    assert adapt(model).branches
    assert model.config._attn_implementation == "eager"


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Any:
    """A model whose inputs are changed before it sees them."""
    model = make(name)

    def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        change(kwargs)
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_a_model_that_ignores_masks_gets_chains() -> None:
    model = changed("gpt2", lambda inputs: inputs.pop("attention_mask", None))
    adapter = adapt(model)
    assert not adapter.branches
    assert isinstance(adapter.passes, CachedPasses)


def test_a_model_that_refuses_masks_gets_chains() -> None:
    def refuse(inputs: dict[str, Any]) -> None:
        if inputs.get("attention_mask") is not None:
            raise ValueError("masks have two dimensions here")

    assert not adapt(changed("gpt2", refuse)).branches


def test_a_model_that_ignores_positions_gets_chains() -> None:
    adapter = adapt(changed("gpt2", lambda inputs: inputs.pop("position_ids", None)))
    assert not adapter.branches
    assert isinstance(adapter.passes, CachedPasses)


def test_a_model_that_forgets_its_cache_is_recomputed() -> None:
    def forget(inputs: dict[str, Any]) -> None:
        cache = inputs.get("past_key_values")
        for layer in cache.layers if cache is not None else ():
            if layer.keys is not None:
                layer.keys = torch.zeros_like(layer.keys)

    model = changed("gpt2", forget)
    adapter = adapt(model)
    assert isinstance(adapter.passes, RecomputedPasses)
    text = tokens(9)
    reader = Text(adapter, adapter.new_storage(10))
    reader.read(text[:5])
    close(reader.read(text[5:]).logits, reference(model, text).logits[0, 5:])


def test_an_encoder_decoder_without_a_sound_cache_is_recomputed_too() -> None:
    def forget(inputs: dict[str, Any]) -> None:
        inputs["past_key_values"] = None

    model = changed("t5", forget)
    adapter = adapt(model)
    assert isinstance(adapter.passes, RecomputedPasses)
    text = tokens(9)
    reader = Text(adapter, adapter.new_storage(10))
    reader.read(text[:5])
    close(reader.read(text[5:]).logits, reference(model, text).logits[0, 5:])


# --- refusals --------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_adapter(folder, torch.float32, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message
    return message


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "there is no config.json" in refusal(tmp_path)
    assert "there is no config.json" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "from-the-future"}, "check its model_type"),
        ({"hidden_size": 32}, "check its model_type"),
        ({"model_type": "vit", "hidden_size": 32}, "'vit' does not write text"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}, "brings code of its own"),
    ],
)
def test_models_that_cannot_serve_are_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('this must never run')")
    assert reason in refusal(tmp_path)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "transformers cannot read" in refusal(tmp_path)
    for wrong in ({"n_layer": "x"}, {"n_head": [1]}, {"bos_token_id": "x"}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **wrong}))
        assert "transformers cannot read" in refusal(tmp_path)


def test_missing_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "damaged" in refusal(tmp_path)
    weights.unlink()
    assert "check that all of its files are there" in refusal(tmp_path)


def test_weights_that_would_be_made_up_are_refused(tmp_path: Path) -> None:
    model = make("neox")
    model.gpt_neox.save_pretrained(tmp_path)  # without the output head
    assert "lacks 1 weights of GPTNeoXForCausalLM, such as lm_head.weight" in refusal(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = tf.BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    kind: Any = tf.BertLMHeadModel
    kind(config).save_pretrained(tmp_path)
    assert "choose a causal language model" in refusal(tmp_path)


def test_an_encoder_decoder_that_does_not_say_where_to_start_is_refused() -> None:
    model = make("t5")
    model.config.decoder_start_token_id = None
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="set decoder_start_token_id"):
        adapt(model)
