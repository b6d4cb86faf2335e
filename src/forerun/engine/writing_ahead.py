"""Plain decoding on a device in runs: several tokens before the host looks at any.

Where nothing is drafted, a step has one thing to tell the next: its token, which the device knows. So a run of steps is
launched at once, and what the host does for every text, it does once for all of them. A text that ends within a run
drops what came behind its end, as one does that accepts drafts beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from forerun.core.law import law
from forerun.core.noise import StepNoise
from forerun.core.transfer import to_device
from forerun.drafters.drafter import Checked, Drafter, Observation, StepStates
from forerun.drafters.none import NoDrafter
from forerun.engine.judge import LIKELIEST, one_way, takes_the_likeliest, without_drafts
from forerun.engine.laws import SettingsMemo
from forerun.engine.request import Job
from forerun.engine.scheduler import Turn
from forerun.models.batch import TextEnds
from forerun.models.cache import KVCache
from forerun.models.static.buffers import MOST_AHEAD
from forerun.models.static.static_pass import Choose
from forerun.models.target import TargetModel, WritesAhead, Written
from forerun.verify.rule import all_rules


def run_length(turns: Many[Turn], target: TargetModel, drafter: Drafter, cache: KVCache, most: int) -> int:
    """How many tokens to write before looking; 1 where every token has to be looked at."""
    if most < 2 or not getattr(target, "writes_ahead", False):  # a protocol would be looked up name by name
        return 1
    if any(turn.budget is None or turn.chain for turn in turns):
        return 1
    if not isinstance(drafter, NoDrafter) and any(turn.budget is not None and turn.budget.nodes for turn in turns):
        return 1
    if one_way(_way(turn.job) for turn in turns) is None:
        return 1
    sequences = [turn.job.sequence for turn in turns]
    length = min(most, MOST_AHEAD, max(sequence.remaining for sequence in sequences))
    length = min([length, *(target.context_length - 1 - sequence.position for sequence in sequences)])
    while length > 1 and sum(cache.blocks_for(sequence.id, length) for sequence in sequences) > cache.free_blocks:
        length //= 2
    return max(1, length)


def write(
    turns: Many[Turn],
    target: TargetModel,
    cache: KVCache,
    count: int,
    settings: SettingsMemo,
    layers: Many[int],
    top: int,
    meanwhile: Callable[[], None],
) -> tuple[list[list[int]], Written]:
    """The next `count` tokens of every text, and what else a drafter wants to see of them. Their slots stay reserved.
    `meanwhile` is called while they are written."""
    assert isinstance(target, WritesAhead)
    jobs = [turn.job for turn in turns]
    sequences = [job.sequence for job in jobs]
    for sequence in sequences:
        cache.reserve(sequence.id, count)
    ends = TextEnds(
        tokens=torch.tensor([sequence.tokens[-1] for sequence in sequences]),
        positions=[sequence.position for sequence in sequences],
        blocks=[cache.blocks(sequence.id) for sequence in sequences],
    )
    written = target.write_ahead(ends, cache.storage, count, _choose(jobs, target, settings), layers, top)
    meanwhile()
    texts: list[list[int]] = written.tokens.T.tolist()
    if min(map(min, texts)) < 0:
        raise ValueError("the logits of a row hold NaN or infinity: the model's output is broken")
    return texts, written


def observations(turns: Many[Turn], given: Many[list[int]], written: Written, count: int) -> list[Observation]:
    """What a run of `count` tokens gave to each text, and what was seen before each of them."""
    features, top = written.features, None if written.top is None else written.top.cpu()
    found = []
    for place, (turn, tokens) in enumerate(zip(turns, given, strict=True)):
        sequence, taken = turn.job.sequence, len(tokens)
        states = StepStates(features, count * place, taken) if features else {}
        checked = None
        if top is not None:  # as if a chain had been drafted, of which all was accepted
            checked = Checked(sequence.tokens[-taken - 1 : -1], list(range(-1, taken - 1)), top[place, :taken])
        found.append(Observation(sequence, tokens, states, sequence.position - taken, checked))
    return found


def _way(job: Job) -> str | None:
    """The rule that draws a token from logits and noise alone; None where it takes more."""
    params = job.sequence.params
    if params.logprobs is not None or params.penalises or params.grammar is not None:
        return None
    if takes_the_likeliest(job):
        return LIKELIEST
    rule = without_drafts(job.rule)
    if rule.choose is None and rule.lossless:  # at a leaf they all draw in one way
        return "sample_match"
    return None if rule.choose is None else rule.name


def _choose(jobs: list[Job], target: TargetModel, settings: SettingsMemo) -> Choose | None:
    way = one_way(map(_way, jobs))
    if way is None or way == LIKELIEST:
        return None
    device = target.device
    draw = all_rules()[way].choose
    assert draw is not None
    columns = settings.of(jobs, device)
    seeds = to_device([[job.sequence.seed, job.sequence.position + 1] for job in jobs], device)
    noise = StepNoise(seeds[:, 0], seeds[:, 1])

    def choose(logits: Tensor, step: int) -> Tensor:
        p = law(logits, columns, checked=True)
        return draw(p, noise, torch.full_like(noise.seeds, step))

    return choose
