"""Two ways to run packed segments through a `transformers` model.

`CachedPasses` hands the model the keys and values of what came before. `RecomputedPasses` hands it the text itself:
slower, but right for whatever a model remembers (the states of Mamba and RWKV, hybrids, caches that forget).
Neither keeps anything between passes outside of `Storage`, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from forerun.models.adapter_calls import Calls, Masks, Request, Rows
from forerun.models.batch import Segment
from forerun.models.storage import LayerShape, Storage
from forerun.models.target import Output


@dataclass(frozen=True)
class MaskStyle:
    """In which form a model takes the mask of a tree. Which one is right is tried out, see `adapter_probe`."""

    kinds: tuple[str, ...] = ()
    """Of layers, as `layer_types` in its configuration names them; none where all layers share one mask."""
    windowed: Literal["all", "by kind", "none"] = "none"
    window: int = 0
    """A token sees this many tokens, itself included."""

    def masks(self, visible: Tensor, distance: Tensor, dtype: torch.dtype) -> Masks:
        """visible and distance [G, N, P + N]."""
        near = visible & (distance < self.window) if self.windowed != "none" else visible
        if not self.kinds:
            return _additive(near, dtype)
        return {kind: _additive(near if kind == "sliding_attention" else visible, dtype) for kind in self.kinds}


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers rather than booleans: eager attention adds the mask, and sdpa takes both."""
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return mask.masked_fill_(visible, 0.0)[:, None]


def needs_mask(segment: Segment) -> bool:
    """Whether it is more than one text that goes on: a tree, or a part of one."""
    return not (segment.is_chain and segment.context_visible is None and segment.context_positions is None)


@dataclass(frozen=True)
class Padded:
    """G segments brought to P tokens of context and N rows."""

    segments: tuple[Segment, ...]
    context: int
    rows: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Padded:
        context = max(segment.context.shape[0] for segment in segments)
        return cls(tuple(segments), context, max(segment.rows for segment in segments))

    @property
    def is_plain(self) -> bool:
        """Chains of one shape: the model's own causal mask is right."""
        return all(
            not needs_mask(segment) and segment.rows == self.rows and segment.context.shape[0] == self.context
            for segment in self.segments
        )

    def stack(self, rows: Sequence[Tensor], width: int) -> Tensor:
        """[G, width], zeros behind what is shorter."""
        if all(row.shape[0] == width for row in rows):
            return torch.stack(list(rows))
        padded = rows[0].new_zeros(len(rows), width)
        for g, row in enumerate(rows):
            padded[g, : row.shape[0]] = row
        return padded

    def visible(self) -> Tensor:
        """[G, N, P + N] bool. A padded row sees itself: a softmax over nothing is NaN."""
        device = self.segments[0].tokens.device
        eye = torch.eye(self.rows, dtype=torch.bool, device=device)
        visible = torch.zeros(len(self.segments), self.rows, self.context + self.rows, dtype=torch.bool, device=device)
        for g, segment in enumerate(self.segments):
            count = segment.rows
            own = torch.ones(count, count, dtype=torch.bool, device=device).tril_()
            if segment.ancestors is not None:
                first = count - segment.ancestors.shape[0]
                own[first:, first:] = segment.ancestors
            before, seen = segment.context.shape[0], segment.context_visible
            visible[g, :count, :before] = True
            if seen is not None:
                visible[g, :count, before - seen.shape[1] : before] = seen
            visible[g, :, self.context :] = eye
            visible[g, :count, self.context : self.context + count] = own
        return visible

    def distance(self, positions: Tensor) -> Tensor:
        """[G, N, P + N]: how many positions a key lies before a query, from positions [G, N]."""
        before = torch.arange(self.context, device=positions.device).repeat(len(self.segments), 1)
        for g, segment in enumerate(self.segments):
            if segment.context_positions is not None:
                end = segment.context.shape[0]
                before[g, end - segment.context_positions.shape[0] : end] = segment.context_positions
        return positions[:, :, None] - torch.cat([before, positions], dim=1)[:, None, :]

    def real_rows(self) -> Tensor | None:
        """Places in the [G · N] rows that are not padding; None for all."""
        if all(segment.rows == self.rows for segment in self.segments):
            return None
        device = self.segments[0].tokens.device
        return torch.cat(
            [torch.arange(segment.rows, device=device) + g * self.rows for g, segment in enumerate(self.segments)]
        )

    def kept(self) -> list[int]:
        """Rows of which some segment wants the logits."""
        return sorted({row for s in self.segments for row in range(s.rows - s.logits, s.rows)})


