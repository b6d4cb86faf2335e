from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step_record import StepRecord
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Checked, Observation
from forerun.drafters.find import make_drafter
from forerun.drafters.none import NoDrafter
from forerun.drafters.parallel import ACCURACIES, Options, Parallel, Planner, Ranks, falling
from forerun.engine.engine import Engine
from forerun.engine.request import DraftOptions, Request
from forerun.models.batch import Batch
from forerun.models.heads.files import HeadFolder, write_head
from forerun.models.storage import Storage
from forerun.models.target import Output
from forerun.models.transformer import Transformer
from tests.drafters.contract import look_ahead
from tests.drafters.models import VOCABULARY, accept_some, paths_of, sequence, setup, slow_logits, tiny
from tests.engine.tiny import drain, tiny_model
from tests.models import rows as other_models
from tests.models.test_static import models

PLENTY = Budget(64, 64)
SHARP = ((0.9, 0.05), (0.8, 0.05), (0.7, 0.05), (0.6, 0.05))


def drafter(target: Transformer | None = None, count: int = 3, **options: Any) -> Parallel:
    target = tiny() if target is None else target
    noise = torch.randn(count, target.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return Parallel(Options(**options), target, noise)


# --- which row guesses what ------------------------------------------------------------------------------------


def answers(text: Many[int], ahead: int) -> list[int]:
    """What a target says `ahead` look-ahead rows behind a text, the likeliest first: it looks at every token."""
    return random.Random(f"{list(text)} {ahead}").sample(range(VOCABULARY), 8)


def check(tree: DraftTree, row: int, one: Sequence, top: int) -> Checked:
    """Each row by the way to it alone: first tokens, then look-ahead rows, which come in order."""
    _, tokens, parents = tree.rows()[row]
    best = []
    for node in range(len(tokens)):
        way: list[int] = []
        above = node
        while above > 0:
            way.insert(0, tokens[above])
            above = parents[above]
        drafts = [token for token in way if token < VOCABULARY]
        assert way[len(drafts) :] == list(range(VOCABULARY, VOCABULARY + len(way) - len(drafts)))
        best.append(answers([*one.tokens, *drafts], len(way) - len(drafts))[:top])
    return Checked(tokens, parents, torch.tensor(best))


@pytest.mark.parametrize("options", [{}, {"nodes": 40}, {"tree": "3"}, {"tree": "fixed:2,2"}, {"nodes": 4}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_what_was_said_behind_the_last_accepted_node(options: dict[str, Any], seed: int) -> None:
    """The next root stands behind it, so look-ahead row 1 has guessed what comes after that root."""
    chosen, made, one = random.Random(seed), drafter(**options), sequence(seed)
    drafted = depths = 0
    for _ in range(60):
        tree = made.draft([one], [PLENTY])
        ranks: dict[Ranks, int] = {}
        for path in paths_of(tree, 0)[1:]:
            rank = ranks[path[:-1]] = ranks.get(path[:-1], -1) + 1
            assert path[-1] == answers(one.tokens[:-1], len(path))[rank]
            drafted += 1
            depths = max(depths, len(path))
        checked, committed = check(tree, 0, one, made.top), accept_some(tree, 0, chosen)
        one.commit(committed)
        made.observe([Observation(one, committed, {}, 0, checked)])
    assert drafted > 40
    assert depths == made.plan._length(made.plan.rows, made.plan.depth)


class Revealing(Transformer):
    """Writes its positions: at position i stands the token i, up to the vocabulary. A look-ahead row says what comes
    after its own position, as any other does."""

    def forward_rows(
        self, batch: Batch, storage: Storage, layers: Many[int] = (), only: Many[int] | None = None
    ) -> Output:
        said = (batch.positions + 1) % self.vocab_size
        for segment in batch.segments:
            seen = torch.ones(segment.rows, segment.rows).tril() > 0
            if segment.ancestors is not None:
                nodes = segment.ancestors.shape[0]
                seen[-nodes:, -nodes:] = segment.ancestors
            for row, token in enumerate(segment.tokens.tolist()):
                above = [other for other in seen[row].nonzero()[:, 0].tolist() if segment.tokens[other] >= VOCABULARY]
                assert len(above) == max(0, token - VOCABULARY + 1), (
                    "a chain of look-ahead rows, and nobody sees others"
                )
        logits = 100.0 * torch.nn.functional.one_hot(said, self.vocab_size)
        return Output(logits if batch.wanted is None else logits[batch.wanted])


def revealing() -> Revealing:
    return Revealing(replace(tiny().config, context_length=200))


@pytest.mark.parametrize("greedy", [True, False])
def test_in_the_engine_positions_are_those_that_were_guessed(greedy: bool) -> None:
    """The target is sure of itself everywhere, so every draft that comes from the right row is right."""
    steps: list[StepRecord] = []
    target = revealing()
    made = Engine(
        target, Parallel(Options(tree="3", nodes=15), target, torch.zeros(3, 16)), slots=512, trace=steps.append
    )
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=42, ignore_eos=True)
    text = drain(made, [Request([0, 1, 2], params)])[0][0]
    assert text == [place % VOCABULARY for place in range(3, 45)]
    counts = made.statistics
    # The prompt, a step without drafts, then three drafts and the target's own token in each.
    assert [len(step.sequences[0].committed) for step in steps] == [1, 1, *[4] * 10]
    assert [len(step.sequences[0].tokens) - 1 for step in steps] == [0, 0, *[3] * 10]
    assert (counts.drafted, counts.accepted, counts.rows_wasted) == (30, 30, 0)
    assert counts.acceptance_by_depth == [1.0] * 3
    # Behind the root and behind every draft three look-ahead rows, as long as there is something to guess.
    # At the end four tokens are left: after a refusal one or two could still be guessed.
    assert [step.sequences[0].silent for step in steps] == [0, 3, *[12] * 9, 3]
    assert counts.rows == 3 + sum(1 + len(s.sequences[0].tokens) - 1 + s.sequences[0].silent for s in steps[1:])
    assert {kind for step in steps for kind in step.sequences[0].kinds} == {"accepted", "bonus"}


# --- the text is the target's ----------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=30),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=24),
    SamplingParams(seed=6, temperature=0.8, top_p=0.8, presence_penalty=0.4, max_tokens=24),
    SamplingParams(seed=7, top_k=4, n=2, max_tokens=15, logprobs=2),
]


class Hinted(Parallel):
    """Its guesses are given to it, so that they are good without training. The rows are as ever."""

    hints: Many[Many[int]] = ()

    def observe(self, observations: Many[Observation]) -> None:
        super().observe(observations)
        for seen in observations:
            known = len(self._guesses.get(seen.sequence.id, []))
            if known:
                self._guesses[seen.sequence.id] = [list(row) for row in self.hints[:known]]


def requests(number: int | None = None) -> list[Request]:
    params = MIXED if number is None else MIXED[number : number + 1]
    return [Request([7, 8, 9, place], one) for place, one in enumerate(params)]


@cache
def plain(number: int | None) -> list[list[list[int]]]:
    return drain(Engine(tiny_model(), NoDrafter(), slots=512), requests(number))


@pytest.mark.parametrize("number", [None, *range(len(MIXED))])
@pytest.mark.parametrize("options", [{}, {"nodes": 40}, {"tree": "fixed:6,3,2", "nodes": 64}, {"nodes": 3}], ids=str)
def test_texts_are_those_of_plain_decoding(number: int | None, options: dict[str, Any]) -> None:
    """Alone, where a rule walks along the path, and together, where all laws are made at once."""
    target = tiny_model()
    likely = [token for text in plain(None) for one in text for token in one]
    frequent = sorted(set(likely), key=lambda token: -likely.count(token))
    made = Hinted(Options(**options), target, torch.randn(3, 32, generator=torch.Generator().manual_seed(1)))
    made.hints = [frequent[:8]] * 3
    engine = Engine(target, made, slots=512)
    assert drain(engine, requests(number)) == plain(number)
    if number is None:
        assert engine.statistics.accepted > 0


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"presence_penalty": 0.7}])
def test_the_static_pass_reads_look_ahead_rows_like_the_plain_one(params: dict[str, Any]) -> None:
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
    asked = [Request([5, 6, 7, 5], settings), Request(list(range(1, 40)), settings)]
    traces: list[list[Any]] = []
    texts = []
    for target in models("two share, tied"):
        steps: list[StepRecord] = []
        texts.append(drain(Engine(target, drafter(target, nodes=24), slots=1024, trace=steps.append), asked))
        traces.append([(s.tokens, s.parents, s.silent) for step in steps for s in step.sequences])
    assert texts[0] == texts[1] == drain(Engine(models("two share, tied")[0], NoDrafter(), slots=1024), asked)
    assert traces[0] == traces[1], "the same guesses"
    assert any(len(tokens) > 1 for tokens, _, _ in traces[0])


