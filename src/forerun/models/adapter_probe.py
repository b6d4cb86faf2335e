"""What a `transformers` model can do, found by trying.

Whether a cache can be cut and put together again, and whether a mask is obeyed, is written in no configuration, and a
model that ignores a mask answers all the same. So a few random tokens are run both ways and the logits compared.
"Equal" has to mean something in bfloat16 too: an error is measured against what the mistake in question would
change (reading another context, ignoring the mask), not against the size of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from forerun.models.adapter_calls import Calls, Request
from forerun.models.adapter_passes import CachedPasses, MaskStyle, RecomputedPasses
from forerun.models.batch import Segment
from forerun.models.storage import LayerShape

T = TypeVar("T")

TEXT = 12
"""Tokens of a trial text."""
SHORT_WINDOW = 5
"""Windows that are read from the configuration at every pass are made this short while trying, so that a short text
reaches beyond them."""
LONGEST_WINDOW = 1024
"""Windows that a model was built with cannot be made short: texts are made longer, up to this."""
CONFIGURED_WINDOWS = ("sliding_window", "attention_chunk_size")
BUILT_IN_WINDOWS = ("window_size", "attention_window", "attention_window_size")

PARENTS = (-1, 0, 0, 0, 0, 0, 0, 0, 7, 1, 8)
"""A root with seven children, so that a row's number says little about its depth, and then grandchildren."""

REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError, AssertionError)
"""How model code says that it was not written for what it was asked, in a trial that may fail."""

