"""Lookahead decoding (Fu et al., 2024): the target guesses its own text in parallel, as in a Jacobi iteration.

A *window* of W columns with N − 1 levels stands before the text. The token at level l of column j is a guess for the
position j + l after the root; level 0 holds the oldest guesses, each level above was made one step later, and level 0
of column 0 is the root itself. A row sees the root, the oldest guesses up to its own column, and its own column below
it. So the window is a tree like any other: level 0 is a chain under the root, and on each node of this chain, the root
included, a column hangs (W = 4, N = 4; a letter is a column, a digit a level):

    root ── b0 ── c0 ── d0
     a1      b1    c1    d1
     a2      b2    c2    d2

What the target finds most likely after the last node of a column is the guess of the next level, for the position
j + N − 1. The whole column with it is a run of N tokens, which goes to a *pool*, by its first token. Then level 0 is
dropped, all others move down, and where c tokens were committed the columns move left by c − 1. What stands ready in
the pool for the last committed token is drafted beside the window, in the same tree.

Most rows of the window are there to be computed and not to be accepted, but a guess that happens to be right counts
like any other draft: the target checks them all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Checked, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.none import roots_only

PER_TOKEN = 16
"""Runs that a pool keeps for one first token, the latest."""
FIRST_TOKENS = 8192
"""First tokens that a pool keeps runs for, the latest used."""


@dataclass(frozen=True)
class Options:
    window: int = 5
    """Columns of the window: how many positions ahead are guessed at a time; 0 leaves the pool alone."""
    level: int = 3
    """The length of the runs in the pool, N in the paper. The window has one level less. On the default model 4 costs
    half as many rows again and commits hardly more."""
    candidates: int = 5
    """How many runs of the pool are drafted side by side."""
    prompt: bool = True
    """Whether the pool also gets the runs of the committed text, beginning with the prompt."""

    def __post_init__(self) -> None:
        for name, least, most in (("window", 0, 32), ("level", 2, 16), ("candidates", 1, 32)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"the lookahead option {name} is {value!r}: give a whole number from {least} to {most}"
                )
        if not isinstance(self.prompt, bool):
            raise ValueError(f"the lookahead option prompt is {self.prompt!r}: give true or false")


def make(options: Options, setup: Setup) -> Drafter:
    return Lookahead(options)


class Pool:
    """What may follow a token: runs by their first token. What was not used longest is dropped first."""

    def __init__(self, per_token: int = PER_TOKEN, first_tokens: int = FIRST_TOKENS) -> None:
        self.per_token, self.first_tokens = per_token, first_tokens
        self._runs: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, run: Many[int]) -> None:
        first, rest = run[0], tuple(run[1:])
        runs = self._runs.get(first)
        if runs is None:
            runs = self._runs[first] = OrderedDict()
            if len(self._runs) > self.first_tokens:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(first)
        runs[rest] = None
        runs.move_to_end(rest)
        if len(runs) > self.per_token:
            runs.popitem(last=False)

    def after(self, first: int, count: int) -> list[tuple[int, ...]]:
        """Without their first token, the latest first."""
        runs = self._runs.get(first)
        if runs is None:
            return []
        self._runs.move_to_end(first)
        latest = reversed(runs)
        return [run for run, _ in zip(latest, range(count), strict=False)]

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))


@dataclass
class State:
    """Of one text: the window's columns, each with its levels from 0 on, and the pool."""

    columns: list[list[int]] = field(default_factory=list)
    pool: Pool = field(default_factory=Pool)
    read: int = 0
    """So many tokens of the text have their runs in the pool."""


