"""How right a trained drafter is, and whether it knows: on texts of its target, asked as it will be when it drafts.

At some places of a text the drafter is led along what the target says there, and asked at each depth. So one looks at
the drafts whose path came true, the only ones that count. Three things come of it:

- accuracies: how often the target says the drafter's candidate of rank r at depth d. Static trees are built from them.
- confidence against acceptance: a dynamic tree relies on the drafter's own shares being the chances of its candidates.
- tau: under Gumbel coupling the chance of a candidate is read from (q/E)^(1/tau). Where the drafter is sure of laws
  that are not the target's, the race is less decided than it believes: tau is what makes the target's real choices
  most likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.core.sequence import Sequence
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Observation
from forerun.drafters.parallel import Parallel
from forerun.drafters.trained import SideDrafter
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.target import Output
from forerun.models.transformer import Transformer

TOP = 10
"""Ranks that are counted."""
BINS = 20
TAUS = tuple(round(0.5 * 1.1**step, 3) for step in range(22))
PASS_ROWS = 512
STRIDE = 3
"""Tokens between two places of a text."""

Examined = DraftModel | SideDrafter | Parallel
"""Drafters that have been trained: heads that go on from state to state are draft models too."""


@dataclass
class Findings:
    depth: int
    seen: Tensor = field(init=False)  # [D] places that were reached
    right: Tensor = field(init=False)  # [D, TOP]
    offered: Tensor = field(init=False)  # [BINS] candidates of that confidence
    accepted: Tensor = field(init=False)  # [BINS]
    confidence: Tensor = field(init=False)  # [BINS] their sum
    likelihood: Tensor = field(init=False)  # [len(TAUS)] of the target's choices
    races: int = 0

    def __post_init__(self) -> None:
        self.seen, self.right = torch.zeros(self.depth), torch.zeros(self.depth, TOP)
        self.offered, self.accepted, self.confidence = torch.zeros(BINS), torch.zeros(BINS), torch.zeros(BINS)
        self.likelihood = torch.zeros(len(TAUS), dtype=torch.float64)

    @property
    def accuracies(self) -> list[list[float]]:
        """By depth and rank, down to where nobody came any more."""
        reached = [d for d in range(self.depth) if self.seen[d] > 0]
        return [[round(float(a), 4) for a in self.right[d] / self.seen[d]] for d in reached]

    @property
    def tau(self) -> float:
        return TAUS[int(self.likelihood.argmax())] if self.races else 1.0

    @property
    def table(self) -> list[dict[str, float]]:
        """Confidence against acceptance, where there were candidates."""
        rows = []
        for k in range(BINS):
            if self.offered[k] > 0:
                count = float(self.offered[k])
                rows.append(
                    {
                        "confidence": round(float(self.confidence[k]) / count, 4),
                        "acceptance": round(float(self.accepted[k]) / count, 4),
                        "candidates": int(count),
                    }
                )
        return rows

    def kept(self) -> dict[str, Any]:
        """What a drafter's folder has of it."""
        return {"accuracies": self.accuracies, "tau": self.tau, "confidence": self.table}

    def learn(self, depth: int, logits: Tensor, target: Tensor, ids: Tensor | None, noise: torch.Generator) -> Tensor:
        """What the drafter says [R, Vd] and what the target says [R, V] at places of one depth; which of these went on
        to the next [R]."""
        columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
        said = target.argmax(-1, keepdim=True)
        here = columns == said  # [R, Vd]; nowhere where the token cannot be drafted
        q = logits.float().log_softmax(-1)
        own = torch.where(here, q, -torch.inf).amax(-1, keepdim=True)
        rank = (q > own).sum(-1).where(here.any(-1), TOP).clamp_max(TOP).cpu()
        self.seen[depth] += len(rank)
        counted = torch.nn.functional.one_hot(rank, TOP + 1)[:, :TOP].sum(0)
        self.right[depth] += counted
        best = q.topk(min(TOP, q.shape[1]), -1)
        shares, hits = best.values.exp().cpu(), (columns[best.indices] == said).float().cpu()
        bins = (shares * BINS).long().clamp_max(BINS - 1).flatten()
        self.offered.index_add_(0, bins, torch.ones_like(shares.flatten()))
        self.accepted.index_add_(0, bins, hits.flatten())
        self.confidence.index_add_(0, bins, shares.flatten())
        self._race(q, target, columns, noise)
        return rank < TOP

    def _race(self, q: Tensor, target: Tensor, columns: Tensor, noise: torch.Generator) -> None:
        u = torch.rand(target.shape, generator=noise, dtype=torch.float64).clamp_min(1e-300).to(q.device)
        g = -(-u.log()).log()
        won = (target.double().log_softmax(-1) + g).argmax(-1, keepdim=True)
        here = columns == won
        scores = q.double() + g[:, columns]
        some = here.any(-1)
        for place, tau in enumerate(TAUS):
            law = (scores / tau).log_softmax(-1)
            self.likelihood[place] += float(law[here & some[:, None]].sum())
        self.races += int(some.sum())


