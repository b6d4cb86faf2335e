"""The draft model against a slow reference that reads every path from scratch, one node after the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from scipy.stats import chisquare

from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters import layer_skip, run_ahead
from forerun.drafters.draft_model import DraftModel, Options, make
from forerun.drafters.drafter import Budget
from forerun.drafters.growing import _distinct
from forerun.drafters.run_ahead import RunAhead
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.batch import Batch
from forerun.models.storage import Storage
from forerun.models.target import Output
from forerun.models.transformer import Transformer
from tests.drafters.contract import REQUESTS
from tests.drafters.models import VOCABULARY, accept_some, paths_of, sequence, setup, tiny, twin
from tests.drafters.slow import SlowDrafter

TREES = (
    "4",
    "sampled:3,2,1",
    "fixed:3,2,1",
    "1,2,2",
    "dynamic:3,3,8",
    "dynamic:1,3,3",
    "dynamic:2,5,9",
    "static:14",
    "sequoia:14,4",
)
ACCURACIES = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]
"""By depth and rank: shapes whose nodes have different numbers of children."""
AMPLE = Budget(256, 64)


def drafter_of(tree: str, model: Transformer | None = None, slots: int = 2048) -> DraftModel:
    return DraftModel(RunAhead(model or tiny(1), slots), TreeSpec.parse(tree), VOCABULARY, ACCURACIES)


def compare(drafter: DraftModel, tree: DraftTree, texts: list[Sequence], budgets: list[Budget]) -> None:
    """Every tree is the slow drafter's, and every law that is kept is the one its children came from."""
    model = drafter.ahead.model
    assert isinstance(model, Transformer)
    for row, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
        slow = SlowDrafter(model, drafter.spec, text)
        if drafter.spec.dynamic:
            assert paths_of(tree, row) == slow.grown(budget)
            continue
        wanted = slow.shaped(budget)
        assert paths_of(tree, row) == [tuple(path) for path in wanted.values()]
        if tree.q is None or tree.q_rows is None:
            continue
        for node, path in wanted.items():
            if int(tree.children[row, node, 0]) >= 0:
                kept = tree.q[row, tree.q_rows[row, node, 0]]
                torch.testing.assert_close(kept, slow.law(path), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tree", TREES)
def test_drafts_equal_a_slow_reference(tree: str) -> None:
    """Requests of every kind in one batch, with budgets of their own, through steps of good and bad luck."""
    drafter, chosen = drafter_of(tree), random.Random(3)
    texts = [sequence(number, params, length=5 + number) for number, params in enumerate(REQUESTS)]
    for step in range(3):
        budgets = [AMPLE if step == 0 else Budget(chosen.randint(0, 6), chosen.randint(0, 3)) for _ in texts]
        drafted = drafter.draft(texts, budgets)
        compare(drafter, drafted, texts, budgets)
        drafter.ahead.cache.check_integrity()
        for row, text in enumerate(texts):
            text.commit(accept_some(drafted, row, chosen))


@pytest.mark.parametrize("tree", TREES)
def test_a_batch_equals_each_alone(tree: str) -> None:
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS)]
    together = drafter_of(tree).draft(texts, [AMPLE] * len(texts))
    for row, text in enumerate(texts):
        alone = drafter_of(tree).draft([text], [AMPLE])
        assert paths_of(together, row) == paths_of(alone, 0)


def refused_and_kept(drafter: DraftModel, tree: str, steps: int, seed: int) -> tuple[int, int]:
    """Drafts through a history of acceptance and refusal; returns how many trees there were, and how many of them
    differ from what a drafter without a past makes of the same text."""
    chosen = random.Random(seed)
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS[:4])]
    trees = different = 0
    for _ in range(steps):
        turn = [text for text in texts if chosen.random() < 0.8] or texts[:1]
        budgets = [Budget(chosen.choice([0, 2, 5, 20]), chosen.choice([1, 2, 3, 4])) for _ in turn]
        drafted = drafter.draft(turn, budgets)
        drafter.ahead.cache.check_integrity()
        anew = drafter_of(tree).draft([twin(text) for text in turn], budgets)
        for row, text in enumerate(turn):
            trees += 1
            different += paths_of(drafted, row) != paths_of(anew, row)
            text.commit(accept_some(drafted, row, chosen))
        for text in texts:  # some go on without being drafted for
            if text not in turn and chosen.random() < 0.5:
                text.commit([chosen.randrange(VOCABULARY)])
    return trees, different


