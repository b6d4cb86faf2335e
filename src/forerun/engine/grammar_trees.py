"""What a grammar makes of drafts: those that break it leave the target's pass, and what it forces is drafted for free.

Both must leave the law alone, whatever rule judges. Let p be the law behind a node, with the grammar's mask.

*Pruning.* A drafted token x that breaks the grammar has p(x) = 0 and is always refused. Where tokens were chosen, not
drawn, it can simply go. Where they were drawn from q it cannot: that x was drawn says something about the draw, and
what is drawn instead has to come from the remainder [p − q]+, not from p. So the draw stays in the tree, as a leaf, and
only its row leaves the pass. What was drafted below x is never reached and goes.

*Forcing.* Which token x is forced behind a node follows from the path to it. So x may be drafted there as a draw from
the law that is 1 at x, instead of whatever the drafter drew, and judged by p like any other draw. Behind x the
drafter's own draws stay, if x was among what it drew: that says nothing about what it drew behind x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from forerun.core.tree import DraftTree, LogValues
from forerun.engine.grammar_walk import Walk

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Room:
    """For the drafts of one text: so many nodes besides the root, so deep."""

    nodes: int
    depth: int


@dataclass
class _Draws:
    """One tree as lists. Nodes keep their numbers; those that went have left `kept`."""

    tokens: list[int]
    parents: list[int]
    draws: list[list[tuple[int, int]]]  # for each node: the children drawn there, with the rows of q behind them
    kept: set[int]
    free_row: int  # the row of q behind the first forced token; those of others follow
    sampled: bool
    broken: set[int] = field(default_factory=set)  # draws that stay in the tree and have no row in the pass
    forced: list[int] = field(default_factory=list)  # tokens with a row of q of their own
    path: list[int] = field(default_factory=list)  # tokens between the root and where the walk stands
    certain: set[int] = field(default_factory=set)  # nodes whose token is forced where they stand

    def apply(self, walk: Walk, room: Room, silent: int = 0) -> None:
        """`silent` rows of the pass are taken by nodes that are not drafts."""
        self._visit(0, walk, [])
        self._extend(walk, room, silent)

    def _visit(self, node: int, walk: Walk, known: list[int]) -> None:
        """Prune below a node that the walk stands at. `known` tokens are forced there, as was found further up."""
        drawn = self.draws[node]
        if not drawn:
            return
        if walk.over:
            self._drop(node)
            return
        known = known or walk.forced_next()
        if known:
            self._force(node, known[0])
            drawn = self.draws[node]
        seen: set[int] = set()
        left: list[tuple[int, int]] = []
        for child, row in drawn:
            if child not in seen and child not in self.broken:
                seen.add(child)
                self._judge(child, walk, known[1:])
            if child in self.kept:
                left.append((child, row))
        self.draws[node] = left

    def _judge(self, child: int, walk: Walk, known: list[int]) -> None:
        token = self.tokens[child]
        if walk.enter(token):
            self.path.append(token)
            self._visit(child, walk, known)
            self.path.pop()
            walk.leave()
            return
        self._drop(child)
        if not self.sampled:
            self.kept.discard(child)
        elif not self._possible(token, walk):
            self.broken.add(child)

    def _possible(self, token: int, walk: Walk) -> bool:
        """Whether the mask where the walk stands says otherwise than the walk: then the target has to be asked."""
        return bool(walk.mask_here(self.path)[token])

    def _force(self, node: int, token: int) -> None:
        """The draws at a node become one of the forced token."""
        child = next((child for child, _ in self.draws[node] if self.tokens[child] == token), None)
        for other, _ in self.draws[node]:
            if other != child:
                self._drop(other)
                self.kept.discard(other)
        if child is None:
            child = self._add(node, token)
        self.certain.add(child)
        self.draws[node] = [(child, self._row_of(token))]

    def _extend(self, walk: Walk, room: Room, silent: int) -> None:
        """What is forced behind leaves, as far as there is room."""
        left = room.nodes - silent - (len(self.kept) - len(self.broken) - 1)
        for leaf in sorted(self.kept - self.broken):
            if left <= 0:
                return
            if self.draws[leaf]:
                continue
            path = self._path_to(leaf)
            entered = 0
            while entered < len(path) and walk.enter(path[entered]):
                entered += 1
            most = min(left, room.depth - len(path)) if entered == len(path) else 0
            run = _run(walk, most)
            for _ in range(entered + len(run)):
                walk.leave()
            node = leaf
            for token in run:
                child = self._add(node, token)
                self.draws[node] = [(child, self._row_of(token))]
                node, left = child, left - 1

    def _add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.draws.append([])
        self.kept.add(len(self.tokens) - 1)
        self.certain.add(len(self.tokens) - 1)
        return len(self.tokens) - 1

    def values(self, told: Many[float] | None) -> dict[int, float] | None:
        """Of the nodes that stayed, as `DraftTree.log_values`, from what the drafter told: what is forced is as likely
        as what it stands behind."""
        if told is None:
            return None
        found = {0: 0.0}
        for node in sorted(self.kept - {0}):
            above = self.parents[node]
            known = node not in self.certain and told[above] > -math.inf
            found[node] = found[above] + (told[node] - told[above] if known else 0.0)
        return found

    def _row_of(self, token: int) -> int:
        if not self.sampled:
            return 0
        if token not in self.forced:
            self.forced.append(token)
        return self.free_row + self.forced.index(token)

    def _drop(self, node: int) -> None:
        """Everything below a node."""
        for child, _ in self.draws[node]:
            self._drop(child)
            self.kept.discard(child)
        self.draws[node] = []

    def _path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


def _run(walk: Walk, most: int) -> list[int]:
    """Forced tokens where the walk stands, which goes down along with them."""
    run: list[int] = []
    while len(run) < most:
        forced = walk.forced_next()[: most - len(run)]
        for token in forced:
            if not walk.enter(token):
                return run
            run.append(token)
        if not forced:
            break
    return run


def constrain(tree: DraftTree, walks: Many[Walk | None], rooms: Many[Room]) -> tuple[DraftTree, list[frozenset[int]]]:
    """The trees of texts with a grammar pruned, with what it forces, and for each tree the nodes that need no row in
    the target's pass. Trees of other texts stay as they are. The host has to know the drafts for this."""
    if all(walk is None for walk in walks):
        return tree, [frozenset()] * len(walks)
    if tree.planted is not None:
        return _constrain_lists(tree, walks, rooms)
    return _constrain_tensors(tree, walks, rooms)