@pytest.mark.parametrize("tied", [True, False])
def test_in_half_precision_too(tied: bool) -> None:
    target = other_models.tiny(replace(other_models.CONFIGS["two share, tied"], tied=tied))
    settings = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    asked = [Request([5, 6, 7, number], settings) for number in range(3)]
    expected = [drain(Engine(target, NoDrafter(), slots=512), [one])[0] for one in asked]
    made = Engine(target, drafter(target), slots=512)
    assert made.target.vocab_size == other_models.VOCABULARY
    found = drain(made, asked)
    assert made.statistics.drafted > 0
    if target.in_c is not None:  # elsewhere bfloat16 rounds a tree unlike a chain
        assert found == expected


@pytest.mark.parametrize("rule", [None, "sample_match"])
def test_without_a_seed_the_law_is_the_targets(rule: str | None) -> None:
    """Three tokens, of which the second and the third may be drafted."""
    target = tiny_model()
    params = SamplingParams(temperature=1.1, top_k=2, max_tokens=3, ignore_eos=True, n=1000)
    bare = LawSettings.of([replace(params, n=1)])
    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        laws = {text: law(slow_logits(target, [7, *text])[None], bare)[0] for text in wanted}
        wanted = {
            (*text, token): chance * float(laws[text][token])
            for text, chance in wanted.items()
            for token in laws[text].nonzero()[:, 0].tolist()
        }
    assert len(wanted) == 8
    second = list(dict.fromkeys(text[1] for text in wanted))
    made = Hinted(Options(tree=f"fixed:{len(second)}"), target, torch.zeros(1, 32))
    made.hints = [second]
    engine = Engine(target, made, slots=4096, max_batch=64, max_rows=4096, rule=rule)
    counts = dict.fromkeys(wanted, 0)
    for _ in range(3):
        for text in drain(engine, [Request([7], params)])[0]:
            counts[tuple(text)] += 1  # one that cannot occur is a KeyError
    assert engine.statistics.accepted > 2000
    assert (
        chisquare(list(counts.values()), [3000 * chance for chance in wanted.values()], sum_check=False).pvalue > 1e-4
    )


