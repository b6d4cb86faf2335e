"""Which layers of a model draft best for it: a search on texts, once for a model.

A choice of layers is scored as it will be used. At some places of a text one token is read through these layers alone,
behind keys and values that the whole model left, and its most likely next token is compared with the whole model's.
From all layers on, the one that is missed least is dropped, again and again. Likelihood tells which one that is: on so
few places the number of right guesses would be luck, and layers chosen by it do worse elsewhere. What a choice is worth
is the speedup that the closed form promises for its right guesses and its cost. The final score is taken at places that
the search did not see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence as Text
from forerun.drafters.draft_length import Costs
from forerun.drafters.drafter import Budget
from forerun.drafters.layer_choice import Choice, share
from forerun.drafters.layer_skip import LayerSkip
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.transformer import Transformer
from forerun.theory.closed_form import speedup

PLACES = 160
"""Of texts where drafts are compared, for the search; and as many more for the final score."""
PASS_ROWS = 80
CANDIDATES = 6
"""At each step of the search so many layers are tried: those that were missed least before."""
FINALISTS = 4
LONGEST = 8
"""Draft lengths that are considered."""
WORTH_KEEPING = 0.67
"""Layers of which a level costs more would not be 1.5 times as fast even if every guess were right: not considered."""
TIMED_ROWS = (1, 2, 4, 8, 16)
TIMED_DEPTH = 4
ROUNDS = 9
TRUST = 32
"""A calibrated acceptance counts as so many tokens of the texts to come."""

Progress = Callable[[str, int, int], None]
Work = Callable[[], object]


@dataclass(frozen=True)
class Score:
    """Of a choice of layers."""

    agreement: float
    """How often its most likely token is the whole model's."""
    likelihood: float
    """The mean log probability that it gives to the whole model's token."""


