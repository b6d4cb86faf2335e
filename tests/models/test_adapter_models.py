"""Tiny random models of many families and texts that know their slots, for the tests of the adapter; and what the
families are found to be capable of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from forerun.models.adapter import Adapter, adapt
from forerun.models.adapter_passes import CachedPasses, RecomputedPasses
from forerun.models.batch import Batch, Segment
from forerun.models.storage import Storage
from forerun.models.target import Output, TargetModel

VOCABULARY = 97
WINDOW = 8
PROMPT = [5, 17, 40, 8, 23]
"""What the encoders of the tests read."""

GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5["decoder_start_token_id"] = 0
BART: dict[str, Any] = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "max_position_embeddings": 64},
}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2Config(**GPT, **ENDS),
    "gptj": lambda: tf.GPTJConfig(**GPT, **ENDS, rotary_dim=4),
    "opt": lambda: tf.OPTConfig(**COMMON, **ENDS, ffn_dim=64, word_embed_proj_dim=32),
    "neox": lambda: tf.GPTNeoXConfig(**COMMON, **ENDS),
    "phi": lambda: tf.PhiConfig(**COMMON, **ENDS),
    "stablelm": lambda: tf.StableLmConfig(**COMMON, **ENDS, num_key_value_heads=2),
    "falcon": lambda: tf.FalconConfig(**COMMON, **ENDS),
    "mistral": lambda: tf.MistralConfig(**COMMON, **ENDS, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, **ENDS, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **ENDS),
    "falcon-alibi": lambda: tf.FalconConfig(**COMMON, **ENDS, alibi=True),
    "gpt-neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=64,
        **ENDS,
    ),
    "mamba": lambda: tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **ENDS),
    "rwkv": lambda: tf.RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, **ENDS),
    "t5": lambda: tf.T5Config(**T5),
    "umt5": lambda: tf.UMT5Config(**T5),
    "bart": lambda: tf.BartConfig(vocab_size=VOCABULARY, **BART, forced_eos_token_id=None),
}
TREES = ["gpt2", "gptj", "opt", "neox", "phi", "stablelm", "falcon", "mistral", "gemma2"]
CACHED_CHAINS = ["bloom", "falcon-alibi", "gpt-neo", "t5", "umt5", "bart"]
RECOMPUTED = ["mamba", "rwkv"]
ALL = TREES + CACHED_CHAINS + RECOMPUTED


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Weights larger than usual, so that tokens matter to each other."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    kind: Any = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
    model = kind.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


@cache
def adapted(name: str) -> tuple[Any, Adapter]:
    model = make(name)
    return model, adapt(model)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(model: Any, text: list[int], **options: Any) -> Any:
    """The model's own answer to the whole text, for an encoder–decoder after `PROMPT`."""
    ids = torch.tensor([text])
    if model.config.is_encoder_decoder:
        return model(input_ids=torch.tensor([PROMPT]), decoder_input_ids=ids, use_cache=False, **options)
    return model(input_ids=ids, use_cache=False, **options)


class Text:
    """One sequence: which slot holds which of its tokens. Slots are handed out in no good order."""

    def __init__(self, adapter: TargetModel, storage: Storage, number: int = 0, slots: range | None = None) -> None:
        self.adapter = adapter
        self.storage = storage
        self.number = number
        order = list(slots or range(storage.slots))
        self.free = order[1::2] + order[::2]
        self.slots: list[int] = []
        self.start = adapter.begin(number, PROMPT)

    def segment(
        self, new: list[int], wanted: int | None = None, parents: list[int] | None = None, keep: bool = True
    ) -> Segment:
        """New tokens, of which the last form a tree if it is given; `keep` makes them part of the text."""
        taken = self.free[: len(new)]
        before, nodes = len(self.slots), 0 if parents is None else len(parents)
        positions = torch.arange(before, before + len(new))
        ancestors = None
        if parents is not None:
            ancestors = torch.eye(nodes, dtype=torch.bool)
            for node, parent in enumerate(parents):
                if parent >= 0:
                    ancestors[node] |= ancestors[parent]
            positions[len(new) - nodes :] = before + len(new) - nodes + ancestors.sum(dim=1) - 1
        segment = Segment(
            sequence=self.number,
            tokens=torch.tensor(new),
            positions=positions,
            ancestors=ancestors,
            context=torch.tensor(self.slots, dtype=torch.int64),
            slots=torch.tensor(taken),
            logits=len(new) if wanted is None else wanted,
        )
        if keep:
            self.slots += taken
            del self.free[: len(new)]
        return segment

    def read(
        self,
        new: list[int],
        wanted: int | None = None,
        parents: list[int] | None = None,
        keep: bool = True,
        layers: tuple[int, ...] = (),
    ) -> Output:
        segment = self.segment(new, wanted, parents, keep)
        return self.adapter.forward_rows(Batch.pack([segment]), self.storage, layers)


def close(got: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_what_a_model_can_do_is_found_out(name: str) -> None:
    model, adapter = adapted(name)
    assert adapter.branches == (name in TREES)
    assert isinstance(adapter.passes, RecomputedPasses if name in RECOMPUTED else CachedPasses)
    assert adapter.vocab_size == VOCABULARY
    assert adapter.device == torch.device("cpu")
    assert adapter.eos == {model.config.eos_token_id}


def test_context_lengths() -> None:
    lengths = {name: adapted(name)[1].context_length for name in ("gpt2", "opt", "mistral", "bart", "bloom", "t5")}
    assert lengths == {"gpt2": 64, "opt": 64, "mistral": 64, "bart": 64, "bloom": 2**20, "t5": 2**20}
