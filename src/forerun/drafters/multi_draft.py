"""Several drafts side by side (SpecInfer, Miao et al. 2023): paths of several small models, or several of one, merged.

Each model runs ahead with its own cache and drafts `samples` paths from the root, one pass for each level over the
paths of all sequences. Paths with equal beginnings share nodes, and every token stays a draw of its own with the law it
was drawn from: where two paths drew the same token, the verification meets it twice.

The drawing is `INDEPENDENT`. How many paths come through a node depends on what was drawn above it, and not on what is
drawn at it; given that, its draws are independent, each from the law that its own model has there. That is all which
recursive rejection asks for. It holds for one model as for several, so there is one rule for both.

At temperature 0 a path is a model's most likely text, under coupling the text that wins the race with the request's own
noise; several paths of one model begin with its best candidates and go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import ABSENT, Drawing, iid_children, race_children, top_children
from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import draft_settings, token_race
from forerun.drafters.draft_model import load_draft
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.level_run import Rows
from forerun.drafters.none import roots_only
from forerun.drafters.run_ahead import Run, RunAhead
from forerun.drafters.tree_spec import MAX_DEPTH, MAX_NODES
from forerun.models.target import TargetModel

MOST_PATHS = 32


@dataclass(frozen=True)
class Options:
    models: str = ""
    """The drafts, "a,b" or one alone: names, folders, files or Hugging Face ids, as for draft_model."""
    samples: int = 2
    """How many paths each of them drafts."""
    length: int = 4
    """How long the paths are."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(
                "the drafter multi_draft needs models: name smaller ones of the family with models=NAME,NAME"
            )
        for name, most in (("samples", MOST_PATHS), ("length", MAX_DEPTH)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"the multi_draft option {name} is {value!r}: give a whole number from 1 to {most}")
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"the multi_draft option models names a model twice in {self.models!r}: raise samples for more paths"
            )
        paths = len(self.names) * self.samples
        if paths > MOST_PATHS or paths * self.length > MAX_NODES:
            raise ValueError(
                f"the drafter multi_draft would draft {paths} paths of {self.length} tokens: lower samples or length "
                f"to at most {MOST_PATHS} paths and {MAX_NODES} tokens"
            )

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.models.split(",") if name.strip()]


def make(options: Options, setup: Setup) -> Drafter:
    models = [load_draft(name, setup) for name in options.names]
    for name, model in zip(options.names, models, strict=True):
        if options.samples > 1 and not model.branches:
            raise ValueError(f"the draft model {name} cannot read a tree: let it draft one path, with samples=1")
    return MultiDraft(models, options.samples, options.length, setup.target.vocab_size, setup.slots)


@dataclass(frozen=True)
class _Drawn:
    """What a model drafted at one depth."""

    tokens: Tensor  # [B, S]; ABSENT where there is no path, or no candidate for one
    rows: Rows
    q: Tensor  # [R, V] the laws behind the tokens: at the root one row for all paths, then a row for each