# --- rows and budgets ------------------------------------------------------------------------------------------


def guess(made: Parallel, one: Sequence, depths: int) -> None:
    made._guesses[one.id] = [list(range(10 * depth, 10 * depth + 8)) for depth in range(depths)]


def check_rows(made: Parallel, tree: DraftTree, one: Sequence, budget: Budget) -> list[int]:
    """Returns how many look-ahead rows hang behind each node."""
    _, tokens, parents = tree.rows()[0]
    drafted = len(tokens) - tree.silent[0]
    assert len(tokens) - 1 <= max(0, min(budget.nodes, made.plan.rows))
    assert all(token < VOCABULARY for token in tokens[:drafted])
    depths, chains, owner = [0], [0] * drafted, 0
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node:
            depths.append(depths[parent] + 1)
        if node >= drafted:
            first = token == VOCABULARY
            assert parent < drafted if first else (parent == node - 1 and tokens[parent] == token - 1)
            owner = parent if first else owner
            chains[owner] += 1
            assert depths[node] + 2 <= one.remaining, "what it guesses could be committed, and a token behind it"
        assert one.position + depths[node] < made.context_length
    assert all(depths[node] <= budget.depth for node in range(drafted))
    return chains


@pytest.mark.parametrize("options", [{}, {"tree": "fixed:2,2,1"}, {"tree": "3", "nodes": 9}], ids=str)
@pytest.mark.parametrize("known", [0, 2, 3])
def test_budgets_are_kept(options: dict[str, Any], known: int) -> None:
    made = drafter(**options)
    for nodes, depth in product(range(-1, 45), range(9)):
        one, budget = sequence(0), Budget(nodes, depth)
        guess(made, one, known)
        tree = made.draft([one], [budget])
        chains = check_rows(made, tree, one, budget)
        if min(nodes, depth) < 1:
            assert tree.size == 1
        elif not known:
            rows = min(nodes, made.plan.rows)
            assert chains == [min(rows, made.plan._length(rows, min(depth, 3)))]
        else:
            assert tree.max_depth >= 1, "guesses are used"


@pytest.mark.parametrize("left", range(1, 9))
@pytest.mark.parametrize("known", [0, 3])
def test_nothing_is_guessed_behind_the_end(left: int, known: int) -> None:
    """Of the text, or of what the model can read."""
    made = drafter(tiny(context_length=100), nodes=40)
    ends = Sequence([1] * 5, 20, output=[1] * (20 - left))
    full = Sequence([1] * (100 - left), 1000)
    for one, budget in ((ends, Budget(64, left - 1)), (full, Budget(64, 64))):
        guess(made, one, known)
        tree = made.draft([one], [budget])
        check_rows(made, tree, one, budget)
        if left == 1 and one is ends:
            assert tree.size == 1
    if left == 2:
        guess(made, ends, known)
        tree = made.draft([ends], [Budget(64, 1)])
        assert tree.silent == [0]
        assert (tree.size > 1) == (known > 0)