def _constrain_lists(
    tree: DraftTree, walks: Many[Walk | None], rooms: Many[Room]
) -> tuple[DraftTree, list[frozenset[int]]]:
    assert tree.planted is not None
    trees: list[tuple[list[int], list[int]]] = []
    counts: list[int] = []
    made: list[_Draws | None] = []
    for (tokens, parents), silent, walk, room in zip(
        tree.planted.trees, tree.planted.silent, walks, rooms, strict=True
    ):
        if walk is None:
            trees.append((tokens, parents))
            counts.append(silent)
            made.append(None)
            continue
        end = len(tokens) - silent
        draws: list[list[tuple[int, int]]] = [[] for _ in range(end)]
        for node in range(1, end):
            draws[parents[node]].append((node, 0))
        own = _Draws(tokens[:end], parents[:end], draws, set(range(end)), 0, sampled=False)
        own.apply(walk, room, silent)
        made.append(own)
        nodes = sorted(own.kept)
        # Behind them the silent nodes that still have somebody to stand behind; these are numbered from `end` on.
        known = {node: place for place, node in enumerate(nodes)}
        kept_tokens = [own.tokens[node] for node in nodes]
        kept_parents = [-1, *(known[own.parents[node]] for node in nodes[1:])]
        beyond: dict[int, int] = {}
        for node in range(end, len(tokens)):
            above = known.get(parents[node]) if parents[node] < end else beyond.get(parents[node])
            if above is not None:
                beyond[node] = len(kept_tokens)
                kept_tokens.append(tokens[node])
                kept_parents.append(above)
        trees.append((kept_tokens, kept_parents))
        counts.append(len(beyond))
    log_values = None if tree.log_values is None else partial(_values_of_lists, tree.log_values, made)
    grown = DraftTree.of_lists(trees, tree.planted.root_positions, counts, log_values=log_values)
    return grown, [frozenset()] * len(walks)


