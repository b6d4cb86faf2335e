"""A smaller model with the same tokenizer drafts (Leviathan et al., Chen et al., 2023; trees: SpecInfer, Sequoia).

Every level of the tree is one pass of the draft over the nodes of all sequences. What a node's law is and which
children it gets is each request's own affair:

- at temperature 0 the most likely tokens; in a tree ranked by the law at temperature 1, since the one-hot has a single
  candidate;
- under Gumbel coupling, the rule for seeded requests, the winners of the race with the request's own noise at that
  position, which is how the target will choose there;
- else what the tree asks for: draws from q, whose very law is kept for the verification, or the most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import ABSENT, Drawing, iid_children, race_children, top_children
from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.noise import Purpose, StepNoise, row_key, uniform
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.none import roots_only
from forerun.drafters.run_ahead import Ahead, Rows, Run, RunAhead
from forerun.drafters.tree_levels import LevelPlan, levels_of
from forerun.drafters.tree_spec import TreeSpec
from forerun.trees.dynamic import Frontier, expand_and_rerank


@dataclass(frozen=True)
class Options:
    model: str = ""
    """The draft: a name, a folder, a file or a Hugging Face id, as for the target."""
    tree: str = "4"
    """What to draft: "4" for a chain of four, "3,2,1" for a sampled tree, "fixed:3,2,1", "dynamic:8,5,40"."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("the drafter draft_model needs a model: name a smaller one of the family with model=NAME")
        TreeSpec.parse(self.tree)


