"""A bfloat16 pass in one call, for Llama-like models on a CPU with AMX; `amx.c` has the arithmetic.

A model that only drafts may have its weights in bytes, half as much to read: nobody's text depends on their last bits.

Its rows are the same bit for bit whatever stands beside them: alone, in a chain, in a tree, in a batch.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.native import build
from forerun.models.config import ModelConfig, Rope
from forerun.models.native.reading import Reading
from forerun.models.native.shelf import BYTE_TILE, Shelf
from forerun.models.rope import frequencies
from forerun.models.storage import Storage
from forerun.models.target import Output

FLAGS = ["-O3", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")), "-mamx-tile"]
FLAGS += ["-mamx-bf16", "-mamx-int8"]
LANES = 16
"""Queries that look at a key together: so many heads may share one."""
WIDEST_HEAD = 256
TILE_ROWS = 32
"""Scratch is rounded up to so many rows, since tiles are read whole."""
LINE = 64
FIRST_TURNS = 1024
"""Angles are made for so many positions at first, and for twice as many as needed when these are too few."""


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Names with commas; `int64_t`, or with a star in front a pointer, or with a tilde a double."""
    kinds = {"*": ctypes.c_void_p, "~": ctypes.c_double}
    listed = [field.strip() for field in fields.split(",")]
    typed = [(field.lstrip("*~"), kinds.get(field[0], ctypes.c_int64)) for field in listed]
    return type(name, (ctypes.Structure,), {"_fields_": typed})


Layer = structure(
    "Layer",
    "*qkv, *qkv_scales, *out, *out_scales, *gate_up, *gate_up_scales, *down, *down_scales, "
    "*input_norm, *inner_norm, *q_norm, *k_norm, *beside_norm, *qkv_bias, *out_bias, rope",
)
Model = structure(
    "Model",
    "layers, hidden, heads, kv_heads, head_dim, inner, vocabulary, *layer, *norm, *head, *head_scales, ~eps, ~scale",
)
Pass = structure(
    "Pass",
    "rows, segments, wanted, slots, threads, *x, *beside, *cosine, *sine, *cache, *row_slots, *first_row, *first_key, "
    "*keys, *prefix, *tail_start, *tail, *wanted_rows, *active, *features, *logits, *peaks, *highest, *likeliest, "
    "*normed, *queries, *mixed, *act, *qkv, *scores, score_size, *row_scales, *packed",
)


@cache
def library() -> ctypes.CDLL | None:
    """None where the processor, the system or the compiler is not up to it."""
    features = torch.cpu.get_capabilities()
    needed = ("amx_bf16", "amx_int8", "amx_tile", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16")
    if platform.system() != "Linux" or not all(features.get(name) for name in needed):
        return None
    found = build.load(Path(__file__).with_suffix(".c"), FLAGS)
    return found if found is not None and found.forerun_ask_for_tiles() == 0 else None


def supports(config: ModelConfig) -> bool:
    """Whether the pass in C is this model's."""
    plain = not (config.sandwich_norms or config.norm_offset or config.mlp_bias) and config.activation == "silu"
    layers = all(layer.window is None and not layer.experts for layer in config.layers)
    inputs = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim, config.vocab_size)
    heads = config.head_dim % 64 == 0 and config.head_dim <= WIDEST_HEAD and config.heads // config.kv_heads <= LANES
    aligned = all(size % 32 == 0 for size in inputs)
    return plain and layers and heads and aligned and library() is not None


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Sixteen rows of the one, sixteen of the other, and so on."""
    return torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], 1).flatten(0, 2)


@dataclass(frozen=True)
class LayerWeights:
    """Matrices [out, in]; norms and biases by their names in `Layer`, None where there are none."""

    qkv: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    vectors: dict[str, Tensor | None]


class AmxPass:
    """A model's weights as the pass wants them: copied layer by layer, so that the caller can let go of each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterator[LayerWeights],
        norm: Tensor | None,
        head: Tensor,
        *,
        in_bytes: bool = False,
    ) -> None:
        """With `in_bytes` its matrices are rounded, where their sizes allow it."""
        found = library()
        assert found is not None
        self.call = found.forerun_pass
        self.call.restype = None
        self.config = config
        self.ropes: list[Rope] = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.frequencies = [frequencies(rope, config.head_dim) for rope in self.ropes]
        self.turns: tuple[Tensor, Tensor] | None = None
        inputs = (config.hidden_size, config.intermediate_size)
        self.in_bytes = in_bytes and all(size % BYTE_TILE == 0 for size in inputs)
        self.shelf = shelf = Shelf(weights_read(config), in_bytes=self.in_bytes)
        self.kept: list[object] = [shelf]  # what C points to
        layers = (Layer * len(config.layers))()
        for index, layer in enumerate(weights):
            own = layers[index]
            own.qkv, own.qkv_scales = shelf.put(layer.qkv)
            own.out, own.out_scales = shelf.put(layer.out)
            own.gate_up, own.gate_up_scales = shelf.put(interleave(layer.gate, layer.up))
            own.down, own.down_scales = shelf.put(layer.down)
            for name, vector in layer.vectors.items():
                setattr(own, name, None if vector is None else self._keep(vector.float()))
            rope = config.layers[index].rope
            own.rope = -1 if rope is None else self.ropes.index(rope)
        self.kept.append(layers)
        last, last_scales = shelf.put(head)
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
            head=last,
            head_scales=last_scales,
            eps=config.norm_eps,
            scale=config.attention_scale or config.head_dim**-0.5,
        )

    def head_matrix(self) -> Tensor:
        """[V, H], copied back."""
        return self.shelf.last(self.config.vocab_size, self.config.hidden_size)

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
        score_size = LANES * (2 * seen.most + 96)
        scratch = Scratch()
        highest = scratch.room(4 * threads * count)
        normed = scratch.room(2 * height * config.hidden_size * (2 if config.reads_beside else 1))
        queries, mixed = scratch.room(2 * height * heads), scratch.room(2 * height * heads)
        act = scratch.room(2 * height * config.intermediate_size)
        qkv = scratch.room(4 * height * (heads + 2 * kv))
        scores = scratch.room(4 * threads * score_size)
        row_scales = scratch.room(4 * height)
        packed = scratch.room(2 * seen.keys.shape[0] * kv) if rows > 1 else None
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
                    *(start + qkv, start + scores, score_size, start + row_scales),
                    None if packed is None else start + packed,
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