class MultiDraft:
    drawing = Drawing.INDEPENDENT
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, models: Many[TargetModel], samples: int, length: int, vocabulary: int, slots: int) -> None:
        """`vocabulary` is the target's."""
        self.samples = samples
        self.length = length
        self.vocabulary = vocabulary
        self.branches = len(models) * samples > 1
        self.ahead = [RunAhead(model, slots) for model in models]
        self.history = History(vocabulary, models[0].device)
        self.device = models[0].device

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        step = _Step(self, sequences)
        drafted: list[list[_Drawn]] = []
        for number, ahead in enumerate(self.ahead):
            lengths = [self._lengths(number, item, budget) for item, budget in zip(sequences, budgets, strict=True)]
            # A level takes `samples` rows, even of a sequence with fewer paths: nodes have the same numbers in all.
            rows = [self.samples * (paths[0] - 1) if paths[0] else None for paths in lengths]
            run = ahead.start(sequences, rows)
            parts = [paths if part else [0] for paths, part in zip(lengths, run.takes_part, strict=True)]
            drafted.append(step.extend(run, number, parts))
        return step.merge(drafted)

    def observe(self, observations: Many[Observation]) -> None:
        """Committed tokens are read from the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        for ahead in self.ahead:
            ahead.forget(sequence)
        self.history.forget(sequence)

    def _lengths(self, number: int, sequence: Sequence, budget: Budget) -> list[int]:
        """Of the paths of one model, which do not get longer. Nothing that was drawn is looked at: paths might share
        nodes, and yet each has the nodes that it may need. All first samples come before all second ones."""
        models = len(self.ahead)
        paths = max(1, min(models * self.samples, budget.nodes))
        each, more = divmod(max(0, budget.nodes), paths)
        limit = min(self.length, budget.depth, self.ahead[number].model.context_length - sequence.position)
        indices = range(number, models * self.samples, models)
        lengths = [each + (index < more) if index < paths else 0 for index in indices]
        return [max(0, min(length, limit)) for length in lengths]


class _Step:
    """One drafting step of a batch."""

    def __init__(self, drafter: MultiDraft, sequences: Many[Sequence]) -> None:
        self.drafter = drafter
        self.sequences = sequences
        self.device = drafter.device
        positions = [sequence.position for sequence in sequences]
        self.positions = self._column(positions)
        self.noise = StepNoise(self._column([sequence.seed for sequence in sequences]), self.positions + 1)
        params = [sequence.params for sequence in sequences]
        self.settings = draft_settings(params, self.device, ranked=False)
        self.first = self.settings if drafter.samples == 1 else draft_settings(params, self.device, ranked=True)
        self.greedy = [sequence.params.greedy for sequence in sequences]
        self.coupled = [sequence.coupled and not sequence.params.greedy for sequence in sequences]
        self.drawn = [not (greedy or coupled) for greedy, coupled in zip(self.greedy, self.coupled, strict=True)]

    def extend(self, run: Run, number: int, lengths: list[list[int]]) -> list[_Drawn]:
        """The paths of a model, level by level; of each sequence the lengths of its paths."""
        samples, batch = self.drafter.samples, len(self.sequences)
        levels: list[_Drawn] = []
        paths = self.positions.new_zeros(batch, samples, 0)
        above = self.positions.new_full((batch, samples), -1)
        for depth in range(max(own[0] for own in lengths)):
            counts = [sum(length > depth for length in own) for own in lengths]
            there = torch.arange(samples, device=self.device) < self._column(counts)[:, None]
            if depth == 0:
                rows = run.roots()
                q = self._law(rows, run.ids, self.first, paths[:, :1])
                tokens = self._spread(rows.sequence, self._first(rows, q, number))
            else:
                # A path without a candidate goes on from token 0, which is read and forgotten; where there is no path
                # the number is none, so that nobody takes it for something that was read.
                read = torch.where(there, levels[-1].tokens.clamp_min(0), ABSENT)
                paths = torch.cat([paths, read[:, :, None]], 2)
                start = run.tokens.shape[1]
                rows = run.level(read, above, counts)
                q = self._law(rows, run.ids, self.settings, paths)
                tokens = self._spread((rows.sequence, rows.column), self._next(rows, q, number, depth))
                there &= levels[-1].tokens >= 0
                above = start + _last_equal(paths)
            levels.append(_Drawn(torch.where(there, tokens, ABSENT), rows, q))
        return levels

    def merge(self, drafted: list[list[_Drawn]]) -> DraftTree:
        """One tree of all paths, with the laws behind their tokens if anybody will read them."""
        models, samples = len(drafted), self.drafter.samples
        longest = max(len(levels) for levels in drafted)
        if not longest:
            return roots_only(self.sequences)
        batch, paths = len(self.sequences), models * samples
        table = self.positions.new_full((batch, samples, models, longest), ABSENT)  # first samples before second ones
        for number, levels in enumerate(drafted):
            for depth, level in enumerate(levels):
                table[:, :, number, depth] = level.tokens
        texts = [[_until_absent(path) for path in own] for own in table.view(batch, paths, longest).tolist()]
        # Greedy and coupled requests take any tree. Where there are no others nobody reads q: the tree counts as fixed.
        sampled = any(self.drawn)
        depth = max(len(path) for own in texts for path in own)
        tree = DraftTree.from_paths(
            [sequence.tokens[-1] for sequence in self.sequences],
            texts,
            self.positions,
            Drawing.INDEPENDENT if sampled else Drawing.FIXED,
            q=self._kept(drafted, depth) if sampled else None,
        )
        return replace(tree, log_values=lambda: self._log_values(tree))

    def _log_values(self, tree: DraftTree) -> list[list[float] | None]:
        """By the laws that tokens were drawn from; of a token that was drawn several times, by that of the first."""
        found: list[list[float] | None] = []
        for b, drawn in enumerate(self.drawn):
            if not drawn or tree.q is None or tree.q_rows is None:
                found.append(None)
                continue
            values = {0: 0.0}
            for node, children in enumerate(tree.children[b].tolist()):
                for rank, child in enumerate(children):
                    if child >= 0 and child not in values:
                        law_of_draw = tree.q[b, tree.q_rows[b, node, rank]]
                        values[child] = values[node] + float(law_of_draw[tree.tokens[b, child]].log())
            found.append([values.get(node, -math.inf) for node in range(tree.size)])
        return found

    def _kept(self, drafted: list[list[_Drawn]], longest: int) -> Tensor:
        """[B, P · D, V]: row j · D + d is the law behind token d of path j."""
        models, samples, vocabulary = len(drafted), self.drafter.samples, self.drafter.vocabulary
        some = next(levels[0].q for levels in drafted if levels)
        kept = some.new_zeros(len(self.sequences), samples, models, longest, vocabulary)
        for number, levels in enumerate(drafted):
            for depth, level in enumerate(levels[:longest]):
                if depth == 0:
                    kept[level.rows.sequence, :, number, 0] = level.q[:, None]
                else:
                    kept[level.rows.sequence, level.rows.column, number, depth] = level.q
        return kept.flatten(1, 3)

    def _law(self, rows: Rows, ids: Tensor | None, settings: LawSettings, paths: Tensor) -> Tensor:
        """[R, V] the laws after paths [B, F, depth], over the target's vocabulary: models pad theirs differently, or
        know only some tokens, `ids`, of it."""
        own = settings.take(rows.sequence)
        context = None
        if own.penalises:
            context = self.drafter.history.context(self.sequences, rows.sequence, paths[rows.sequence, rows.column])
        logits = rows.logits[:, : self.drafter.vocabulary]
        if ids is not None:
            nothing = logits.new_full((logits.shape[0], self.drafter.vocabulary), -torch.inf)
            logits = nothing.index_copy_(1, ids, logits)
        if missing := self.drafter.vocabulary - logits.shape[1]:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return law(logits, own, context)

    def _first(self, rows: Rows, q: Tensor, number: int) -> Tensor:
        """[R, S] how a model's paths begin."""
        samples = self.drafter.samples
        tokens = torch.full((q.shape[0], samples), ABSENT, device=self.device)
        for some in self._rows_of(rows, self.greedy):
            tokens[some] = top_children(q[some], samples) if samples > 1 else exact.argmax(q[some])[:, None]
        for some in self._rows_of(rows, self.coupled):
            noise = self.noise.take(rows.sequence[some])
            if samples > 1:
                race = token_race(noise, 0, torch.arange(self.drafter.vocabulary, device=self.device))
                tokens[some] = race_children(q[some], race, samples)
            else:
                tokens[some] = noise.first_arrival(q[some], torch.zeros_like(some))[:, None]
        for some in self._rows_of(rows, self.drawn):
            tokens[some] = iid_children(q[some], self._uniforms(number, 0)[rows.sequence[some]])
        return tokens

    def _next(self, rows: Rows, q: Tensor, number: int, depth: int) -> Tensor:
        """[R] how the paths go on, one token each."""
        tokens = torch.full((q.shape[0],), ABSENT, device=self.device)
        for some in self._rows_of(rows, self.greedy):
            tokens[some] = exact.argmax(q[some])
        for some in self._rows_of(rows, self.coupled):
            noise = self.noise.take(rows.sequence[some])
            tokens[some] = noise.first_arrival(q[some], torch.full_like(some, depth))
        for some in self._rows_of(rows, self.drawn):
            u = self._uniforms(number, depth)[rows.sequence[some], rows.column[some]]
            tokens[some] = exact.draw(q[some], u)
        return tokens

    def _uniforms(self, number: int, depth: int) -> Tensor:
        """[B, S] numbers of their own for each model, depth and path."""
        return self.noise.draft(torch.full_like(self.positions, number * MAX_DEPTH + depth), self.drafter.samples)

    def _spread(self, where: Tensor | tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        """[B, S], with tokens at some places."""
        spread = self.positions.new_full((len(self.sequences), self.drafter.samples), ABSENT)
        spread[where] = tokens
        return spread

    def _rows_of(self, rows: Rows, wanted: list[bool]) -> list[Tensor]:
        """The rows [R'] of the sequences that are wanted, as a list of one or of none."""
        members = [b for b, count in enumerate(rows.counts) for _ in range(count)]
        places = [row for row, b in enumerate(members) if wanted[b]]
        return [self._column(places)] if places else []

    def _column(self, values: Many[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _last_equal(paths: Tensor) -> Tensor:
    """[B, S] for paths [B, S, depth]: the last of those that equal it.

    Equal paths are read twice, which costs less than finding out on the host; but what follows them hangs on one of the
    two, on the last, which is the one that a run finds when it looks for what came true.
    """
    equal = (paths[:, :, None] == paths[:, None]).all(-1)  # [B, S, S]
    return equal.shape[1] - 1 - equal.flip(-1).to(torch.uint8).argmax(-1)


def _until_absent(path: list[int]) -> list[int]:
    return path[: path.index(ABSENT)] if ABSENT in path else path
