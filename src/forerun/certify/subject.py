"""What is certified, and how its texts are written: by the real engine, for requests that have seeds of their own, so
that a certificate can be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter
from forerun.drafters.none import NoDrafter
from forerun.engine.controller import Controller
from forerun.engine.engine import MAX_NODES, Engine
from forerun.engine.loaded import memory_of
from forerun.engine.request import Request
from forerun.models.target import TargetModel
from forerun.verify.rule import VerificationRule, all_rules, pair, strongest_rule

BATCH = 32
ROWS = 1024
"""Of a pass: enough for every text of the batch to have its tree."""

Told = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""
Change = Callable[[VerificationRule], VerificationRule]


def unchanged(rule: VerificationRule) -> VerificationRule:
    return rule


class ChangeableEngine(Engine):
    """The engine, with a way to put a broken rule in the place of the right one. A rule that no request could ask for
    has no name, so it cannot be asked for by name."""

    change: Change = staticmethod(unchanged)

    def rule_for(self, request: Request) -> VerificationRule:
        return self.change(super().rule_for(request))


class LostTrackError(Exception):
    """The engine's books are wrong: what its cache holds is not what its texts say."""


@dataclass
class Written:
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    refused: int = 0
    """Steps whose drafts were all refused where the path ended."""
    irregular: int = 0
    """Steps that did not end in a token of the target's own though the text went on, and tokens behind a text's end."""


class Subject:
    """A target with a drafter and, where one was named, a rule; beside it plain decoding of the model whose text is
    asked for: the target itself, or the `original` that it was made from."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        *,
        slots: int,
        rule: str | None = None,
        original: TargetModel | None = None,
        controller: Controller | None = None,
    ) -> None:
        """A `controller` chooses how much is drafted; without one it is all that the drafter likes to draft."""
        self.target, self.drafter, self.rule = target, drafter, rule
        self.original = original or target
        sizes: dict[str, Any] = {"slots": slots, "max_batch": BATCH, "max_rows": ROWS}
        self.engine = ChangeableEngine(target, drafter, **sizes, max_drafting=BATCH, controller=controller)
        self.plain = Engine(self.original, NoDrafter(), **sizes)

    def rule_for(self, params: SamplingParams) -> VerificationRule:
        """The one that judges texts without a seed."""
        about = {"chain": not self.drafter.branches, "greedy": params.greedy}
        name = self.rule or strongest_rule(self.drafter.drawing, **about, seeded=False)
        return pair(name, self.drafter.drawing, **about)

    @property
    def why_lossy(self) -> str | None:
        if self.original is not self.target:
            return "the target is not the original model"
        lossless = self.rule is None or all_rules()[self.rule].lossless
        return None if lossless else f"the rule {self.rule} is lossy"

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        self.engine.change = change
        try:
            yield
        finally:
            self.engine.change = unchanged


def write(engine: Engine, requests: Sequence[Request], told: Callable[[int, int], None]) -> list[Written]:
    """The text of each request. The engine's books are checked at every step."""
    told(0, len(requests))
    numbers = {engine.add(request): place for place, request in enumerate(requests)}
    texts = [Written() for _ in requests]
    done = 0
    while engine.has_work:
        for update in engine.step():
            text = texts[numbers[update.request]]
            text.tokens += update.tokens
            text.refused += "corrected" in update.kinds
            text.irregular += bool(update.kinds) and update.kinds[-1] == "accepted" and update.finish_reason is None
            if update.finish_reason is not None:
                done += 1
                text.drafted = update.statistics.drafted
                told(done, len(requests))
        try:
            engine.check_integrity()
        except AssertionError as error:
            raise LostTrackError(str(error)) from error
    for text, request in zip(texts, requests, strict=True):
        ends = engine.target.eos.union(request.params.stop_token_ids)
        text.irregular += sum(token in ends for token in text.tokens[:-1])
        text.irregular += max(0, len(text.tokens) - request.params.max_tokens)
    return texts


def slots_for(prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Cache for a full batch of such prompts, with so many tokens behind each."""
    longest = max(len(prompt) for prompt in prompts) + tokens + MAX_NODES + 1
    return BATCH * -(-longest // 16) * 16


def refuse_misfits(models: Sequence[TargetModel], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Prompts with so many tokens behind them have to fit the context of each model, and the caches the memory."""
    longest = max(len(prompt) for prompt in prompts)
    context = min(model.context_length for model in models)
    fix = "lower --length, or leave long --prompts out"
    if longest + tokens > context:
        raise ValueError(
            f"the longest prompt has {longest:,} tokens, up to {tokens:,} are written behind it, and the model's "
            f"context holds {context:,}: {fix}"
        )
    slots, target = slots_for(prompts, tokens), models[0]
    needed = 2 * slots * target.new_storage(16).bytes_per_slot  # with drafts, and plainly
    memory = memory_of(target.device)
    if needed > memory:
        raise ValueError(
            f"{BATCH} texts of up to {longest + tokens:,} tokens take {needed / 2**30:,.1f} GiB of cache, and there "
            f"are {memory / 2**30:,.1f} GiB of memory: {fix}"
        )