def examine(drafter: Examined, target: Transformer, texts: Many[tuple[list[int], int]], depth: int) -> Findings:
    """Texts with the place from which on they count."""
    depth = min(depth, _reach(drafter, target) or depth)
    findings = Findings(depth)
    noise = torch.Generator().manual_seed(0)
    for number, (text, start) in enumerate(texts):
        places = range(max(2, start), len(text) - depth, STRIDE)
        features, logits = _read(target, text, drafter.layers)
        ahead = _look_ahead(target, text, places, depth)
        observed = 0
        for at in places:
            sequence = Sequence(text[: at + 1], 1, id=number)
            fresh = {layer: states[observed:at] for layer, states in features.items()}
            drafter.observe([Observation(sequence, [], fresh, observed)])
            observed = at
            if isinstance(drafter, DraftModel):
                _lead(drafter, findings, sequence, text, logits, noise)
            elif isinstance(drafter, SideDrafter):
                with torch.inference_mode():
                    said = drafter.heads(drafter.last_state(sequence)[None])[0]
                _compare(findings, said, logits[at:], drafter.heads.ids, noise)
            else:
                _compare(findings, next(ahead), logits[at:], None, noise)
        drafter.forget(Sequence(text, 1, id=number))
    if not float(findings.seen.sum()):
        raise ValueError("there is too little text to calibrate with: give more prompts, or longer answers")
    return findings


def _reach(drafter: Examined, target: Transformer) -> int | None:
    """How far ahead it sees, where that has an end."""
    if isinstance(drafter, SideDrafter):
        return drafter.heads.count
    if isinstance(drafter, Parallel):
        assert target.extra is not None, "the drafter has given the target its embeddings"
        return target.extra.shape[0]
    return None


def _compare(findings: Findings, said: Tensor, target: Tensor, ids: Tensor | None, noise: torch.Generator) -> None:
    """Guesses [D, V] that were all made at once, with what the target says there [≥ D, V]."""
    for depth in range(findings.depth):
        if not bool(findings.learn(depth, said[depth][None], target[depth][None], ids, noise)[0]):
            return


def _lead(
    drafter: DraftModel,
    findings: Findings,
    sequence: Sequence,
    text: list[int],
    target: Tensor,
    noise: torch.Generator,
) -> None:
    """Each depth is a pass of the drafter's own, behind what the target said above it."""
    at = sequence.position
    run = drafter.ahead.start([sequence], [findings.depth])
    assert run.takes_part[0], "the cache has room for one text"
    rows = run.roots()
    for depth in range(findings.depth):
        went_on = findings.learn(depth, rows.logits, target[at + depth][None], run.ids, noise)
        if not bool(went_on[0]) or depth + 1 == findings.depth:
            return
        token = torch.tensor([[text[at + depth + 1]]], device=run.device)
        rows = run.level(token, torch.full_like(token, depth - 1), [1])


def _look_ahead(target: Transformer, text: list[int], places: Iterable[int], count: int) -> Iterator[Tensor]:
    """For each place the logits [count, V] of the look-ahead rows that hung behind the token before it. They are read
    as when they draft: behind the text, in its pass, and nothing of them is kept."""
    cache = KVCache(target.new_storage(-(-(len(text) + count) // 16) * 16))
    rows = range(target.vocab_size, target.vocab_size + count)
    for at in places:
        while at - cache.committed(0) > PASS_ROWS:
            start = cache.committed(0)
            _pass(target, cache, text[start : start + PASS_ROWS], 0)
            cache.commit({0: range(PASS_ROWS)})
        fresh = text[cache.committed(0) : at]
        yield _pass(target, cache, [*fresh, *rows], count).logits
        cache.commit({0: range(len(fresh))})


def _read(target: Transformer, text: list[int], layers: Many[int]) -> tuple[dict[int, Tensor], Tensor]:
    """Hidden states and logits of all of a text."""
    cache = KVCache(target.new_storage(-(-len(text) // 16) * 16))
    states: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    logits: list[Tensor] = []
    for start in range(0, len(text), PASS_ROWS):
        tokens = text[start : start + PASS_ROWS]
        output = _pass(target, cache, tokens, len(tokens), layers)
        cache.commit({0: range(len(tokens))})
        logits.append(output.logits.clone())
        for layer in layers:
            states[layer].append(output.features[layer].clone())
    return {layer: torch.cat(parts) for layer, parts in states.items()}, torch.cat(logits)


def _pass(target: Transformer, cache: KVCache, tokens: list[int], logits: int, layers: Many[int] = ()) -> Output:
    """What comes next in the text that the cache holds. Which rows stay is for the caller to say."""
    start = cache.committed(0)
    cache.reserve(0, len(tokens))
    context, own = cache.slots(0)
    positions = torch.arange(start, start + len(tokens))
    segment = Segment(0, torch.tensor(tokens), positions, None, context, own, logits, blocks=cache.blocks(0))
    return target.forward_rows(Batch.pack([segment]), cache.storage, layers)
