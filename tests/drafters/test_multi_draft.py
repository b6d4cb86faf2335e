"""Several drafts against a slow reference that reads every path from scratch, and the law of what they lead to."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from forerun.core import exact
from forerun.core import tree as tree_module
from forerun.core.drawing import Drawing
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters import multi_draft, run_ahead
from forerun.drafters.drafter import Budget
from forerun.drafters.find import Setup
from forerun.drafters.multi_draft import MultiDraft, Options, make
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch
from forerun.models.heads.shared_draft import frozen_shared_draft, new_shared_draft
from forerun.models.storage import Storage
from forerun.models.target import Output
from forerun.models.transformer import Transformer
from tests.drafters.contract import REQUESTS
from tests.drafters.models import VOCABULARY, accept_some, paths_of, sequence, setup, slow_law, tiny, twin
from tests.engine.test_engine import forward
from tests.engine.tiny import drain, tiny_model

AMPLE = Budget(256, 64)
CASES = [(1, 1, 4), (1, 3, 3), (2, 1, 3), (2, 2, 3), (3, 2, 2)]
"""Models, samples, length."""


def drafter_of(models: int, samples: int, length: int, slots: int = 2048) -> MultiDraft:
    return MultiDraft([tiny(1 + number) for number in range(models)], samples, length, VOCABULARY, slots)


def lengths_of(paths: int, length: int, budget: Budget) -> list[int]:
    """The nodes are dealt out one by one, to each path in turn."""
    dealt = [0] * paths
    for node in range(max(0, budget.nodes)):
        dealt[node % paths] += 1
    return [max(0, min(each, length, budget.depth)) for each in dealt]


def slow_path(drafter: MultiDraft, text: Sequence, index: int, length: int) -> tuple[list[int], list[Tensor]]:
    """One path, and the laws behind its tokens."""
    sample, number = divmod(index, len(drafter.ahead))
    model = drafter.ahead[number].model
    assert isinstance(model, Transformer)
    noise = StepNoise(torch.tensor([text.seed]), torch.tensor([text.position + 1]))
    path: list[int] = []
    laws: list[Tensor] = []
    for depth in range(length):
        params = text.params
        if params.greedy:
            params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        q = slow_law(model, text, path, params, VOCABULARY)
        if text.params.greedy or text.coupled:
            race = torch.ones(VOCABULARY) if text.params.greedy else noise.race(torch.tensor([depth]), VOCABULARY)[0]
            order = (q / race).argsort(descending=True)[: int((q > 0).sum())].tolist()
            rank = sample if depth == 0 else 0
            if rank >= len(order):
                break
            path.append(order[rank])
        else:
            u = noise.draft(torch.tensor([number * 64 + depth]), drafter.samples)[0, sample]
            path.append(int(exact.draw(q, u)))
        laws.append(q)
    return path, laws


def compare(drafter: MultiDraft, tree: DraftTree, texts: Many[Sequence], budgets: Many[Budget]) -> None:
    """Every tree holds the slow paths, and every draw has its law, in the order of the paths."""
    for row, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
        lengths = lengths_of(len(drafter.ahead) * drafter.samples, drafter.length, budget)
        slow = [slow_path(drafter, text, index, length) for index, length in enumerate(lengths)]
        wanted = {tuple(path[:size]) for path, _ in slow for size in range(len(path) + 1)}
        nodes = paths_of(tree, row)
        assert set(nodes) == wanted
        assert len(nodes) == len(wanted)
        if tree.q is None or tree.q_rows is None or text.params.greedy or text.coupled:
            continue
        for node, beginning in enumerate(nodes):
            size = len(beginning)
            through = [(path, laws) for path, laws in slow if len(path) > size and tuple(path[:size]) == beginning]
            draws = [child for child in tree.children[row, node].tolist() if child >= 0]
            assert [int(tree.tokens[row, child]) for child in draws] == [path[size] for path, _ in through]
            for rank, (_, laws) in enumerate(through):
                kept = tree.q[row, tree.q_rows[row, node, rank]]
                torch.testing.assert_close(kept, laws[size], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_a_slow_reference(case: tuple[int, int, int]) -> None:
    """Requests of every kind in one batch, with budgets of their own, through steps of good and bad luck."""
    drafter, chosen = drafter_of(*case), random.Random(3)
    texts = [sequence(number, params, length=5 + number) for number, params in enumerate(REQUESTS)]
    for step in range(3):
        budgets = [AMPLE if step == 0 else Budget(chosen.randint(0, 9), chosen.randint(0, 3)) for _ in texts]
        tree = drafter.draft(texts, budgets)
        assert tree.drawing is Drawing.INDEPENDENT
        compare(drafter, tree, texts, budgets)
        for ahead in drafter.ahead:
            ahead.cache.check_integrity()
        for row, text in enumerate(texts):
            text.commit(accept_some(tree, row, chosen))


@pytest.mark.parametrize("case", CASES)
def test_a_batch_equals_each_alone(case: tuple[int, int, int]) -> None:
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS)]
    budgets = [AMPLE, Budget(3, 2), AMPLE, Budget(5, 5), AMPLE, AMPLE]
    together = drafter_of(*case).draft(texts, budgets)
    for row, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
        alone = drafter_of(*case).draft([text], [budget])
        assert paths_of(together, row) == paths_of(alone, 0)
        assert alone.drawing is (Drawing.FIXED if text.coupled or text.params.greedy else Drawing.INDEPENDENT)


def some_tokens(seed: int, step: int) -> Transformer:
    """A draft that shares a target's matrices and knows every so manieth token."""
    target = tiny(seed)
    return frozen_shared_draft(new_shared_draft(target, 2, ids=torch.arange(1, VOCABULARY, step)), target)


