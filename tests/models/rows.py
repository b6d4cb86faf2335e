"""Tiny models, and one text and its tree read in many ways, for tests of the passes in C."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from forerun.core.sequence import Sequence as Text
from forerun.drafters.run_ahead import RunAhead
from forerun.models.batch import Batch, Segment
from forerun.models.config import Layer, ModelConfig, Rope
from forerun.models.native import amx, floats
from forerun.models.native.shelf import rounded
from forerun.models.static.static_pass import StaticPass
from forerun.models.storage import Storage
from forerun.models.transformer import Transformer

Model = TypeVar("Model", bound=Transformer)
VOCABULARY = 96
SLOTS = 1024


def config(heads: int, kv_heads: int, head_dim: int, hidden: int = 64, **more: object) -> ModelConfig:
    plain: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": (Layer(), Layer()),
        "context_length": 512,
    }
    return ModelConfig(**(plain | more))  # type: ignore[arg-type]


LLAMA3 = Rope(kind="llama3", factor=8.0, original_context=64)
YARN = Rope(kind="yarn", factor=4.0, original_context=64)
CONFIGS = {
    "one head each": config(2, 2, 64),
    "two share, tied": config(4, 2, 64, tied=True, layers=(Layer(), Layer(rope=None), Layer(LLAMA3))),
    "three share, biases": config(3, 1, 64, hidden=128, qkv_bias=True, output_bias=True),
    "eight share, normed, wide": config(8, 1, 128, hidden=96, qk_norm=True, intermediate_size=160),
    "sixteen share, touchy": config(32, 2, 64, attention_scale=0.03, layers=(Layer(), Layer(YARN), Layer(), Layer())),
    "the widest heads": config(2, 1, 256, attention_scale=0.1, embedding_scale=3.0),
}
NARROW = {
    "heads of 16": config(8, 2, 16, intermediate_size=32, layers=(Layer(), Layer(rope=None))),
    "heads of 32, normed": config(4, 1, 32, hidden=32, qk_norm=True),
    "heads of 48, biases": config(4, 2, 48, hidden=160, qkv_bias=True, output_bias=True, intermediate_size=288),
    "heads of 80, five share": config(10, 2, 80, tied=True),
    "heads of 96, seven share": config(7, 1, 96, attention_scale=0.05, layers=(Layer(LLAMA3), Layer(YARN))),
}
"""For float32 only."""
IN_C = {torch.bfloat16: amx, torch.float32: floats}
NEAR = 1e-5
"""Between two ways to compute in float32."""
NEAR_IN_BYTES = 3e-4
"""The same with weights in bytes, and rows of 16 bits."""


def pass_in(dtype: torch.dtype, *values: object) -> object:
    """Values of a test of the pass in C, behind the numbers that it is computed with."""
    missing = pytest.mark.skipif(IN_C[dtype].library() is None, reason="no such processor, or no compiler")
    return pytest.param(dtype, *values, marks=missing, id="-".join(map(str, (dtype, *values))))


each_pass = pytest.mark.parametrize("dtype", [pass_in(dtype) for dtype in IN_C])


def names(dtype: torch.dtype) -> list[str]:
    """Of the models that such a pass knows."""
    return [*CONFIGS, *NARROW] if dtype == torch.float32 else [*CONFIGS]


each_model = pytest.mark.parametrize(
    ("dtype", "name"), [pass_in(dtype, name) for dtype in IN_C for name in names(dtype)]
)


def tiny(shape: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """The same weights in every number format: those of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(shape)
    for name, parameter in model.named_parameters():
        spread = 0.3 if "norm" in name or "bias" in name else shape.hidden_size**-0.5 * 1.5
        drawn = torch.randn(parameter.shape, generator=generator) * spread + ("norm.weight" in name)
        parameter.data = drawn.bfloat16().to(dtype)
    if shape.tied:
        model.tie()
    return model.requires_grad_(False)


def in_pytorch(model: Model) -> Model:
    """Prepared, without a pass in C."""
    model.learned_through = True
    model.prepare()
    assert model.in_c is None
    return model


def with_static_pass(model: Model) -> Model:
    """Prepared, with the static pass, which it has by itself on a GPU only."""
    in_pytorch(model).static = model.static or StaticPass(model)
    return model


