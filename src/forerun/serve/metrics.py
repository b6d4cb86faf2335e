"""What Prometheus may ask: requests and their times as they end, and the engines' own figures at the time it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forerun.engine.engine import Engine
from forerun.engine.statistics import PHASES

MILLISECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
BUDGETS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PER_PASS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Metrics:
    """A registry of its own, so that several servers can live in one process."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "forerun_requests", "Requests, by what they were answered.", ["endpoint", "status"], registry=own
        )
        self.running = Gauge("forerun_texts_inside", "Texts that are being written or wait.", registry=own)
        self.waiting = Gauge("forerun_texts_waiting", "Texts that wait for a place.", registry=own)
        self.first = Histogram(
            "forerun_time_to_first_token_seconds", "From a request's arrival.", buckets=SECONDS, registry=own
        )
        self.between = Histogram(
            "forerun_inter_token_seconds", "A step's time by its tokens.", buckets=MILLISECONDS, registry=own
        )
        self.seconds = Histogram(
            "forerun_request_seconds", "From arrival to the last token.", ["endpoint"], buckets=SECONDS, registry=own
        )
        self.tokens = Counter("forerun_tokens", "Tokens read and written.", ["kind"], registry=own)
        self.per_pass = Histogram(
            "forerun_tokens_per_pass", "Of a text, when it is over.", ["drafter"], buckets=PER_PASS, registry=own
        )
        self.budget = Histogram(
            "forerun_draft_budget_tokens", "Drafted for a text in a step.", ["drafter"], buckets=BUDGETS, registry=own
        )

    def counted(self, drafter: str, texts: int, drafted: int) -> None:
        """From the engine's thread: a step checked so many drafts for so many texts."""
        self.budget.labels(drafter).observe(drafted / texts)

    def watch(
        self, engines: Callable[[], dict[str, Engine]], inside: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        self.running.set_function(inside)
        self.waiting.set_function(waiting)
        self.registry.register(_EngineFigures(engines))

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        made: bytes = generate_latest(self.registry)
        return made


class _EngineFigures:
    """Of every engine: what speculation did, by position, and how full the cache is."""

    def __init__(self, engines: Callable[[], dict[str, Engine]]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Any]:
        """Names are known when there are engines."""
        return []

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        label = ["drafter"]
        totals = {
            name: CounterMetricFamily(f"forerun_{name}", text, labels=label)
            for name, text in (
                ("drafted_tokens", "Drafts that were checked."),
                ("accepted_tokens", "Drafts that were accepted."),
                ("target_passes", "Passes that decided tokens, once for each text."),
                ("preemptions", "Texts that stepped back for want of cache."),
                ("reused_tokens", "Tokens of prompts that were found in the cache."),
            )
        }
        offered = CounterMetricFamily("forerun_draft_offered", "Steps with a draft.", labels=[*label, "position"])
        taken = CounterMetricFamily("forerun_draft_accepted", "Steps that took it.", labels=[*label, "position"])
        spent = CounterMetricFamily("forerun_step_seconds", "Time of steps.", labels=[*label, "phase"])
        used = GaugeMetricFamily("forerun_cache_used_ratio", "Share of the cache's blocks in use.", labels=label)
        for name, engine in self._engines().items():
            figures = engine.statistics
            totals["drafted_tokens"].add_metric([name], figures.drafted)
            totals["accepted_tokens"].add_metric([name], figures.accepted)
            totals["target_passes"].add_metric([name], figures.target_passes)
            totals["preemptions"].add_metric([name], figures.preemptions)
            totals["reused_tokens"].add_metric([name], engine.scheduler.reused)
            depths = zip(list(figures.offered_by_depth), list(figures.accepted_by_depth), strict=False)
            for depth, (steps, accepted) in enumerate(depths, start=1):
                offered.add_metric([name, str(depth)], steps)
                taken.add_metric([name, str(depth)], accepted)
            for phase in PHASES:
                spent.add_metric([name, phase], figures.seconds[phase])
            used.add_metric([name], engine.cache.used)
        return [*totals.values(), offered, taken, spent, used]