@pytest.mark.parametrize("tree", TREES)
def test_the_past_leaves_no_trace(tree: str) -> None:
    assert refused_and_kept(drafter_of(tree), tree, steps=12, seed=4)[1] == 0


@pytest.mark.parametrize("tree", ["4", "sampled:3,2,1", "dynamic:3,3,8"])
def test_a_cache_that_keeps_refused_rows_is_seen(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault planted: the first guesses stay, right or wrong, as many as tokens were committed."""

    def keeps(guess: run_ahead._Guess, text: list[int]) -> list[int]:
        unread = guess.run.unread(guess.index)
        new = len(text) - 1 - guess.run.length(guess.index)
        return list(range(unread + min(len(guess.run.nodes(guess.index)[0]), new)))

    monkeypatch.setattr(run_ahead._Guess, "kept", keeps)
    trees, different = refused_and_kept(drafter_of(tree), tree, steps=12, seed=4)
    assert different > trees / 10


def test_accepted_rows_stay_and_are_not_read_again() -> None:
    drafter, text = drafter_of("4"), sequence(1, SamplingParams(temperature=0.0))
    tree = drafter.draft([text], [AMPLE])
    text.commit([*tree.tokens[0, 1:].tolist(), 3])  # all four, and a bonus
    batches = record_passes(drafter)
    drafter.draft([text], [AMPLE])
    # Of the four drafts the last was a leaf, which was never read: it and the bonus are; then three drafts.
    assert batches == [2, 1, 1, 1]


def record_passes(drafter: DraftModel, fatal: int = 0) -> list[int]:
    """The rows of each pass from now on. The `fatal`-th does half of its work and breaks off."""
    batches: list[int] = []
    forward = drafter.ahead.model.forward_rows

    def counted(batch: Batch, storage: Storage, layers: Many[int] = ()) -> Output:
        batches.append(batch.rows)
        output = forward(batch, storage, layers)
        if len(batches) == fatal:
            storage.keys[0][batch.slots] = 9.0
            raise KeyboardInterrupt
        return output

    drafter.ahead.model.forward_rows = counted  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize(
    ("tree", "passes"), [("4", [12, 1, 1, 1]), ("3,2,1", [12, 3, 6]), ("dynamic:3,3,8", [12, 3, 3])]
)
def test_a_level_is_one_pass_without_leaves(tree: str, passes: list[int]) -> None:
    drafter = drafter_of(tree)
    batches = record_passes(drafter)
    drafter.draft([sequence(1), sequence(2)], [AMPLE, AMPLE])
    assert batches == [2 * rows for rows in passes]


def test_long_texts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [sequence(number, params, length=20 * number + 1) for number, params in enumerate(REQUESTS)]
    whole = drafter_of("3,2").draft(texts, [AMPLE] * len(texts))
    monkeypatch.setattr(run_ahead, "PASS_ROWS", 16)
    monkeypatch.setattr(run_ahead, "SHORT", 3)
    drafter = drafter_of("3,2")
    batches = record_passes(drafter)
    parts = drafter.draft(texts, [AMPLE] * len(texts))
    assert max(batches) <= 3 * len(texts)
    assert [paths_of(parts, row) for row in range(len(texts))] == [paths_of(whole, row) for row in range(len(texts))]


def test_the_first_token_of_a_chain_follows_q() -> None:
    drafter = drafter_of("2", slots=256 * 16)
    counts = torch.zeros(VOCABULARY)
    q = torch.zeros(VOCABULARY)
    for start in range(0, 2048, 256):
        texts = [sequence(5) for _ in range(256)]
        for number, text in enumerate(texts, start=start):
            text.id, text.seed = number, 977 * number + 1
        tree = drafter.draft(texts, [AMPLE] * 256)
        assert tree.q is not None
        assert bool(tree.present.all())
        q = tree.q[0, 0]
        counts += tree.tokens[:, 1].bincount(minlength=VOCABULARY)
        for text in texts:
            drafter.forget(text)
    likely = q > 5 / 2048
    found = [*counts[likely].tolist(), float(counts[~likely].sum())]
    wanted = [*q[likely].tolist(), float(q[~likely].sum())]
    total = sum(wanted)
    assert chisquare(found, [2048 * share / total for share in wanted]).pvalue > 1e-3


def test_siblings_follow_q_without_what_was_drawn_before() -> None:
    q = torch.tensor([0.5, 0.3, 0.2, 0.0])
    u = torch.rand(4000, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    drawn = _distinct(q.expand(4000, 4), u)
    assert drawn[:, 3].tolist() == [-1] * 4000  # three tokens are possible
    orders = Counter(map(tuple, drawn[:, :3].tolist()))
    wanted = {order: float(q[order[0]] * q[order[1]] / (1 - q[order[0]])) for order in permutations(range(3))}
    assert set(orders) == set(wanted)
    assert (
        chisquare([orders[o] for o in wanted], [4000 * share for share in wanted.values()], sum_check=False).pvalue
        > 1e-3
    )


def test_q_is_kept_only_where_it_is_read() -> None:
    drafter = drafter_of("3,2")
    greedy, seeded, sampling = (sequence(n, p) for n, p in enumerate((REQUESTS[1], REQUESTS[2], REQUESTS[0])))
    fixed = drafter.draft([greedy, seeded], [AMPLE, AMPLE])
    assert (fixed.drawing, fixed.q) == (Drawing.FIXED, None)
    mixed = drafter_of("3,2").draft([greedy, sampling], [AMPLE, AMPLE])
    assert mixed.drawing is Drawing.WITHOUT_REPLACEMENT
    assert mixed.q is not None
    assert mixed.q.shape[1] == 4  # the root and its three children


@pytest.mark.parametrize("vocabulary", [VOCABULARY - 6, VOCABULARY + 6])
def test_a_draft_with_another_padding(vocabulary: int) -> None:
    """Its logits are fitted before the law, so q sums to 1 over the target's vocabulary."""
    drafter = drafter_of("3,2", tiny(1, vocabulary))
    texts = [sequence(n, params, vocabulary=VOCABULARY - 6) for n, params in enumerate(REQUESTS)]
    tree = drafter.draft(texts, [AMPLE] * len(texts))
    compare(drafter, tree, texts, [AMPLE] * len(texts))
    assert tree.q is not None
    assert tree.q.shape[2] == VOCABULARY
    torch.testing.assert_close(tree.q[0].sum(-1), torch.ones(tree.q.shape[1]))


def test_tokens_that_the_draft_does_not_know_do_no_harm() -> None:
    drafter = drafter_of("3,2", tiny(1, VOCABULARY - 6))
    text = sequence(1, vocabulary=VOCABULARY - 6)
    text.commit([VOCABULARY - 1, 2, VOCABULARY - 2])
    assert drafter.draft([text], [AMPLE]).size == 10


@pytest.mark.parametrize("tree", TREES)
def test_a_draft_does_not_read_past_its_context(tree: str) -> None:
    drafter, chosen = drafter_of(tree, tiny(1, context_length=16)), random.Random(5)
    text = sequence(1, length=11)
    deepest = []
    for _ in range(8):
        drafted = drafter.draft([text], [AMPLE])
        deepest.append(drafted.max_depth + text.position)
        text.commit([chosen.randrange(VOCABULARY)])
    assert max(deepest[:4]) <= 16  # the last token read is at position 15
    assert drafter.draft([text], [AMPLE]).size == 1


def test_a_full_cache_drafts_less_and_never_fails() -> None:
    drafter, chosen = drafter_of("3,2,1", slots=96), random.Random(6)
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS)]
    batches = record_passes(drafter)
    sizes: list[int] = []
    for _ in range(25):
        tree = drafter.draft(texts, [AMPLE] * len(texts))
        drafter.ahead.cache.check_integrity()
        anew = drafter_of("3,2,1").draft(texts, [AMPLE] * len(texts))
        for row, text in enumerate(texts):
            sizes.append(len(paths_of(tree, row)))
            assert sizes[-1] == 1 or paths_of(tree, row) == paths_of(anew, row)
            text.commit(accept_some(tree, row, chosen))
    assert sizes.count(1) > 20  # there was too little room
    assert len(sizes) - sizes.count(1) > 20  # for some
    assert sum(batches) < 25 * 6 * 60  # and texts did not push each other out all the time
    for text in texts:
        drafter.forget(text)
    assert drafter.ahead.cache.used == 0


