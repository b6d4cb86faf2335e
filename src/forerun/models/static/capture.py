"""Work that is the same every time: captured as a CUDA graph, and replayed.

Capturing takes a moment, and the very first time the kernels are built, which takes seconds; both are told to
`listeners`. A graph that cannot be captured leaves the same launches to the host.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from forerun.kernels.attention import tree_attention
from forerun.kernels.gpu.language import built

log = logging.getLogger(__name__)

T = TypeVar("T")

listeners: list[Callable[[str], None]] = []
"""Called with a line about anything that makes the user wait."""


_captured: list[float] = []
_launched: list[str] = []


def captured() -> int:
    """How many times something was captured in this process."""
    return len(_captured)


def unsettled() -> int:
    """The same, with what was launched by the host since it may not come again, and with kernels that were built: who
    times his work knows by it that this came between."""
    return len(_captured) + len(_launched) + built()


def capture_seconds() -> float:
    """How long that took, all together."""
    return sum(_captured)


class Graphs:
    """Whether a device captures, and the memory that its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on = device.type == "cuda"

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.on else None


class Replayed(Generic[T]):
    """Calls `launch`, or what was captured of it. What it returns is overwritten by the next call."""

    def __init__(self, launch: Callable[[], T], graphs: Graphs, pool: Any, what: str, patience: int = 0) -> None:
        """`launch` is run once before it is captured: give it buffers with which nothing is written, or have the
        `patience` to see it called so many times before; then to run it twice must do no harm."""
        self.launch, self.graphs, self.pool, self.what, self.patience = launch, graphs, pool, what, patience
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: T | None = None
        if not patience:
            self.capture()

    def __call__(self) -> T:
        if self.patience:
            self.patience -= 1
            if self.graphs.on:
                _launched.append(self.what)
                if not self.patience:
                    self.capture()
        if self.graph is None or self.result is None:
            return self.launch()
        self.graph.replay()
        return self.result

    def capture(self) -> None:
        if not self.graphs.on or self.graph is not None:
            return
        self.patience, started = 0, time.perf_counter()
        try:
            self._capture_once()
        finally:
            _captured.append(time.perf_counter() - started)
            log.info("capturing %s took %.2f s", self.what, _captured[-1])

    def _capture_once(self) -> None:
        graphs, device = self.graphs, self.graphs.device
        for listener in listeners:
            listener(f"preparing {self.what}")
        # Once for real, on a stream of its own: this builds the kernels.
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.launch()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        if tree_attention.broken is not None:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = self.launch()
        except torch.OutOfMemoryError:
            log.warning("there is no memory to capture %s: the host launches it, which is slower", self.what)
            return
        except RuntimeError as error:
            graphs.on = False
            warnings.warn(
                f"this pass cannot be captured as a CUDA graph, so every launch comes from the host, which is slower: "
                f"{str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.graph, self.result = graph, result
