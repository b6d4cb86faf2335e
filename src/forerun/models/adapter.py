"""Any model of the `transformers` library as a target: slower than our own transformer, but whatever is released.

Attention is the one that transformers picks, sdpa or, where that would be wrong (soft caps, sinks, ALiBi), eager:
both take masks with four dimensions, which is how trees are told. Flash kernels do not, and are not used.
What a model can do is tried out when it is loaded (`adapter_probe`): trees, chains with cached keys and values, or
chains with the text read anew in every pass. Encoder–decoder models take chains.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from forerun.models.adapter_calls import Calls, DecoderOnly, EncoderDecoder
from forerun.models.adapter_passes import CachedPasses, RecomputedPasses, needs_mask
from forerun.models.adapter_probe import choose_passes
from forerun.models.batch import Batch
from forerun.models.storage import Storage
from forerun.models.target import Output, TargetModel

UNLIMITED = 2**20
"""The context length of a model that names none."""

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
"""How configurations spell the context length."""


def load_adapter(folder: Path | str, dtype: torch.dtype, device: torch.device | str) -> TargetModel:
    """A model that was saved with `save_pretrained` or downloaded from a hub; nothing is fetched, and code that comes
    with a model is not run."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"there is no config.json in {folder}: name a folder that holds a model of transformers")
    with _quiet():
        config = _read_config(folder)
        model = _read_weights(folder, config, dtype)
        placed: PreTrainedModel = nn.Module.to(model, torch.device(device))
        return adapt(placed)


def adapt(model: PreTrainedModel) -> Adapter:
    """Try out what the model can do, and wrap it accordingly."""
    model.train(False)
    model.requires_grad_(False)
    if model.config._attn_implementation not in {"sdpa", "eager"}:
        model.set_attn_implementation("eager")
    with torch.inference_mode():
        calls: Calls = EncoderDecoder(model) if model.config.is_encoder_decoder else DecoderOnly(model)
    passes, vocabulary = choose_passes(model, calls)
    return Adapter(
        vocab_size=vocabulary,
        context_length=_context_length(model.config),
        eos=_eos(model),
        branches=passes.style is not None,
        device=model.device,
        dtype=model.dtype,
        calls=calls,
        passes=passes,
    )


@dataclass
class Adapter:
    """A `TargetModel` of a way to call the model and a way to run segments through it."""

    vocab_size: int
    context_length: int
    eos: frozenset[int]
    branches: bool
    device: torch.device
    dtype: torch.dtype
    calls: Calls
    passes: CachedPasses | RecomputedPasses

    def new_storage(self, slots: int) -> Storage:
        return self.passes.new_storage(slots)

    def forward_rows(self, batch: Batch, storage: Storage, layers: Sequence[int] = ()) -> Output:
        if not self.branches and any(needs_mask(segment) for segment in batch.segments):
            raise ValueError("this model cannot check trees: choose a drafter or a tree shape that makes chains")
        with torch.inference_mode():
            return self.passes.forward_rows(batch.on(self.device).segments, storage, layers)

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return self.calls.begin(sequence, prompt)

    def forget(self, sequence: int) -> None:
        self.calls.forget(sequence)


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the libraries raise
        if "trust_remote_code" in str(error):
            message = f"the model in {folder} brings code of its own, which is not run: choose one of transformers' own"
        else:
            message = f"transformers cannot read {folder / 'config.json'}: check its model_type and that it is whole"
        raise ValueError(message) from error
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise ValueError(
            f"a model of type {config.model_type!r} does not write text: choose a causal or an encoder–decoder model"
        )
    return config


def _read_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Weights that a file lacks would be made up at random, without a word: that is refused."""
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except ImportError as error:
        raise ValueError(f"the model in {folder} needs a package that is not installed: {_first(error)}") from error
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the weights in {folder} cannot be loaded ({_first(error)}): check that all of its files are there"
        ) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # safetensors derives it from Exception
            raise
        raise ValueError(f"a weight file in {folder} is damaged: copy or download it again") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}:"
            " choose a checkpoint that was trained to write text"
        )
    loaded: PreTrainedModel = model
    return loaded


def _first(error: BaseException) -> str:
    """Of a message that may be a page long, the first line without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". :") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither progress bars nor advice meant for those who call transformers themselves."""
    logging: Any = transformers_logging  # it has no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _context_length(config: PreTrainedConfig) -> int:
    """Of the text that is written. With relative positions (T5) it has no end, whatever the configuration says."""
    text = config.get_text_config(decoder=True)
    if hasattr(text, "relative_attention_num_buckets"):
        return UNLIMITED
    lengths = (getattr(text, name, None) for name in LENGTHS)
    length = next((length for length in lengths if isinstance(length, int) and length > 0), UNLIMITED)
    # longrope turns all keys otherwise as soon as a pass goes beyond the first length: drafts would change the text
    scaling = getattr(text, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "longrope":
        original = scaling.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return min(length, original or length)
    return length


def _eos(model: PreTrainedModel) -> frozenset[int]:
    """What ends a text: the generation settings know it better than the configuration."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), model.config):
        ends = getattr(source, "eos_token_id", None)
        if isinstance(ends, int):
            return frozenset({ends})
        if ends:
            return frozenset(int(end) for end in ends)
    return frozenset()
