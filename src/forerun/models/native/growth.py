"""`growth.h` for a head: a dynamic tree behind one text in one call. All memory but the cache is kept between calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.native import choice
from forerun.models.native import amx
from forerun.models.rope import frequencies
from forerun.models.storage import Storage

WIDEST = 64
"""Nodes of a level, at most."""

Growth = amx.structure(
    "Growth",
    "joined, *embedding, *fc, *token_norm, *state_norm, width, depth, size, length, *slots, *cosine, *sine, "
    "*candidates, *ids, *temperature, *keys, *raced, *tau, *states, *joint, *paths, *scratch, *shares, *places, "
    "*tokens, *parents, *numbers, *values, *kept_tokens, *kept_parents",
)


@dataclass(frozen=True)
class Entry:
    """How a token and the state before it go into the layer: joined by a matrix, or side by side."""

    embedding: Tensor  # [tokens, H] bfloat16
    fc: Tensor | None = None  # [H, 2 H]
    token_norm: Tensor | None = None
    state_norm: Tensor | None = None


@dataclass(frozen=True)
class Root:
    """What is known of the root before its tree grows."""

    token: int
    state: Tensor  # [H]
    places: list[int]  # columns of its candidates, the best first; -1 for none
    shares: list[float]  # logarithms
    keys: list[int]  # of the noise behind each depth, the root's own first
    temperature: float
    raced: bool


class TreeInC:
    def __init__(self, head: amx.AmxPass, entry: Entry, ids: Tensor, width: int, depth: int) -> None:
        found, chosen = amx.library(), choice.library()
        assert found is not None
        assert chosen is not None
        assert width <= WIDEST
        self.call = found.forerun_grow
        self.call.restype = None
        self.head, self.width, self.depth = head, width, depth
        config = head.config
        hidden, rows, drafted = config.hidden_size, width, width * (depth - 1)
        grown = 1 + width + width * width * (depth - 1)
        height = -(-rows // amx.TILE_ROWS) * amx.TILE_ROWS
        heads = config.heads * config.head_dim
        self.kept: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> Tensor:
            self.kept[name] = tensor.contiguous()
            return self.kept[name]

        def bf16(name: str, *shape: int) -> int:
            return keep(name, torch.zeros(shape, dtype=torch.bfloat16)).data_ptr()

        def whole(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> int:
            return keep(name, torch.zeros(shape, dtype=dtype)).data_ptr()

        def real(name: str, *shape: int) -> int:
            return whole(name, *shape, dtype=torch.float32)

        rope = config.layers[0].rope
        self.turns = None if rope is None else frequencies(rope, config.head_dim)
        half = config.head_dim // 2
        self.pass_ = amx.Pass(
            *(0, 1, 0, 0, 0, bf16("x", height, hidden), bf16("beside", height, hidden)),
            *(real("cosine", rows, half), real("sine", rows, half), 0, 0),
            *(whole("first_row", 2), whole("first_key", 2), 0),
            whole("prefix", rows, dtype=torch.int32),
            whole("tail_start", rows + 1, dtype=torch.int32),
            whole("tail", rows * depth, dtype=torch.int32),
            keep("wanted", torch.arange(rows)).data_ptr(),
            keep("active", torch.ones(1, dtype=torch.uint8)).data_ptr(),
            whole("features", 2),
            bf16("logits", rows, config.vocab_size),
            real("peaks", rows, config.vocab_size // amx.TILE_ROWS),
            *(0, 0),  # `highest` and `likeliest`, one for each thread
            bf16("normed", height, 2 * hidden),
            bf16("queries", height, heads),
            bf16("mixed", height, heads),
            bf16("act", height, config.intermediate_size),
            real("qkv", height, heads + 2 * config.kv_heads * config.head_dim),
            *(0, 0),  # `scores`, by threads and keys
        )
        self.growth = Growth(
            joined=int(entry.fc is not None),
            embedding=keep("embedding", entry.embedding).data_ptr(),
            fc=None if entry.fc is None else self._tiled(entry.fc),
            token_norm=None if entry.token_norm is None else keep("token_norm", entry.token_norm.float()).data_ptr(),
            state_norm=None if entry.state_norm is None else keep("state_norm", entry.state_norm.float()).data_ptr(),
            width=width,
            depth=depth,
            cosine=real("turns", depth, half),
            sine=real("turns_sine", depth, half),
            candidates=ctypes.cast(chosen.forerun_candidates, ctypes.c_void_p).value,
            ids=keep("ids", ids).data_ptr(),
            temperature=whole("temperature", width, dtype=torch.float64),
            keys=whole("keys", depth, width),
            raced=whole("raced", width),
            tau=whole("tau", 1, dtype=torch.float64),
            states=bf16("states", 1 + drafted, hidden),
            joint=bf16("joint", height, 2 * hidden),
            paths=whole("paths", max(1, drafted), depth),
            scratch=real("scratch", 3, config.vocab_size),
            shares=real("shares", width, width),
            places=whole("places", width, width),
            tokens=whole("tokens", grown),
            parents=whole("parents", grown),
            numbers=whole("numbers", grown),
            values=whole("values", grown, dtype=torch.float64),
            kept_tokens=whole("kept_tokens", grown),
            kept_parents=whole("kept_parents", grown),
        )

    def grow(
        self, root: Root, slots: NDArray[np.int64], length: int, storage: Storage, size: int, depth: int, tau: float
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents of the tree, `size` nodes with the root and `depth` levels at most; `slots` are those of
        the text, `length` of them, and of the rows behind it."""
        assert storage.whole is not None
        assert depth <= self.depth
        assert slots.shape[0] >= length + self.width * (depth - 1)
        kept, growth, run = self.kept, self.growth, self.pass_
        kept["states"][0] = root.state
        kept["tokens"][0] = root.token
        kept["places"][0] = torch.tensor(root.places)
        kept["shares"][0] = torch.tensor(root.shares)
        if root.raced:
            kept["keys"][: len(root.keys)] = torch.tensor(root.keys)[:, None]
            kept["temperature"].fill_(root.temperature)
        kept["raced"].fill_(int(root.raced))
        kept["tau"][0] = tau
        self._turn(length)
        threads, keys = torch.get_num_threads(), length + self.width * self.depth
        self._room(threads, keys)
        run.slots, run.threads, run.cache = storage.slots, threads, storage.whole.data_ptr()
        growth.size, growth.depth, growth.length, growth.slots = size, depth, length, slots.ctypes.data
        self.call(ctypes.byref(self.head.model), ctypes.byref(run), ctypes.byref(growth))
        tokens: list[int] = kept["kept_tokens"][:size].tolist()
        count = tokens.index(-1) if -1 in tokens else size
        return tokens[:count], kept["kept_parents"][:count].tolist()

    def _turn(self, length: int) -> None:
        """Of the positions behind the root, which is the last of `length`."""
        if self.turns is None:
            return
        per_position, scale = self.turns
        angle = torch.arange(length, length + self.depth)[:, None].float() * per_position
        torch.mul(angle.cos(), scale, out=self.kept["turns"])
        torch.mul(angle.sin(), scale, out=self.kept["turns_sine"])

    def _room(self, threads: int, keys: int) -> None:
        """Scratch for so many threads and keys; twice as much as needed, since texts grow."""
        scores = self.kept.get("scores")
        size = amx.LANES * (2 * keys + 96)
        if scores is not None and scores.shape[0] == threads and scores.shape[1] >= size:
            return
        self.kept["scores"] = scores = torch.zeros(threads, 2 * size)
        self.kept["highest"] = torch.zeros(threads, self.width)
        self.kept["likeliest"] = torch.zeros(threads, self.width, dtype=torch.int64)
        run = self.pass_
        run.scores, run.score_size = scores.data_ptr(), scores.shape[1]
        run.highest, run.likeliest = self.kept["highest"].data_ptr(), self.kept["likeliest"].data_ptr()

    def _tiled(self, matrix: Tensor) -> int:
        shelf = amx.Shelf(matrix.numel())
        self.shelf = shelf
        return shelf.put(matrix)
