"""One forward pass of a `transformers` model, decoder-only or encoder–decoder, asked for in one way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

Masks = Tensor | dict[str, Tensor]
"""[G, 1, N, P + N] additive: one for all layers, or one for each kind of layer that the model has."""


@dataclass(frozen=True)
class Request:
    """G texts of one shape in one pass."""

    sequences: tuple[int, ...]  # G ids
    tokens: Tensor  # [G, N]
    layers: Sequence[int] = ()
    keep: Tensor | None = None  # [K] rows whose logits are wanted; None for all
    cache: DynamicCache | None = None  # P tokens that came before; the pass adds its own N
    positions: Tensor | None = None  # [G, N]; None leaves them to the model
    masks: Masks | None = None  # None for a causal mask, which the model makes itself


@dataclass(frozen=True)
class Rows:
    logits: Tensor  # [G, K, V]
    features: dict[int, Tensor]  # layer to [G, N, H]


class Calls(Protocol):
    """How the two kinds of model are called."""

    takes_positions: bool
    takes_masks: bool
    together: bool
    """Whether several sequences may share a pass."""

    def run(self, request: Request) -> Rows: ...

    def begin(self, sequence: int, prompt: list[int]) -> list[int]: ...

    def forget(self, sequence: int) -> None: ...


@dataclass(frozen=True)
class Stack:
    """The layers of a decoder, for those who want to see between them.

    `hidden_states` of transformers will not do: its last entry has been through the final norm already, and some models
    (Mamba) leave the embedding out, so that every number means another layer. Hooks read what the layers hand on.
    """

    blocks: tuple[nn.Module, ...]
    """None at all where they were not found."""

    @classmethod
    def find(cls, model: PreTrainedModel, inputs: dict[str, Any]) -> Stack:
        """The outermost list of modules in which each is called once and reads what the one before it returned."""
        whole: Any = model
        root: nn.Module = whole.get_decoder() if model.config.is_encoder_decoder else model
        for blocks in (module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module)):
            with _watch(blocks) as seen:
                model(**inputs, use_cache=False)
            in_order = [number for number, _, _ in seen] == list(range(len(blocks)))
            if in_order and all(_same(this[2], following[1]) for this, following in pairwise(seen)):
                return cls(tuple(blocks))
        return cls(())

    def check(self, wanted: Sequence[int]) -> None:
        if wanted and not self.blocks:
            raise ValueError("the layers of this model cannot be told apart: choose a drafter that reads no features")
        for layer in wanted:
            if not 0 <= layer <= len(self.blocks):
                raise ValueError(
                    f"the model has no layer {layer}: choose a drafter that reads layers 0 to {len(self.blocks)}"
                )

    def call(self, model: PreTrainedModel, wanted: Sequence[int], inputs: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
        """The model's output, and the hidden states after as many layers as wanted."""
        self.check(wanted)
        places = sorted({max(0, layer - 1) for layer in wanted})
        with _watch([self.blocks[place] for place in places]) as seen:
            output = model(**inputs, return_dict=True)
        states = {}
        for number, before, after in seen:
            states[places[number] + 1] = after
            if places[number] == 0:
                states[0] = before
        return output, {layer: states[layer] for layer in wanted}


@contextmanager
def _watch(blocks: Sequence[nn.Module] | nn.ModuleList) -> Iterator[list[tuple[int, Any, Any]]]:
    """(number, hidden states that go in, hidden states that come out) for every call of a block, as they happen."""
    seen: list[tuple[int, Any, Any]] = []

    def note(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs.get("hidden_states")
        seen.append((number, before, output[0] if isinstance(output, tuple | list) else output))

    handles = [
        block.register_forward_hook(partial(note, number), with_kwargs=True) for number, block in enumerate(blocks)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class DecoderOnly:
    """A causal model: the prompt is the beginning of the text."""

    together = True

    def __init__(self, model: PreTrainedModel) -> None:
        accepted = inspect.signature(model.forward).parameters
        self.model = model
        self.takes_positions = "position_ids" in accepted
        self.takes_masks = True
        self._selects_rows = "logits_to_keep" in accepted
        self.stack = Stack.find(model, {"input_ids": _few_tokens(model)})

    def run(self, request: Request) -> Rows:
        inputs: dict[str, Any] = {"input_ids": request.tokens, "use_cache": request.cache is not None}
        if request.cache is not None:
            inputs["past_key_values"] = request.cache
        if request.positions is not None:
            inputs["position_ids"] = request.positions
        if request.masks is not None:
            inputs["attention_mask"] = request.masks
        if request.keep is not None and self._selects_rows:
            inputs["logits_to_keep"] = request.keep
        output, features = self.stack.call(self.model, request.layers, inputs)
        logits = output.logits
        return Rows(logits if request.keep is None or self._selects_rows else logits[:, request.keep], features)

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return list(prompt)

    def forget(self, sequence: int) -> None:
        """Nothing is kept for a sequence outside of its storage."""


@dataclass
class Source:
    """What an encoder made of a prompt."""

    output: Any
    """As the model's own encoder returned it, with what its decoder may look for besides the hidden states."""
    cross: DynamicCache = field(default_factory=DynamicCache)
    """Keys and values of the cross attention: filled by the first pass, read by all others."""


class EncoderDecoder:
    """T5 and its relatives: an encoder reads the prompt, the text begins with the decoder's start token.

    Prompts differ in length, so each sequence has its own pass. Trees are not tried: T5 counts positions from the
    length of its cache, and takes none from outside.
    """

    together = False
    takes_positions = False
    takes_masks = False

    def __init__(self, model: PreTrainedModel) -> None:
        generation = getattr(model, "generation_config", None)
        start = getattr(generation, "decoder_start_token_id", None)
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        if not isinstance(start, int):
            raise ValueError("the model does not say where its text starts: set decoder_start_token_id in config.json")
        self.model = model
        self.start = start
        self._sources: dict[int, Source] = {}
        few = _few_tokens(model)
        self.stack = Stack.find(model, {"input_ids": few, "decoder_input_ids": few})

    @property
    def longest_prompt(self) -> int | None:
        """None where positions are relative (T5), so that an encoder reads any length."""
        if hasattr(self.model.config, "relative_attention_num_buckets"):
            return None
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) and longest > 0 else None

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        if not prompt:
            raise ValueError("the prompt is empty: an encoder needs at least one token to read")
        longest = self.longest_prompt
        if longest is not None and len(prompt) > longest:
            raise ValueError(f"the prompt has {len(prompt)} tokens: shorten it to the {longest} that the encoder reads")
        tokens = torch.tensor([prompt], device=self.model.device)
        with torch.inference_mode():
            self._sources[sequence] = Source(self.model.get_encoder()(input_ids=tokens, return_dict=True))
        return [self.start]

    def forget(self, sequence: int) -> None:
        self._sources.pop(sequence, None)

    def run(self, request: Request) -> Rows:
        (sequence,) = request.sequences
        assert sequence in self._sources, f"sequence {sequence} was not begun"
        source = self._sources[sequence]
        inputs: dict[str, Any] = {
            "encoder_outputs": source.output,
            "decoder_input_ids": request.tokens,
            "use_cache": request.cache is not None,
        }
        if request.cache is not None:
            inputs["past_key_values"] = EncoderDecoderCache(request.cache, source.cross)
        output, features = self.stack.call(self.model, request.layers, inputs)
        return Rows(output.logits if request.keep is None else output.logits[:, request.keep], features)


def _few_tokens(model: PreTrainedModel) -> Tensor:
    return torch.tensor([[3, 1, 2]], device=model.device)


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