@pytest.mark.parametrize("samples", [1, 2])
def test_drafts_that_know_some_tokens_equal_a_slow_reference(samples: int) -> None:
    drafter, chosen = MultiDraft([some_tokens(1, 2), some_tokens(2, 3)], samples, 3, VOCABULARY, 2048), random.Random(3)
    texts = [sequence(number, params, length=5 + number) for number, params in enumerate(REQUESTS)]
    for _ in range(2):
        tree = drafter.draft(texts, [AMPLE] * len(texts))
        compare(drafter, tree, texts, [AMPLE] * len(texts))
        drawn = {token for row in range(len(texts)) for path in paths_of(tree, row) for token in path}
        assert drawn <= {*range(1, VOCABULARY, 2), *range(1, VOCABULARY, 3)}
        assert len(drawn) > 5
        for row, text in enumerate(texts):
            text.commit(accept_some(tree, row, chosen))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(seed=3), SamplingParams(temperature=0.0)])
def test_a_draft_none_of_whose_tokens_is_allowed_still_has_a_law(params: SamplingParams) -> None:
    drafter = MultiDraft([some_tokens(1, 8)], 2, 2, VOCABULARY, 512)
    forbidden = replace(params, logit_bias=dict.fromkeys(range(1, VOCABULARY, 8), -float("inf")))
    tree = drafter.draft([sequence(1, forbidden)], [AMPLE])
    assert tree.max_depth <= 2


def refused_and_kept(drafter: MultiDraft, case: tuple[int, int, int], seed: int) -> tuple[int, int]:
    """Drafts through a history of acceptance and refusal; returns how many trees there were, and how many of them
    differ from what a drafter without a past makes of the same text."""
    chosen = random.Random(seed)
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS[:4])]
    trees = different = 0
    for _ in range(12):
        turn = [text for text in texts if chosen.random() < 0.8] or texts[:1]
        budgets = [Budget(chosen.choice([0, 2, 5, 20]), chosen.choice([1, 2, 3, 4])) for _ in turn]
        tree = drafter.draft(turn, budgets)
        anew = drafter_of(*case).draft([twin(text) for text in turn], budgets)
        for row, text in enumerate(turn):
            trees += 1
            different += paths_of(tree, row) != paths_of(anew, row)
            text.commit(accept_some(tree, row, chosen))
        for text in texts:  # some go on without being drafted for
            if text not in turn and chosen.random() < 0.5:
                text.commit([chosen.randrange(VOCABULARY)])
    return trees, different