ERROR_TO_CHANGE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The largest error, as a part of the change that the mistake would make; 0.1 in shorter formats."""

SEQUENCE = -1
"""The id of trial texts."""


def choose_passes(model: PreTrainedModel, calls: Calls) -> tuple[CachedPasses | RecomputedPasses, int]:
    """The fastest way to run the model that gives its own logits, and how wide those are (which may be more than the
    tokenizer knows); ValueError for a model that looks ahead."""
    calls.begin(SEQUENCE, [1, 2, 3])
    try:
        with torch.inference_mode():
            trial = Trial(model, calls)
            return trial.choose(), trial.vocabulary
    finally:
        calls.forget(SEQUENCE)


class Trial:
    """A random text, and the logits that the model gives when it reads it whole."""

    def __init__(self, model: PreTrainedModel, calls: Calls) -> None:
        self.model = model
        self.calls = calls
        self.config = model.config.get_text_config(decoder=True)
        self.window = _size(self.config, "sliding_window") or 0
        self.built_in = max((_size(self.config, name) or 0 for name in BUILT_IN_WINDOWS), default=0)
        self.vocabulary = self._plain(torch.tensor([1, 2, 3], device=model.device))[0].shape[-1]
        self.text = self._random(TEXT + min(self.built_in, LONGEST_WINDOW), 0)
        self.tolerance = ERROR_TO_CHANGE.get(model.dtype, 0.1)

    def choose(self) -> CachedPasses | RecomputedPasses:
        self._check_causal()
        shapes = self._shapes()
        if shapes is None or self.built_in > LONGEST_WINDOW:
            return RecomputedPasses(self.calls, self.model.device)
        before = self._plain(self.text)[0] if self.window > SHORT_WINDOW else self.text
        with _short_windows(self.config):
            # a window that stays what it was cannot be tried, so no tree is trusted with it
            tried = self.window <= SHORT_WINDOW or not torch.equal(before, self._plain(self.text)[0])
            for positions in (True, False) if self.calls.takes_positions else (False,):
                passes = CachedPasses(self.calls, shapes, self.model.dtype, self.model.device, positions)
                if self._caches(passes):
                    return replace(passes, style=self._style(passes) if positions and tried else None)
        return RecomputedPasses(self.calls, self.model.device)

    def _check_causal(self) -> None:
        """Another second half must not change the logits of the first as another first token does."""
        half = len(self.text) // 2
        end, first = self._random(len(self.text) - half, 1), (self.text[:1] + 1) % self.vocabulary
        texts = self.text, torch.cat([self.text[:half], end]), torch.cat([first, self.text[1:]])
        # without the first row, which is changed by its own token and not through attention
        right, other_end, other_start = (logits[1:half] for logits in self._plain(*texts))
        if not self._close(other_end, right, other_start):
            raise ValueError("the model's tokens see those that come after them: choose a causal language model")

    def _shapes(self) -> tuple[LayerShape, ...] | None:
        """What each layer keeps for a token; None if that is anything but one key and one value for each token."""
        cache = DynamicCache()
        if _attempt(lambda: self.calls.run(Request((SEQUENCE,), self.text[None], cache=cache))) is None:
            return None
        shapes = []
        for layer in cache.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
                return None
            keys, values = layer.keys, layer.values
            if {keys.dtype, values.dtype} != {self.model.dtype}:
                return None
            if any(tensor.dim() != 4 or tensor.shape[2] != len(self.text) for tensor in (keys, values)):
                return None
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
        return tuple(shapes) or None

    def _caches(self, passes: CachedPasses) -> bool:
        """Read in three pieces into slots in disorder, with a wrong end that is then written over."""
        length = len(self.text)
        slots = torch.randperm(length, generator=torch.Generator().manual_seed(2)).to(self.model.device)
        first, second = length - 7, length - 3
        wrong = torch.cat([self.text[:second], self._random(3, 3)])
        other = torch.cat([self._random(second, 4), self.text[second:]])
        storage = passes.new_storage(length)

        def read() -> Tensor:
            passes.forward_rows([_chain(wrong, 0, first, slots)], storage, ())
            passes.forward_rows([_chain(wrong, first, length, slots)], storage, ())
            return passes.forward_rows([_chain(self.text, second, length, slots)], storage, ()).logits

        logits = _attempt(read)
        if logits is None:
            return False
        return self._close(logits, *(whole[second:] for whole in self._plain(self.text, other)))

    def _style(self, passes: CachedPasses) -> MaskStyle | None:
        """The first form of mask that the model obeys, for trees and for padding."""
        if not self.calls.takes_masks:
            return None
        for style in self._styles():
            if self._branches(replace(passes, style=replace(style, window=_size(self.config, "sliding_window") or 0))):
                return replace(style, window=self.window)
        return None

    def _styles(self) -> Iterator[MaskStyle]:
        yield MaskStyle()
        if self.window:
            yield MaskStyle(windowed="all")
            kinds = tuple(sorted(set(getattr(self.config, "layer_types", None) or ())))
            if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
                yield MaskStyle(kinds, "by kind")

    def _branches(self, passes: CachedPasses) -> bool:
        """A tree behind a context, padded together with a shorter text; every node against its own path."""
        device = self.model.device
        length, nodes = len(self.text), len(PARENTS)
        drafted = self._random(nodes, 5)
        slots = torch.arange(2 * length + nodes + 2, device=device)
        tree_slots, short_slots = slots[: length + nodes], slots[length + nodes :]
        ancestors = _ancestors(PARENTS).to(device)
        depth = ancestors.sum(dim=1) - 1
        short = self._random(length - 2, 6)
        tree = Segment(
            sequence=SEQUENCE,
            tokens=torch.cat([self.text[-1:], drafted]),
            positions=torch.cat([torch.zeros_like(depth[:1]), depth + 1]) + length - 1,
            ancestors=ancestors,
            context=tree_slots[: length - 1],
            slots=tree_slots[length - 1 :],
            logits=nodes,
        )
        storage = passes.new_storage(len(slots))

        def check() -> Tensor:
            passes.forward_rows([_chain(self.text, 0, length - 1, tree_slots)], storage, ())
            passes.forward_rows([_chain(short, 0, length - 4, short_slots)], storage, ())
            tail = _chain(short, length - 4, length - 2, short_slots)
            return passes.forward_rows([tree, tail], storage, ()).logits

        logits = _attempt(check)
        if logits is None:
            return False
        paths = [torch.cat([self.text, drafted[row]]) for row in ancestors]
        other = torch.cat([self._random(length - 4, 7), short[-2:]])
        ignored, right, wrong, *own = self._plain(torch.cat([self.text, drafted]), short, other, *paths)
        ignored = ignored[length:]  # what rows without a mask would give
        ignored[:2] = ignored[2:4].clone()  # the root and its first child are a chain, which is right without a mask
        # node by node: an average over the tree would hide a wrong one
        return all(
            self._close(got, path[-1], unmasked)
            for got, path, unmasked in zip(logits[:nodes], own, ignored, strict=True)
        ) and self._close(logits[nodes:], right[-2:], wrong[-2:])

    def _plain(self, *texts: Tensor) -> list[Tensor]:
        """Logits [N, V] of each text [N], without cache or mask. In one pass if texts may share one: what is padded
        behind a text changes nothing before it, in a model that is causal."""
        if not self.calls.together:
            return [self.calls.run(Request((SEQUENCE,), text[None])).logits[0] for text in texts]
        padded = pad_sequence(list(texts), batch_first=True)
        logits = self.calls.run(Request((SEQUENCE,) * len(texts), padded)).logits
        return [rows[: len(text)] for rows, text in zip(logits, texts, strict=True)]

    def _random(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (count,), generator=generator).to(self.model.device)

    def _close(self, got: Tensor, right: Tensor, wrong: Tensor) -> bool:
        """NaN is not close."""
        error = (got.float() - right.float()).square().mean().sqrt()
        change = (wrong.float() - right.float()).square().mean().sqrt()
        return bool(error < self.tolerance * change)


def _attempt(trial: Callable[[], T]) -> T | None:
    """None if the model refuses."""
    try:
        return trial()
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the model
        raise
    except REFUSALS:
        return None


def _chain(text: Tensor, start: int, end: int, slots: Tensor) -> Segment:
    positions = torch.arange(start, end, device=text.device)
    return Segment(SEQUENCE, text[start:end], positions, None, slots[:start], slots[start:end], end - start)


def _ancestors(parents: Sequence[int]) -> Tensor:
    """[N, N] bool, each node among its own ancestors."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def _size(config: PreTrainedConfig, name: str) -> int | None:
    size = getattr(config, name, None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


@contextmanager
def _short_windows(config: PreTrainedConfig) -> Iterator[None]:
    true = {name: size for name in CONFIGURED_WINDOWS if (size := _size(config, name))}
    try:
        for name, size in true.items():
            setattr(config, name, min(size, SHORT_WINDOW))
        yield
    finally:
        for name, size in true.items():
            setattr(config, name, size)
