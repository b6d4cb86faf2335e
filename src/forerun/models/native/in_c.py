"""A pass in one call, for Llama-like models on a CPU: in bfloat16 (`amx.c`) or in float32 (`floats.c`).

A model that only drafts may have its weights in bytes, less to read: nobody's text depends on their last bits.

Its rows are the same bit for bit whatever stands beside them: alone, in a chain, in a tree, in a batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.config import ModelConfig, Rope
from forerun.models.native.reading import Reading
from forerun.models.native.shelf import Form, Order, Place, Shelf
from forerun.models.rope import frequencies
from forerun.models.storage import Storage
from forerun.models.target import Output

LANES = 16
"""So many heads may share one of keys."""
WIDEST_HEAD = 256
ROWS_TOGETHER = 8
"""So many rows look at keys together, in float32."""
FOLDED_TIMES = {Form.HALVES: 0.55, Form.NIBBLES: 0.45, Form.EIGHTHS: 0.45}
"""How long a weight takes with a row or two, where one that is not folded takes 1."""
TILE_ROWS = 32
"""Scratch is rounded up to so many rows, since tiles are read whole."""
LINE = 64
GROUP = 32
"""Numbers that have a scale of their own where they are rounded."""
FIRST_TURNS = 1024
"""Angles are made for so many positions at first, and for twice as many as needed when these are too few."""


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Names with commas; `int64_t`, or with a star in front a pointer, or with a tilde a double."""
    kinds = {"*": ctypes.c_void_p, "~": ctypes.c_double}
    listed = [field.strip() for field in fields.split(",")]
    typed = [(field.lstrip("*~"), kinds.get(field[0], ctypes.c_int64)) for field in listed]
    return type(name, (ctypes.Structure,), {"_fields_": typed})


def fields_of(name: str, place: Place) -> dict[str, int | None]:
    """Of a `Matrix` in a structure."""
    return {name: place.address, f"{name}_scales": place.scales, f"{name}_form": int(place.form)}


Layer = structure(
    "Layer",
    "*qkv, *qkv_scales, qkv_form, *out, *out_scales, out_form, "
    "*gate_up, *gate_up_scales, gate_up_form, *down, *down_scales, down_form, "
    "*input_norm, *inner_norm, *q_norm, *k_norm, *beside_norm, *qkv_bias, *out_bias, rope",
)
Model = structure(
    "Model",
    "layers, hidden, heads, kv_heads, head_dim, inner, vocabulary, *layer, *norm, "
    "*head, *head_scales, head_form, ~eps, ~scale",
)
Pass = structure(
    "Pass",
    "rows, segments, wanted, slots, threads, *x, *beside, *cosine, *sine, *cache, *row_slots, *first_row, *first_key, "
    "*keys, *prefix, *tail_start, *tail, *wanted_rows, *active, *features, *logits, *peaks, *highest, *likeliest, "
    "*normed, *queries, *mixed, *act, *qkv, *scores, score_size, *row_scales, *packed, *rounded, *rounded_scales",
)


@dataclass(frozen=True)
class Arithmetic:
    """What a pass is computed with."""

    library: ctypes.CDLL
    dtype: torch.dtype
    """Of rows, and of weights that are not in bytes."""
    order: Order
    folds: ctypes.CDLL | None
    """What folds matrices."""
    byte_time: float = 1.0
    """How long a weight in bytes that is not folded takes, with a few rows, where one of `dtype` takes 1 with one."""
    rounds: bool = False
    """Whether rows are rounded to 16 bits where matrices are folded to 4 or 8: see `rounded.h`."""


def llama_like(config: ModelConfig, head_unit: int) -> bool:
    """Whether it is computed as a pass in C computes, with heads that are a multiple of `head_unit` wide."""
    plain = not (config.sandwich_norms or config.norm_offset or config.mlp_bias) and config.activation == "silu"
    layers = all(layer.window is None and not layer.experts for layer in config.layers)
    heads, size, share = config.heads, config.head_dim, config.heads // config.kv_heads
    sizes = (config.hidden_size, config.intermediate_size, heads * size, config.kv_heads * size, config.vocab_size)
    fitting = size % head_unit == 0 and size <= WIDEST_HEAD and share <= LANES
    return plain and layers and fitting and all(each % TILE_ROWS == 0 for each in sizes)


