"""The continuations of a suffix, as a tree with confidences (after SuffixDecoding, Oliaro et al., 2024).

A whole suffix tree holds every suffix of a text, and nearly all of them nobody ever asks for. Here only an index is
kept: where runs of 1, 2, 4 and 8 tokens ended. For the suffix at hand it gives the *places* where it stood before, each
with the length of its match, and the part of the suffix tree below these places is unrolled when it is wanted. A token
costs four entries of a dictionary instead of one for each depth, and a text is taken out as exactly as it was put in.

What follows a node is guessed as in PPM (Cleary and Witten, 1984): from the longest matches by how often each token
followed there, and with what trust these leave over from the next shorter ones, and so on,

    confidence(x) = trust(longest) · count(x) / count   or, where x did not follow the longest,
    confidence(x) = (1 − trust(longest)) · trust(next) · count(x) / count   …

How far a match of some length can be trusted is measured as texts go on. A frequency alone cannot tell: what stood
there once has the frequency 1, after a match of one token as after one of twenty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

RUNS = (8, 4, 2, 1)
"""The lengths of the runs that are looked up. Between them, matches are measured by comparing tokens."""
PLACES = 16
"""Of each store so many places are looked at, those of long runs first, then the latest: a text that says the same a
thousand times must not cost a thousand looks."""
END = -1
"""Stands between the texts of a store."""
LONGEST = 24
"""Longer matches are trusted like one of this length."""
PACE = 0.03
"""The weight of one more token in a trust."""
OWN = (0.0, 0.37, 0.57, 0.66, 0.7, 0.72, 0.75, 0.78, 0.8, 0.83, 0.86, 0.89, 0.92, 0.95)
"""What to think of matches of 0, 1, 2, … tokens before there is experience: in the text that is being written,"""
EARLIER = (0.0, 0.22, 0.28, 0.33, 0.4, 0.4, 0.4, 0.42, 0.5, 0.75, 0.85, 0.9, 0.92, 0.95)
"""and in earlier outputs. Measured once on answers of the default model; longer matches count like the last."""


class Trust:
    """How often the next token was among those that had followed a match, by the length of the match."""

    def __init__(self, first: Many[float]) -> None:
        self.chances = [*first, *[first[-1]] * (1 + LONGEST - len(first))]

    def learn(self, length: int, right: bool) -> None:
        self.chances[length] += PACE * (right - self.chances[length])


class Store:
    """Texts, and the place of every short run in them.

    A run's latest place stands in a dictionary, and beside every place the one before it: chains of plain numbers,
    because ten thousand small lists would keep the garbage collector busier than all the rest. Places are numbered from
    the first token that ever was, so they stay what they are when old texts are dropped.
    """

    def __init__(self, trust: Trust, *, grows: bool) -> None:
        """`grows` is said of the text that is being written: past its end a copy goes on with itself."""
        self.trust, self.grows = trust, grows
        self.tokens: list[int] = []
        self._lengths: deque[int] = deque([0])
        self._dropped = 0
        # For each length of RUNS. A run is known by its hash: two that share one are told apart when comparing.
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in RUNS)  # run → where it ended last
        self._before: tuple[list[int], ...] = tuple([] for _ in RUNS)  # by place, the one before; 0 for none

    def __len__(self) -> int:
        """Tokens of all texts."""
        return len(self.tokens) - len(self._lengths) + 1

    def texts(self) -> Iterator[list[int]]:
        """The oldest first."""
        start = 0
        for length in self._lengths:
            yield self.tokens[start : start + length]
            start += length + 1

    def begin(self) -> None:
        """The next tokens are another text."""
        self.tokens.append(END)
        self._lengths.append(0)
        for before in self._before:
            before.append(0)

    def extend(self, more: Iterable[int]) -> None:
        """The last text goes on. A run is taken in when a token follows it, so the end never finds itself."""
        tokens = self.tokens
        old, start = len(tokens), len(tokens) - self._lengths[-1]
        tokens.extend(more)
        for run, latest, before in zip(RUNS, self._latest, self._before, strict=True):
            first = min(len(tokens), max(old, start + run))  # where the first run ends that a new token follows
            before.extend([0] * (first - old))
            around = tokens[first - run : -1]
            keys = map(hash, zip(*(around[place:] for place in range(run)), strict=False))
            for end, key in enumerate(keys, start=self._dropped + first):
                before.append(latest.get(key, 0))
                latest[key] = end
        self._lengths[-1] = len(tokens) - start

    def drop_first(self) -> None:
        """Take the oldest text out, with all its places. Another one must have begun. Chains simply end where the
        dropped part begins."""
        size = self._lengths.popleft()
        for run, latest, before in zip(RUNS, self._latest, self._before, strict=True):
            for end in range(run, size):
                key = hash(tuple(self.tokens[end - run : end]))
                if latest.get(key) == self._dropped + end:
                    del latest[key]
            del before[: size + 1]
        del self.tokens[: size + 1]
        self._dropped += size + 1

    def places(self, text: list[int], longest: int) -> list[Place]:
        """Where suffixes of the text, of at most `longest` tokens, stood before."""
        tokens, dropped = self.tokens, self._dropped
        found: dict[int, Place] = {}
        longest = min(longest, len(text))
        for run, latest, before in zip(RUNS, self._latest, self._before, strict=True):
            start = latest.get(hash(tuple(text[-run:])), 0) - dropped if run <= longest else 0
            looks = PLACES
            while start > 0 and looks:
                if start not in found:
                    length, most = 0, min(longest, start)
                    while length < most and tokens[start - 1 - length] == text[-1 - length]:
                        length += 1
                    if length:
                        found[start] = Place(self, start, length)
                        if len(found) == PLACES:
                            return list(found.values())
                start = before[start] - dropped
                looks -= 1
        return list(found.values())


class Place(NamedTuple):
    """Where `length` tokens equal those at the end of the text."""

    store: Store
    start: int
    """What followed stands here, counted in `store.tokens`."""
    length: int


class Group(NamedTuple):
    """The matches of one length in one store, asked what comes next."""

    trust: Trust
    length: int
    counts: dict[int, int]
    """How often each token came next; those that a longer match had named are left out."""


@dataclass
class Guess:
    """A tree for one text. Node 0 is the root; a parent comes before its child."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [1.0])
    """The chance that the text goes on along the path to a node."""
    asked: dict[int, list[Group]] = field(default_factory=dict)
    """For the nodes that were looked behind: who was asked, in this order."""

    def learn(self, text: Iterable[int]) -> None:
        """The text went on like this: whom to trust more, and whom less?"""
        node = 0
        for token in text:
            for group in self.asked.get(node, ()):
                right = token in group.counts
                group.trust.learn(group.length, right)
                if right:
                    break
            children = (child for child in range(node + 1, len(self.tokens)) if self.parents[child] == node)
            following = next((child for child in children if self.tokens[child] == token), None)
            if following is None:
                return
            node = following