def test_who_was_pushed_out_comes_back() -> None:
    ahead = RunAhead(tiny(1), slots=64)
    one, two = sequence(1, length=40), sequence(2, length=30)
    assert ahead.start([one], [0]).takes_part == [True]
    assert ahead.start([one, two], [0, 0]).takes_part == [True, False]
    ahead.forget(one)
    assert ahead.start([two], [0]).takes_part == [True]


def test_a_pass_that_breaks_off_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it breaks: while the prompt is read, at the root, or at a level."""
    monkeypatch.setattr(run_ahead, "PASS_ROWS", 8)
    monkeypatch.setattr(run_ahead, "SHORT", 3)
    for fatal in range(1, 7):  # three parts of the prompt, the root, two levels
        drafter, text = drafter_of("3,2,1"), sequence(3, length=25)
        record_passes(drafter, fatal)
        with pytest.raises(KeyboardInterrupt):
            drafter.draft([text], [AMPLE])
        text.commit([1, 2])
        tree = drafter.draft([text], [AMPLE])
        drafter.ahead.cache.check_integrity()
        assert paths_of(tree, 0) == paths_of(drafter_of("3,2,1").draft([twin(text)], [AMPLE]), 0)


def test_make_loads_the_model_and_refuses_what_cannot_be() -> None:
    made = make(Options(model="small", tree="fixed:2,2"), setup())
    assert (made.drawing, made.branches, made.layers) == (Drawing.FIXED, True, ())
    chain = make(Options(model="small"), setup())
    assert (chain.drawing, chain.branches) == (Drawing.IID, False)
    with pytest.raises(ValueError, match="needs a model: name a smaller one"):
        make(Options(), setup())  # and none comes with Forerun
    with pytest.raises(ValueError, match="not understood"):
        Options(model="small", tree="x")
    only_chains = tiny(1)
    only_chains.branches = False
    with pytest.raises(ValueError, match=r"small cannot read the tree 2,2: ask for a chain"):
        make(Options(model="small", tree="2,2"), setup(draft=only_chains))
    make(Options(model="small", tree="fixed:1,1"), setup(draft=only_chains))


@pytest.mark.parametrize("tree", ["static:26", "sequoia:26,6"])
def test_a_shape_that_nothing_was_measured_for_is_refused(tree: str) -> None:
    """Before a model is loaded; and where layers of the target draft."""

    def load(name: str) -> Transformer:
        raise AssertionError("too early")

    with pytest.raises(ValueError, match=f'tree {tree} comes from a measurement.*name a shape, as in "fixed:3,2,1"'):
        make(Options(model="small", tree=tree), replace(setup(), load=load))
    with pytest.raises(ValueError, match="comes from a measurement"):
        layer_skip.make(layer_skip.Options(layers="0", tree=tree), setup())
    drafter = DraftModel(RunAhead(tiny(1), 64), TreeSpec.parse(tree), VOCABULARY, ACCURACIES)
    assert drafter.branches
    assert max(len(children) for children in drafter.spec.shape.children) == drafter.spec.width


def test_a_draft_with_an_encoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(1)
    monkeypatch.setattr(model, "begin", lambda sequence, prompt: [0])
    with pytest.raises(ValueError, match="choose a decoder-only model"):
        drafter_of("2", model).draft([sequence(1)], [AMPLE])
