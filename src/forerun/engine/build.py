"""How an engine is put together, and a request for it: what `LLM` and the server have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter, Expects, Resumes
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.engine.completion import Transcript
from forerun.engine.controller import GUESSED, Controller
from forerun.engine.engine import MAX_ROWS, Engine
from forerun.engine.experience import SIZES
from forerun.engine.loaded import LoadedModel, default_slots
from forerun.engine.preparing import prepare
from forerun.engine.request import DraftOptions, Request
from forerun.engine.text import StopWatcher
from forerun.models.transformer import Transformer


def build_engine(
    model: LoadedModel,
    drafter: str,
    options: Mapping[str, Any],
    *,
    max_batch: int,
    cache_tokens: int | None = None,
    rule: str | None = None,
    adaptive: bool = False,
    reuse: bool = False,
    prepared: bool = True,
) -> Engine:
    """Without `cache_tokens` the cache is as large as memory allows. With `reuse`, a text that begins like an earlier
    one need not be read again where that one's rows are still in the cache; not so where an encoder reads prompts, or
    where a drafter has to see the target's states of all of them and does not keep what it made of them. `prepared`
    lets an adaptive engine take its time before the first text; without it, what it needs is made as it comes."""
    slots = default_slots(model.target, max_batch) if cache_tokens is None else cache_tokens
    setup = Setup(model.target, slots, model.load_beside, lambda: model.tokenizer.fingerprint, model.folder, adaptive)
    made = make_drafter(drafter, setup, options)
    controller = None
    if adaptive:
        key = f"{drafter} {sorted((name, str(value)) for name, value in options.items())}"
        controller = model.controllers[key] = Controller(model.controllers.get(key), _gains(made))
    engine = Engine(
        model.target,
        made,
        slots=slots,
        max_batch=max_batch,
        max_rows=max(MAX_ROWS, 2 * max_batch),
        rule=rule,
        controller=controller,
    )
    if adaptive and prepared:
        prepare(engine)
    sees_enough = not made.layers or isinstance(made, SideDrafter | Resumes)  # the first needs the last state alone
    if isinstance(made, Resumes):
        engine.scheduler.resume = made.resume
    engine.scheduler.reuse = reuse and isinstance(model.target, Transformer) and sees_enough
    if isinstance(made, FeatureDrafter):
        made.keep(engine.scheduler.reuse)
    return engine


def _gains(drafter: Drafter) -> Sequence[float]:
    """Of each size that the controller chooses among."""
    if not isinstance(drafter, Expects) or not drafter.gain(None):
        return GUESSED
    return [drafter.gain(size) for size in SIZES]


def request_for(model: LoadedModel, tokens: list[int], params: SamplingParams, draft: DraftOptions) -> Request:
    """The model's tokens as a request that ends where the model ends a turn, or at a stop string."""
    tokenizer = model.tokenizer
    if not params.ignore_eos:  # the end of a turn ends the text too, though the model may not call it so
        turn_ends = sorted(tokenizer.eos - model.target.eos - set(params.stop_token_ids))
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *turn_ends))
    ends = partial(StopWatcher, tokenizer, params.stop) if params.stop else None
    return Request(tokens, params, draft, ends=ends)


def transcript_of(model: LoadedModel, request: Request) -> Transcript:
    """What turns the request's updates into text."""
    params = request.params
    endings = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model.target.eos)
    return Transcript(model.tokenizer, params, endings, len(request.prompt))
