"""The training loop, for any method that gives a loss for a batch of texts.

Which texts a step takes and how fast it learns depend on its number alone, so a run that goes on from a checkpoint does
what it would have done without the interruption; only a limit in time makes it depend on the clock. In several
processes each takes its part of the batch, and the sum of all is divided by the number of all places: the same step as
one process makes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.train.batches import Batches
from forerun.train.captured import CapturedSteps
from forerun.train.checkpoint import read_checkpoint, write_checkpoint
from forerun.train.loss import Learner, Steady
from forerun.train.optimizers import Optimizer, Paced, optimizers
from forerun.train.processes import Processes
from forerun.train.rounding import Rounding
from forerun.train.texts import Text, TextBatch

CLIP = 1.0
"""The largest norm of a gradient."""
EXPLODED = 10.0
"""A loss this many times the first one, plus one, will not come back."""
LOOK = {"cpu": 1, "cuda": 25}
"""Steps after which the host looks at the losses. It would have to wait for the device at each of them."""
TENTHS = 10
"""Measurements of a run, where it is not said how often to measure."""


@dataclass(frozen=True)
class LoopOptions:
    steps: int = 2000
    batch: int = 16
    """Texts in a step, of all processes together."""
    batch_tokens: int = 0
    """Instead as many texts as have no more tokens together, their padding counted."""
    learning_rate: float = 3e-4
    optimizer: Optimizer = "adamw"
    warmup: float = 0.05
    """The share of the run in which the learning rate rises; then it falls to nothing along a cosine."""
    every: int | None = None
    """Steps between two measurements; None for ten in the whole run."""
    patience: int | None = 5
    """Measurements without a better one before it ends early; None for never. Much is learned in the last part of a
    run, as the learning rate falls."""
    time_limit: float | None = None
    """Seconds after which it ends."""
    seed: int = 0

    def rate(self, done: float) -> float:
        """The learning rate where that share of the run is done."""
        rising = max(1, round(self.warmup * self.steps)) / self.steps
        if done < rising:
            return self.learning_rate * min(1.0, (done + 1 / self.steps) / rising)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (done - rising) / max(1 / self.steps, 1 - rising)))


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
    seconds: float = field(default=0.0, compare=False)
    """What it has taken so far."""


@dataclass(frozen=True)
class News:
    """What is told after every step, or after some on an accelerator."""

    step: int
    steps: int
    seconds_left: float
    loss: float
    measure: float
    best: float


class Loop:
    def __init__(
        self,
        method: Learner,
        texts: Sequence[Text],
        options: LoopOptions,
        measure: Callable[[], float],
        place: Path,
        processes: Processes = Processes(),
        tell: Callable[[News], None] = lambda news: None,
        look: int | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """`measure` is what should rise; `place` is the file of the checkpoint; `look` is how many steps go by before
        the host looks at the losses, and tells; `rounding` is how weights are stored in the end."""
        if not options.batch_tokens and options.batch % processes.count:
            raise ValueError(f"--batch is {options.batch}: give a multiple of {processes.count}, one share a process")
        self.method, self.texts, self.options = method, texts, options
        self.measure, self.place, self.processes, self.tell = measure, place, processes, tell
        self.learning = [weight for weight in method.module.parameters() if weight.requires_grad]
        self.device = self.learning[0].device
        self.batches = Batches([len(text) for text in texts], options.batch, options.batch_tokens, options.seed)
        self.standing = Standing()
        self.best_weights: dict[str, Tensor] = {}
        self.optimizers = optimizers(method, options.optimizer, self.device)
        self.rounding = rounding or Rounding(method.module, 16)
        self.captured = self._captures()
        self._look_every = look or LOOK.get(self.device.type, 1)
        self._saved: int | None = None
        self._unseen: list[tuple[tuple[str, ...], Tensor]] = []
        self._recent: list[dict[str, float]] = []
        self._began = 0.0

    def _captures(self) -> CapturedSteps | None:
        """Where the host would take longer to launch a step than the device to compute it."""
        method, tokens = self.method, self.options.batch_tokens
        steady = isinstance(method, Steady) and method.steady and not isinstance(method, Paced)
        if not (steady and tokens and self.device.type == "cuda" and self.processes.count == 1):
            return None
        return CapturedSteps(method, self.learning, tokens)

    def resume(self) -> None:
        """Go on where the checkpoint was written."""
        content = read_checkpoint(self.place)
        self.method.module.load_state_dict(content["weights"])
        for optimizer, state in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.best_weights = content["best_weights"]
        self.standing = Standing(**content["standing"])
        torch.set_rng_state(content["random"])
        self._saved = self.standing.step

    def run(self) -> Standing:
        """Train to the end, and leave the module with its best weights."""
        standing, options = self.standing, self.options
        self._began = time.perf_counter() - standing.seconds
        if not standing.history:
            self._measure()
        done = self._done()
        start, began = time.perf_counter(), done
        while done < 1 and (options.patience is None or standing.since < options.patience):
            if isinstance(self.method, Paced):
                self.method.proceed(done)
            self._learn(options.rate(done))
            before, done = done, self._done()
            if standing.step % self._look_every == 0:
                self._look()
                taken = time.perf_counter() - start
                self._tell(taken / max(done - began, 1e-9) * max(0.0, 1 - done))
            if done >= 1 or self._due(before, done):
                self._measure()
        self.method.module.load_state_dict(self.best_weights)
        return standing

    def _done(self) -> float:
        """The share of the run that is over, by steps or by time, and the same for all processes."""
        by_steps = self.standing.step / self.options.steps
        limit = self.options.time_limit
        if limit is None:
            return by_steps
        by_time = self.processes.from_first((time.perf_counter() - self._began) / limit, self.device)
        return max(by_steps, min(1.0, by_time))

    def _due(self, before: float, done: float) -> bool:
        """Whether it is time to measure."""
        if self.options.every is not None:
            return self.standing.step % self.options.every == 0
        return int(TENTHS * done + 1e-9) > int(TENTHS * before + 1e-9)

    def _learn(self, rate: float) -> None:
        """One step of the optimiser."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["pace"]
        with self.rounding.applied():
            names, means = self._gradients()
        norm = nn.utils.clip_grad_norm_(self.learning, CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.standing.step += 1
        self._unseen.append((("loss", *names, "gradient"), torch.cat([means, norm.double()[None]])))

    def _gradients(self) -> tuple[tuple[str, ...], Tensor]:
        """Of the mean loss of a step's texts, which is told with the figures beside it."""
        if self.captured is not None:
            batch = self._batch(torch.device("cpu"))
            names, sums = self.captured.learn(batch)
            return names, sums / max(1, batch.laws)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.method.loss(self._batch(self.device))
        sums = torch.stack([loss.total.detach(), *loss.figures.values()]).double()
        sums, count = self.processes.sums(sums, loss.count)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss.total / count.to(loss.total.dtype))
        self.processes.sum_gradients(self.learning)
        return tuple(loss.figures), sums / count

    def _batch(self, device: torch.device) -> TextBatch:
        """This process's part of a step's texts. Where there is none left, one of which nothing is learned."""
        step, rank = self.standing.step, self.processes.rank
        chosen = self.batches.at(step)
        numbers = range(rank, len(chosen), self.processes.count)
        seed = (self.options.seed * 1_000_003 + step) % 2**63
        if not numbers:
            text = self.texts[chosen[0]]
            return TextBatch.pack([Text(text.tokens, len(text))], device, seed)
        return TextBatch.pack([self.texts[chosen[number]] for number in numbers], device, seed, numbers)

    def _look(self) -> None:
        """At the losses since the last look; a run that has gone astray is ended."""
        rows = [row.tolist() for row in torch.stack([row for _, row in self._unseen]).cpu()] if self._unseen else []
        first_step = self.standing.step - len(rows) + 1
        for step, (names, _), row in zip(range(first_step, self.standing.step + 1), self._unseen, rows, strict=True):
            means = dict(zip(names, row, strict=True))
            if self.standing.first_loss is None and math.isfinite(means["loss"]):
                self.standing.first_loss = means["loss"]
            self._refuse_astray(means["loss"], "loss", step)
            self._refuse_astray(means.pop("gradient"), "gradient", step)
            self._recent.append(means)
        self._unseen = []

    def _refuse_astray(self, value: float, what: str, step: int) -> None:
        first = self.standing.first_loss
        exploded = what == "loss" and first is not None and value > EXPLODED * (first + 1)
        if math.isfinite(value) and not exploded:
            return
        kept = "" if self._saved is None else f", and go on from step {self._saved} with --resume"
        raise ValueError(
            f"the {what} is {value:.4g} at step {step}, so training has diverged: lower --learning-rate "
            f"({self.options.learning_rate:g}){kept}"
        )

    def _measure(self) -> None:
        """Measure, note what is best, and write the checkpoint."""
        self._look()
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
        standing.seconds = time.perf_counter() - self._began
        if processes.first:
            write_checkpoint(self.place, self._content())
        self._saved = standing.step

    def _content(self) -> dict[str, Any]:
        return {
            "standing": vars(self.standing),
            "weights": self.method.module.state_dict(),
            "best_weights": self.best_weights,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
        }

    def _tell(self, seconds_left: float) -> None:
        standing = self.standing
        loss = self._recent[-1]["loss"] if self._recent else math.nan
        latest = standing.history[-1]["measure"]
        self.tell(News(standing.step, self.options.steps, seconds_left, loss, latest, standing.best))