class Exam:
    """Places of texts, and the whole model's answers there."""

    def __init__(self, model: Transformer, texts: Sequence[tuple[list[int], int]]) -> None:
        """Texts with the place from which on they count."""
        self.model = model
        blocks = sum(-(-len(text) // 16) for text, _ in texts) + -(-PASS_ROWS // 16)
        self.cache = KVCache(model.new_storage(16 * blocks))
        places: list[tuple[int, int]] = []
        answers: list[Tensor] = []
        for number, (text, start) in enumerate(texts):
            self.cache.reserve(number, len(text))
            _, own = self.cache.slots(number)
            answers.append(self._read(text, own))
            self.cache.commit({number: range(len(text))})
            places.extend((number, at) for at in range(max(1, start), len(text)))
        if len(places) < 2:
            raise ValueError("there is too little text to calibrate with: give some hundred words")
        self.cache.reserve(len(texts), PASS_ROWS)
        self.scratch = self.cache.slots(len(texts))[1]
        self.texts = [text for text, _ in texts]
        kept = places[:: max(1, len(places) // (2 * PLACES))][: 2 * PLACES]
        self.search = self._papers(kept[::2], answers)
        self.final = self._papers(kept[1::2], answers)

    def _read(self, text: list[int], slots: Tensor) -> Tensor:
        """The whole model's answer behind each token [N]."""
        tokens = torch.tensor(text, device=slots.device)
        answers = []
        for start in range(0, len(text), 512):
            part = slice(start, start + 512)
            positions = torch.arange(len(text), device=slots.device)[part]
            segment = Segment(0, tokens[part], positions, None, slots[:start], slots[part], positions.shape[0])
            answers.append(self.model.forward_rows(Batch.pack([segment]), self.cache.storage).logits.argmax(-1))
        return torch.cat(answers)

    def _papers(self, places: list[tuple[int, int]], answers: list[Tensor]) -> list[tuple[Batch, Tensor]]:
        papers = []
        for first in range(0, len(places), PASS_ROWS):
            segments = []
            for row, (number, at) in enumerate(places[first : first + PASS_ROWS]):
                tokens = torch.tensor([self.texts[number][at]], device=self.scratch.device)
                context, own = self.cache.slots(number)[0][:at], self.scratch[row : row + 1]
                segments.append(Segment(row, tokens, torch.full_like(tokens, at), None, context, own, 1))
            right = torch.stack([answers[number][at] for number, at in places[first : first + PASS_ROWS]])
            papers.append((Batch.pack(segments), right))
        return papers

    def score(self, layers: Sequence[int], *, final: bool = False) -> Score:
        agreed, likelihood, count = 0, 0.0, 0
        for batch, right in self.final if final else self.search:
            logits = self.model.forward_rows(batch, self.cache.storage, only=layers).logits
            agreed += int((logits.argmax(-1) == right).sum())
            likelihood += float(torch.log_softmax(logits.float(), -1).gather(1, right[:, None]).sum())
            count += right.shape[0]
        return Score(agreed / count, likelihood / count)

    # --- time ---------------------------------------------------------------------------------------------------

    def row_pass(self, rows: int, layers: Sequence[int] | None = None) -> Work:
        """A pass over so many rows at the end of the longest text."""
        context = self.cache.slots(self._longest)[0]
        positions = torch.arange(context.shape[0], context.shape[0] + rows, device=context.device)
        tokens = torch.zeros_like(positions)
        batch = Batch.pack([Segment(0, tokens, positions, None, context, self.scratch[:rows], rows)])
        return lambda: self.model.forward_rows(batch, self.cache.storage, only=layers)

    def chain_draft(self, layers: Sequence[int], depth: int) -> Work:
        """A chain of drafts behind the longest text, with everything that belongs to it."""
        drafter = LayerSkip(self.model, Choice(tuple(layers)), TreeSpec("chain", (depth,)), adaptive=False)
        text = Text(list(self.texts[self._longest]), depth, params=SamplingParams(temperature=0.0))
        cache = KVCache(self.model.new_storage(len(text.tokens) + depth + 16))  # of zeros: they take the same time
        drafter.share(cache)
        cache.reserve(text.id, text.position)
        cache.commit({text.id: range(text.position)})
        return lambda: drafter.draft([text], [Budget(depth, depth)])

    def relative_times(self, works: Sequence[Work]) -> list[float]:
        """Each as a multiple of the first. They take turns, and medians are of rounds: a machine that has other things
        to do slows all of a round."""
        rounds = [[self._seconds(work) for work in works] for _ in range(ROUNDS + 1)][1:]  # the first one warms up
        return [median(seconds[which] / seconds[0] for seconds in rounds) for which in range(len(works))]

    def _seconds(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - start

    @property
    def _longest(self) -> int:
        return max(range(len(self.texts)), key=lambda number: len(self.texts[number]))


def calibrate(model: Transformer, texts: Sequence[tuple[list[int], int]], progress: Progress) -> Choice:
    """The best choice that the search meets; its `speedup` is 1 if none pays. Texts come with the place from which on
    they count: what the model has written itself tells most."""
    count = len(model.config.layers)
    progress("Reading texts", 0, 0)
    with torch.inference_mode():
        exam = Exam(model, texts)
        progress("Timing passes", 0, 0)
        *rows, head = exam.relative_times([*(exam.row_pass(count) for count in TIMED_ROWS), exam.row_pass(1, ())])
        row_costs = {count: max(1.0, cost) for count, cost in zip(TIMED_ROWS, rows, strict=True)}
        guess = Choice(tuple(range(count)), row_costs=row_costs, weight=TRUST)

        def priced(layers: tuple[int, ...], score: Score) -> Choice:
            level = head + (1 - head) * len(layers) / count
            return replace(guess, layers=layers, acceptance=score.agreement, level_cost=level)

        met = [priced(layers, score) for layers, score in _eliminate(exam, priced, progress)]
        cheap = [one for one in met if one.level_cost <= WORTH_KEEPING] or met[-1:]
        finalists = sorted(cheap, key=promise, reverse=True)[:FINALISTS]
        best = max((priced(one.layers, exam.score(one.layers, final=True)) for one in finalists), key=promise)
        progress("Timing drafts", 0, 0)
        level = exam.relative_times([exam.row_pass(1), exam.chain_draft(best.layers, TIMED_DEPTH)])[1] / TIMED_DEPTH
    least = min(share(model.config, best.layers), len(best.layers) / count)  # less would be noise
    best = replace(best, level_cost=max(level, least))
    return replace(best, speedup=max(1.0, promise(best)))


def promise(choice: Choice, level_cost: float | None = None) -> float:
    """The speedup of the best draft length above 0: below 1 where none pays."""
    costs = Costs(choice.level_cost if level_cost is None else level_cost, choice.row_costs)
    lengths = range(1, LONGEST + 1)
    return max(speedup(choice.acceptance, length, costs.level, costs.by_rows) for length in lengths)


def _eliminate(
    exam: Exam, priced: Callable[[tuple[int, ...], Score], Choice], progress: Progress
) -> list[tuple[tuple[int, ...], Score]]:
    """The choices on the way from all layers to few. It ends where even with the cost of a single layer the score would
    promise less than what was found: dropping more layers hardly makes guesses better."""
    count = len(exam.model.config.layers)
    kept = tuple(range(count))
    known: dict[int, Score] = {}  # a layer, and the score when it was dropped last
    way: list[tuple[tuple[int, ...], Score]] = []
    tried, most = 0, count + CANDIDATES * max(0, count - 2)
    best = 1.0
    cheapest = priced((0,), Score(0.0, 0.0)).level_cost
    while len(kept) > 1:
        candidates = sorted(known, key=lambda layer: -known[layer].likelihood)[:CANDIDATES] if known else kept
        for layer in candidates:
            progress("Trying layers", tried, most)
            known[layer] = exam.score([other for other in kept if other != layer])
            tried += 1
        dropped = max(candidates, key=lambda layer: known[layer].likelihood)
        kept = tuple(layer for layer in kept if layer != dropped)
        way.append((kept, known.pop(dropped)))
        now = priced(*way[-1])
        best = max(best, promise(now))
        if promise(now, cheapest) <= best:
            break
    return way or [(kept, exam.score(kept))]
