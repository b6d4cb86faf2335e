"""What decoding cost and what speculation gained, for one text and for a whole run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from forerun.core.transfer import event
from forerun.models.static.capture import unsettled

Phase = Literal["draft", "target", "verify", "rest"]
PHASES: tuple[Phase, ...] = ("draft", "target", "verify", "rest")


class Clock:
    """Splits the time of a step into phases; what is not measured otherwise is the rest.

    An accelerator works while the host goes on. There the device stamps its own times around each phase up to the
    verdict, which the host waits for; the rest of a step is what the wall clock says beyond them.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.started = time.perf_counter()
        self._device = device
        self._unsettled = unsettled()
        self._stamped = device.type == "cuda"
        self._stamps: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def undisturbed(self) -> bool:
        """Whether nothing was prepared for the first time, which takes many times as long as it will from now on."""
        return unsettled() == self._unsettled

    def spent(self, *, with_rest: bool) -> float:
        """Seconds in all; the rest is what the host takes beside a device."""
        return sum(seconds for phase, seconds in self.seconds.items() if with_rest or phase != "rest")

    @contextmanager
    def phase(self, name: Phase, *, learning: bool = False) -> Iterator[None]:
        """`learning` of what was committed: nobody waits for that."""
        if self._stamped and not learning:
            start = self._stamps[-1][2] if name == "verify" else self._stamp()  # which begins when the pass ends
            yield
            self._stamps.append((name, start, self._stamp()))
            return
        before = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - before

    def _stamp(self) -> torch.cuda.Event:
        stamp = event(timing=True)
        stamp.record(_stream(self._device))
        return stamp

    def stop(self) -> None:
        total = time.perf_counter() - self.started
        for name, start, end in self._stamps:
            end.synchronize()
            self.seconds[name] += start.elapsed_time(end) / 1000
        self.seconds["rest"] = max(0.0, total - sum(self.seconds[name] for name in PHASES[:-1]))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Finding the current one takes as long as writing several stamps."""
    return torch.cuda.default_stream(device)


@dataclass
class Statistics:
    """A *target pass* is one that decided tokens; passes that only read a prompt are counted apart. In a batch a pass
    serves many texts and counts once for each of them."""

    prompt_tokens: int = 0
    tokens: int = 0
    target_passes: int = 0
    prompt_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    rows: int = 0
    preemptions: int = 0
    reused: int = 0
    """Tokens that were in the cache already, left there by an earlier text."""
    cache_peak: float = 0.0
    """The largest share of the cache in use, by all texts together."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of all steps it took part in."""
    seconds_reading: float = 0.0
    """Of a whole run: of the steps that also read a prompt."""
    tokens_reading: int = 0
    """And the tokens committed in those."""
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    began: float | None = None
    """By `time.perf_counter`, as the next two: when its first step began."""
    first: float | None = None
    """When the step ended that gave its first token."""
    last: float | None = None
    """When its latest step ended."""
    seconds_to_first: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of the steps up to the first token, which are those that read the prompt."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def rows_wasted(self) -> int:
        """Rows of the target's passes whose token was refused."""
        return self.drafted - self.accepted

    @property
    def acceptance_by_depth(self) -> list[float]:
        """At depth d: of the steps that got there and had a draft for it, the share that accepted one."""
        pairs = zip(self.accepted_by_depth, self.offered_by_depth, strict=True)
        return [accepted / offered for accepted, offered in pairs]

    def count_step(self, seconds: dict[str, float], cache_used: float) -> None:
        for name, spent in seconds.items():
            self.seconds[name] += spent
        self.cache_peak = max(self.cache_peak, cache_used)
        self.last = time.perf_counter()
        if self.began is None:
            self.began = self.last - sum(seconds.values())
        if self.first is None and self.tokens:
            self.first, self.seconds_to_first = self.last, dict(self.seconds)

    def count_verdict(self, drafted: int, accepted: int, refused_further: bool, tokens: int) -> None:
        """`refused_further` says that drafts stood where the accepted path ended."""
        self.target_passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        reached = accepted + refused_further
        self.offered_by_depth += [0] * (reached - len(self.offered_by_depth))
        self.accepted_by_depth += [0] * (reached - len(self.accepted_by_depth))
        for depth in range(reached):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted

    def count_plain(self, tokens: int) -> None:
        """Tokens of so many passes without drafts."""
        self.target_passes += tokens
        self.tokens += tokens
        self.rows += tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "target_passes": self.target_passes,
            "prompt_passes": self.prompt_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "seconds": self.total_seconds,
            "seconds_by_phase": dict(self.seconds),
            "acceptance_by_depth": self.acceptance_by_depth,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rows": self.rows,
            "rows_wasted": self.rows_wasted,
            "preemptions": self.preemptions,
            "cache_peak": self.cache_peak,
        }
