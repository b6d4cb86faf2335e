"""The training loop, for any method that gives a loss for a batch of texts.

Which texts a step takes and how fast it learns depend on its number alone, so a run that goes on from a checkpoint does
what it would have done without the interruption. In several processes each takes its part of the batch, and the sum
of all is divided by the number of all tokens: the same step as one process makes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forerun.train.checkpoint import read_checkpoint, write_checkpoint
from forerun.train.processes import Processes
from forerun.train.texts import Text, TextBatch

CLIP = 1.0
"""The largest norm of a gradient."""
EXPLODED = 10.0
"""A loss this many times the first one, plus one, will not come back."""


@dataclass(frozen=True)
class Loss:
    total: Tensor
    """Summed over tokens."""
    count: int
    """Of how many tokens."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else to tell, summed likewise."""


class Method(Protocol):
    @property
    def module(self) -> nn.Module:
        """What learns."""
        ...

    def loss(self, batch: TextBatch) -> Loss: ...


@dataclass(frozen=True)
class LoopOptions:
    steps: int = 2000
    batch: int = 16
    """Texts in a step, of all processes together."""
    learning_rate: float = 3e-4
    warmup: float = 0.05
    """The share of steps in which the learning rate rises; then it falls to nothing along a cosine."""
    every: int = 200
    """Steps between two measurements."""
    patience: int = 5
    """Measurements without a better one before it ends early."""
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))


@dataclass
class Standing:
    """How far a run is, and what it has found."""

    step: int = 0
    first_loss: float | None = None
    best: float = -math.inf
    """The highest measurement."""
    best_step: int = 0
    since: int = 0
    """Measurements since it last rose."""
    history: list[dict[str, float]] = field(default_factory=list)
    """A row for each measurement: the step, the measure, and the figures of the steps before it."""


@dataclass(frozen=True)
class News:
    """What is told after every step."""

    step: int
    steps: int
    seconds_left: float
    loss: float
    measure: float
    best: float


class Loop:
    def __init__(
        self,
        method: Method,
        texts: Sequence[Text],
        options: LoopOptions,
        measure: Callable[[], float],
        place: Path,
        processes: Processes = Processes(),
        tell: Callable[[News], None] = lambda news: None,
    ) -> None:
        """`measure` is what should rise; `place` is the file of the checkpoint."""
        if options.batch % processes.count:
            raise ValueError(f"--batch is {options.batch}: give a multiple of {processes.count}, one share a process")
        self.method, self.texts, self.options = method, texts, options
        self.measure, self.place, self.processes, self.tell = measure, place, processes, tell
        self.device = next(method.module.parameters()).device
        self.standing = Standing()
        self.best_weights: dict[str, Tensor] = {}
        self.optimizer = torch.optim.AdamW(method.module.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
        self._saved: int | None = None
        self._recent: list[dict[str, float]] = []

    def resume(self) -> None:
        """Go on where the checkpoint was written."""
        content = read_checkpoint(self.place)
        self.method.module.load_state_dict(content["weights"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.best_weights = content["best_weights"]
        self.standing = Standing(**content["standing"])
        torch.set_rng_state(content["random"])
        self._saved = self.standing.step

    def run(self) -> Standing:
        """Train to the end, and leave the module with its best weights."""
        standing, options = self.standing, self.options
        step = self._wrapped()
        if not standing.history:
            self._measure()
        start, began = time.perf_counter(), standing.step
        while standing.step < options.steps and standing.since < options.patience:
            self._learn(step)
            per_step = (time.perf_counter() - start) / (standing.step - began)
            self._tell((options.steps - standing.step) * per_step)
            if standing.step % options.every == 0 or standing.step == options.steps:
                self._measure()
        self.method.module.load_state_dict(self.best_weights)
        return standing

    def _wrapped(self) -> nn.Module:
        step = _Step(self.method)
        return step if self.processes.count == 1 else DistributedDataParallel(step)

    def _learn(self, step: nn.Module) -> None:
        """One step of the optimiser, unless the loss has gone astray."""
        options, standing = self.options, self.standing
        chosen = batch_indices(standing.step, options.batch, len(self.texts), options.seed)
        own = chosen[self.processes.rank :: self.processes.count]
        batch = TextBatch.pack([self.texts[index] for index in own], self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate(standing.step)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: Loss = step(batch)
        local = {"loss": float(loss.total.detach()), "count": float(loss.count), **loss.figures}
        sums = self.processes.sums(local, self.device)
        count = sums.pop("count")
        means = {name: value / count for name, value in sums.items()}
        self._refuse_astray(means["loss"], "loss")
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss.total * (self.processes.count / count))
        norm = nn.utils.clip_grad_norm_(self.method.module.parameters(), CLIP)
        self._refuse_astray(float(norm), "gradient")
        self.optimizer.step()
        standing.step += 1
        if standing.first_loss is None:
            standing.first_loss = means["loss"]
        self._recent.append(means)

    def _refuse_astray(self, value: float, what: str) -> None:
        first = self.standing.first_loss
        exploded = what == "loss" and first is not None and value > EXPLODED * (first + 1)
        if math.isfinite(value) and not exploded:
            return
        kept = "" if self._saved is None else f", and go on from step {self._saved} with --resume"
        raise ValueError(
            f"the {what} is {value:.4g} at step {self.standing.step + 1}, so training has diverged: lower "
            f"--learning-rate ({self.options.learning_rate:g}){kept}"
        )

    def _measure(self) -> None:
        """Measure, note what is best, and write the checkpoint."""
        standing, processes = self.standing, self.processes
        value = processes.from_first(self.measure() if processes.first else 0.0, self.device)
        names = self._recent[0] if self._recent else ()
        means = {name: sum(row[name] for row in self._recent) / len(self._recent) for name in names}
        standing.history.append({"step": standing.step, "measure": value, **means})
        self._recent = []
        standing.since = 0 if value > standing.best else standing.since + 1
        if value >= standing.best:  # of equals the one that has learned longer
            standing.best, standing.best_step = value, standing.step
            weights = self.method.module.state_dict()
            self.best_weights = {name: weight.detach().clone() for name, weight in weights.items()}
        if processes.first:
            write_checkpoint(self.place, self._content())
        self._saved = standing.step

    def _content(self) -> dict[str, Any]:
        return {
            "standing": vars(self.standing),
            "weights": self.method.module.state_dict(),
            "best_weights": self.best_weights,
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    def _tell(self, seconds_left: float) -> None:
        standing = self.standing
        latest = standing.history[-1]["measure"]
        loss = self._recent[-1]["loss"]
        self.tell(News(standing.step, self.options.steps, seconds_left, loss, latest, standing.best))


class _Step(nn.Module):
    """The loss as a module, which is what takes gradients across processes."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.learns = method.module
        self.loss = method.loss

    def forward(self, batch: TextBatch) -> Loss:
        return self.loss(batch)


def batch_indices(step: int, batch: int, count: int, seed: int) -> list[int]:
    """The texts of a step: all of them in an order by chance, then again in another order, and so on."""
    places = range(step * batch, (step + 1) * batch)
    return [_order(place // count, count, seed)[place % count] for place in places]


@lru_cache(maxsize=4)
def _order(epoch: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
