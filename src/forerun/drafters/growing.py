"""How a tree grows, level by level, for any drafter that says what it thinks of the next token at a node.

Every level is one question to a *run*, about the nodes of all sequences. What a node's law is and which children it
gets is each request's own affair:

- at temperature 0 the most likely tokens; in a tree ranked by the law at temperature 1, since the one-hot has a single
  candidate;
- under Gumbel coupling, the rule for seeded requests, the winners of the race with the request's own noise at that
  position, which is how the target will choose there;
- else what the tree asks for: draws from q, whose very law is kept for the verification, or the most likely tokens.

A run may know a part of the target's vocabulary only (FR-Spec, Zhao et al. 2025). Then laws, races and rankings are
made over its few columns, and what comes out is named by the target's ids. Penalties and biases speak of ids; for a
batch that has any, logits are spread over the target's vocabulary first.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import ABSENT, Drawing, iid_children, race_children, top_children
from forerun.core.history import History
from forerun.core.law import Context, LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree, LogValues
from forerun.drafters.confidence import AS_IT_IS, Scores, Taus, add_along_paths, draft_settings, token_race
from forerun.drafters.drafter import Budget
from forerun.drafters.host_growth import GrowsItself, dynamic_depth
from forerun.drafters.level_run import LevelRun, Rows
from forerun.drafters.none import roots_only
from forerun.drafters.tree_levels import LevelPlan, levels_of
from forerun.drafters.tree_spec import TreeSpec
from forerun.trees.dynamic import Frontier, expand_and_rerank


def rows_below_root(spec: TreeSpec, budget: Budget) -> int | None:
    """How many drafted nodes a run is asked about, for their children; None where nothing is drafted."""
    if budget.nodes < 1 or budget.depth < 1:
        return None
    if spec.dynamic:
        return spec.width * (dynamic_depth(spec, budget) - 1)
    return sum(bool(children) for children in spec.cut(budget).children) - 1


def grow(
    spec: TreeSpec,
    vocabulary: int,
    history: History,
    sequences: Many[Sequence],
    run: LevelRun,
    budgets: Many[Budget],
    *,
    taus: Taus = AS_IT_IS,
) -> DraftTree:
    """One tree for each sequence; `vocabulary` is the target's."""
    assert min(taus.coupled, taus.greedy) > 0
    drafts = [part and min(b.nodes, b.depth) > 0 for b, part in zip(budgets, run.takes_part, strict=True)]
    if not any(drafts):
        return roots_only(sequences)
    budgets = [budget if some else Budget(0, 0) for budget, some in zip(budgets, drafts, strict=True)]
    if isinstance(run, GrowsItself):
        tree = run.grow(spec, sequences, budgets, taus)
        if tree is not None:
            return tree
    step = _Step(spec, vocabulary, history, sequences, run, taus)
    return step.grow_dynamic(budgets) if spec.dynamic else step.fill_shape(budgets)


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that get children, for all sequences."""

    rows: Rows
    depth: int
    make_laws: Callable[[], Tensor]

    @cached_property
    def q(self) -> Tensor:
        """[R, C] the laws their children come from, over the columns of the step."""
        return self.make_laws()


class _Step:
    """One drafting step of a batch."""

    def __init__(
        self,
        spec: TreeSpec,
        vocabulary: int,
        history: History,
        sequences: Many[Sequence],
        run: LevelRun,
        taus: Taus,
    ) -> None:
        self.spec, self.vocabulary, self.history, self.sequences, self.run = spec, vocabulary, history, sequences, run
        self.taus = taus
        self.device = run.device
        self.roots = self._column([sequence.tokens[-1] for sequence in sequences])
        self.positions = self._column([sequence.position for sequence in sequences])
        self.noise = StepNoise(self._column([sequence.seed for sequence in sequences]), self.positions + 1)
        params = [sequence.params for sequence in sequences]
        self.penalises = any(each.penalises for each in params)
        self.coupled = [sequence.coupled and not sequence.params.greedy for sequence in sequences]
        sampled = spec.drawing.sampled
        self.drawn = [sampled and not sequence.coupled and not sequence.params.greedy for sequence in sequences]
        fits = run.ids is not None or run.vocabulary <= vocabulary
        self.plain = fits and all(each.greedy and not (each.penalises or each.logit_bias) for each in params)
        # Of the columns that laws are over here; None where these are the target's whole vocabulary.
        self.ids = None if self.penalises or any(each.logit_bias for each in params) else run.ids

    @cached_property
    def settings(self) -> LawSettings:
        ranked = self.spec.branches or self.spec.dynamic  # which tells how sure it is, with one path too
        params = [text.params for text in self.sequences]
        return draft_settings(params, self.device, ranked=ranked, tau=self.taus.greedy)

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
        filled: list[tuple[_Level, Tensor]] = []
        for depth, plan in enumerate(levels):
            nodes, children = self._column(plan.nodes), slice(plan.children.start, plan.children.stop)
            if depth == 0:
                rows = self.run.roots()
            else:
                read = tokens[:, nodes]
                if self.penalises:
                    paths = torch.cat([paths[:, self._column(plan.parent_columns)], read[:, :, None]], 2)
                above = self._column(plan.parent_places).expand(len(sizes), -1)
                counts = [sum(shape.children[node][0] < size for node in plan.nodes) for size in sizes]
                rows = self.run.level(read, above, counts)
            level = self._level(rows, depth, paths)
            columns = self._children(level, nodes, plan.width)
            filled.append((level, columns))
            found = self._of_children(plan, rows, self._named(columns))
            there = (found >= 0) & present[:, parents[children]] & (self._column(plan.children) < limits)
            present[:, children] = there
            tokens[:, children] = torch.where(there, found, 0)
        # Greedy and coupled requests take any tree. Where there are no others nobody reads q: the tree counts as fixed.
        q, q_rows = self._kept([level for level, _ in filled], levels, shape) if any(self.drawn) else (None, None)
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
            log_values=self._log_values(filled, levels, shape),
        )

    def _of_children(self, plan: LevelPlan, rows: Rows, values: Tensor, nothing: float = ABSENT) -> Tensor:
        """[B, children] of what there is for the candidates of a level's rows [R, width]."""
        found = self._spread(rows, values, len(plan.nodes), nothing).flatten(1)
        return found[:, : len(plan.children)] if plan.picks is None else found[:, self._column(plan.picks)]

    def _log_values(
        self, filled: list[tuple[_Level, Tensor]], levels: tuple[LevelPlan, ...], shape: TreeShape
    ) -> LogValues | None:
        """By the columns that were chosen at each level; not on an accelerator, where logits are overwritten. At
        temperature 0 a chain's laws have one token: others are made, unless they hang on the text, which grows."""
        if self.device.type != "cpu":
            return None

        def values() -> list[list[float] | None]:
            params = [text.params for text in self.sequences]
            ranked = draft_settings(params, self.device, ranked=True, tau=self.taus.greedy)
            shares = []
            for (level, columns), plan in zip(filled, levels, strict=True):
                q = level.q if self.spec.branches or self.penalises else self._law(level.rows, ranked, None)
                found = self._scores(level, q).log_shares(columns)
                shares.append(self._of_children(plan, level.rows, found, -torch.inf))
            told = zip(params, add_along_paths(shape, torch.cat(shares, 1)), strict=True)
            lost = self.penalises and not self.spec.branches
            return [None if lost and each.greedy else own for each, own in told]

        return values

    def _likeliest_chain(self, shape: TreeShape) -> DraftTree:
        """Nothing to choose and nobody apart: the draft writes as it would by itself."""
        roots = self.run.roots()
        assert roots.likeliest is not None
        columns = [self.roots[:, None], self._named(roots.likeliest.clamp_min(0)[:, None])]
        if shape.depth > 1:
            columns.append(self.run.chain(columns[1], shape.depth - 1))
        return DraftTree.full(shape, torch.cat(columns, 1), self.positions)

    def _kept(self, laws: list[_Level], levels: tuple[LevelPlan, ...], shape: TreeShape) -> tuple[Tensor, Tensor]:
        """The laws behind the draws, [B, I, V] for the I nodes with children, and for each draw its row."""
        inner = [node for plan in levels for node in plan.nodes]
        q = laws[0].q.new_zeros(len(self.sequences), len(inner), self.vocabulary)
        first = 0
        for level, plan in zip(laws, levels, strict=True):
            at = (level.rows.sequence, first + level.rows.column)
            if self.ids is None:
                q[at] = level.q
            else:
                q[at[0][:, None], at[1][:, None], self.ids] = level.q
            first += len(plan.nodes)
        row_of = dict(zip(inner, range(len(inner)), strict=True))
        rows = self._column([row_of.get(node, 0) for node in range(shape.size)])
        return q, rows[None, :, None].expand(len(self.sequences), -1, shape.width)

    # --- a shape that grows with the tokens -------------------------------------------------------------------

    def grow_dynamic(self, budgets: Many[Budget]) -> DraftTree:
        width = self.spec.width
        depths = [dynamic_depth(self.spec, budget) for budget in budgets]
        nodes = [min(self.spec.size, budget.nodes) for budget in budgets]
        depth = max(depths)
        batch = len(depths)
        # For each grown node its number in the run, and the drafted tokens that lead to it.
        places = torch.full((batch, 1 + width + width * width * (depth - 1)), -1, device=self.device)
        paths = places.new_zeros(batch, places.shape[1], depth)
        asked = 0

        def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
            nonlocal asked
            columns = frontier.nodes.shape[1]
            each = frontier.nodes[:, :, None].expand(-1, -1, depth)
            if frontier.depth == 0:
                rows = self.run.roots()
            else:
                upper = frontier.parents[:, :, None].expand(-1, -1, depth)
                path = paths.gather(1, upper)
                path[:, :, frontier.depth - 1] = frontier.tokens
                paths.scatter_(1, each, path)
                counts = [columns if frontier.depth < limit else 0 for limit in depths]
                rows = self.run.level(frontier.tokens, places.gather(1, frontier.parents), counts)
                numbers = torch.arange(asked, asked + columns, device=self.device).expand(batch, -1)
                places.scatter_(1, frontier.nodes, numbers)
                asked += columns
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
            log_values=grown.log_values.tolist,
        )

    def _confident(self, level: _Level, count: int) -> tuple[Tensor, Tensor]:
        """The best candidates of each row [R, count], with their log confidences."""
        scores = self._scores(level, level.q)
        best = top_children(scores.values, count)
        return self._named(best), scores.log_shares(best)

    # --- both ---------------------------------------------------------------------------------------------------

    def _level(self, rows: Rows, depth: int, paths: Tensor) -> _Level:
        """A level's nodes, with their laws; `paths` [B, F, depth] lead to them."""

        def laws() -> Tensor:
            context = None
            if self.settings.penalises:
                context = self.history.context(self.sequences, rows.sequence, paths[rows.sequence, rows.column])
            return self._law(rows, self.settings, context)

        return _Level(rows, depth, laws)

    def _law(self, rows: Rows, settings: LawSettings, context: Context | None) -> Tensor:
        return law(self._fit(rows.logits), settings.take(rows.sequence), context, checked=True)

    def _scores(self, level: _Level, q: Tensor) -> Scores:
        """What the candidates of a level's rows are worth, by laws q [R, C]."""
        coupled = self._rows_of(level.rows, self.coupled)
        return Scores.of(q, None if coupled is None else self._token_race(level), coupled, self.taus.coupled)

    def _fit(self, logits: Tensor) -> Tensor:
        """Over the columns of the step, or over the target's vocabulary: models pad theirs to different sizes. A draft
        that is broken drafts nonsense, and that is refused: nobody else's text should end for it."""
        logits = logits.nan_to_num()
        ids = self.run.ids
        if ids is not None:
            assert logits.shape[1] == ids.shape[0]
            if self.ids is not None:
                return logits
            return logits.new_full((logits.shape[0], self.vocabulary), -torch.inf).index_copy_(1, ids, logits)
        missing = self.vocabulary - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocabulary]

    def _named(self, columns: Tensor) -> Tensor:
        """The target's ids of columns; who is absent stays so."""
        if self.ids is None:
            return columns
        return torch.where(columns >= 0, self.ids[columns.clamp_min(0)], ABSENT)

    def _children(self, level: _Level, nodes: Tensor, count: int) -> Tensor:
        """[R, count] columns of the candidates of each row; `nodes` [F] are the level's nodes."""
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
        chosen = torch.full((q.shape[0], count), ABSENT, device=self.device)
        for wanted, choose in ways:
            some = self._rows_of(rows, wanted)
            if some is not None:
                chosen[some] = choose(some)
        return chosen

    def _coupled_children(self, level: _Level, some: Tensor, count: int) -> Tensor:
        if count == 1 and self.ids is None:  # by the target's own arithmetic, and without noise for who cannot win
            depths = torch.full_like(some, level.depth)
            return self.noise.take(level.rows.sequence[some]).first_arrival(level.q[some], depths)[:, None]
        return race_children(level.q[some], self._token_race(level), count)

    def _token_race(self, level: _Level) -> Tensor:
        """[R', C] the target's noise for the tokens after the coupled rows. All nodes of a depth share it, so it is
        made once for each sequence."""
        counts = level.rows.counts
        members = [b for b, count in enumerate(counts) if count and self.coupled[b]]
        which = [index for index, b in enumerate(members) for _ in range(counts[b])]
        noise = self.noise.take(self._column(members))
        tokens = torch.arange(self.vocabulary, device=self.device) if self.ids is None else self.ids
        return token_race(noise, level.depth, tokens)[self._column(which)]

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
