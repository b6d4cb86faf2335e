from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Checked, Observation
from forerun.drafters.lookahead import Lookahead, Options, Pool, mixed
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.drafters.contract import check_nodes
from tests.drafters.models import paths_of, sequence
from tests.engine.tiny import drain, tiny_model

PLENTY = Budget(64, 64)
Target = Callable[[list[int]], int]


def text(tokens: list[int], number: int = 0) -> Sequence:
    return Sequence(tokens, 10_000, id=number)


def moody(tokens: list[int]) -> int:
    """A target that looks at three tokens: the same words are often followed by the same, and not always."""
    last = [0, 0, *tokens][-3:]
    return (5 * last[-1] + last[-2] + (last[-3] == 1)) % 7


def counting(tokens: list[int]) -> int:
    return (tokens[-1] + 1) % 30


def paths_to(tree: DraftTree, row: int) -> list[list[int]]:
    return [list(path) for path in paths_of(tree, row)]


def check(tree: DraftTree, row: int, one: Sequence, target: Target) -> tuple[Checked, list[int]]:
    """What the target says about every node, and what it commits: the greedy rule."""
    paths = paths_to(tree, row)
    places = {tuple(path): place for place, path in enumerate(paths)}
    tokens = [one.tokens[-1], *(path[-1] for path in paths[1:])]
    parents = [-1, *(places[tuple(path[:-1])] for path in paths[1:])]
    best = [target(one.tokens + path) for path in paths]
    committed: list[int] = []
    while tuple(committed) in places:
        committed.append(best[places[tuple(committed)]])
    return Checked(tokens, parents, torch.tensor(best)[:, None]), committed


def step(made: Lookahead, running: list[Sequence], target: Target, budgets: list[Budget]) -> DraftTree:
    tree = made.draft(running, budgets)
    seen = []
    for row, one in enumerate(running):
        checked, committed = check(tree, row, one, target)
        one.commit(committed)
        seen.append(Observation(one, committed, {}, 0, checked))
    made.observe(seen)
    return tree


@dataclass
class Paper:
    """The method for one text, as the paper draws it: guesses by level and *absolute* position, so that nothing moves
    when tokens are committed, and for each guess the list of what it may see."""

    options: Options
    levels: list[dict[int, int]] = field(default_factory=list)
    runs: list[tuple[int, ...]] = field(default_factory=list)
    read: int = 0

    def guess(self, root: int, column: int, level: int) -> int | None:
        return self.levels[level].get(root + column + level)

    def fill(self, tokens: list[int]) -> None:
        root, missing = len(tokens) - 1, False
        for column in range(self.options.window):
            for level in range(0 if column else 1, self.options.level - 1):
                missing |= self.guess(root, column, level) is None
            if missing:
                start = mixed(len(tokens) + (column << 32)) % len(tokens)
                for level in range(self.options.level - 1):
                    guess = tokens[(start + level) % len(tokens)]
                    self.levels[level][root + column + level] = guess

    def paths(self, tokens: list[int]) -> set[tuple[int, ...]]:
        """Every row of the pass, by the tokens it sees after the root."""
        length, root = self.options.level, len(tokens) - 1
        self.levels = self.levels or [{} for _ in range(length - 1)]
        for end in range(max(length, self.read + 1), len(tokens) + 1):
            self.add(tuple(tokens[end - length : end]))
        self.read = len(tokens)
        fitting = [run[1:] for run in reversed(self.runs) if run[0] == tokens[-1]][: self.options.candidates]
        rows = {run[:end] for run in fitting for end in range(1, length)}
        if self.options.window:
            self.fill(tokens)
        for column in range(self.options.window):
            for level in range(length - 1):
                oldest = [self.guess(root, before, 0) for before in range(1, column + 1)]
                own = [self.guess(root, column, below) for below in range(1, level + 1)]
                rows.add(tuple(token for token in oldest + own if token is not None))
        return rows | {()}

    def add(self, run: tuple[int, ...]) -> None:
        if run in self.runs:
            self.runs.remove(run)
        self.runs.append(run)

    def learn(self, tokens: list[int], target: Target) -> None:
        """`tokens` is the text that the pass was made for."""
        length, root = self.options.level, len(tokens) - 1
        newest: dict[int, int] = {}
        for column in range(self.options.window):
            oldest = [self.levels[0][root + before] for before in range(1, column + 1)]
            own = [self.levels[level][root + column + level] for level in range(1, length - 1)]
            guess = newest[root + column + length - 1] = target(tokens + oldest + own)
            self.add((oldest[-1] if oldest else tokens[-1], *own, guess))
        self.levels = [*self.levels[1:], newest]


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    sizes=st.tuples(st.integers(0, 5), st.integers(2, 5), st.integers(1, 4)),
    reads=st.booleans(),
    target=st.sampled_from([moody, counting]),
)
def test_equals_the_papers_window(prompt: list[int], sizes: tuple[int, int, int], reads: bool, target: Target) -> None:
    window, level, candidates = sizes
    options = Options(window=window, level=level, candidates=candidates, prompt=reads)
    made, paper, one = Lookahead(options), Paper(options), text(list(prompt))
    for _ in range(12):
        before = list(one.tokens)
        if not reads:
            paper.read = len(before)
        wanted = paper.paths(before)
        tree = step(made, [one], target, [PLENTY])
        assert set(map(tuple, paths_to(tree, 0))) == wanted
        paper.learn(before, target)
    plain = list(prompt)
    while len(plain) < len(one.tokens):
        plain.append(target(plain))
    assert one.tokens == plain


