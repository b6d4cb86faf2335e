"""The Python API: a model, a drafter, text in and text out.

    llm = LLM("smollm2-135m", drafter="ngram")
    print(llm.generate("Why is the sky blue?", SamplingParams(max_tokens=200)).text)

Prompts go into the engine at once and run together. Texts stream as they are written. All methods may be called from
any thread and any event loop.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, overload

from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.drafters.find import read_options
from forerun.engine.build import build_engine, request_for, transcript_of
from forerun.engine.completion import Completion, Piece, Transcript
from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import Message, Prompt, as_prompts, to_tokens
from forerun.engine.request import DraftOptions, Request
from forerun.engine.runner import Handle, Runner
from forerun.engine.statistics import Statistics
from forerun.models.checkpoint import Progress
from forerun.models.store import naming
from forerun.verify.rule import all_rules

Counted = Callable[[int, int], None]
"""Told how many prompts are done, and of how many."""


class LLM:
    """A model with a drafter, ready to write. Close it, or use it in a `with` statement, when its memory is needed."""

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        drafter: str = "none",
        *,
        drafter_options: Mapping[str, Any] | None = None,
        tree: str | None = None,
        rule: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
        offline: bool = False,
        max_batch: int = 8,
        cache_tokens: int | None = None,
        trace: str | Path | None = None,
        adaptive: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`model` is a built-in name, a folder, a GGUF file or a Hugging Face id; `tree` is an option of the drafter,
        as in "5" or "3,2,1"; `rule` is a verification rule, by default the strongest lossless one; `cache_tokens` is
        how many tokens the cache holds, by default what fits in memory; `trace` is a file for one JSON line a step;
        `adaptive` lets the engine choose how much is drafted, by what has paid so far, instead of the whole tree."""
        options = dict(drafter_options or {}) | ({} if tree is None else {"tree": tree})
        read_options(drafter, options)
        if rule is not None and rule not in all_rules():
            raise ValueError(f"there is no verification rule {rule!r}: use one of {', '.join(all_rules())}")
        for name, value in (("max_batch", max_batch), ("cache_tokens", cache_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")
        if isinstance(model, str | Path):
            model = LoadedModel.load(
                model, dtype=dtype, device=device, revision=revision, offline=offline, progress=progress
            )
        self.model = model
        self._engine = build_engine(
            model, drafter, options, max_batch=max_batch, cache_tokens=cache_tokens, rule=rule, adaptive=adaptive
        )
        with ExitStack() as closing_all:
            self._engine.trace = None if trace is None else closing_all.enter_context(_trace_to(Path(trace)))
            self._runner = closing_all.enter_context(Runner(self._engine))
            self._finalizer = weakref.finalize(self, closing_all.pop_all().close)

    @property
    def context_length(self) -> int:
        """How many tokens prompt and output may have together."""
        return self._engine.context_length

    @property
    def statistics(self) -> Statistics:
        """Of everything written so far."""
        return self._engine.statistics

    @property
    def cache_bytes(self) -> int:
        """What the cache takes in memory."""
        storage = self._engine.cache.storage
        return storage.slots * storage.bytes_per_slot

    def tokens(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """What the model sees of a prompt. A text becomes a user's message where the model has a chat template, unless
        `chat` is False; lists of messages always go through the template."""
        return to_tokens(prompt, self.model.tokenizer, chat=chat)

    @overload
    def generate(
        self,
        prompts: str | list[int] | list[Message],
        params: SamplingParams = ...,
        *,
        chat: bool | None = ...,
        draft: DraftOptions | None = ...,
        progress: Counted | None = ...,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] = ...,
        *,
        chat: bool | None = ...,
        draft: DraftOptions | None = ...,
        progress: Counted | None = ...,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(),
        *,
        chat: bool | None = None,
        draft: DraftOptions | None = None,
        progress: Counted | None = None,
    ) -> Completion | list[Completion]:
        """The completion of a prompt, or those of a list of prompts; `params` are for all, or one for each."""
        batch = self._begin(prompts, params, chat, draft)
        try:
            for done, writing in enumerate(batch.writings):
                if progress is not None:
                    progress(done, len(batch.writings))
                for _ in writing.pieces():
                    pass
            if progress is not None:
                progress(len(batch.writings), len(batch.writings))
            return batch.result()
        finally:
            batch.cancel()

    @overload
    async def agenerate(
        self,
        prompts: str | list[int] | list[Message],
        params: SamplingParams = ...,
        *,
        chat: bool | None = ...,
        draft: DraftOptions | None = ...,
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        prompts: list[str] | list[list[int]] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] = ...,
        *,
        chat: bool | None = ...,
        draft: DraftOptions | None = ...,
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(),
        *,
        chat: bool | None = None,
        draft: DraftOptions | None = None,
    ) -> Completion | list[Completion]:
        """`generate` for an event loop; a task that is cancelled cancels its requests."""
        batch = self._begin(prompts, params, chat, draft)
        try:
            for writing in batch.writings:
                async for _ in writing.apieces():
                    pass
            return batch.result()
        finally:
            batch.cancel()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        chat: bool | None = None,
        draft: DraftOptions | None = None,
    ) -> Iterator[Piece]:
        """The pieces of a completion as they are written. Leaving the loop cancels the request."""
        writing = self.start(prompt, params, chat=chat, draft=draft)
        with closing(cast("Any", writing.pieces())) as pieces:
            yield from pieces

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        chat: bool | None = None,
        draft: DraftOptions | None = None,
    ) -> AsyncIterator[Piece]:
        """`stream` for an event loop."""
        writing = self.start(prompt, params, chat=chat, draft=draft)
        async with aclosing(cast("Any", writing.apieces())) as pieces:
            async for piece in pieces:
                yield piece

    def start(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        chat: bool | None = None,
        draft: DraftOptions | None = None,
    ) -> Writing:
        """Begins a completion and returns at once: for who wants both its pieces and the whole, or to cancel it from
        elsewhere."""
        return self._submit([self._request(prompt, params, chat, draft)])[0]

    def with_drafter(
        self,
        drafter: str,
        *,
        drafter_options: Mapping[str, Any] | None = None,
        tree: str | None = None,
        rule: str | None = None,
        **more: Any,
    ) -> LLM:
        """Another LLM with the same model in memory, and a cache of its own."""
        return LLM(self.model, drafter, drafter_options=drafter_options, tree=tree, rule=rule, **more)

    def close(self) -> None:
        """Ends what is being written. Harmless when done twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[list[Message]],
        params: SamplingParams | list[SamplingParams],
        chat: bool | None,
        draft: DraftOptions | None,
    ) -> _Batch:
        many, single = as_prompts(prompts)
        each = [params] * len(many) if isinstance(params, SamplingParams) else params
        if len(each) != len(many):
            raise ValueError(f"there are {len(many)} prompts and {len(each)} params: give one for all, or one for each")
        requests = [self._request(prompt, own, chat, draft) for prompt, own in zip(many, each, strict=True)]
        return _Batch(self._submit(requests), single)

    def _request(
        self, prompt: Prompt, params: SamplingParams, chat: bool | None, draft: DraftOptions | None
    ) -> Request:
        return request_for(self.model, self.tokens(prompt, chat=chat), params, draft or DraftOptions())

    def _submit(self, requests: list[Request]) -> list[Writing]:
        handles = self._runner.submit_all(requests)
        return [Writing(handle, transcript_of(self.model, handle.request)) for handle in handles]


@contextmanager
def _trace_to(path: Path) -> Iterator[Callable[[StepRecord], None]]:
    with naming(path), path.open("w", encoding="utf-8") as file:

        def write(record: StepRecord) -> None:
            with naming(path):
                print(record.as_json(), file=file)

        yield write


@dataclass(frozen=True)
class Writing:
    """A request on its way, and what was written of it."""

    handle: Handle
    transcript: Transcript

    def pieces(self) -> Iterator[Piece]:
        """Leaving the iteration cancels the request."""
        with closing(cast("Any", iter(self.handle))) as updates:
            for update in updates:
                yield self.transcript.add(update)

    async def apieces(self) -> AsyncIterator[Piece]:
        async with aclosing(cast("Any", aiter(self.handle))) as updates:
            async for update in updates:
                yield self.transcript.add(update)

    def cancel(self) -> None:
        self.handle.cancel()

    def completion(self) -> Completion:
        """What was written of it when the pieces ended."""
        return self.transcript.completion()


@dataclass(frozen=True)
class _Batch:
    writings: list[Writing]
    single: bool

    def result(self) -> Completion | list[Completion]:
        completions = [writing.completion() for writing in self.writings]
        return completions[0] if self.single else completions

    def cancel(self) -> None:
        """What is not over, because something else failed."""
        for writing in self.writings:
            writing.cancel()
