"""`growth.h` for a head: a dynamic tree behind one text in one call. All memory but the cache is kept between calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.native import choice
from forerun.models.native import in_c
from forerun.models.native.shelf import Place, Shelf
from forerun.models.storage import Storage

WIDEST = 64  # `MOST_WIDTH`
"""Nodes of a level, at most."""
LONGEST = 64
"""Unread rows of a text, at most."""

Growth = in_c.structure(
    "Growth",
    "joined, *embedding, *fc, *fc_scales, fc_form, *token_norm, *state_norm, "
    "width, *ids, raced, ~temperature, ~tau, *noise, *scratch, *shares, *places, "  # `Choice`
    "depth, size, length, unread, *text, *brought, *slots, *cosine, *sine, *keys, ~least, *states, *joint, *paths, "
    "*tokens, *parents, *numbers, *values, *kept_tokens, *kept_parents, *kept_values",
)


@dataclass(frozen=True)
class Entry:
    """How a token and the state before it go into the layer: joined by a matrix, or side by side."""

    embedding: Tensor  # [tokens, H]
    fc: Tensor | None = None  # [H, 2 H]
    token_norm: Tensor | None = None
    state_norm: Tensor | None = None


@dataclass(frozen=True)
class Text:
    """The text that a tree grows behind, as far as the head has not read it: its last row is the root's."""

    tokens: list[int]
    states: Tensor  # [n, H] those before its tokens
    slots: NDArray[np.int64]  # of the whole text and of the rows behind it
    length: int


@dataclass(frozen=True)
class Race:
    """Whose candidates are chosen by noise."""

    keys: list[int]  # behind each depth, the root's own first
    temperature: float


