"""Two drafters for one text: a cheap one where it is sure and another elsewhere, or both in one tree.

Every node of a proposal gets a *value*, the chance that it is accepted. A drafter that knows it says so
(`DraftTree.log_values`). For others it is measured while texts go on: how often the child of each rank at each depth
was the one that came. The values of a tree add up to the drafts that it is expected to have accepted, and both ways to
combine choose by them:

- `confident`: the first proposal where it promises as much as the second drafter has had accepted lately, which then
  need not draft at all; otherwise the better of the two;
- `merge`: both proposals as one tree, of which the most valuable nodes are kept.

The tree that results is a choice among nodes by what they are, which only fixed trees allow: of a sampled one the rest
would no longer be distributed as q. So both drafters must draft fixed trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import logs_of
from forerun.drafters.drafter import Budget, Checked, Drafter, Expects, Observation, PutsOff, SharesCache
from forerun.drafters.find import Setup, make_drafter, read_options, resolve
from forerun.drafters.kinds import CHEAP_NODES
from forerun.drafters.none import roots_only
from forerun.models.cache import KVCache

DEPTHS, RANKS = 16, 8
"""Nodes that are deeper, or have more elder siblings, count as the last of these."""
SLOWEST = 0.02
"""The weight of one more observation in an average, once there are many."""


@dataclass(frozen=True)
class Options:
    first: str = "suffix"
    """A drafter that costs little: it drafts for every text in every step."""
    second: str = "recycling"
    """The other one. It must draft fixed trees too, as draft_model does with tree=fixed:3,2,1."""
    mode: str = "merge"
    """"confident" takes the first one's tree where it promises enough, "merge" makes one tree of both."""
    tokens: int = 0
    """How many tokens are drafted, at most; 0 for as many as this device checks at little more than the cost of one."""
    min_confidence: float = 0.02
    """A token is drafted if the chance that it is accepted is at least this."""
    threshold: float = 1.0
    """In the mode "confident": a promise is enough from so many times what the second one has accepted on average."""
    first_options: str = ""
    """Options of the first drafter, as in "tokens=8,max_match=3"."""
    second_options: str = ""
    """Options of the second drafter, as in "model=smollm2-135m,tree=fixed:3,2,1"."""

    def __post_init__(self) -> None:
        for name in (self.first, self.second):
            if name == "combine":
                raise ValueError("combine cannot combine itself: name two other drafters with first=NAME second=NAME")
            if resolve(name)[0] == "parallel":
                raise ValueError("combine keeps drafts only, and parallel learns from rows beside them: use it alone")
        if self.mode not in {"confident", "merge"}:
            raise ValueError(f'the combine option mode is {self.mode!r}: write "confident" or "merge"')
        tokens: object = self.tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= 64:
            raise ValueError(f"the combine option tokens is {tokens!r}: give a whole number from 0 to 64")
        for name, most in (("min_confidence", 1), ("threshold", 100)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ValueError(f"the combine option {name} is {value!r}: give a number from 0 to {most}")
        read_options(self.first, pairs("first_options", self.first_options))
        read_options(self.second, pairs("second_options", self.second_options))


def pairs(name: str, text: str) -> dict[str, str]:
    """The options in "tokens=8,tree=fixed:3,2,1": a comma begins another one only where a name and = follow it."""
    options: dict[str, str] = {}
    key = ""
    for piece in text.split(",") if text.strip() else ():
        before, equals, value = piece.partition("=")
        if equals:
            key = before.strip()
            options[key] = value.strip()
        elif key:
            options[key] += f",{piece.strip()}"
        else:
            raise ValueError(f'the combine option {name} is {text!r}: write options as in "tokens=8,max_match=3"')
    return options


def make(options: Options, setup: Setup) -> Drafter:
    first = make_drafter(options.first, setup, pairs("first_options", options.first_options))
    second = make_drafter(options.second, setup, pairs("second_options", options.second_options))
    for place, name, drafter in (("first", options.first, first), ("second", options.second, second)):
        if drafter.drawing.sampled:
            raise ValueError(
                f"combine needs fixed trees and {name} would sample: ask it for one, as with "
                f"{place}_options=tree=fixed:3,2,1 or tree=dynamic:4,4,16, besides its other options"
            )
    return Combine(first, second, replace(options, tokens=options.tokens or setup.nodes))


@dataclass(frozen=True)
class Proposal:
    """A tree for one text. Node 0 is the root; a parent comes before its child and is worth no less."""

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @property
    def promise(self) -> float:
        """How many drafts it is expected to have accepted."""
        return sum(self.values) - 1


class Record:
    """What has become of a drafter's proposals."""

    def __init__(self) -> None:
        self.accepted = 1.0
        """Tokens of a proposal that came true, on average."""
        self.chances = [[0.4 / (1 + rank) ** 1.5 for rank in range(RANKS)] for _ in range(DEPTHS)]
        """By depth and rank: how often that child came where its parent had come."""
        self._seen = [0] * (1 + DEPTHS)  # observations of each depth, and of proposals as a whole

    def values(self, parents: Many[int]) -> list[float]:
        values, depths, children = [1.0], [0], [0] * len(parents)
        for parent in parents[1:]:
            depth, rank = depths[parent], children[parent]
            children[parent] += 1
            depths.append(depth + 1)
            values.append(values[parent] * self.chances[min(depth, DEPTHS - 1)][min(rank, RANKS - 1)])
        return values

    def learn(self, proposal: Proposal, text: Many[int]) -> None:
        """The text went on like this. That tells about all nodes on its way, drafted in the end or not."""
        node, length = 0, 0
        for depth, token in enumerate(text):
            children = [child for child, parent in enumerate(proposal.parents) if parent == node and child]
            if not children:
                break
            row, pace = self.chances[min(depth, DEPTHS - 1)], self._pace(min(depth, DEPTHS - 1))
            for rank, child in enumerate(children[:RANKS]):
                row[rank] += pace * ((proposal.tokens[child] == token) - row[rank])
            node = next((child for child in children if proposal.tokens[child] == token), -1)
            if node < 0:
                break
            length += 1
        self.accepted += self._pace(DEPTHS) * (length - self.accepted)

    def _pace(self, which: int) -> float:
        """Quick at first, as if the beginning were worth four observations."""
        self._seen[which] += 1
        return max(SLOWEST, 1 / (4 + self._seen[which]))


@dataclass(frozen=True)
class Part:
    """One of the two drafters, and what is known about it."""

    drafter: Drafter
    record: Record = field(default_factory=Record)
    proposals: dict[int, Proposal] = field(default_factory=dict)
    """The last ones, by sequence, until it is known what came."""

    def propose(self, sequences: Many[Sequence], budgets: Many[Budget]) -> list[Proposal]:
        if not sequences:
            return []
        tree = self.drafter.draft(sequences, budgets)
        told = [None] * len(sequences) if tree.log_values is None else tree.log_values()
        made = []
        for (nodes, tokens, parents), logs in zip(tree.lists(), told, strict=True):
            values = self.record.values(parents) if logs is None else [math.exp(logs[node]) for node in nodes]
            made.append(Proposal(tokens, parents, values))
        self.proposals.update((sequence.id, one) for sequence, one in zip(sequences, made, strict=True))
        return made

    def observe(self, observations: Many[Observation]) -> None:
        """Each drafter sees what it asked for and no more."""
        for seen in observations:
            proposal = self.proposals.pop(seen.sequence.id, None)
            if proposal is not None:
                self.record.learn(proposal, seen.tokens)
        self.drafter.observe([self._narrowed(seen) for seen in observations])

    def _narrowed(self, seen: Observation) -> Observation:
        own, checked = self.drafter, seen.checked
        if checked is not None and checked.top.shape[1] != own.top:
            checked = Checked(checked.tokens, checked.parents, checked.top[:, : own.top]) if own.top else None
        if checked is seen.checked and len(own.layers) == len(seen.features):
            return seen
        features = {layer: seen.features[layer] for layer in own.layers}
        return Observation(seen.sequence, seen.tokens, features, seen.start, checked)

    def forget(self, sequence: Sequence) -> None:
        self.proposals.pop(sequence.id, None)
        self.drafter.forget(sequence)


class Combine:
    drawing = Drawing.FIXED

    def __init__(self, first: Drafter, second: Drafter, options: Options) -> None:
        self.options = options
        self.first, self.second = self.parts = Part(first), Part(second)
        self.merges = options.mode == "merge"
        self.branches = self.merges or first.branches or second.branches
        self.layers = tuple(sorted({*first.layers, *second.layers}))
        self.top = max(first.top, second.top)

    def share(self, cache: KVCache) -> None:
        for part in self.parts:
            if isinstance(part.drafter, SharesCache):
                part.drafter.share(cache)

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        choices = [[proposal] for proposal in self.first.propose(sequences, budgets)]
        unsure = [
            b
            for b, budget in enumerate(budgets)
            if min(budget.nodes, budget.depth) > 0 and (self.merges or self._is_unsure(choices[b][0]))
        ]
        more = self.second.propose([sequences[b] for b in unsure], [budgets[b] for b in unsure])
        for b, proposal in zip(unsure, more, strict=True):
            choices[b].append(proposal)
            if not self.merges:
                choices[b] = [max(choices[b], key=lambda one: one.promise)]
        chosen = []
        for proposals, budget in zip(choices, budgets, strict=True):
            nodes = min(self.options.tokens or CHEAP_NODES, budget.nodes)
            chosen.append(merge(proposals, nodes, self.options.min_confidence))
        if all(len(proposal.tokens) == 1 for proposal in chosen):
            return roots_only(sequences)
        return DraftTree.of_lists(
            [(proposal.tokens, proposal.parents) for proposal in chosen],
            [sequence.position for sequence in sequences],
            log_values=logs_of([proposal.values for proposal in chosen]),
        )

    def observe(self, observations: Many[Observation]) -> None:
        self.first.observe(observations)
        self.second.observe(observations)

    def forget(self, sequence: Sequence) -> None:
        self.first.forget(sequence)
        self.second.forget(sequence)

    def gain(self, nodes: int | None) -> float:
        """What the second expects, where it knows of as many as are drafted here: the first seldom has a tree."""
        own, most = self.second.drafter, self.options.tokens or CHEAP_NODES
        if not isinstance(own, Expects) or own.gain(most) <= own.gain(most - 1):
            return 0.0
        return own.gain(most if nodes is None else min(nodes, most))

    def late(self) -> float:
        return sum(part.drafter.late() for part in self.parts if isinstance(part.drafter, PutsOff))

    def _is_unsure(self, proposal: Proposal) -> bool:
        return proposal.promise < self.options.threshold * self.second.record.accepted


def merge(proposals: Many[Proposal], nodes: int, least: float) -> Proposal:
    """One tree of the most valuable nodes. Where several drafters propose the same, the highest value counts; so no
    node is worth more than its parent, and what is kept hangs together."""
    tokens, parents, values = [proposals[0].tokens[0]], [-1], [1.0]
    known: dict[tuple[int, int], int] = {}  # (parent, token) → node
    for proposal in proposals:
        places = [0]
        for token, parent, value in zip(proposal.tokens[1:], proposal.parents[1:], proposal.values[1:], strict=True):
            key = (places[parent], token)
            node = known.get(key)
            if node is None:
                node = known[key] = len(tokens)
                tokens.append(token)
                parents.append(places[parent])
                values.append(value)
            else:
                values[node] = max(values[node], value)
            places.append(node)
    worth = [node for node in range(1, len(tokens)) if values[node] >= least]
    kept = [0, *sorted(worth, key=lambda node: (-values[node], node))[: max(0, nodes)]]
    new = {node: place for place, node in enumerate(kept)} | {-1: -1}
    return Proposal([tokens[node] for node in kept], [new[parents[node]] for node in kept], [values[n] for n in kept])