def test_the_window_is_a_comb() -> None:
    options = Options(window=3, level=4, candidates=1, prompt=False)
    one = text([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    tree = Lookahead(options).draft([one], [PLENTY])
    a, b, c = (mixed(10 + (column << 32)) % 10 for column in range(3))
    run = [[10 + (start + level) % 10 for level in range(3)] for start in (a, b, c)]
    spine = (run[1][0], run[2][0])
    assert paths_of(tree, 0) == [
        (),
        (run[0][1],),
        (run[0][1], run[0][2]),
        spine[:1],
        (*spine[:1], run[1][1]),
        (*spine[:1], run[1][1], run[1][2]),
        spine,
        (*spine, run[2][1]),
        (*spine, run[2][1], run[2][2]),
    ]


def test_the_window_finds_what_no_text_has_shown() -> None:
    """A target that says how long the text is never repeats itself: from the text alone nothing could be drafted."""
    passes = {}
    for window in (0, 5):
        made, one = Lookahead(Options(window=window, level=4)), text([0, 0])
        passes[window] = 0
        while len(one.tokens) < 102:
            step(made, [one], len, [PLENTY])
            passes[window] += 1
        assert one.tokens[2:] == list(range(2, len(one.tokens)))
    assert passes[0] == 100
    assert passes[5] < 40


@pytest.mark.parametrize(("window", "level", "candidates"), [(5, 4, 5), (3, 2, 4), (0, 5, 3), (7, 3, 1)])
def test_tight_budgets_are_shared(window: int, level: int, candidates: int) -> None:
    options = Options(window=window, level=level, candidates=candidates)
    one = text([1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1] * 3)
    for nodes in range(40):
        for depth in range(9):
            made = Lookahead(options)
            tree = made.draft([one], [Budget(nodes, depth)])
            drafted = int((tree.parents >= 0).sum())
            assert drafted <= nodes
            assert int(tree.depths.max()) <= depth
            assert drafted > 0 or min(nodes, depth) < 1
            columns = made._columns_for(Budget(nodes, depth))
            assert made._rows(columns) <= nodes
            checked, _ = check(tree, 0, one, moody)
            made.observe([Observation(one, [9], {}, 0, checked)])
            assert len(made._states[one.id].columns) >= columns or min(nodes, depth) < 1
    assert Lookahead(options)._columns_for(PLENTY) == window


def test_changing_budgets_cost_columns_and_never_the_text() -> None:
    chosen = random.Random(1)
    made, one = Lookahead(Options()), text([1, 2, 3])
    for _ in range(60):
        step(made, [one], moody, [Budget(chosen.choice([0, 1, 4, 9, 64]), chosen.choice([0, 1, 3, 64]))])
    plain = [1, 2, 3]
    while len(plain) < len(one.tokens):
        plain.append(moody(plain))
    assert one.tokens == plain


def test_a_batch_equals_each_alone() -> None:
    limits = [PLENTY, Budget(7, 3), Budget(0, 0), Budget(20, 64)]
    together = [sequence(number, vocabulary=7) for number in range(4)]
    alone = [sequence(number, vocabulary=7) for number in range(4)]
    made, others = Lookahead(Options()), [Lookahead(Options()) for _ in alone]
    for _ in range(10):
        tree = step(made, together, moody, limits)
        for row, (other, one, limit) in enumerate(zip(others, alone, limits, strict=True)):
            assert paths_of(step(other, [one], moody, [limit]), 0) == paths_of(tree, row)
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_a_text_that_stepped_back_goes_on_like_a_new_one() -> None:
    made, one = Lookahead(Options()), text([1, 2, 3, 1, 2])
    for _ in range(5):
        step(made, [one], moody, [PLENTY])
    made.forget(one)
    made.forget(one)
    checked, _ = check(Lookahead(Options()).draft([one], [PLENTY]), 0, one, moody)
    made.observe([Observation(one, [4], {}, 0, checked)])  # of a text that was never drafted for
    fresh = Lookahead(Options())
    assert paths_of(made.draft([one], [PLENTY]), 0) == paths_of(fresh.draft([one], [PLENTY]), 0)


def test_the_pool_keeps_what_was_used_last() -> None:
    pool = Pool(per_token=2, first_tokens=2)
    for run in ([1, 5], [1, 6], [1, 5], [1, 7]):
        pool.add(run)
    assert pool.after(1, 9) == [(7,), (5,)]
    assert pool.after(1, 1) == [(7,)]
    pool.add([2, 5])
    assert pool.after(1, 1) == [(7,)]  # asking is using
    pool.add([3, 5])
    assert pool.after(2, 9) == []
    assert (len(pool.after(1, 9)), len(pool.after(3, 9)), len(pool)) == (2, 1, 3)
    for token in range(1000):
        pool.add([token // 5 % 3, token])
    assert len(pool) == 4


def run(**options: Any) -> tuple[Any, Engine]:
    target = tiny_model()
    made = Engine(target, Lookahead(Options(**options)), slots=512)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    return drain(made, [Request([7, 8, 9, number], params) for number in range(3)]), made


@pytest.mark.parametrize("reads", [True, False])
def test_a_tiny_model_is_drafted_well_and_always_the_same(reads: bool) -> None:
    texts, made = run(prompt=reads)
    assert made.statistics.accepted > 0
    assert made.statistics.tokens_per_pass > 1.1
    again, other = run(prompt=reads)
    assert again == texts
    assert other.statistics.accepted_by_depth == made.statistics.accepted_by_depth


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": -1}, "window is -1: give a whole number from 0 to 32"),
        ({"level": 1}, "level is 1: give a whole number from 2 to 16"),
        ({"candidates": 0}, "candidates is 0: give a whole number from 1 to 32"),
        ({"candidates": 2.5}, "candidates is 2.5: give"),
        ({"prompt": 1}, "prompt is 1: give true or false"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)


def test_without_a_window_nothing_is_asked_of_the_target() -> None:
    assert Lookahead(Options(window=0)).top == 0
    assert Lookahead(Options()).top == 1


@pytest.mark.parametrize("batch", [1, 8])
def test_time_is_printed(batch: int) -> None:
    chosen, made = random.Random(0), Lookahead(Options())
    running = [sequence(number, length=1000, vocabulary=400) for number in range(batch)]
    drafting, learning = [], []
    for _ in range(100):
        start = time.perf_counter()
        tree = made.draft(running, [PLENTY] * batch)
        drafting.append(time.perf_counter() - start)
        seen = []
        for row, one in enumerate(running):
            committed = [chosen.randrange(400)]
            one.commit(committed)
            seen.append(Observation(one, committed, {}, 0, check_nodes(tree, row, 1, chosen)))
        start = time.perf_counter()
        made.observe(seen)
        learning.append(time.perf_counter() - start)
    medians = [1e6 * sorted(spent)[50] for spent in (drafting, learning)]
    print(f"lookahead, batch {batch}: {medians[0]:.0f} µs to draft, {medians[1]:.0f} µs to learn")