class TreeInC:
    def __init__(self, head: in_c.PassInC, entry: Entry, ids: Tensor, width: int, depth: int) -> None:
        chosen, dtype = choice.library(), head.arithmetic.dtype
        assert chosen is not None
        assert width <= WIDEST
        self.call = head.arithmetic.library.forerun_grow
        self.call.restype = None
        self.head, self.width, self.depth = head, width, depth
        config = head.config
        hidden, rows, drafted = config.hidden_size, max(width, LONGEST), width * (depth - 1)
        grown = 1 + width + width * width * (depth - 1)
        height = -(-rows // in_c.TILE_ROWS) * in_c.TILE_ROWS
        heads = config.heads * config.head_dim
        self.kept: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> Tensor:
            self.kept[name] = tensor.contiguous()
            return self.kept[name]

        def rows_of(name: str, *shape: int) -> int:
            return keep(name, torch.zeros(shape, dtype=dtype)).data_ptr()

        def whole(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> int:
            return keep(name, torch.zeros(shape, dtype=dtype)).data_ptr()

        def real(name: str, *shape: int) -> int:
            return whole(name, *shape, dtype=torch.float32)

        half = config.head_dim // 2
        self.pass_ = in_c.Pass(
            *(0, 1, 0, 0, 0, rows_of("x", height, hidden), rows_of("beside", height, hidden)),
            *(real("cosine", rows, half), real("sine", rows, half), 0, 0),
            *(whole("first_row", 2), whole("first_key", 2), 0),
            whole("prefix", rows, dtype=torch.int32),
            whole("tail_start", rows + 1, dtype=torch.int32),
            whole("tail", width * depth, dtype=torch.int32),
            keep("wanted", torch.arange(rows)).data_ptr(),
            keep("active", torch.ones(1, dtype=torch.uint8)).data_ptr(),
            whole("features", 2),
            rows_of("logits", width, config.vocab_size),
            real("peaks", width, config.vocab_size // in_c.TILE_ROWS),
            *(0, 0),  # `highest` and `likeliest`, one for each thread
            rows_of("normed", height, 2 * hidden),
            rows_of("queries", height, heads),
            rows_of("mixed", height, heads),
            rows_of("act", height, config.intermediate_size),
            real("qkv", height, heads + 2 * config.kv_heads * config.head_dim),
            *(0, 0),  # `scores`, by threads and keys
            real("row_scales", height),
            0,  # `packed`: few rows look at a text
            *(0, 0),  # `rounded` and its scales
        )
        if head.arithmetic.rounds:
            most = in_c.most_rounded(config, height)
            self.pass_.rounded = whole("rounded", most, dtype=torch.int16)
            self.pass_.rounded_scales = real("rounded_scales", most // in_c.GROUP, 2)
        self.growth = Growth(
            joined=int(entry.fc is not None),
            embedding=keep("embedding", entry.embedding).data_ptr(),
            **({} if entry.fc is None else in_c.fields_of("fc", self._placed(entry.fc))),
            token_norm=None if entry.token_norm is None else keep("token_norm", entry.token_norm.float()).data_ptr(),
            state_norm=None if entry.state_norm is None else keep("state_norm", entry.state_norm.float()).data_ptr(),
            width=width,
            depth=depth,
            text=whole("text", LONGEST),
            noise=ctypes.cast(chosen.forerun_gumbel, ctypes.c_void_p).value,
            ids=keep("ids", ids).data_ptr(),
            keys=whole("keys", depth),
            states=rows_of("states", 1 + drafted, hidden),
            joint=rows_of("joint", height, 2 * hidden),
            paths=whole("paths", max(1, drafted), depth),
            shares=real("shares", width, width),
            places=whole("places", width, width),
            tokens=whole("tokens", grown),
            parents=whole("parents", grown),
            numbers=whole("numbers", grown),
            values=whole("values", grown, dtype=torch.float64),
            kept_tokens=whole("kept_tokens", grown),
            kept_parents=whole("kept_parents", grown),
            kept_values=whole("kept_values", grown, dtype=torch.float64),
        )
        self.grown = [self.kept[name].numpy() for name in ("kept_tokens", "kept_parents", "kept_values")]

    def grow(
        self, text: Text, race: Race | None, storage: Storage, size: int, depth: int, tau: float, least: float = 0.0
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and log values of the tree, `size` nodes with the root and `depth` levels at most; it ends
        before a level that the text gets to with a chance below `least`."""
        assert storage.whole is not None
        assert depth <= self.depth
        unread, states = len(text.tokens), text.states.contiguous()
        assert 0 < unread <= LONGEST
        assert states.shape == (unread, self.head.config.hidden_size)
        assert states.dtype == self.head.arithmetic.dtype
        assert text.slots.shape[0] >= text.length + self.width * (depth - 1)
        kept, growth, run = self.kept, self.growth, self.pass_
        size = min(size, kept["kept_tokens"].shape[0])
        assert max(text.tokens) < kept["embedding"].shape[0]
        ctypes.memmove(growth.text, (ctypes.c_int64 * unread)(*text.tokens), 8 * unread)
        growth.raced, growth.tau = int(race is not None), tau
        if race is not None:
            growth.temperature = race.temperature
            ctypes.memmove(growth.keys, (ctypes.c_int64 * depth)(*race.keys), 8 * depth)
        threads = torch.get_num_threads()
        self._room(threads, text.length + self.width * self.depth)
        run.slots, run.threads, run.cache = storage.slots, threads, storage.whole.data_ptr()
        growth.size, growth.depth, growth.length, growth.unread = size, depth, text.length, unread
        growth.brought, growth.slots, growth.least = states.data_ptr(), text.slots.ctypes.data, least
        self.call(ctypes.byref(self.head.model), ctypes.byref(run), ctypes.byref(growth))
        tokens: list[int] = self.grown[0][:size].tolist()
        count = tokens.index(-1) if -1 in tokens else size
        return tokens[:count], self.grown[1][:count].tolist(), self.grown[2][:count].tolist()

    def _room(self, threads: int, keys: int) -> None:
        """Scratch for so many threads and keys, and as many positions; twice as much as needed, since texts grow."""
        scores = self.kept.get("scores")
        size = in_c.score_size(self.head.config, keys)
        enough = scores is not None and scores.shape[0] == threads and scores.shape[1] >= size
        if enough and self.kept["cosine of all"].shape[0] >= keys:
            return
        self.kept["scores"] = scores = torch.zeros(threads, 2 * size)
        self.kept["highest"] = torch.zeros(threads, self.width)
        self.kept["likeliest"] = torch.zeros(threads, self.width, dtype=torch.int64)
        self.kept["scratch"] = torch.zeros(threads, 5, self.head.config.vocab_size)
        run, growth = self.pass_, self.growth
        run.scores, run.score_size = scores.data_ptr(), scores.shape[1]
        run.highest, run.likeliest = self.kept["highest"].data_ptr(), self.kept["likeliest"].data_ptr()
        growth.scratch = self.kept["scratch"].data_ptr()
        self.kept["cosine of all"], self.kept["sine of all"] = cosine, sine = self._turns(2 * keys)
        growth.cosine, growth.sine = cosine.data_ptr(), sine.data_ptr()

    def _turns(self, positions: int) -> tuple[Tensor, Tensor]:
        """[positions, D / 2] each"""
        if not self.head.frequencies:
            nothing = torch.zeros(positions, self.head.config.head_dim // 2)
            return nothing, nothing
        cosine, sine = self.head.turned(positions)
        return cosine[0], sine[0]

    def _placed(self, matrix: Tensor) -> Place:
        arithmetic = self.head.arithmetic
        self.shelf = Shelf(matrix.numel(), arithmetic.order, arithmetic.dtype, arithmetic.folds)
        return self.shelf.put(matrix)
