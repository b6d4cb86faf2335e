"""Prompt lookup: what followed the last words when they stood in the text before.

The longest suffix of the text that occurs earlier is looked up, and what came after it there is copied. Where the copy
reaches the end of the text it goes on with itself, so a text that repeats a short pattern is drafted at full length.
Several earlier places give several copies, merged into one tree: those of the longest match first, the latest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.none import roots_only
from forerun.drafters.tree_spec import MAX_DEPTH, MAX_NODES, TreeSpec

PLACES = 32
"""Of each match length so many earlier places are looked at, the latest first: a text that says the same a thousand
times must not cost a thousand looks."""


@dataclass(frozen=True)
class Options:
    tokens: int = 8
    """How many tokens are copied."""
    max_match: int = 4
    """The longest suffix that is looked up."""
    min_match: int = 2
    """The shortest. 1 drafts nearly always and is seldom right."""
    candidates: int = 1
    """How many different copies are drafted side by side."""
    tree: str = ""
    """Instead of tokens and candidates: "8" for one copy of 8 tokens, "fixed:3,1,1,1" for three of 4."""

    def __post_init__(self) -> None:
        for name, most in (("tokens", MAX_DEPTH), ("max_match", 64), ("min_match", 64), ("candidates", 32)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"the ngram option {name} is {value!r}: give a whole number from 1 to {most}")
        if self.min_match > self.max_match:
            raise ValueError(
                f"the ngram option min_match is {self.min_match} and max_match {self.max_match}: give a min_match that "
                f"is not above max_match"
            )
        if self.tree:
            spec = TreeSpec.parse(self.tree)
            if spec.kind not in {"chain", "fixed"} or any(width != 1 for width in spec.numbers[1:]):
                raise ValueError(
                    f'ngram cannot make the tree {self.tree!r}: write "8" for one copy or "fixed:3,1,1,1" for three'
                )

    @property
    def copies(self) -> tuple[int, int]:
        """How many, and how long."""
        if not self.tree:
            return self.candidates, self.tokens
        spec = TreeSpec.parse(self.tree)
        return (1 if spec.kind == "chain" else spec.numbers[0]), spec.depth


def make(options: Options, setup: Setup) -> Drafter:
    return NGram(options)


class Index:
    """Where each run of min_match to max_match tokens ended in one text. It grows with the text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.lengths = range(shortest, longest + 1)
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in self.lengths]
        self._indexed = 0

    def update(self, text: list[int]) -> None:
        """Take in all ends that have a token after them; so the suffix of the text never finds itself."""
        for end in range(self._indexed + 1, len(text)):
            for length, ends in zip(self.lengths, self._ends, strict=True):
                if length <= end:
                    ends.setdefault(tuple(text[end - length : end]), []).append(end)
        self._indexed = len(text) - 1

    def matches(self, text: list[int]) -> Iterator[int]:
        """Ends of what equals a suffix of the text: the longest first, of those the latest."""
        for length, ends in zip(reversed(self.lengths), reversed(self._ends), strict=True):
            if length <= len(text):
                yield from ends.get(tuple(text[-length:]), [])[: -PLACES - 1 : -1]


@dataclass
class _Trie:
    """Copies that share their beginnings. Node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) → node

    def add(self, path: list[int], most: int) -> None:
        """As much of the path as leaves the trie with at most that many nodes."""
        node = 0
        for token in path:
            child = self.children.get((node, token))
            if child is None:
                if len(self.tokens) >= most:
                    return
                child = self.children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child


class NGram:
    drawing = Drawing.FIXED
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, options: Options) -> None:
        self.options = options
        self.candidates, self.tokens = options.copies
        self.branches = self.candidates > 1
        self._indices: dict[int, Index] = {}

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tries = [self._trie(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        size = max(len(trie.tokens) for trie in tries)
        if size == 1:
            return roots_only(sequences)
        trees = [(trie.tokens, trie.parents) for trie in tries]
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences])

    def observe(self, observations: Many[Observation]) -> None:
        """Committed tokens are read from the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)

    def _trie(self, sequence: Sequence, budget: Budget) -> _Trie:
        text = sequence.tokens
        trie = _Trie([text[-1]])
        length = min(self.tokens, budget.depth, budget.nodes)
        if length < 1:
            return trie
        index = self._indices.get(sequence.id)
        if index is None:
            index = self._indices[sequence.id] = Index(self.options.min_match, self.options.max_match)
        index.update(text)
        copies: set[tuple[int, ...]] = set()
        for end in index.matches(text):
            path = copied(text, end, length)
            if tuple(path) not in copies:
                copies.add(tuple(path))
                trie.add(path, 1 + min(budget.nodes, MAX_NODES))
                if len(copies) == self.candidates:
                    break
        return trie


def copied(text: list[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on; past the end of the text, the copy itself is what follows."""
    path = text[start : start + length]
    period = len(text) - start
    while len(path) < length:
        path.append(path[-period])
    return path