def interleave(gate: Tensor, up: Tensor, each: int) -> Tensor:
    """So many rows of the one, as many of the other, and so on."""
    return torch.stack([gate.view(-1, each, gate.shape[1]), up.view(-1, each, up.shape[1])], 1).flatten(0, 2)


def score_size(config: ModelConfig, keys: int) -> int:
    """How many scores a thread has at once."""
    together = max(2 * LANES, ROWS_TOGETHER * (config.heads // config.kv_heads))
    return together * (keys + 96)


def most_rounded(config: ModelConfig, height: int) -> int:
    """How many numbers so many rows have, where they have most."""
    return height * max(2 * config.hidden_size, config.heads * config.head_dim, config.intermediate_size)


@dataclass(frozen=True)
class LayerWeights:
    """Matrices [out, in]; norms and biases by their names in `Layer`, None where there are none."""

    qkv: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    vectors: dict[str, Tensor | None]


class PassInC:
    """A model's weights as the pass wants them: copied layer by layer, so that the caller can let go of each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterator[LayerWeights],
        norm: Tensor | None,
        head: Tensor,
        arithmetic: Arithmetic,
        *,
        in_bytes: bool = False,
    ) -> None:
        """With `in_bytes` its matrices are rounded, where their sizes allow it."""
        self.arithmetic = arithmetic
        self.call = arithmetic.library.forerun_pass
        self.call.restype = None
        self.config = config
        self.ropes: list[Rope] = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.frequencies = [frequencies(rope, config.head_dim) for rope in self.ropes]
        self.turns: tuple[Tensor, Tensor] | None = None
        inputs = (config.hidden_size, config.intermediate_size)
        order = arithmetic.order
        self.in_bytes = in_bytes and all(size % order.inputs_in_bytes == 0 for size in inputs)
        self.shelf = shelf = Shelf(
            weights_read(config), order, torch.int8 if self.in_bytes else arithmetic.dtype, arithmetic.folds
        )
        self.kept: list[object] = [shelf]  # what C points to
        layers = (Layer * len(config.layers))()
        for index, layer in enumerate(weights):
            own = layers[index]
            gate_up = interleave(layer.gate, layer.up, order.gate)
            named = (("qkv", layer.qkv), ("out", layer.out), ("gate_up", gate_up), ("down", layer.down))
            for name, matrix in named:
                for field, value in fields_of(name, shelf.put(matrix)).items():
                    setattr(own, field, value)
            for name, vector in layer.vectors.items():
                setattr(own, name, None if vector is None else self._keep(vector.float()))
            rope = config.layers[index].rope
            own.rope = -1 if rope is None else self.ropes.index(rope)
        self.kept.append(layers)
        self.model = Model(
            layers=len(config.layers),
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            layer=ctypes.addressof(layers),
            norm=None if norm is None else self._keep(norm.float()),
            eps=config.norm_eps,
            scale=config.attention_scale or config.head_dim**-0.5,
            **fields_of("head", shelf.put(head)),
        )

    @property
    def weights_time(self) -> float:
        """How long it takes with a few rows to go by all weights, where one that is kept as it is takes 1."""
        times = FOLDED_TIMES | {Form.UNFOLDED: self.arithmetic.byte_time if self.in_bytes else 1.0}
        return sum(times[place.form] * place.outputs * place.inputs for place in self.shelf.places)

    @property
    def rounded(self) -> bool:
        """Whether rows have 16 bits in any product."""
        return self.arithmetic.rounds and any(place.form in (Form.NIBBLES, Form.EIGHTHS) for place in self.shelf.places)

    def head_matrix(self) -> Tensor:
        """[V, H], copied back."""
        return self.shelf.last().to(self.arithmetic.dtype)

    def run(
        self,
        x: Tensor,
        beside: Tensor | None,
        reading: Reading,
        storage: Storage,
        layers: Sequence[int] = (),
        only: Sequence[int] | None = None,
        *,
        summed: bool = True,
    ) -> Output:
        """x [R, H], the embeddings, becomes the hidden states behind the last layer; `beside` [R, H] is what attention
        reads beside it, where it does. Without `summed` nobody asks for the likeliest tokens."""
        assert storage.whole is not None, "the storage was not made by this model"
        config, seen, wanted = self.config, reading.seen, reading.wanted
        rows, count, depth = x.shape[0], wanted.shape[0], len(config.layers)
        logits = x.new_empty(count, config.vocab_size)
        peaks = torch.empty(count, config.vocab_size // TILE_ROWS)
        features = {index: torch.empty_like(x) for index in layers}
        places = (ctypes.c_void_p * (depth + 1))(*(_address(features.get(index)) for index in range(depth + 1)))
        active = (ctypes.c_uint8 * depth)(*([1] * depth if only is None else (index in only for index in range(depth))))
        cosine, sine = self._angles(reading.positions)
        threads = torch.get_num_threads()
        likeliest = torch.empty(threads, count, dtype=torch.int64)
        height = -(-rows // TILE_ROWS) * TILE_ROWS
        heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        scored, size = score_size(config, seen.most), x.element_size()
        scratch = Scratch()
        highest = scratch.room(4 * threads * count)
        normed = scratch.room(size * height * config.hidden_size * (2 if config.reads_beside else 1))
        queries, mixed = scratch.room(size * height * heads), scratch.room(size * height * heads)
        act = scratch.room(size * height * config.intermediate_size)
        qkv = scratch.room(4 * height * (heads + 2 * kv))
        scores = scratch.room(4 * threads * scored)
        row_scales = scratch.room(4 * height)
        packed = scratch.room(size * seen.keys.shape[0] * kv) if rows > 1 and self.arithmetic.order.tiled else None
        rounded = rounded_scales = None
        if self.arithmetic.rounds:
            most = most_rounded(config, height)
            rounded, rounded_scales = scratch.room(2 * most), scratch.room(8 * most // GROUP)
        start = scratch.take()
        self.call(
            ctypes.byref(self.model),
            ctypes.byref(
                Pass(
                    *(rows, len(seen.first_row) - 1, count, storage.slots, threads),
                    *(x.data_ptr(), _address(beside), cosine.data_ptr(), sine.data_ptr(), storage.whole.data_ptr()),
                    *(reading.slots.data_ptr(), seen.first_row.data_ptr(), seen.first_key.data_ptr()),
                    *(seen.keys.data_ptr(), seen.prefix.data_ptr(), seen.tail_start.data_ptr(), seen.tail.data_ptr()),
                    *(wanted.data_ptr(), ctypes.addressof(active), ctypes.addressof(places)),
                    *(logits.data_ptr(), peaks.data_ptr(), start + highest, likeliest.data_ptr()),
                    *(start + normed, start + queries, start + mixed, start + act),
                    *(start + qkv, start + scores, scored, start + row_scales),
                    *(None if room is None else start + room for room in (packed, rounded, rounded_scales)),
                )
            ),
        )
        if not summed:
            return Output(logits, features)
        return Output(logits, features, likeliest[0], peaks)

    def _keep(self, vector: Tensor) -> int:
        vector = vector.contiguous()
        self.kept.append(vector)
        return vector.data_ptr()

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tables, R, D / 2] each."""
        if not self.frequencies:
            return positions, positions
        turns, needed = self.turns, 1 + int(positions.max())
        if turns is None or turns[0].shape[1] < needed:
            self.turns = turns = self.turned(max(needed, min(max(FIRST_TURNS, 2 * needed), self.config.context_length)))
        return turns[0].index_select(1, positions), turns[1].index_select(1, positions)

    def turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """[tables, positions, D / 2] each, of a model that has any."""
        where = torch.arange(positions)[:, None].float()
        turned = [(where * per_position, scale) for per_position, scale in self.frequencies]
        cosine = torch.stack([angle.cos() * scale for angle, scale in turned])
        return cosine, torch.stack([angle.sin() * scale for angle, scale in turned])


class Scratch:
    """One piece of memory for all that a pass needs on its way: many small ones would take longer to ask for."""

    def __init__(self) -> None:
        self.size = 0

    def room(self, size: int) -> int:
        """Where so many bytes begin."""
        start = self.size
        self.size += -(-size // LINE) * LINE
        return start

    def take(self) -> int:
        """The address of all of it, which stays as long as this object does."""
        self.memory = torch.empty(self.size, dtype=torch.uint8)
        return self.memory.data_ptr()


def weights_read(config: ModelConfig) -> int:
    """How many numbers the matrices have that a pass reads."""
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = (2 * heads + 2 * kv + 3 * config.intermediate_size) * config.hidden_size
    if config.reads_beside:
        layer += (heads + 2 * kv) * config.hidden_size
    return len(config.layers) * layer + config.vocab_size * config.hidden_size


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
