"""How right a trained drafter is, and whether it knows: on texts of its target, asked as it will be when it drafts.

At some places of a text the drafter is led along what the target says there, and asked at each depth. So one looks at
the drafts whose path came true, the only ones that count. Three things come of it:

- accuracies: how often the target says the drafter's candidate of rank r at depth d. Static trees are built from them.
- confidence against acceptance (as in EAGLE-2, Li et al., 2024): a dynamic tree relies on a candidate's confidence
  being its chance. It is told for both kinds, of greedy texts and of those that are sampled with a seed.
- taus: under Gumbel coupling the chance of a candidate is read from (q/E)^(1/tau). Where the drafter is sure of laws
  that are not the target's, the race is less decided than it believes: tau is what makes the target's real choices
  most likely. At temperature 0 it is read from q^(1/tau), with another tau, found alike: the likeliest is not one draw
  from p, and a drafter that is close to p knows it more often than q says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.core.drawing import ABSENT, top_children
from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Observation
from forerun.drafters.parallel import Parallel
from forerun.drafters.trained import SideDrafter
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.target import Output
from forerun.models.transformer import Transformer

TOP = 20
"""Ranks that are counted."""
BINS = 10
TAUS = tuple(round(1.1**step, 3) for step in range(-7, 15))
PASS_ROWS = 512
STRIDE = 3
"""Tokens between two places of a text."""

Examined = DraftModel | SideDrafter | Parallel
"""Drafters that have been trained: heads that go on from state to state are draft models too."""


@dataclass(frozen=True)
class Trust:
    """Candidates by their confidence, in bins of equal width, and how many of them the target took."""

    candidates: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    taken: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    confidence: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))  # their sum

    def count(self, log_confidences: Tensor, taken: Tensor) -> None:
        """Of any candidates [N]."""
        confidences = log_confidences.double().exp()
        bins = (confidences * BINS).long().clamp_max(BINS - 1)
        self.candidates.index_add_(0, bins, torch.ones_like(bins))
        self.taken.index_add_(0, bins, taken.long())
        self.confidence.index_add_(0, bins, confidences)

    @property
    def rows(self) -> list[dict[str, float]]:
        """The bins that have candidates."""
        return [
            {
                "from": k / BINS,
                "to": (k + 1) / BINS,
                "candidates": count,
                "confidence": round(float(self.confidence[k]) / count, 4),
                "acceptance": round(float(self.taken[k]) / count, 4),
            }
            for k, count in enumerate(self.candidates.tolist())
            if count
        ]


@dataclass
class ByTau:
    """What candidates are worth by the shares of score^(1/tau), for each of the taus."""

    trust: tuple[Trust, ...] = field(default_factory=lambda: tuple(Trust() for _ in TAUS))
    likelihood: Tensor = field(default_factory=lambda: torch.zeros(len(TAUS), dtype=torch.float64))  # of what was taken
    places: int = 0

    @property
    def best(self) -> float:
        return TAUS[int(self.likelihood.argmax())] if self.places else 1.0

    @property
    def trusted(self) -> Trust:
        """With the tau that was found."""
        return self.trust[TAUS.index(self.best)]

    def learn(self, scores: Tensor, columns: Tensor, said: Tensor) -> None:
        """Scores [R, Vd] of the tokens `columns` [Vd], and what the target took [R, 1]."""
        best = top_children(scores, TOP)
        here = (columns == said) & (scores > 0)  # [R, Vd]
        taken = torch.where(here.any(-1, keepdim=True), here.long().argmax(-1, keepdim=True), ABSENT)
        asked = torch.cat([best, taken], 1)
        shares = log_shares_by_tau(scores, asked).cpu()  # [T, R, TOP + 1]
        some, right, draftable = (best >= 0).cpu(), (columns[best] == said).cpu(), (taken[:, 0] >= 0).cpu()
        for trust, own in zip(self.trust, shares, strict=True):
            trust.count(own[:, :TOP][some], right[some])
        self.likelihood += shares[:, draftable, TOP].sum(1)
        self.places += int(draftable.sum())


@dataclass
class Findings:
    depth: int
    seen: Tensor = field(init=False)  # [D] places that were reached
    right: Tensor = field(init=False)  # [D, TOP]
    greedy: ByTau = field(default_factory=ByTau)
    coupled: ByTau = field(default_factory=ByTau)

    def __post_init__(self) -> None:
        self.seen, self.right = torch.zeros(self.depth), torch.zeros(self.depth, TOP)

    @property
    def accuracies(self) -> list[list[float]]:
        """By depth and rank, down to where nobody came any more."""
        reached = [d for d in range(self.depth) if self.seen[d] > 0]
        return [[round(float(a), 4) for a in self.right[d] / self.seen[d]] for d in reached]

    def kept(self) -> dict[str, Any]:
        """What a drafter's folder has of it."""
        taus = {"tau": self.coupled.best, "greedy_tau": self.greedy.best}
        confidence = {"greedy": self.greedy.trusted.rows, "coupled": self.coupled.trusted.rows}
        return {"accuracies": self.accuracies, **taus, "confidence": confidence}

    def learn(self, depth: int, logits: Tensor, target: Tensor, ids: Tensor | None, noise: torch.Generator) -> Tensor:
        """What the drafter says [R, Vd] and what the target says [R, V] at places of one depth; which of these went on
        to the next [R]."""
        columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
        said = target.argmax(-1, keepdim=True)
        here = columns == said  # [R, Vd]; nowhere where the token cannot be drafted
        q = _law(logits)
        own = torch.where(here, q, -torch.inf).amax(-1, keepdim=True)
        rank = (q > own).sum(-1).where(here.any(-1), TOP).clamp_max(TOP).cpu()
        self.seen[depth] += len(rank)
        counted = torch.nn.functional.one_hot(rank, TOP + 1)[:, :TOP].sum(0)
        self.right[depth] += counted
        self.greedy.learn(q, columns, said)
        self._race(q, target, columns, noise)
        return rank < TOP

    def _race(self, q: Tensor, target: Tensor, columns: Tensor, noise: torch.Generator) -> None:
        """The same at temperature 1, under coupling."""
        u = torch.rand(target.shape, generator=noise, dtype=torch.float64).clamp_min(1e-300).to(q.device)
        race = -u.log()
        won = (_law(target) / race).argmax(-1, keepdim=True)
        self.coupled.learn(q / race[:, columns], columns, won)


def log_shares_by_tau(scores: Tensor, columns: Tensor) -> Tensor:
    """`log_shares` for all taus at once."""
    logs = scores.log() / torch.tensor(TAUS, dtype=scores.dtype, device=scores.device)[:, None, None]
    shares = logs.gather(2, columns.clamp_min(0).expand(len(TAUS), -1, -1)) - logs.logsumexp(2, keepdim=True)
    return torch.where(columns >= 0, shares, -torch.inf)


def _law(logits: Tensor) -> Tensor:
    """[R, V] at temperature 1, exact enough for the logs of rare tokens."""
    return law(logits.double(), LawSettings.of([SamplingParams(temperature=1.0)] * len(logits), logits.device))


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
                    root = torch.tensor([text[at]], device=drafter.heads.device)
                    said = drafter.heads(drafter.last_state(sequence)[None], root)[0]
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
