"""Machines whose times and acceptances are made up, for what chooses how much is drafted: deterministic, with noise,
pauses, and first steps that take many times as long."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

PAUSE = 40.0
"""Passes that a step takes longer when another program has the processor."""
DEEPEST = 6


class Chooser(Protocol):
    def limits(self, texts: list[int]) -> list[int | None]: ...

    def observe(
        self, texts: list[int], drafted: list[int], tokens: list[int], seconds: float, steps: int = 1
    ) -> None: ...

    def forget(self, text: int) -> None: ...


@dataclass(frozen=True)
class Fixed:
    """Drafts so many tokens, whatever comes of it."""

    nodes: int

    def limits(self, texts: list[int]) -> list[int | None]:
        return [self.nodes] * len(texts)

    def observe(
        self, texts: list[int], drafted: list[int], tokens: list[int], seconds: float, steps: int = 1
    ) -> None: ...

    def forget(self, text: int) -> None: ...


@dataclass
class Machine:
    passing: Callable[[int, int], float]
    """Milliseconds of a pass, by texts and rows."""
    drafting: Callable[[int, int], float]
    """Milliseconds, by texts that are drafted for and tokens that are drafted for all of them."""
    natural: int
    """What is drafted for a text if nothing is said."""
    ahead: int = 1
    """Passes of plain decoding that are done at once, as on an accelerator."""
    saved: float = 0.0
    """Of a plain pass, where several are done at once."""
    cold: float = 20.0
    """Passes that the first step of a kind takes longer."""
    finds: float = 1.0
    """How often there is anything to draft for a text."""
    noise: float = 0.05
    pauses: float = 0.01
    max_rows: int = 512
    seed: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def write(self, chooser: Chooser, rights: list[float], length: int, batch: int) -> float:
        """Milliseconds for texts of about so many tokens, of which `batch` are on their way at once. A draft of text t
        is right with the chance `rights[t]`, one after the other, and with fewer drafts less often. Pauses and first
        steps are told to the chooser, and not counted: nothing can be done about them."""
        lengths, noise = random.Random(self.seed), random.Random(self.seed + 1)
        dice = [random.Random(1000 * self.seed + text) for text in range(len(rights))]
        waiting = [(text, max(4, round(length * lengths.uniform(0.7, 1.3)))) for text in range(len(rights))]
        left: dict[int, int] = {}
        total = 0.0
        while waiting or left:
            while waiting and len(left) < batch:
                text, tokens = waiting.pop(0)
                left[text] = tokens
            texts = list(left)
            most = min(self.natural, self.max_rows // len(texts) - 1)
            drafted = [most if limit is None else min(limit, most) for limit in chooser.limits(texts)]
            if self.finds < 1:
                drafted = [own if dice[t].random() < self.finds else 0 for t, own in zip(texts, drafted, strict=True)]
            rows, steps = len(texts) + sum(drafted), 1
            if any(drafted):
                each = self.passing(len(texts), rows) + self.drafting(sum(map(bool, drafted)), sum(drafted))
                found = [1 + self._accepted(dice[t], rights[t], own) for t, own in zip(texts, drafted, strict=True)]
            else:
                steps = min(self.ahead, max(left.values()))
                each = self.passing(len(texts), rows) * (1 - (self.saved if steps > 1 else 0.0))
                found = [steps] * len(texts)
            spent = steps * each * noise.uniform(1 - self.noise, 1 + self.noise)
            total += spent
            kind = (len(texts).bit_length(), rows.bit_length())
            if kind not in self._seen:
                self._seen.add(kind)
                spent += self.cold * each
            elif noise.random() < self.pauses:
                spent += PAUSE * each
            found = [min(count, left[text]) for count, text in zip(found, texts, strict=True)]
            chooser.observe(texts, drafted, found, spent, steps)
            for text, count in zip(texts, found, strict=True):
                left[text] -= count
                if not left[text]:
                    del left[text]
                    chooser.forget(text)
        return total

    def _accepted(self, dice: random.Random, right: float, nodes: int) -> int:
        count = 0
        while count < min(DEEPEST, nodes) and dice.random() < right * (nodes / self.natural) ** 0.15:
            count += 1
        return count


def cpu(texts: int, rows: int) -> float:
    """Two cores with AMX, as measured up to 64 rows."""
    return 10.9 + 0.09 * rows + 0.0011 * rows * min(rows, 64)


def accelerator(texts: int, rows: int) -> float:
    """A pass over 64 rows takes as long as one over a single row."""
    return 4.4 + 0.01 * texts + 0.013 * max(0, rows - 64)


def slow(texts: int, rows: int) -> float:
    """Two cores without matrix units."""
    return 40.0 + 4.0 * rows


def arithmetic(texts: int, rows: int) -> float:
    """Every row takes its time."""
    return 2.0 + rows


def machine(name: str, seed: int) -> Machine:
    drafting: Callable[[int, int], float]
    kind, _, method = name.partition(", ")
    if method == "seldom":
        each = accelerator if kind == "accelerator" else slow
        return Machine(
            each, lambda texts, nodes: 0.1 * texts, 8, ahead=8 if each is accelerator else 1, finds=0.15, seed=seed
        )
    if kind == "accelerator":
        head = method == "head"
        drafting = (lambda texts, nodes: 2.0 + 0.05 * texts) if head else (lambda texts, nodes: 0.3 + 0.15 * texts)
        return Machine(accelerator, drafting, 60 if head else 8, ahead=8, saved=0.06, cold=60.0, seed=seed)
    if kind == "arithmetic":
        return Machine(arithmetic, lambda texts, nodes: 0.2 * texts, 16, seed=seed)
    drafting, natural = {
        "lookup": (lambda texts, nodes: 0.15 * texts + 0.01 * nodes, 8),
        "trees": (lambda texts, nodes: 0.4 * texts + 0.03 * nodes, 24),
        "head": (lambda texts, nodes: 2.5 + 1.2 * texts + 0.05 * nodes, 32),
    }[method]
    return Machine(cpu, drafting, natural, seed=seed)


MACHINES = (
    "cpu, lookup",
    "cpu, trees",
    "cpu, head",
    "cpu, seldom",
    "accelerator, lookup",
    "accelerator, head",
    "accelerator, seldom",
    "arithmetic",
)
LUCKS = {"none": (0.0,), "poor": (0.25,), "good": (0.75,), "mixed": (0.0, 0.2, 0.6, 0.85)}


def rights(luck: str, texts: int) -> list[float]:
    return [LUCKS[luck][text % len(LUCKS[luck])] for text in range(texts)]