@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 9, 30])
def test_a_request_may_limit_drafts(nodes: int) -> None:
    target = revealing()
    steps: list[StepRecord] = []
    made = Engine(target, Parallel(Options(), target, torch.zeros(3, 16)), slots=512, trace=steps.append)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    limits = DraftOptions(nodes=nodes, depth=2)
    text = drain(made, [Request([0], params, draft=limits)])[0][0]
    assert text == list(range(1, 31))
    assert max(step.rows for step in steps) <= 1 + nodes
    most = max(len(step.sequences[0].committed) for step in steps)
    assert most == 1 + nodes if nodes < 2 else 2 <= most <= 3


def test_rows_go_where_they_promise_most() -> None:
    """The share of steps that have drafts, from a chain of two states that is followed step by step."""
    for accuracies, rows in product((ACCURACIES, SHARP), (1, 2, 3, 6, 15, 40)):
        plan = Planner(Options(), falling(accuracies, 4, 8), rows)
        best = 0.0
        for length, count in product(range(1, 5), range(rows + 1)):
            drafts = [path for path in plan.order if len(path) <= length][:count]
            chains = plan._chains(drafts, rows - len(drafts), length, 99)
            assert sum(chains.values()) + len(drafts) <= rows
            # Of a short chain the next tree has the upper depths alone.
            gain = sum(plan.values[path] for path in drafts)
            last = {path: plan.values[path] for path in [(), *drafts]}
            for path in drafts:
                last[path[:-1]] -= plan.values[path]
            assert sum(last.values()) == pytest.approx(1.0)
            upper = {n: sum(plan.values[path] for path in drafts if len(path) <= n) for n in range(5)}
            kept = sum(last[path] * upper[length] / gain for path, length in chains.items()) if gain else 0.0
            share = 0.0
            for _ in range(200):  # half a step at a time, or it might swing for ever
                share += (share * kept + (1 - share) - share) / 2
            assert plan._promise(drafts, chains) == pytest.approx(share * gain, abs=1e-6)
            best = max(best, share * gain)
        made = plan.layout(rows, 4, 4, 99)
        assert len(made.parents) <= 1 + rows
        assert 0 < len(made.picks) <= rows
        length = plan._length(rows, 4)
        drafts, chains = plan._plan(rows, length, length, 99)
        assert (len(drafts), sum(chains.values())) == (len(made.picks), len(made.steps))
        assert plan._promise(drafts, chains) == pytest.approx(best)
    assert len(made.steps) > len(made.picks) > 4


def test_a_tree_that_was_asked_for_is_drafted_whole() -> None:
    made, one = drafter(tree="fixed:3,2"), sequence(0)
    guess(made, one, 3)
    tree = made.draft([one], [PLENTY])
    assert paths_of(tree, 0)[1:] == [(0,), (1,), (2,), *product((0, 1, 2), (10, 11))]
    assert check_rows(made, tree, one, PLENTY)[0] == 2
    assert (made.top, made.branches) == (3, True)
    single = drafter(tree="2")
    assert (single.top, single.branches) == (1, False)
    guess(single, one, 3)
    assert paths_of(single.draft([one], [PLENTY]), 0) == [(), (0,), (0, 10)]


def test_accuracies_shape_the_tree() -> None:
    assert falling([[0.2, 0.5, 0.1]], 2, 2) == [[0.2, 0.2], [0.2, 0.2]]
    narrow = Parallel(Options(nodes=30), tiny(), torch.zeros(4, 16), SHARP)
    wide = Parallel(Options(nodes=30), tiny(), torch.zeros(4, 16), [[0.2] * 6])
    assert narrow.top < wide.top == 6
    one = sequence(0)
    for made in (narrow, wide):
        guess(made, one, 4)
    assert narrow.draft([one], [PLENTY]).max_depth == 4
    assert wide.draft([one], [PLENTY]).width == 6
    useless = Parallel(Options(), tiny(), torch.zeros(4, 16), [[0.0]])
    assert useless.draft([one], [PLENTY]).size == 1
    few = Parallel(Options(nodes=30), tiny(vocabulary=3), torch.zeros(2, 16))
    assert few.top == 3


# --- several texts ---------------------------------------------------------------------------------------------