def round_matrices(model: Model, dtype: torch.dtype) -> Model:
    """What is left of its weights when in bytes, for a pass of such numbers. In float32 each 32 have a scale."""
    for part in (*model.model.layers.modules(), model.lm_head):
        if isinstance(part, nn.Linear):
            groups = part.weight.data.view(-1, 32) if dtype == torch.float32 else part.weight.data
            whole, scales = rounded(groups)
            rows = (whole * scales[:, None]).to(part.weight.dtype).view(part.weight.shape)
            part.weight = nn.Parameter(rows, requires_grad=False)
    return model


def error(found: Tensor, right: Tensor) -> float:
    """The root mean square of what is wrong, as a part of what is right."""
    return float((found.float() - right).square().mean().sqrt() / right.square().mean().sqrt())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Seen:
    """All that a pass leaves of R rows."""

    logits: Tensor  # [R, V]
    hidden: Tensor  # [R, layers + 1, H]
    cached: Tensor  # [R, layers, 2, kv_heads, D]

    def __getitem__(self, rows: Tensor | slice | list[int]) -> Seen:
        return Seen(self.logits[rows], self.hidden[rows], self.cached[rows])

    def same(self, other: Seen) -> bool:
        """Bit for bit; NaN is like nothing."""
        return all(torch.equal(vars(self)[name], vars(other)[name]) for name in ("logits", "hidden", "cached"))

    @staticmethod
    def cat(parts: Sequence[Seen]) -> Seen:
        return Seen(*(torch.cat([vars(part)[name] for part in parts]) for name in ("logits", "hidden", "cached")))


def read(model: Transformer, storage: Storage, segments: Sequence[Segment]) -> list[Seen]:
    """What one pass says of each segment's rows; the logits of all of them."""
    batch = Batch.pack(segments)
    depth = len(model.config.layers)
    output = model.forward_rows(batch, storage, layers=range(depth + 1))
    assert storage.whole is not None
    assert output.likeliest is None or torch.equal(output.likeliest, output.logits.argmax(-1)), "the first of equals"
    hidden = torch.stack([output.features[index] for index in range(depth + 1)], 1)
    whole = Seen(output.logits, hidden, storage.whole[:, batch.slots].transpose(0, 1).clone())
    starts = [0, *torch.tensor([segment.rows for segment in segments]).cumsum(0).tolist()]
    return [whole[slice(start, end)] for start, end in pairwise(starts)]


def chain(tokens: Tensor, context: Tensor, slots: Tensor) -> Segment:
    positions = torch.arange(context.shape[0], context.shape[0] + tokens.shape[0])
    return Segment(0, tokens, positions, None, context, slots, tokens.shape[0])


def garbage(model: Transformer) -> Storage:
    """A cache in which nothing may be read that was not written."""
    storage = model.new_storage(SLOTS)
    assert storage.whole is not None
    storage.whole.fill_(torch.nan)
    return storage


@dataclass(frozen=True)
class Case:
    """A text, of which the cache holds the first tokens, and a tree behind it; node 0 is the root."""

    text: Tensor  # [T] without the root
    held: int
    tokens: Tensor  # [N]
    parents: list[int]

    @classmethod
    def random(cls, generator: torch.Generator, longest: int = 200, most: int = 64, unread: int = 6) -> Case:
        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        length, size, deep = number(0, longest), number(1, most), number(1, 8)
        parents = [-1, *(max(0, node - number(1, min(node, deep))) for node in range(1, size))]
        tokens = torch.randint(VOCABULARY, (length + size,), generator=generator)
        return cls(tokens[:length], max(0, length - number(0, unread)), tokens[length:], parents)

    def path(self, node: int) -> list[int]:
        """From the root down to the node."""
        above = [] if node == 0 else self.path(self.parents[node])
        return [*above, node]

    @property
    def ancestors(self) -> Tensor:
        seen = torch.zeros(len(self.parents), len(self.parents), dtype=torch.bool)
        for node in range(len(self.parents)):
            seen[node, self.path(node)] = True
        return seen

    @property
    def size(self) -> int:
        return self.text.shape[0] + self.tokens.shape[0]

    def plain(self, model: Transformer) -> Seen:
        """One token at a time: the text, and then every node behind its own path."""
        storage = garbage(model)
        length = self.text.shape[0]
        every = torch.arange(self.size)
        tokens = torch.cat([self.text, self.tokens])
        rows = []
        for row in range(self.size):
            above = self.path(row - length)[:-1] if row >= length else []
            context = torch.cat([every[: min(row, length)], torch.tensor(above, dtype=torch.int64) + length])
            rows += read(model, storage, [chain(tokens[row : row + 1], context, every[row : row + 1])])
        return Seen.cat(rows)

    def tree(self, slots: Tensor) -> Segment:
        """The rest of the text and the tree. `slots` for text and tree."""
        tokens = torch.cat([self.text[self.held :], self.tokens])
        depths = self.ancestors.sum(1) - 1
        positions = torch.cat([torch.arange(self.held, self.text.shape[0]), self.text.shape[0] + depths])
        own = slots[self.held : self.size]
        return Segment(0, tokens, positions, self.ancestors, slots[: self.held], own, tokens.shape[0])


