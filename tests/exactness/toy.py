"""A world small enough to enumerate: a target and a drafter over a few tokens, and one exact step of the engine.

Both are tables of weights, looked up by the sum of all the tokens they have seen, so that one token too many in a
cache changes what they say; and both go through the real `law`. The pieces that real code gets wrong are methods, so
that a test can plant a fault in one and see it caught.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.law import Context, LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.verify.plain import PlainTree, PlainVerdict, Row
from forerun.verify.rule import VerificationRule

from .worlds import Branch, Key, all_outcomes

Text = tuple[int, ...]
Weights = tuple[tuple[float, ...], ...]  # [sum of the tokens seen, modulo V][token]


@dataclass(frozen=True)
class ToyPair:
    """Weights of the target and of two drafters (the second only where children have laws of their own)."""

    target: Weights
    drafter: Weights
    second: Weights

    @property
    def vocabulary(self) -> int:
        return len(self.target)

    @classmethod
    def random(cls, vocabulary: int, seed: int) -> ToyPair:
        """Weights with zeros, ties, one-hots, disjoint supports and p = q among them."""
        rng = np.random.default_rng(seed)

        def row() -> Row:
            kind = rng.integers(6)
            weights = rng.exponential(size=vocabulary)
            if kind == 1:
                weights = rng.integers(1, 3, size=vocabulary).astype(float)  # ties
            elif kind == 2:
                weights[rng.integers(vocabulary)] = 0
            elif kind == 3:
                weights = np.eye(vocabulary)[rng.integers(vocabulary)]
            return np.asarray(weights)

        target = [row() for _ in range(vocabulary)]
        tables = []
        for _ in range(2):
            table = []
            for p in target:
                kind = rng.integers(6)
                if kind == 0:
                    q = p
                elif kind == 1 and 0 < np.count_nonzero(p) < vocabulary:
                    q = (p == 0).astype(float)  # disjoint
                else:
                    q = row()
                table.append(q)
            tables.append(table)
        return cls(_table(target), _table(tables[0]), _table(tables[1]))


def _table(rows: list[Row]) -> Weights:
    return tuple(tuple(float(w) for w in row) for row in rows)


@dataclass(frozen=True)
class Draft:
    """One thing the drafter may propose, and how likely it is."""

    probability: float
    tokens: list[int]  # per node; the root's token first
    present: list[bool]
    q: list[Row]  # [N or N·K rows][V]


@dataclass(frozen=True)
class State:
    """What is committed, and the text whose entries the target's and the drafter's caches hold.

    The root's entries do not exist yet, so a right cache is the text without its last token.
    """

    text: Text
    target_cache: Text
    drafter_cache: Text

    @classmethod
    def start(cls, prompt: Text) -> State:
        return cls(prompt, prompt[:-1], prompt[:-1])


@dataclass(frozen=True)
class Step:
    """One thing a step may do."""

    tokens: Text  # committed
    target_entries: Text  # what its cache gains
    drafter_entries: Text
    probability: float = 0.0


@dataclass
class ToyEngine:
    pair: ToyPair
    rule: VerificationRule
    drawing: Drawing
    shape: TreeShape
    params: SamplingParams
    prompt: Text = (0,)
    mask: tuple[bool, ...] | None = None
    _laws: dict[tuple[str, Text, Text], Row] = field(default_factory=dict)
    _steps: dict[Text, list[Step]] = field(default_factory=dict)

    # --- the pieces that faults are planted in ---------------------------------------------------------

    def target_law(self, seen: Text, path: Text) -> Row:
        """p after the committed text `seen` and the drafted `path`."""
        return self._law("target", seen, path)

    def drafter_law(self, which: str, seen: Text, path: Text) -> Row:
        """The law the drafter draws from."""
        return self._law(which, seen, path)

    def recorded_law(self, which: str, seen: Text, path: Text) -> Row:
        """The law the tree says the drafter drew from."""
        return self.drafter_law(which, seen, path)

    def prune(self, draft: Draft) -> Draft:
        """What is left of a draft before it is verified: all of it."""
        return draft

    def entries_kept(self, tree: PlainTree, verdict: PlainVerdict) -> tuple[Text, Text]:
        """What a step adds to the target's and to the drafter's cache: the root and the accepted path."""
        kept = (tree.tokens[0], *(tree.tokens[node] for node in verdict.path))
        return kept, kept

    def commit(self, sequence: Sequence, tokens: Text) -> None:
        sequence.commit(tokens)

    def committed(self, tree: PlainTree, verdict: PlainVerdict) -> Text:
        return (*(tree.tokens[node] for node in verdict.path), verdict.token)

    # --- one exact step ------------------------------------------------------------------------------------

    def _law(self, which: str, seen: Text, path: Text) -> Row:
        # Without penalties only the sum matters; then few laws serve all texts.
        key = (which, seen, path) if self.params.penalises else (which, (), (self._sum((*seen, *path)),))
        if key not in self._laws:
            self._laws[key] = self._compute_law(which, seen, path)
        return self._laws[key]

    def _sum(self, text: Text) -> int:
        return sum(text) % self.pair.vocabulary

    def _compute_law(self, which: str, seen: Text, path: Text) -> Row:
        table: Weights = getattr(self.pair, which)
        weights = torch.tensor(table[self._sum((*seen, *path))], dtype=torch.float64)
        allowed = torch.tensor(self.mask or (True,) * self.pair.vocabulary)
        allowed[[token for token, bias in self.params.logit_bias.items() if bias == -torch.inf]] = False
        if weights[allowed].sum() == 0:  # this table and these settings leave nothing: a law must have something
            weights[allowed] = 1.0
        context = Context.of(
            [self.prompt],
            [seen[len(self.prompt) :]],
            self.pair.vocabulary,
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([path or (-1,)]),
        )
        mask = None if self.mask is None else torch.tensor([self.mask])
        row: Row = law(weights.log()[None], LawSettings.of([self.params]), context, mask)[0].numpy()
        return row

    def _drafter_of(self, rank: int) -> str:
        return "second" if self.drawing is Drawing.INDEPENDENT and rank % 2 else "drafter"

    def _path(self, tokens: list[int], node: int) -> Text:
        path: Text = ()
        while node > 0:
            path = (tokens[node], *path)
            node = self.shape.parents[node]
        return path

    def drafts(self, state: State) -> Iterator[Draft]:
        """Everything the drafter may propose, node by node in the order of the shape."""
        size = self.shape.size
        seen = (*state.drafter_cache, state.text[-1])

        def grow(node: int, tokens: list[int], present: list[bool], probability: float) -> Iterator[Draft]:
            if node == size:
                yield self.prune(Draft(probability, tokens, present, self._recorded(seen, tokens, present)))
                return
            parent, rank = self.shape.parents[node], self.shape.ranks[node]
            if not present[parent]:
                yield from grow(node + 1, [*tokens, 0], [*present, False], probability)
                return
            q = self.drafter_law(self._drafter_of(rank), seen, self._path(tokens, parent))
            elder = [tokens[n] for n in self.shape.children[parent] if n < node and present[n]]
            choices = _choices(q, self.drawing, rank, elder)
            if not choices:
                yield from grow(node + 1, [*tokens, 0], [*present, False], probability)
            for token, chance in choices:
                yield from grow(node + 1, [*tokens, token], [*present, True], probability * chance)

        yield from grow(1, [state.text[-1]], [True], 1.0)

    def _recorded(self, seen: Text, tokens: list[int], present: list[bool]) -> list[Row]:
        """The rows of q: one per node, or one per node and rank where each child has a law of its own."""
        width = max(self.shape.width, 1) if self.drawing is Drawing.INDEPENDENT else 1
        nothing = np.zeros(self.pair.vocabulary)
        return [
            self.recorded_law(self._drafter_of(rank), seen, self._path(tokens, node)) if present[node] else nothing
            for node in range(self.shape.size)
            for rank in range(width)
        ]

    def tree(self, drafts: list[Draft], position: int) -> DraftTree:
        """The drafts as one batch."""
        tokens = torch.tensor([draft.tokens for draft in drafts])
        shape = torch.tensor(self.shape.parents).expand_as(tokens)
        parents = torch.where(torch.tensor([draft.present for draft in drafts]), shape, -1)
        positions = torch.full((len(drafts),), position)
        if not self.drawing.sampled:
            return DraftTree.build(tokens, parents, positions, self.drawing)
        q = torch.from_numpy(np.stack([np.stack(draft.q) for draft in drafts]))
        q_rows = None
        if self.drawing is Drawing.INDEPENDENT:
            nodes = torch.arange(self.shape.size)[:, None] * self.shape.width + torch.arange(self.shape.width)
            q_rows = nodes.expand(len(drafts), -1, -1)
        return DraftTree.build(tokens, parents, positions, self.drawing, q=q, q_rows=q_rows, width=self.shape.width)

    def target_rows(self, state: State, tree: PlainTree) -> list[Row]:
        """The target's pass: p after the path to each node."""
        seen = (*state.target_cache, state.text[-1])
        paths: list[Text | None] = [()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            above = paths[parent] if parent >= 0 else None
            paths.append(None if above is None else (*above, token))
        padding = np.zeros(self.pair.vocabulary)
        return [padding if path is None else self.target_law(seen, path) for path in paths]

    def step(self, state: State) -> list[Step]:
        """Everything one step may do, with its probability."""
        root = state.text[-1]
        sums = (self._sum((*state.target_cache, root)), self._sum((*state.drafter_cache, root)))
        key = (*state.text, -1, *state.target_cache) if self.params.penalises else sums
        if key not in self._steps:
            chances: dict[Step, float] = {}
            for chance, step in self._step(state):
                chances[step] = chances.get(step, 0.0) + chance
            self._steps[key] = [replace(step, probability=chance) for step, chance in chances.items()]
        return self._steps[key]

    def _step(self, state: State) -> Iterator[tuple[float, Step]]:
        drafts = [draft for draft in self.drafts(state) if draft.probability > 0]
        tree = self.tree(drafts, len(state.text) - 1)
        replays: list[Replay] = []
        rows: list[list[Row]] = []
        for b, draft in enumerate(drafts):
            plain = PlainTree.of(tree, b)
            p = self.target_rows(state, plain)
            rows.append(p)
            for branch in all_outcomes(lambda world: self.rule.reference(plain, p, world)):  # noqa: B023
                replays.append(Replay(b, branch))
                step = Step(self.committed(plain, branch.outcome), *self.entries_kept(plain, branch.outcome))
                yield draft.probability * branch.probability, step
        self.compare(tree, torch.from_numpy(np.array(rows)), replays)

    def compare(self, tree: DraftTree, p: Tensor, replays: list[Replay]) -> None:
        """The batched form must give every outcome of the reference, at the uniforms that lead there."""
        sure = [replay for replay in replays if replay.branch.probability > 1e-9]
        rows = torch.tensor([replay.draft for replay in sure])
        noise = TableNoise.of([replay.branch.uniforms for replay in sure], tree)
        verdict = self.rule.verify(tree.take(rows), p[rows], noise)
        found = zip(
            verdict.nodes.tolist(),
            verdict.tokens.tolist(),
            verdict.lengths.tolist(),
            verdict.stops.tolist(),
            strict=True,
        )
        for (nodes, token, length, stop), replay in zip(found, sure, strict=True):
            path = tuple(node for node in nodes if node >= 0)
            assert PlainVerdict(path, token) == replay.branch.outcome, f"batched {path}, {token}, reference {replay}"
            assert length == len(path)
            assert stop == (path[-1] if path else 0)

    # --- whole texts -----------------------------------------------------------------------------------------

    def law_of_text(self, length: int, eos: frozenset[int] = frozenset()) -> dict[Text, float]:
        """The exact law of the first `length` committed tokens (fewer where an EOS comes first)."""
        open_states = {State.start(self.prompt): 1.0}
        law_of: dict[Text, float] = {}
        while open_states:
            # the shortest first, so that everything that leads to a state is there before it is left
            state = min(open_states, key=lambda state: len(state.text))
            probability = open_states.pop(state)
            for step in self.step(state):
                chance = probability * step.probability
                sequence = Sequence(list(self.prompt), length, eos, output=list(state.text[len(self.prompt) :]))
                self.commit(sequence, step.tokens)
                output = tuple(sequence.output)
                if sequence.finish_reason is not None:
                    law_of[output] = law_of.get(output, 0.0) + chance
                    continue
                after = State(
                    (*self.prompt, *output),
                    (*state.target_cache, *step.target_entries),
                    (*state.drafter_cache, *step.drafter_entries),
                )
                open_states[after] = open_states.get(after, 0.0) + chance
        return law_of

    def law_of_plain_decoding(self, length: int, eos: frozenset[int] = frozenset()) -> dict[Text, float]:
        """The same for the target alone: one token after the other. Faults are not planted here."""
        law_of: dict[Text, float] = {}
        for output in itertools.product(range(self.pair.vocabulary), repeat=length):
            probability, text = 1.0, output
            for place, token in enumerate(output):
                probability *= float(self._law("target", (*self.prompt, *output[:place]), ())[token])
                if token in eos:
                    text = output[: place + 1]
                    break
            law_of[text] = probability if len(text) < length else law_of.get(text, 0.0) + probability
        return {text: probability for text, probability in law_of.items() if probability > 0}

    def tokens_per_step(self) -> float:
        """How many tokens the first step commits on average."""
        return sum(step.probability * len(step.tokens) for step in self.step(State.start(self.prompt)))

    def error(self, length: int, eos: frozenset[int] = frozenset()) -> float:
        """The largest difference between the two laws."""
        found, wanted = self.law_of_text(length, eos), self.law_of_plain_decoding(length, eos)
        return max(abs(found.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.keys() | wanted.keys())


@dataclass
class MergedToyEngine(ToyEngine):
    """Several whole paths are drafted and merged into one tree: SpecInfer's way.

    The shape is a star of equal chains; the first tokens of paths 0, 1, … are ranks 0, 1, … of the root.
    """

    def _chains(self) -> list[list[int]]:
        """The nodes of each path."""
        chains = []
        for node in self.shape.children[0]:
            chain = [node]
            while self.shape.children[chain[-1]]:
                chain.append(self.shape.children[chain[-1]][0])
            chains.append(chain)
        return chains

    def tree(self, drafts: list[Draft], position: int) -> DraftTree:
        chains = self._chains()
        roots = [draft.tokens[0] for draft in drafts]
        paths = [[[draft.tokens[node] for node in chain] for chain in chains] for draft in drafts]
        positions = torch.full((len(drafts),), position)
        q = None
        if self.drawing.sampled:
            width = self.shape.width if self.drawing is Drawing.INDEPENDENT else 1
            # The law behind a node's token stands at its parent; deeper nodes of a chain have rank 0.
            places = [
                self.shape.parents[node] * width + (self.shape.ranks[node] if width > 1 else 0)
                for chain in chains
                for node in chain
            ]
            q = torch.from_numpy(np.stack([np.stack([draft.q[place] for place in places]) for draft in drafts]))
        return DraftTree.from_paths(roots, paths, positions, self.drawing, q=q)


@dataclass(frozen=True)
class Replay:
    draft: int
    branch: Branch[PlainVerdict]


@dataclass(frozen=True)
class TableNoise:
    """Given uniforms for a batch; what a sequence never asks for is one half."""

    accepts: Tensor  # [B, N, K]
    finals: Tensor  # [B, D + 1]

    @classmethod
    def of(cls, uniforms: list[dict[Key, float]], tree: DraftTree) -> TableNoise:
        accepts = np.full((len(uniforms), tree.size, max(tree.width, 1)), 0.5)
        finals = np.full((len(uniforms), tree.max_depth + 1), 0.5)
        for b, numbers in enumerate(uniforms):
            for (purpose, place, rank), u in numbers.items():
                if purpose == "accept":
                    accepts[b, place, rank] = u
                else:
                    finals[b, place] = u
        return cls(torch.from_numpy(accepts), torch.from_numpy(finals))

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        ranks = torch.as_tensor(rank).expand_as(nodes).clamp_max(self.accepts.shape[2] - 1)
        return self.accepts[torch.arange(nodes.shape[0]), nodes, ranks]

    def final(self, depths: Tensor) -> Tensor:
        return self.finals.gather(1, depths[:, None]).squeeze(1)

    def take(self, sequences: Tensor) -> TableNoise:
        return TableNoise(self.accepts[sequences], self.finals[sequences])

    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor:
        raise AssertionError("Gumbel noise is not enumerated")


def _choices(q: Row, drawing: Drawing, rank: int, elder: list[int]) -> list[tuple[int, float]]:
    """The tokens a child may be, with their probabilities, given its elder siblings."""
    if drawing is Drawing.FIXED:
        order = sorted(range(len(q)), key=lambda token: (-q[token], token))
        return [(order[rank], 1.0)] if rank < len(order) else []
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        q = q.copy()
        q[elder] = 0
        if q.sum() == 0:
            return []
        q = q / q.sum()
    return [(token, float(q[token])) for token in np.flatnonzero(q).tolist()]
