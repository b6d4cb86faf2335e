"""A step of training as a CUDA graph: loss and gradients of a batch, launched at once.

The host takes four times as long to launch a head's step as the device takes to compute it. So batches are padded to a
few shapes, and of each shape the launches are captured when it first comes. What is padded counts nothing: the same
sums and gradients as of the batch as it was, but for the order in which they are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.models.static.capture import Graphs, Replayed
from forerun.train.loss import Learner
from forerun.train.texts import Room, TextBatch

SHORTEST = 64
LAWS = 1024
"""Places that are learned come in multiples of it."""


def room_for(batch: TextBatch, tokens: int) -> Room:
    """The shape that a batch is padded to, if batches have up to so many tokens."""
    texts, length = batch.tokens.shape
    below, above = steps_around(length)
    return Room(max(texts, tokens // (below + 1)), above, -(-batch.laws // LAWS) * LAWS)


def steps_around(length: int) -> tuple[int, int]:
    """Of 64, 80, 96, 112, 128, 160, 192, … the one that a length has, or the next, and the one before that."""
    below, step = 0, SHORTEST
    while step < length:
        below, step = step, step + (1 << (step.bit_length() - 1)) // 4
    return below, step


@dataclass
class _Shape:
    batch: TextBatch
    share: Tensor
    """What each place counts in the gradient: one over their number."""
    names: tuple[str, ...]
    replayed: Replayed[Tensor]


class CapturedSteps:
    def __init__(self, method: Learner, learning: Sequence[nn.Parameter], tokens: int) -> None:
        """`tokens` are what a batch has at most, with its padding."""
        self.method, self.learning, self.tokens = method, list(learning), tokens
        self.device = self.learning[0].device
        self.graphs = Graphs(self.device)
        self._pool = self.graphs.pool()
        self._shapes: dict[Room, _Shape] = {}
        for weight in self.learning:
            weight.grad = torch.zeros_like(weight)

    def learn(self, batch: TextBatch) -> tuple[tuple[str, ...], Tensor]:
        """Leaves the gradients of a batch's mean loss with the weights. → the names of its figures behind the loss, and
        all of them, summed."""
        room = room_for(batch, self.tokens)
        padded = batch.padded(room).on(self.device)
        shape = self._shapes.get(room)
        if shape is None:
            shape = self._shapes[room] = self._new(padded)
        shape.batch.take(padded)
        shape.share.fill_(1 / max(1, batch.laws))
        return shape.names, shape.replayed().clone()

    def _new(self, batch: TextBatch) -> _Shape:
        names: list[tuple[str, ...]] = []
        share = torch.zeros((), device=self.device)

        def launch() -> Tensor:
            torch._foreach_zero_([weight.grad for weight in self.learning if weight.grad is not None])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.method.loss(batch)
            torch.autograd.backward(loss.total * share)
            names.append(tuple(loss.figures))
            return torch.stack([loss.total.detach(), *loss.figures.values()]).double()

        replayed = Replayed(launch, self.graphs, self._pool, f"a step of {tuple(batch.tokens.shape)} tokens")
        if not names:  # on a CPU nothing was run yet
            launch()
        return _Shape(batch, share, names[0], replayed)