def live(made: Parallel, running: list[Sequence], budgets: list[Budget], seed: int) -> list[list[tuple[int, ...]]]:
    tree = made.draft(running, budgets)
    seen = []
    for row, one in enumerate(running):
        checked = check(tree, row, one, made.top)
        committed = accept_some(tree, row, random.Random(f"{seed} {one.id}"))
        one.commit(committed)
        seen.append(Observation(one, committed, {}, 0, checked))
    made.observe(seen)
    return [paths_of(tree, row) for row in range(len(running))]


def test_a_batch_equals_each_alone() -> None:
    limits = [PLENTY, Budget(7, 3), Budget(0, 0), Budget(20, 64)]
    together, alone = ([sequence(number) for number in range(4)] for _ in range(2))
    made, others = drafter(), [drafter() for _ in alone]
    for step in range(12):
        trees = live(made, together, limits, step)
        for other, one, limit, tree in zip(others, alone, limits, trees, strict=True):
            assert live(other, [one], [limit], step) == [tree]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_guesses_end_with_the_step_that_they_were_for() -> None:
    made, one = drafter(), sequence(0)
    for _ in range(2):
        live(made, [one], [PLENTY], 0)
        guess(made, one, 3)
    assert made.draft([one], [PLENTY]).max_depth > 0
    made.observe([Observation(one, [], {}, 0)])  # a step that says nothing about them
    assert made.draft([one], [PLENTY]).max_depth == 0
    guess(made, one, 3)
    made.forget(one)
    made.forget(one)
    assert made.draft([one], [PLENTY]).max_depth == 0
    assert not made._guesses


# --- making one ------------------------------------------------------------------------------------------------


def folder(path: Path, weight: Tensor | None, method: str = "parallel", **manifest: Any) -> str:
    tensors = {} if weight is None else {"look_ahead.weight": weight}
    write_head(path, HeadFolder(method, {}, {"other.weight": torch.zeros(2, 2), **tensors}, manifest))
    return str(path)


def test_embeddings_and_accuracies_come_from_the_folder(tmp_path: Path) -> None:
    weight = torch.randn(2, 16).bfloat16().float()
    made: Any = make_drafter(
        "parallel", setup(), {"path": folder(tmp_path / "a", weight, calibration={"accuracies": [[0.9], [0.8]]})}
    )
    assert made.plan.order == [(0,), (0, 0)]
    target = tiny()
    make_drafter("parallel", setup(target), {"path": str(tmp_path / "a"), "nodes": "9"})
    assert target.extra is not None
    assert torch.equal(target.extra, weight)
    without: Any = make_drafter("parallel", setup(), {"path": str(look_ahead(16))})
    assert without.top > 1


def test_refusals(tmp_path: Path) -> None:
    other = folder(tmp_path / "b", torch.zeros(2, 16), "medusa")
    nothing = folder(tmp_path / "c", None)
    wide = folder(tmp_path / "d", torch.zeros(2, 17))
    for options, reason in (
        ({}, "no parallel drafter for this model comes with Forerun: train one"),
        ({"path": str(tmp_path / "none")}, "there is no folder"),
        ({"path": other}, "of the method medusa, not parallel"),
        ({"path": nothing}, "holds no look_ahead.weight"),
        ({"path": wide}, r"\(2, 17\) do not fit the model: they must be \[T, 16\]"),
        ({"nodes": -1}, "nodes is -1: give a whole number from 0"),
        ({"top": 0}, "top is 0: give a whole number from 1"),
        ({"tree": "dynamic:3,3,9"}, "cannot make the tree 'dynamic:3,3,9'"),
        ({"tree": "fixed:9", "top": 8}, "9 children at a node and the parallel option top is 8"),
        ({"path": str(look_ahead(16)), "tree": "4"}, "is 4 deep and there are 3 look-ahead embeddings"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_drafter("parallel", setup(), options)
    foreign: Any = object()
    with pytest.raises(ValueError, match="which the adapter for this model cannot: choose another drafter"):
        Parallel(Options(), foreign, torch.zeros(2, 16))
    for empty in ([], [[0.5], []]):
        with pytest.raises(ValueError, match="accuracies has an empty row"):
            Parallel(Options(), tiny(), torch.zeros(2, 16), empty)
    with pytest.raises(ValueError, match="combine keeps drafts only"):
        make_drafter("combine", setup(), {"first": "parallel"})


def test_more_rows_promise_no_less() -> None:
    assert drafter(nodes=24).gain(24) == 0, "nothing was measured"
    made = Parallel(Options(nodes=24), tiny(), torch.zeros(3, 16), [list(row) for row in ACCURACIES])
    gains = [made.gain(rows) for rows in range(25)]
    assert gains[0] == 0 < gains[2] < gains[24] == made.gain(None) == made.gain(99)
    assert all(less <= more + 1e-9 for less, more in pairwise(gains))