@dataclass(frozen=True)
class CachedPasses:
    """Keys and values come from storage and go back to it, so a rejected row is simply never read again."""

    calls: Calls
    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    positions: bool
    """Whether positions are told to the model; otherwise it counts them from the cache."""
    style: MaskStyle | None = None
    """None for a model that checks chains only."""

    def new_storage(self, slots: int) -> Storage:
        return Storage.make(list(self.shapes), slots, self.dtype, self.device)

    def forward_rows(self, segments: Sequence[Segment], storage: Storage, layers: Sequence[int]) -> Output:
        parts: list[Output | None] = [None] * len(segments)
        for members in _together([self._class(segment) for segment in segments]):
            padded = Padded.of([segments[index] for index in members])
            for index, part in zip(members, self._run(padded, storage, layers), strict=True):
                parts[index] = part
        return _joined(parts, layers)

    def _class(self, segment: Segment) -> Hashable:
        """Segments of one class share a pass. With masks they may be padded, up to about twice their size."""
        context, rows = segment.context.shape[0], segment.rows
        if not self.calls.together:
            return segment.sequence
        if self.style is None:
            return context, rows
        return context.bit_length(), max(0, (rows - 1).bit_length() - 3)

    def _run(self, padded: Padded, storage: Storage, layers: Sequence[int]) -> Iterator[Output]:
        segments = padded.segments
        positions = padded.stack([segment.positions for segment in segments], padded.rows)
        masks = None
        if not padded.is_plain:
            assert self.style is not None, "padding and trees need masks"
            masks = self.style.masks(padded.visible(), padded.distance(positions), self.dtype)
        kept = padded.kept()
        cache = self._read(padded, storage)
        rows = self.calls.run(
            Request(
                sequences=tuple(segment.sequence for segment in segments),
                tokens=padded.stack([segment.tokens for segment in segments], padded.rows),
                layers=layers,
                keep=None if len(kept) == padded.rows else torch.tensor(kept, dtype=torch.int64, device=self.device),
                cache=cache,
                positions=positions if self.positions else None,
                masks=masks,
            )
        )
        self._write(padded, storage, cache)
        return _split(padded, rows, kept)

    def _read(self, padded: Padded, storage: Storage) -> DynamicCache:
        """Layers that keep everything, also where the model would rather forget (sliding windows): what is out of sight
        is masked, and a rejected row must not have pushed anything out."""
        cache = DynamicCache()
        if not padded.context:
            return cache
        slots = padded.stack([segment.context for segment in padded.segments], padded.context).flatten()
        shape = (len(padded.segments), padded.context)
        for number, (keys, values) in enumerate(zip(storage.keys, storage.values, strict=True)):
            # [G · P, heads, size] → [G, heads, P, size]
            cache.update(
                keys.index_select(0, slots).view(*shape, *keys.shape[1:]).transpose(1, 2),
                values.index_select(0, slots).view(*shape, *values.shape[1:]).transpose(1, 2),
                number,
            )
        return cache

    def _write(self, padded: Padded, storage: Storage, cache: DynamicCache) -> None:
        slots = torch.cat([segment.slots for segment in padded.segments])
        real = padded.real_rows()
        for number, (keys, values, _) in enumerate(cache):
            # [G, heads, P + N, size] → [G · N, heads, size]
            new = [tensor[:, :, padded.context :].transpose(1, 2).flatten(0, 1) for tensor in (keys, values)]
            if real is not None:
                new = [rows[real] for rows in new]
            storage.write(number, slots, *new)


@dataclass(frozen=True)
class RecomputedPasses:
    """Storage holds the token of each slot instead of keys and values; every pass reads the text from its beginning."""

    calls: Calls
    device: torch.device

    style = None
    """Chains only."""

    def new_storage(self, slots: int) -> Storage:
        return Storage.make([LayerShape(1, 1, 0)], slots, torch.int64, self.device)

    def forward_rows(self, segments: Sequence[Segment], storage: Storage, layers: Sequence[int]) -> Output:
        parts: list[Output | None] = [None] * len(segments)
        for segment in segments:
            tokens = segment.tokens[:, None, None]
            storage.write(0, segment.slots, tokens, tokens[..., :0])
        for members in _together([self._class(segment) for segment in segments]):
            padded = Padded.of([_whole(segments[index], storage) for index in members])
            kept = padded.kept()
            rows = self.calls.run(
                Request(
                    sequences=tuple(segment.sequence for segment in padded.segments),
                    # a causal model does not see what is padded behind a text, so it needs no mask
                    tokens=padded.stack([segment.tokens for segment in padded.segments], padded.rows),
                    layers=layers,
                    keep=torch.tensor(kept, dtype=torch.int64, device=self.device),
                )
            )
            for index, part in zip(members, _split(padded, rows, kept), strict=True):
                fresh = segments[index].rows
                parts[index] = Output(part.logits, {layer: part.features[layer][-fresh:] for layer in layers})
        return _joined(parts, layers)

    def _class(self, segment: Segment) -> Hashable:
        return (segment.context.shape[0] + segment.rows).bit_length() if self.calls.together else segment.sequence


def _whole(segment: Segment, storage: Storage) -> Segment:
    """The segment with its context as rows of its own."""
    before = storage.keys[0][segment.context, 0, 0]
    tokens = torch.cat([before, segment.tokens])
    positions = torch.arange(tokens.shape[0], device=tokens.device)
    slots = torch.cat([segment.context, segment.slots])
    return Segment(segment.sequence, tokens, positions, None, slots[:0], slots, segment.logits)


def _together(classes: Sequence[Hashable]) -> list[list[int]]:
    """Indices of equal classes."""
    members: dict[Hashable, list[int]] = {}
    for index, name in enumerate(classes):
        members.setdefault(name, []).append(index)
    return list(members.values())


def _split(padded: Padded, rows: Rows, kept: Sequence[int]) -> Iterator[Output]:
    """Each segment's own part, without padding."""
    place = {row: number for number, row in enumerate(kept)}
    for g, segment in enumerate(padded.segments):
        # the rows a segment wants follow each other, and so they do among those kept
        first = place[segment.rows - segment.logits] if segment.logits else 0
        features = {layer: states[g, : segment.rows] for layer, states in rows.features.items()}
        yield Output(rows.logits[g, first : first + segment.logits], features)


def _joined(parts: Sequence[Output | None], layers: Sequence[int]) -> Output:
    done = [part for part in parts if part is not None]
    assert len(done) == len(parts)
    return Output(
        torch.cat([part.logits for part in done]),
        {layer: torch.cat([part.features[layer] for part in done]) for layer in layers},
    )