def shuffled(block: int, generator: torch.Generator) -> Tensor:
    """All slots, in blocks in any order."""
    blocks = torch.randperm(SLOTS // block, generator=generator)
    return (blocks[:, None] * block + torch.arange(block)).view(-1)


def together(model: Transformer, cases: Sequence[Case], order: Tensor, more: Sequence[int] = ()) -> list[Seen]:
    """The texts in chunks side by side, then all trees in one pass, beside prompts of `more` tokens each."""
    storage = garbage(model)
    starts = [0, *torch.tensor([case.size for case in cases]).cumsum(0).tolist()]
    slots = [order[start : start + case.size] for start, case in zip(starts, cases, strict=False)]
    held: list[list[Seen]] = [[] for _ in cases]
    size = 7
    while any(sum(len(part.logits) for part in parts) < case.held for parts, case in zip(held, cases, strict=True)):
        turns = {}
        for index, case in enumerate(cases):
            done = sum(len(part.logits) for part in held[index])
            end = min(case.held, done + size)
            if end > done:
                turns[index] = chain(case.text[done:end], slots[index][:done], slots[index][done:end])
        for index, part in zip(turns, read(model, storage, list(turns.values())), strict=True):
            held[index].append(part)
        size += 26
    segments = [case.tree(own) for case, own in zip(cases, slots, strict=True)]
    used = starts[-1]
    for count in more:
        segments.append(chain(torch.arange(count) % VOCABULARY, order[:0], order[used : used + count]))
        used += count
    rows = read(model, storage, segments)[: len(cases)]
    return [Seen.cat([*before, own]) for before, own in zip(held, rows, strict=True)]


def levels(model: Transformer, cases: Sequence[Case]) -> list[Seen]:
    """Level by level, as drafts are made. Logits and cache of the root and the nodes; the root must come first in its
    case, and the hidden states are left out."""
    ahead = RunAhead(model, SLOTS)
    ahead.cache.storage.whole.fill_(torch.nan)  # type: ignore[union-attr]
    texts = [Text([*case.text.tolist(), int(case.tokens[0])], 1000, id=index) for index, case in enumerate(cases)]
    depths = [(case.ancestors.sum(1) - 1).tolist() for case in cases]
    by_level = [
        [[n for n, depth in enumerate(own) if depth == d] for d in range(max(map(max, depths)) + 1)] for own in depths
    ]
    widths = [max(len(own[d]) for own in by_level) for d in range(len(by_level[0]))]
    run = ahead.start(texts, [sum(widths[1:])] * len(cases))
    logits = [{0: row} for row in run.roots().logits]
    numbers: list[dict[int, int]] = [{0: -1} for _ in cases]
    first = 0
    for depth, width in enumerate(widths[1:], start=1):
        tokens, parents = torch.zeros(2, len(cases), width, dtype=torch.int64)
        for index, case in enumerate(cases):
            for column, node in enumerate(by_level[index][depth]):
                tokens[index, column] = case.tokens[node]
                parents[index, column] = numbers[index][case.parents[node]]
                numbers[index][node] = first + column
        rows = run.level(tokens, parents, [len(own[depth]) for own in by_level])
        for index, column, row in zip(rows.sequence.tolist(), rows.column.tolist(), rows.logits, strict=True):
            logits[index][by_level[index][depth][column]] = row
        first += width
    found = []
    for index, case in enumerate(cases):
        reserved = ahead.cache.slots(index)[1]
        unread = run.unread(index)
        places = reserved[[unread + numbers[index][node] for node in range(len(case.parents))]]
        cached = ahead.cache.storage.whole[:, places].transpose(0, 1)  # type: ignore[index]
        ordered = torch.stack([logits[index][node] for node in range(len(case.parents))])
        found.append(Seen(ordered, torch.zeros(0), cached))
    return found