@pytest.mark.parametrize("case", CASES)
def test_the_past_leaves_no_trace(case: tuple[int, int, int]) -> None:
    assert refused_and_kept(drafter_of(*case), case, seed=4)[1] == 0


def test_a_cache_that_keeps_refused_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(guess: run_ahead._Guess, text: list[int]) -> list[int]:
        unread = guess.run.unread(guess.index)
        new = len(text) - 1 - guess.run.length(guess.index)
        return list(range(unread + min(len(guess.run.nodes(guess.index)[0]), new)))

    monkeypatch.setattr(run_ahead._Guess, "kept", keeps)
    trees, different = refused_and_kept(drafter_of(2, 2, 3), (2, 2, 3), seed=4)
    assert different > trees / 10


def test_accepted_rows_stay_and_are_not_read_again() -> None:
    """Also where paths of one model share their nodes: at so low a temperature all draws are the same."""
    drafter, text = drafter_of(1, 3, 4), sequence(1, SamplingParams(temperature=1e-4))
    tree = drafter.draft([text], [AMPLE])
    assert (tree.size, tree.width) == (5, 3)
    text.commit([*tree.tokens[0, 1:].tolist(), 3])  # all four, and a bonus
    batches: list[int] = []
    model = drafter.ahead[0].model
    forward_rows = model.forward_rows

    def counted(batch: Batch, storage: Storage, layers: Many[int] = ()) -> Output:
        batches.append(batch.rows)
        return forward_rows(batch, storage, layers)

    model.forward_rows = counted  # type: ignore[method-assign]
    drafter.draft([text], [AMPLE])
    # The last of the four was a leaf, which was never read: it and the bonus are; then three levels of three paths.
    assert batches == [2, 3, 3, 3]


def test_models_may_have_other_sizes_and_less_room() -> None:
    """A smaller vocabulary, a larger one, a short context, and a cache for one text of two."""
    models = [tiny(1, vocabulary=30), tiny(2, vocabulary=50), tiny(3, context_length=14)]
    drafter = MultiDraft(models, 2, 4, VOCABULARY, 2048)
    texts = [sequence(number, params) for number, params in enumerate(REQUESTS)]
    tree = drafter.draft(texts, [AMPLE] * len(texts))
    assert tree.q is not None
    assert tree.q.shape[2] == VOCABULARY
    compare_depths = [len(path) for path in paths_of(tree, 0)]
    assert max(compare_depths) == 4
    small = MultiDraft([tiny(1), tiny(2)], 2, 4, VOCABULARY, slots=32)
    tree = small.draft(texts[:2], [AMPLE] * 2)
    assert [len(paths_of(tree, row)) > 1 for row in range(2)] == [True, False]


# --- the law of the text ----------------------------------------------------------------------------------------

TARGET = tiny_model(1)
PROMPT = [11, 22, 33, 7]
PARAMS = SamplingParams(temperature=1.2, top_k=4, frequency_penalty=0.7, max_tokens=4, ignore_eos=True, n=1000)
"""The first token comes with the prompt's own pass; the others may be drafted, two of them at once."""


def near(factor: float) -> Transformer:
    """A draft that knows the candidates and is too sure of them, or not sure enough."""
    model = deepcopy(TARGET)
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def expected() -> dict[tuple[int, ...], float]:
    """The law of the first three tokens, by enumeration."""
    bare = LawSettings.of([replace(PARAMS, n=1, frequency_penalty=0.0)])  # the penalty is applied by hand
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        after: dict[tuple[int, ...], float] = {}
        for path, chance in level.items():
            logits = forward(TARGET, [*PROMPT, *path])[-1:].clone()
            for token in path:
                logits[0, token] -= PARAMS.frequency_penalty
            p = law(logits, bare)[0]
            after |= {(*path, token): chance * float(p[token]) for token in p.nonzero()[:, 0].tolist()}
        level = after
    return level