@dataclass
class Trie:
    """Paths that share their beginnings. Node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """(parent, token) → node"""

    def add(self, node: int, path: Many[int], most: int) -> int:
        """As much of the path below a node as leaves the trie with at most that many nodes; returns where it ends."""
        for token in path:
            child = self.known.get((node, token))
            if child is None:
                if len(self.tokens) >= most:
                    break
                child = self.known[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
        return node


class Lookahead:
    drawing = Drawing.FIXED
    branches = True
    layers: tuple[int, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options
        self.top = 1 if options.window else 0
        self._states: dict[int, State] = {}

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tries = [self._trie(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        size = max(len(trie.tokens) for trie in tries)
        if size == 1:
            return roots_only(sequences)
        trees = [(trie.tokens, trie.parents) for trie in tries]
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences])

    def observe(self, observations: Many[Observation]) -> None:
        """The columns that were checked go to the pool with their new guesses, and the window moves on."""
        for seen in observations:
            state = self._states.get(seen.sequence.id)
            if state is None or seen.checked is None:
                continue
            runs = new_runs(state.columns, seen.checked)
            for run in runs:
                if run is not None:
                    state.pool.add(run)
            # A column that was not checked ends the window: those behind it would stand at the wrong place.
            moved = runs[max(0, len(seen.tokens) - 1) :]
            whole = moved.index(None) if None in moved else len(moved)
            state.columns = [run[1:] for run in moved[:whole] if run is not None]

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.id, None)

    def _trie(self, sequence: Sequence, budget: Budget) -> Trie:
        """The pool's candidates, which are the likelier ones and so the first to be verified, then the window."""
        text = sequence.tokens
        state = self._states.setdefault(sequence.id, State())
        if self.options.prompt:
            self._read(state, text)
        trie = Trie([text[-1]])
        most = min(budget.nodes, self._rows(self.options.window) + self.options.candidates * (self.options.level - 1))
        if min(most, budget.depth) < 1:
            return trie
        columns = self._columns_for(budget)
        for run in state.pool.after(text[-1], self.options.candidates):
            trie.add(0, run[: budget.depth], 1 + most - self._rows(columns))
        if columns:
            self._refill(state, text)
            place = 0  # on level 0
            for column, guesses in enumerate(state.columns[:columns]):
                if column:
                    place = trie.add(place, guesses[:1], 1 + most)
                trie.add(place, guesses[1:], 1 + most)
        return trie

    def _rows(self, columns: int) -> int:
        """Of the target's pass that so many columns need: the root stands for the first guess of the first."""
        return columns * (self.options.level - 1) - 1 if columns else 0

    def _columns_for(self, budget: Budget) -> int:
        """Under a tight budget window and candidates share the rows: a window that fills them all finds runs that there
        is no room to try. Columns are whole, or nothing would be learnt from them."""
        columns = self.options.window
        enough = self._rows(columns) + self.options.candidates * (self.options.level - 1)
        rows = budget.nodes if budget.nodes >= enough else budget.nodes // 2
        while columns and (self._rows(columns) > rows or columns + self.options.level - 3 > budget.depth):
            columns -= 1
        return columns

    def _refill(self, state: State, text: list[int]) -> None:
        """New columns begin as runs of the text, picked by position: random to all appearance, and always the same."""
        length = self.options.level - 1
        for column in range(len(state.columns), self.options.window):
            start = mixed(len(text) + (column << 32)) % len(text)
            state.columns.append([text[(start + level) % len(text)] for level in range(length)])

    def _read(self, state: State, text: list[int]) -> None:
        """The runs of the text that end in what was committed since the last time."""
        length = self.options.level
        for end in range(max(length, state.read + 1), len(text) + 1):
            state.pool.add(text[end - length : end])
        state.read = len(text)


def new_runs(columns: Many[list[int]], checked: Checked) -> list[list[int] | None]:
    """For each column of a window, what stood in it and the target's guess after it; None for one that was no part of
    the tree, as under a tight budget."""
    known = {pair: node for node, pair in enumerate(zip(checked.parents, checked.tokens, strict=True))}
    guesses = checked.top[:, 0].tolist()
    runs: list[list[int] | None] = []
    place: int | None = 0  # on level 0
    for column, guessed in enumerate(columns):
        if column and place is not None:
            place = known.get((place, guessed[0]))
        node = place
        for token in guessed[1:]:
            node = None if node is None else known.get((node, token))
        if place is None or node is None:
            runs.append(None)
        else:
            runs.append([checked.tokens[place], *guessed[1:], guesses[node]])
    return runs


def mixed(counter: int) -> int:
    """The output function of SplitMix64: neighbouring counters give numbers that have nothing in common."""
    mask = 2**64 - 1
    bits = (counter + 1) * 0x9E3779B97F4A7C15 & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return bits ^ bits >> 31