@dataclass(frozen=True)
class Limits:
    """Of a tree."""

    nodes: int
    """Besides the root."""
    depth: int
    width: int
    """Children of one node."""
    value: float
    """A node of less value is not worth its row."""


class _Candidate(NamedTuple):
    """A node that may join the tree. The best one compares as the smallest, of equals the first seen."""

    loss: float  # minus its value
    order: int
    parent: int
    path: tuple[int, ...]
    places: list[Place]


def grow(root: int, places: list[Place], limits: Limits) -> Guess:
    """The most valuable nodes, best first: a value is a product of confidences, so no child is worth more than its
    parent, and the best candidate always hangs on what is there."""
    guess = Guess([root])
    places.sort(key=lambda place: -place.length)  # stable: of equal lengths those of the first store come first
    best = _Candidate(-1.0, 0, -1, (), places)
    waiting: list[_Candidate] = []
    order = 0
    for node in range(limits.nodes):  # every round looks behind a node and takes one more into the tree
        if len(best.path) < limits.depth:
            groups, following = _ask(best.places, best.path)
            guess.asked[node] = groups
            for token, chance in _chances(groups, limits.width):
                value = guess.values[node] * chance
                if value >= limits.value:
                    order += 1
                    heappush(waiting, _Candidate(-value, order, node, (*best.path, token), following[token]))
        if not waiting:
            break
        best = heappop(waiting)
        guess.tokens.append(best.path[-1])
        guess.parents.append(best.parent)
        guess.values.append(-best.loss)
    return guess


def _ask(places: list[Place], path: tuple[int, ...]) -> tuple[list[Group], dict[int, list[Place]]]:
    """What followed after a path at places that agree with it, longest matches first: by group, and by token."""
    depth = len(path)
    groups: list[Group] = []
    following: dict[int, list[Place]] = {}
    named: set[int] = set()
    counts: dict[int, int] = {}
    trust, length = None, 0
    for place in places:
        store, at = place.store, place.start + depth
        if at < len(store.tokens):
            token = store.tokens[at]
        elif store.grows:
            token = path[at - len(store.tokens)]
        else:
            continue
        if token == END:
            continue
        if store.trust is not trust or place.length != length:
            named.update(counts)
            counts = {}
            trust, length = store.trust, place.length
            groups.append(Group(trust, min(length + depth, LONGEST), counts))
        following.setdefault(token, []).append(place)
        if token not in named:
            counts[token] = counts.get(token, 0) + 1
    return [group for group in groups if group.counts], following


def _chances(groups: list[Group], width: int) -> list[tuple[int, float]]:
    """The likeliest tokens, in falling order, with their confidences."""
    chances: list[tuple[int, float]] = []
    left = 1.0
    for trust, length, counts in groups:
        trusted = left * trust.chances[length]
        total = sum(counts.values())
        chances.extend((token, trusted * count / total) for token, count in counts.items())
        left -= trusted
    chances.sort(key=lambda item: -item[1])
    return chances[:width]
