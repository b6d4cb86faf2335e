"""Retrieval (REST, He et al. 2023): what followed the last words wherever they stand in a datastore.

The longest suffix of the text that the store has is looked up. What follows it at its places there becomes a trie, and
the nodes that most places go through become the tree. A node's share of the places is the product of the frequencies
along its path, so the best nodes are a connected tree. It is a function of committed texts
alone (how far the store is trusted is learnt from all of them): fixed children.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import logs_of
from forerun.drafters.datastore import DEPTH, Datastore, Match
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.kinds import CHEAP_NODES
from forerun.drafters.none import roots_only
from forerun.drafters.suffix_tree import EARLIER, Trust
from forerun.drafters.suffix_tree import LONGEST as LONGEST_TRUSTED

PLACES = 512
"""Of a match that occurs more often so many places are looked at, evenly spread. They tell the frequency of a token
that is worth a row of the target's pass well enough, and more would take longer."""
LONGEST = DEPTH // 2
"""Of a match, and of what is drafted after it: together they must not be longer than what the store has sorted."""


@dataclass(frozen=True)
class Options:
    store: str = ""
    """The datastore: a file that `forerun datastore build` made with the tokenizer of the model."""
    tokens: int = 8
    """How many tokens ahead are drafted."""
    max_match: int = 16
    """The longest suffix of the text that is looked up."""
    min_match: int = 2
    """The shortest. 1 drafts nearly always and is seldom right."""
    candidates: int = 0
    """How many nodes the tree has at most: those that the store has seen most often. 0 for as many as this device
    checks at little more than the cost of one."""
    min_confidence: float = 0.02
    """A token is drafted if the chance that it is right is at least this: its share of what followed the match, times
    how often the text went on as the store knows it after matches of that length."""

    def __post_init__(self) -> None:
        if not self.store:
            raise ValueError(
                "the drafter retrieval needs a datastore: make one with `forerun datastore build FOLDER --out FILE`, "
                "and name it with store=FILE"
            )
        most = {"tokens": LONGEST, "max_match": LONGEST, "min_match": LONGEST, "candidates": 256}
        for name, limit in most.items():
            value: object = getattr(self, name)
            least = 0 if name == "candidates" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
                raise ValueError(
                    f"the retrieval option {name} is {value!r}: give a whole number from {least} to {limit}"
                )
        chance: object = self.min_confidence
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise ValueError(f"the retrieval option min_confidence is {chance!r}: give a number from 0 to 1")
        if self.min_match > self.max_match:
            raise ValueError(
                f"the retrieval option min_match is {self.min_match} and max_match {self.max_match}: give a min_match "
                f"that is not above max_match"
            )


def make(options: Options, setup: Setup) -> Drafter:
    store = Datastore.open(Path(options.store).expanduser())
    made_for, vocabulary = store.header, setup.target.vocab_size
    if setup.fingerprint() != made_for.fingerprint if setup.fingerprint else made_for.vocabulary > vocabulary:
        raise ValueError(
            f"the datastore {options.store} was made with the tokenizer of {made_for.model or 'another model'}, which "
            f"is not that of this model: build it again with `forerun datastore build FOLDER --out FILE --model MODEL`"
        )
    return Retrieval(replace(options, candidates=options.candidates or setup.nodes), store, vocabulary)


@dataclass
class _Nodes:
    """A tree below its root, the most frequent first; parents are places in the tree, 0 the root."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=lambda: [1.0])
    """Of the root and of them: the chance that they are right."""
    length: int = 0
    """Of the match."""
    known: set[int] = field(default_factory=set)
    """The tokens that followed the match, drafted or not."""


class Retrieval:
    drawing = Drawing.FIXED
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, options: Options, store: Datastore, vocabulary: int) -> None:
        """`vocabulary` is the target's."""
        self.options = options
        self.store = store
        self.vocabulary = min(vocabulary, store.header.vocabulary)
        self.candidates = options.candidates or CHEAP_NODES
        self.branches = self.candidates > 1
        self._trust = Trust(EARLIER)
        self._asked: dict[int, _Nodes] = {}

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        found = [self._nodes(sequence.tokens, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        self._asked.update((sequence.id, nodes) for sequence, nodes in zip(sequences, found, strict=True))
        if not any(nodes.tokens for nodes in found):
            return roots_only(sequences)
        trees = [
            ([sequence.tokens[-1], *nodes.tokens], [-1, *nodes.parents])
            for sequence, nodes in zip(sequences, found, strict=True)
        ]
        values = logs_of([nodes.values for nodes in found])
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences], log_values=values)

    def observe(self, observations: Many[Observation]) -> None:
        """The store does not change; how far it can be trusted does."""
        for seen in observations:
            nodes = self._asked.pop(seen.sequence.id, None)
            if nodes is not None and nodes.length and seen.tokens:
                self._trust.learn(min(nodes.length, LONGEST_TRUSTED), seen.tokens[0] in nodes.known)

    def forget(self, sequence: Sequence) -> None:
        self._asked.pop(sequence.id, None)

    def _nodes(self, text: list[int], budget: Budget) -> _Nodes:
        most = min(self.candidates, budget.nodes)
        depth = min(self.options.tokens, budget.depth, most)
        if depth < 1:
            return _Nodes()
        longest = self.options.max_match
        while (match := self.store.longest(text, self.options.min_match, longest)) is not None:
            nodes = self._best(match, depth, most)
            if nodes.known:
                return nodes
            longest = match.length - 1  # documents end with it, wherever it occurs
        return _Nodes()

    def _best(self, match: Match, depth: int, most: int) -> _Nodes:
        """The `most` nodes that most places go through. Of equal ones the shallower, then the smaller token.

        Places come in the order of what follows them, so those that go through a node are neighbours: a node begins
        where a continuation differs from the one before it, at its own depth or above.
        """
        text = self.store.continuations(match, depth, PLACES)  # [C, depth]
        count = len(text)
        alive = np.logical_and.accumulate(text < self.vocabulary, 1)
        begins = np.ones_like(alive)
        np.logical_or.accumulate(text[1:] != text[:-1], 1, out=begins[1:])
        # Level after level in one line. A level's first place begins something, so nothing runs on into the next.
        starts = np.flatnonzero(begins.T)
        weights = np.diff(starts, append=depth * count) * alive.T.ravel()[starts]  # 0 where a document has ended
        order = np.argsort(-weights, kind="stable")[:most]
        trust = self._trust.chances[min(match.length, LONGEST_TRUSTED)]
        order = order[weights[order] * trust > max(0.0, self.options.min_confidence * count - 1e-9)]
        above = np.searchsorted(starts, starts[order] - count, "right") - 1
        places = {-1: 0}
        nodes = _Nodes(length=match.length, known=set(text[alive[:, 0], 0].tolist()))
        nodes.values += (weights[order] * (trust / count)).tolist()
        for node, parent, start in zip(order.tolist(), above.tolist(), starts[order].tolist(), strict=True):
            level, row = divmod(start, count)
            nodes.parents.append(places[parent])
            nodes.tokens.append(int(text[row, level]))
            places[node] = len(nodes.tokens)
        return nodes