def p_value(models: str, samples: int) -> float:
    """Of the texts that requests without a seed got, under the target's law."""
    drafts = {"a": near(0.3), "b": near(3.0)}
    made = make(Options(models, samples, 2), Setup(TARGET, 4096, drafts.__getitem__))
    engine = Engine(TARGET, made, slots=4096, max_batch=128, max_rows=4096)
    wanted = expected()
    counts = dict.fromkeys(wanted, 0)
    for _ in range(2):
        for text in drain(engine, [Request(PROMPT, PARAMS)])[0]:
            counts[tuple(text[:3])] += 1  # what cannot occur is a KeyError
    rates = engine.statistics.acceptance_by_depth
    assert len(rates) == 2
    assert 0.2 < min(rates) <= max(rates) < 0.999, "drafts must be accepted and refused, or nothing is tested"
    total = sum(counts.values())
    often = [path for path, chance in wanted.items() if total * chance >= 10]
    observed = [counts[path] for path in often]
    chances = [total * wanted[path] for path in often]
    return float(chisquare([*observed, total - sum(observed)], [*chances, total - sum(chances)]).pvalue)


@pytest.mark.parametrize(("models", "samples"), [("a,b", 1), ("a", 3), ("a,b", 2)])
def test_without_a_seed_the_law_is_the_targets(models: str, samples: int) -> None:
    assert p_value(models, samples) > 1e-4


def test_the_laws_of_another_model_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = multi_draft._Step._kept

    def exchanged(self: multi_draft._Step, drafted: list[list[multi_draft._Drawn]], longest: int) -> Tensor:
        swapped = kept(self, drafted[::-1], longest)
        mine = kept(self, drafted, longest)
        return torch.where((mine > 0) & (swapped > 0), swapped, mine)  # where the tree would be refused at once

    monkeypatch.setattr(multi_draft._Step, "_kept", exchanged)
    assert p_value("a,b", 1) < 1e-4


def test_draws_that_were_merged_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens that count as one draw. It moves the law by a hundredth, too little to see in samples; so the draws
    themselves are looked at."""
    texts = [sequence(number, SamplingParams(temperature=0.3)) for number in range(4)]
    drafter = drafter_of(1, 3, 3)
    tree = drafter.draft(texts, [AMPLE] * 4)
    assert int((tree.children >= 0).sum()) == 4 * 3 * 3 > int((tree.parents >= 0).sum())
    compare(drafter, tree, texts, [AMPLE] * 4)
    merge = tree_module._merge
    monkeypatch.setattr(tree_module, "_merge", lambda paths, keep_multiplicity: merge(paths, False))
    with pytest.raises(AssertionError):
        compare(drafter, drafter_of(1, 3, 3).draft(texts, [AMPLE] * 4), texts, [AMPLE] * 4)


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs models: name smaller ones of the family with models=NAME,NAME"),
        ({"models": " , "}, "needs models"),
        ({"models": "a", "samples": 0}, "samples is 0: give a whole number from 1 to 32"),
        ({"models": "a", "length": 65}, "length is 65: give a whole number from 1 to 64"),
        ({"models": "a,b,a"}, "names a model twice in 'a,b,a': raise samples for more paths"),
        ({"models": "a,b", "samples": 17}, "34 paths of 4 tokens: lower samples or length to at most 32"),
        ({"models": "a,b", "samples": 16, "length": 9}, "32 paths of 9 tokens: lower"),
    ],
)
def test_refusals(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)  # type: ignore[arg-type]


def test_a_draft_that_reads_chains_only_has_one_path() -> None:
    class Chains(Transformer):
        branches = False

    chains = tiny(1)
    chains.__class__ = Chains
    with pytest.raises(ValueError, match="the draft model a cannot read a tree: let it draft one path, with samples=1"):
        make(Options("a"), setup(draft=chains))
    assert not make(Options("a", samples=1), setup(draft=chains)).branches
    assert make(Options("a,b", samples=1), setup(draft=chains)).branches
