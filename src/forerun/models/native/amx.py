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
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.native import build
from forerun.models.batch import Batch, Segment
from forerun.models.config import ModelConfig, Rope
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

    def forward(
        self,
        x: Tensor,
        beside: Tensor | None,
        batch: Batch,
        storage: Storage,
        layers: Sequence[int],
        only: Sequence[int] | None,
    ) -> Output:
        """x [R, H], the embeddings, becomes the hidden states behind the last layer; `beside` [R, H] is what attention
        reads beside it, where it does."""
        wanted = torch.arange(x.shape[0]) if batch.wanted is None else batch.wanted
        reading = Reading(batch.positions, batch.slots, wanted, Seen.of(batch.segments))
        return self.run(x, beside, reading, storage, layers, only)

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
        """Without `summed` nobody asks for the likeliest tokens."""
        assert storage.whole is not None, "the storage was not made by this model"
        config, seen, wanted = self.config, reading.seen, reading.wanted
        rows = x.shape[0]
        depth = len(config.layers)
        logits = x.new_empty(wanted.shape[0], config.vocab_size)
        features = {index: torch.empty_like(x) for index in layers}
        places = (ctypes.c_void_p * (depth + 1))(*(_address(features.get(index)) for index in range(depth + 1)))
        active = (ctypes.c_uint8 * depth)(*(only is None or index in only for index in range(depth)))
        cosine, sine = self._angles(reading.positions)
        threads = torch.get_num_threads()
        score_size = LANES * (2 * seen.most + 96)
        height = -(-rows // TILE_ROWS) * TILE_ROWS
        read = config.hidden_size * (2 if config.reads_beside else 1)
        heads, width = config.heads * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
        scratch = [x.new_empty(height, size) for size in (read, heads, heads, config.intermediate_size)]
        peaks = torch.empty(wanted.shape[0], config.vocab_size // TILE_ROWS)
        highest = torch.full((threads, wanted.shape[0]), -torch.inf)
        likeliest = torch.full((threads, wanted.shape[0]), -1)
        qkv = torch.empty(height, width)
        scores = torch.empty(threads, score_size)
        row_scales = torch.empty(height)
        packed = x.new_empty(seen.keys.shape[0], config.kv_heads * config.head_dim) if rows > 1 else None
        self.call(
            ctypes.byref(self.model),
            ctypes.byref(
                Pass(
                    *(rows, len(seen.first_row) - 1, wanted.shape[0], storage.slots, threads),
                    *(x.data_ptr(), _address(beside), cosine.data_ptr(), sine.data_ptr(), storage.whole.data_ptr()),
                    *(reading.slots.data_ptr(), seen.first_row.data_ptr(), seen.first_key.data_ptr()),
                    *(seen.keys.data_ptr(), seen.prefix.data_ptr(), seen.tail_start.data_ptr(), seen.tail.data_ptr()),
                    *(wanted.data_ptr(), ctypes.addressof(active), ctypes.addressof(places)),
                    *(logits.data_ptr(), peaks.data_ptr(), highest.data_ptr(), likeliest.data_ptr()),
                    *(part.data_ptr() for part in scratch),
                    *(qkv.data_ptr(), scores.data_ptr(), score_size, row_scales.data_ptr(), _address(packed)),
                )
            ),
        )
        if not summed:
            return Output(logits, features)
        return Output(logits, features, _first(highest, likeliest), peaks)

    def _keep(self, vector: Tensor) -> int:
        vector = vector.contiguous()
        self.kept.append(vector)
        return vector.data_ptr()

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tables, R, D / 2] each."""
        where = positions[:, None].float()
        turned = [(where * per_position, scale) for per_position, scale in self.frequencies]
        if not turned:
            return where, where
        cosine = torch.stack([angle.cos() * scale for angle, scale in turned])
        return cosine, torch.stack([angle.sin() * scale for angle, scale in turned])


@dataclass(frozen=True)
class Seen:
    """Which keys each row sees: all of its segment's up to some place, and then a path."""

    first_row: Tensor  # [segments + 1]
    first_key: Tensor  # [segments + 1] in `keys`
    keys: Tensor  # slots of a segment's keys, its own rows last
    prefix: Tensor  # [rows] int32: so many keys of the segment are seen, from the first on,
    tail_start: Tensor  # [rows + 1] int32: and then these,
    tail: Tensor  # int32: places among the segment's keys
    most: int  # keys of a segment

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Seen:
        keys: list[Tensor] = []
        prefix: list[Tensor] = []
        counts: list[Tensor] = []
        tails: list[Tensor] = []
        rows, ends = [0], [0]
        for segment in segments:
            keys += [segment.context, segment.slots]
            rows.append(rows[-1] + segment.rows)
            ends.append(ends[-1] + segment.context.shape[0] + segment.rows)
            common, length, tail = _path(segment)
            prefix.append(common)
            counts.append(length)
            tails.append(tail)
        return cls(
            torch.tensor(rows),
            torch.tensor(ends),
            torch.cat(keys),
            torch.cat(prefix).int(),
            torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)).int(),
            torch.cat(tails).int(),
            max(end - start for start, end in pairwise(ends)),
        )


@dataclass(frozen=True)
class Reading:
    """The rows of a pass: where they stand, where they go, whose logits are wanted, and what they see."""

    positions: Tensor  # [R]
    slots: Tensor  # [R]
    wanted: Tensor  # [W]
    seen: Seen


def _path(segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
    """For each row how many keys it sees from the first on, how many more, and which."""
    before, rows = segment.context.shape[0], segment.rows
    if segment.context_visible is None:
        chain = rows if segment.ancestors is None else rows - segment.ancestors.shape[0]
        common = torch.arange(before + 1, before + rows + 1).clamp_(max=before + chain)
        if segment.ancestors is None:
            return common, torch.zeros_like(common), common[:0]
        counts = torch.zeros_like(common)
        counts[chain:] = segment.ancestors.sum(1)
        return common, counts, segment.ancestors.nonzero()[:, 1] + (before + chain)
    own = torch.ones(rows, rows, dtype=torch.bool).tril_()
    if segment.ancestors is not None:
        nodes = segment.ancestors.shape[0]
        own[rows - nodes :, rows - nodes :] = segment.ancestors
    visible = torch.cat([segment.context_visible, own], 1)
    everyone = int(visible.all(0).long().cumprod(0).sum())
    rest = visible[:, everyone:]
    seen_by_all = before - segment.context_visible.shape[1] + everyone
    return torch.full((rows,), seen_by_all), rest.sum(1), rest.nonzero()[:, 1] + seen_by_all


def _first(highest: Tensor, likeliest: Tensor) -> Tensor:
    """The best of what the threads found, [threads, W]. They share the tokens in order, so the first of equals is the
    earlier thread's."""
    best, thread = highest.max(0)
    return torch.where(best.isfinite(), likeliest.gather(0, thread[None])[0], -1)


def weights_read(config: ModelConfig) -> int:
    """How many numbers the matrices have that a pass reads."""
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = (2 * heads + 2 * kv + 3 * config.intermediate_size) * config.hidden_size
    if config.reads_beside:
        layer += (heads + 2 * kv) * config.hidden_size
    return len(config.layers) * layer + config.vocab_size * config.hidden_size


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