def make(options: Options, setup: Setup) -> Drafter:
    spec = TreeSpec.parse(options.tree)
    model = setup.load(options.model)
    if spec.branches and not model.branches:
        raise ValueError(
            f"the draft model {options.model} cannot read the tree {options.tree}: ask for a chain, such as tree=4"
        )
    return DraftModel(RunAhead(model, setup.slots), spec, setup.target.vocab_size)


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that get children, for all sequences."""

    rows: Rows
    depth: int
    make_laws: Callable[[], Tensor]

    @cached_property
    def q(self) -> Tensor:
        """[R, V] the laws their children come from."""
        return self.make_laws()


class DraftModel:
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, ahead: Ahead, spec: TreeSpec, vocabulary: int) -> None:
        """`vocabulary` is the target's."""
        self.spec = spec
        self.drawing = spec.drawing
        self.branches = spec.branches
        self.vocabulary = vocabulary
        self.ahead = ahead
        self.history = History(vocabulary, ahead.model.device)
        self._device = ahead.model.device

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        reach = self.ahead.model.context_length
        budgets = [
            Budget(budget.nodes, min(budget.depth, reach - sequence.position))
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        run = self.ahead.start(sequences, [self._rows_below_root(budget) for budget in budgets])
        if not any(run.takes_part):
            return roots_only(sequences)
        budgets = [b if part else Budget(0, 0) for b, part in zip(budgets, run.takes_part, strict=True)]
        step = _Step(self.spec, self.vocabulary, self.history, sequences, run)
        tree = step.grow_dynamic(budgets) if self.spec.dynamic else step.fill_shape(budgets)
        run.send_home()
        return tree

    def observe(self, observations: Many[Observation]) -> None:
        """Committed tokens are read from the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        self.ahead.forget(sequence)
        self.history.forget(sequence)

    def _rows_below_root(self, budget: Budget) -> int | None:
        """How many drafted nodes have to be read, for their children; None where nothing is drafted."""
        if budget.nodes < 1 or budget.depth < 1:
            return None
        if self.spec.dynamic:
            return self.spec.width * (_dynamic_depth(self.spec, budget) - 1)
        return sum(bool(children) for children in self.spec.cut(budget).children) - 1


def _dynamic_depth(spec: TreeSpec, budget: Budget) -> int:
    """How deep a dynamic tree may get."""
    return max(0, min(spec.depth, budget.depth, budget.nodes))


class _Step:
    """One drafting step of a batch."""

    def __init__(self, spec: TreeSpec, vocabulary: int, history: History, sequences: Many[Sequence], run: Run) -> None:
        fits = run.vocabulary <= vocabulary
        self.spec = spec
        self.vocabulary = vocabulary
        self.history = history
        self.sequences = sequences
        self.run = run
        self.device = run.tokens.device
        self.roots = self._column([sequence.tokens[-1] for sequence in sequences])
        self.positions = self._column([sequence.position for sequence in sequences])
        self.noise = StepNoise(self._column([sequence.seed for sequence in sequences]), self.positions + 1)
        self.penalises = any(sequence.params.penalises for sequence in sequences)
        self.coupled = [sequence.coupled and not sequence.params.greedy for sequence in sequences]
        sampled = spec.drawing.sampled
        self.drawn = [sampled and not sequence.coupled and not sequence.params.greedy for sequence in sequences]
        self.plain = all(_likeliest_token_wins(sequence.params) for sequence in sequences) and fits

    @cached_property
    def settings(self) -> LawSettings:
        params = [_ranked(text.params) if self.spec.branches else text.params for text in self.sequences]
        return LawSettings.of(params, self.device)

    # --- a shape that is known beforehand ---------------------------------------------------------------------

    def fill_shape(self, budgets: Many[Budget]) -> DraftTree:
        """Every tree is a beginning of the same shape, so node i is the same node for all."""
        sizes = [self.spec.cut_size(budget) for budget in budgets]
        shape = self.spec.cut(Budget(max(sizes) - 1, self.spec.depth))
        if self.plain and self.run.writes_ahead and shape.width == 1 and min(sizes) == max(sizes):
            return self._likeliest_chain(shape)
        limits = self._column(sizes)[:, None]
        parents = self._column(shape.parents)
        tokens = parents.new_zeros(len(sizes), shape.size)
        tokens[:, 0] = self.roots
        present = torch.zeros_like(tokens, dtype=torch.bool)
        present[:, 0] = True
        paths = tokens.new_zeros(len(sizes), 1, 0)  # [B, F, depth] the drafted tokens that lead to a level's nodes
        levels = levels_of(shape)
        laws: list[_Level] = []
        for depth, plan in enumerate(levels):
            nodes, children = _slice(plan.nodes), _slice(plan.children)
            if depth == 0:
                rows = self.run.roots()
            else:
                if self.penalises:
                    paths = torch.cat([paths[:, plan.parent_columns], tokens[:, nodes, None]], 2)
                above = self._column(plan.parent_places).expand(len(sizes), -1)
                counts = [sum(shape.children[node][0] < size for node in plan.nodes) for size in sizes]
                rows = self.run.level(tokens[:, nodes], above, counts)
            level = self._level(rows, depth, paths)
            laws.append(level)
            found = self._spread(rows, self._children(level, self._column(plan.nodes), plan.width), len(plan.nodes))
            found = found.flatten(1)[:, : len(plan.children)]
            there = (found >= 0) & present[:, parents[children]] & (self._column(plan.children) < limits)
            present[:, children] = there
            tokens[:, children] = torch.where(there, found, 0)
        # Greedy and coupled requests take any tree. Where there are no others nobody reads q: the tree counts as fixed.
        q, q_rows = self._kept(laws, levels, shape) if any(self.drawn) else (None, None)
        return DraftTree.build(
            tokens,
            torch.where(present, parents, -1),
            self.positions,
            Drawing.FIXED if q is None else self.spec.drawing,
            q=q,
            q_rows=q_rows,
            max_depth=shape.depth,
            width=shape.width,
            check=False,
        )

    def _likeliest_chain(self, shape: TreeShape) -> DraftTree:
        """Nothing to choose and nobody apart: the draft model writes as it would by itself."""
        roots = self.run.roots()
        assert roots.likeliest is not None
        columns = [self.roots[:, None], roots.likeliest.clamp_min(0)[:, None]]
        if shape.depth > 1:
            columns.append(self.run.chain(columns[1], shape.depth - 1))
        return DraftTree.full(shape, torch.cat(columns, 1), self.positions)

    def _kept(self, laws: list[_Level], levels: tuple[LevelPlan, ...], shape: TreeShape) -> tuple[Tensor, Tensor]:
        """The laws behind the draws, [B, I, V] for the I nodes with children, and for each draw its row."""
        inner = [node for plan in levels for node in plan.nodes]
        q = laws[0].q.new_zeros(len(self.sequences), len(inner), self.vocabulary)
        first = 0
        for level, plan in zip(laws, levels, strict=True):
            q[level.rows.sequence, first + level.rows.column] = level.q
            first += len(plan.nodes)
        row_of = dict(zip(inner, range(len(inner)), strict=True))
        rows = self._column([row_of.get(node, 0) for node in range(shape.size)])
        return q, rows[None, :, None].expand(len(self.sequences), -1, shape.width)

    # --- a shape that grows with the tokens -------------------------------------------------------------------

    def grow_dynamic(self, budgets: Many[Budget]) -> DraftTree:
        width = self.spec.width
        depths = [_dynamic_depth(self.spec, budget) for budget in budgets]
        nodes = [min(self.spec.size, budget.nodes) for budget in budgets]
        depth = max(depths)
        batch = len(depths)
        # For each grown node its number in the run, and the drafted tokens that lead to it.
        places = torch.full((batch, 1 + width + width * width * (depth - 1)), -1, device=self.device)
        paths = places.new_zeros(batch, places.shape[1], depth)

        def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
            columns = frontier.nodes.shape[1]
            each = frontier.nodes[:, :, None].expand(-1, -1, depth)
            if frontier.depth == 0:
                rows = self.run.roots()
            else:
                upper = frontier.parents[:, :, None].expand(-1, -1, depth)
                path = paths.gather(1, upper)
                path[:, :, frontier.depth - 1] = frontier.tokens
                paths.scatter_(1, each, path)
                start = self.run.tokens.shape[1]
                counts = [columns if frontier.depth < limit else 0 for limit in depths]
                rows = self.run.level(frontier.tokens, places.gather(1, frontier.parents), counts)
                numbers = torch.arange(start, start + columns, device=self.device).expand(batch, -1)
                places.scatter_(1, frontier.nodes, numbers)
            level = self._level(rows, frontier.depth, paths.gather(1, each)[:, :, : frontier.depth])
            tokens, confidences = self._confident(level, width)
            return self._spread(rows, tokens, columns), self._spread(rows, confidences, columns, -torch.inf)

        grown = expand_and_rerank(self.roots, children, width=width, depth=depth, size=1 + max(nodes))
        kept = torch.arange(1 + max(nodes), device=self.device) <= self._column(nodes)[:, None]
        return DraftTree.build(
            grown.tokens,
            torch.where(kept, grown.parents, -1),
            self.positions,
            Drawing.FIXED,
            max_depth=depth,
            width=width,
            check=False,
        )

    def _confident(self, level: _Level, count: int) -> tuple[Tensor, Tensor]:
        """The best candidates of each row [R, count], with their log confidences.

        Under coupling the target takes the largest p/E. The closer p is to q, the surer the largest q/E; a candidate's
        share of all q/E stands for its chance.
        """
        scores = level.q
        coupled = self._rows_of(level.rows, self.coupled)
        if coupled is not None:
            scores = scores.clone()
            scores[coupled] = scores[coupled] / self._token_race(level).to(scores.dtype)
        tokens = top_children(scores, count)
        share = scores.gather(1, tokens.clamp_min(0)) / scores.sum(1, keepdim=True)
        return tokens, torch.where(tokens >= 0, share.log(), -torch.inf)

    # --- both ---------------------------------------------------------------------------------------------------

    def _level(self, rows: Rows, depth: int, paths: Tensor) -> _Level:
        """A level's nodes, with their laws; `paths` [B, F, depth] lead to them."""

        def laws() -> Tensor:
            settings = self.settings.take(rows.sequence)
            context = None
            if settings.penalises:
                context = self.history.context(self.sequences, rows.sequence, paths[rows.sequence, rows.column])
            return law(self._fit(rows.logits), settings, context, checked=rows.logits.is_cuda)

        return _Level(rows, depth, laws)

    def _fit(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary: models pad theirs to different sizes. A device is not asked whether a draft is
        broken: it will draft nonsense, and that is refused."""
        if logits.is_cuda:
            logits = logits.nan_to_num()
        missing = self.vocabulary - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocabulary]

    def _children(self, level: _Level, nodes: Tensor, count: int) -> Tensor:
        """[R, count] candidates of each row; `nodes` [F] are the level's nodes."""
        rows = level.rows
        if count == 1 and self.plain and rows.likeliest is not None:
            return rows.likeliest.clamp_min(0)[:, None]
        q = level.q
        ways: list[tuple[list[bool], Callable[[Tensor], Tensor]]] = [
            (self.coupled, lambda some: self._coupled_children(level, some, count)),
            (self.drawn, lambda some: self._drawn_children(level, some, nodes, count)),
            (
                [not (a or b) for a, b in zip(self.coupled, self.drawn, strict=True)],
                lambda some: exact.argmax(q[some])[:, None] if count == 1 else top_children(q[some], count),
            ),
        ]
        tokens = torch.full((q.shape[0], count), ABSENT, device=self.device)
        for wanted, choose in ways:
            some = self._rows_of(rows, wanted)
            if some is not None:
                tokens[some] = choose(some)
        return tokens

    def _coupled_children(self, level: _Level, some: Tensor, count: int) -> Tensor:
        if count == 1:  # by the target's own arithmetic, and without noise for tokens that cannot win
            depths = torch.full_like(some, level.depth)
            return self.noise.take(level.rows.sequence[some]).first_arrival(level.q[some], depths)[:, None]
        return race_children(level.q[some], self._token_race(level), count)

    def _token_race(self, level: _Level) -> Tensor:
        """[R', V] the target's noise for the tokens after the coupled rows. All nodes of a depth share it, so it is
        made once for each sequence."""
        counts = level.rows.counts
        members = [b for b, count in enumerate(counts) if count and self.coupled[b]]
        which = [index for index, b in enumerate(members) for _ in range(counts[b])]
        noise = self.noise.take(self._column(members))
        keys = row_key(noise.seeds, noise.starts + level.depth, Purpose.TOKEN)
        # The exponentials of `noise.race`, but for their last bits: these only rank guesses, and cost a fifth.
        u = uniform(keys[:, None], torch.arange(self.vocabulary, device=self.device))
        return (u + 2.0**-53).log_().neg_()[self._column(which)]

    def _drawn_children(self, level: _Level, some: Tensor, nodes: Tensor, count: int) -> Tensor:
        noise = self.noise.take(level.rows.sequence[some])
        drawn_at = nodes[level.rows.column[some]]
        u = noise.draft(drawn_at, count)
        return iid_children(level.q[some], u) if self.spec.drawing is Drawing.IID else _distinct(level.q[some], u)

    def _rows_of(self, rows: Rows, wanted: list[bool]) -> Tensor | None:
        """The rows [R'] of the sequences that are wanted; None if there are none. Known without asking the device."""
        members = [b for b, count in enumerate(rows.counts) for _ in range(count)]
        places = [row for row, b in enumerate(members) if wanted[b]]
        return self._column(places) if places else None

    def _spread(self, rows: Rows, values: Tensor, columns: int, nothing: float = ABSENT) -> Tensor:
        """From packed rows [R, C] to [B, columns, C]."""
        if all(count == columns for count in rows.counts):
            return values.view(len(self.sequences), columns, -1)
        spread = values.new_full((len(self.sequences), columns, values.shape[1]), nothing)
        spread[rows.sequence, rows.column] = values
        return spread

    def _column(self, values: Many[int]) -> Tensor:
        return to_device(values, self.device)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _distinct(q: Tensor, u: Tensor) -> Tensor:
    """Draws without replacement: q [R, V] and uniforms [R, K] → [R, K], each from what the draws before it left.

    A race would do the same with noise for every token; this needs a number per draw.
    """
    left = q.clone()
    drawn = []
    for k in range(u.shape[1]):
        token = exact.draw(left, u[:, k])[:, None]
        drawn.append(token.masked_fill(exact.fixed(left.gather(1, token)) == 0, ABSENT))  # nothing was left
        left.scatter_(1, token, 0.0)
    return torch.cat(drawn, 1)


def _likeliest_token_wins(params: SamplingParams) -> bool:
    return params.greedy and not params.penalises and not params.logit_bias


def _ranked(params: SamplingParams) -> SamplingParams:
    """The settings of the draft's law: the request's own, but at temperature 0 all tokens in their order."""
    if not params.greedy:
        return params
    return replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