def _values_of_lists(told: LogValues, made: Many[_Draws | None]) -> list[Many[float] | None]:
    result: list[Many[float] | None] = []
    for values, own in zip(told(), made, strict=True):
        found = None if own is None else own.values(values)
        result.append(values if found is None else list(found.values()))
    return result


def _constrain_tensors(
    tree: DraftTree, walks: Many[Walk | None], rooms: Many[Room]
) -> tuple[DraftTree, list[frozenset[int]]]:
    sampled = tree.q_rows is not None
    columns = [part.to(HOST).tolist() for part in (tree.tokens, tree.parents, tree.children)]
    rows = columns[2] if tree.q_rows is None else tree.q_rows.to(HOST).tolist()
    first = 0 if tree.q is None else tree.q.shape[1]
    made: list[_Draws] = []
    for b, (walk, room) in enumerate(zip(walks, rooms, strict=True)):
        tokens, parents, children = (column[b] for column in columns)
        draws = [
            [(child, row) for child, row in zip(below, laws, strict=True) if child >= 0]
            for below, laws in zip(children, rows[b], strict=True)
        ]
        kept = {0, *(node for node, parent in enumerate(parents) if parent >= 0)}
        own = _Draws(tokens, parents, draws, kept, first, sampled)
        if walk is not None:
            own.apply(walk, room)
        made.append(own)
    return _built(tree, made), [frozenset(own.broken) for own in made]


def _built(tree: DraftTree, made: list[_Draws]) -> DraftTree:
    """Padded to one size again. Nodes that went are padding."""
    size = max(len(own.tokens) for own in made)
    width = max(len(drawn) for own in made for drawn in own.draws)
    shape = (len(made), size)
    tokens = torch.zeros(shape, dtype=torch.int64)
    parents = torch.full(shape, -1)
    children = torch.full((*shape, width), -1)
    q_rows = torch.zeros((*shape, width), dtype=torch.int64)
    depth = 0
    for b, own in enumerate(made):
        tokens[b, 0] = own.tokens[0]
        depths = {0: 0}
        for node in sorted(own.kept - {0}):
            tokens[b, node], parents[b, node] = own.tokens[node], own.parents[node]
            depths[node] = depths[own.parents[node]] + 1
        depth = max(depth, *depths.values())
        for node, drawn in enumerate(own.draws):
            for rank, (child, row) in enumerate(drawn):
                children[b, node, rank], q_rows[b, node, rank] = child, row
    return DraftTree.build(
        tokens,
        parents,
        tree.positions[:, 0].to(HOST),
        tree.drawing,
        q=None if tree.q is None else _with_forced(tree.q, [own.forced for own in made]),
        children=children,
        q_rows=None if tree.q is None else q_rows,
        max_depth=depth,
        max_draws=max(sum(map(len, own.draws)) for own in made),
        check=False,
        log_values=None if tree.log_values is None else partial(_padded_values, tree.log_values, made, size),
    )


def _padded_values(told: LogValues, made: Many[_Draws], size: int) -> list[Many[float] | None]:
    found = [own.values(values) for values, own in zip(told(), made, strict=True)]
    return [None if own is None else [own.get(node, -math.inf) for node in range(size)] for own in found]


def _with_forced(q: Tensor, forced: Many[list[int]]) -> Tensor:
    """q [B, R, V], and behind its rows the laws of the forced tokens, which are certain."""
    most = max(map(len, forced))
    if not most:
        return q
    certain = q.new_zeros(q.shape[0], most, q.shape[2])
    for b, tokens in enumerate(forced):
        for place, token in enumerate(tokens):
            certain[b, place, token] = 1.0
    return torch.cat([q, certain], 1)
