"""Trees over a part of the target's vocabulary, of uneven shapes, and confidence under coupling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.drawing import top_children
from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.drafters import growing
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.growing import grow, rows_below_root
from forerun.drafters.level_run import Rows
from forerun.drafters.run_ahead import Run, RunAhead
from forerun.drafters.tree_levels import levels_of
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.target import Output
from tests.drafters.contract import REQUESTS
from tests.drafters.models import VOCABULARY, paths_of, sequence, tiny

AMPLE = Budget(256, 64)
ACCURACIES = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]
TREES = ("4", "fixed:3,2,1", "3,2,1", "dynamic:3,3,8", "static:14", "sequoia:14,4")


def spec_of(tree: str) -> TreeSpec:
    return TreeSpec.parse(tree).measured(ACCURACIES)


# --- a draft vocabulary -----------------------------------------------------------------------------------------

IDS = torch.tensor([1, 2, 5, 6, 9, 11, 12, 13, 17, 20, 21, 25, 26, 30, 31, 33, 36, 38])
FORBIDDEN = dict.fromkeys(IDS.tolist(), float("-inf"))

PLAIN = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(temperature=0.8, top_p=0.7),
    SamplingParams(seed=8, top_k=3, min_p=0.01),
    SamplingParams(temperature=1.4, top_k=30),  # more than there are
)
BATCHES = {
    "plain": PLAIN,
    "greedy": (SamplingParams(temperature=0.0),) * 3,
    "penalties": REQUESTS,
    "bias": (
        SamplingParams(logit_bias={2: 3.0, 3: 9.0, 5: float("-inf")}),
        SamplingParams(seed=3, logit_bias={9: 2.0, 39: 5.0}),
        SamplingParams(temperature=0.0, logit_bias={1: -4.0}),
        *PLAIN,
    ),
}


@dataclass(frozen=True)
class Part:
    """A run whose head knows some tokens; `narrow` has a column for each of these, else the others are at -inf."""

    run: Run
    narrow: bool

    @property
    def device(self) -> torch.device:
        return self.run.device

    @property
    def ids(self) -> Tensor | None:
        return IDS if self.narrow else None

    @property
    def vocabulary(self) -> int:
        return IDS.shape[0] if self.narrow else VOCABULARY

    @property
    def takes_part(self) -> list[bool]:
        return self.run.takes_part

    def roots(self) -> Rows:
        return self._cut(self.run.roots())

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        return self._cut(self.run.level(tokens, parents, counts))

    @property
    def writes_ahead(self) -> bool:
        return self.narrow

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        written = [tokens]
        for number in range(count):
            rows = self.level(written[-1], torch.full_like(tokens, number - 1), [1] * tokens.shape[0])
            assert rows.likeliest is not None
            written.append(IDS[rows.likeliest][:, None])
        return torch.cat(written[1:], 1)

    def _cut(self, rows: Rows) -> Rows:
        if self.narrow:
            logits = rows.logits[:, IDS]
            return replace(rows, logits=logits, likeliest=logits.argmax(1))
        logits = torch.full_like(rows.logits, -torch.inf)
        logits[:, IDS] = rows.logits[:, IDS]
        return replace(rows, logits=logits, likeliest=None)


def grown(tree: str, texts: list[Sequence], budgets: list[Budget], *, narrow: bool) -> DraftTree:
    spec, ahead = spec_of(tree), RunAhead(tiny(1), 2048)
    run = ahead.start(texts, [rows_below_root(spec, budget) for budget in budgets])
    return grow(spec, VOCABULARY, History(VOCABULARY), texts, Part(run, narrow), budgets)


def same_trees(tree: str, batch: str) -> None:
    texts = [sequence(number, params, length=5 + number) for number, params in enumerate(BATCHES[batch])]
    for budgets in (
        [AMPLE] * len(texts),
        [Budget(nodes, depth) for nodes, depth in [(5, 2), (0, 3), (8, 3), (3, 9), (9, 1), (2, 2)] * 2][: len(texts)],
    ):
        found, wanted = (grown(tree, texts, budgets, narrow=narrow) for narrow in (True, False))
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.parents, wanted.parents)
        assert torch.equal(found.children, wanted.children)
        assert found.drawing is wanted.drawing
        assert bool(torch.isin(found.tokens[:, 1:], torch.cat([IDS, torch.tensor([0])])).all())
        if wanted.q is None:
            assert found.q is None
        else:
            assert found.q is not None
            assert found.q.shape[2] == VOCABULARY
            torch.testing.assert_close(found.q, wanted.q)
        if batch != "greedy" or tree != "4":  # of a chain that writes ahead all is known before
            DraftTree.build(
                found.tokens,
                found.parents,
                found.positions[:, 0],
                found.drawing,
                q=found.q,
                children=found.children,
                q_rows=found.q_rows,
            )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_draft_vocabulary_gives_the_tree_of_a_whole_one(tree: str, batch: str) -> None:
    """Of one whose other tokens are at -inf."""
    same_trees(tree, batch)


@pytest.mark.parametrize("tree", TREES)
def test_a_request_that_forbids_the_whole_draft_vocabulary_breaks_nothing(tree: str) -> None:
    """What is drafted then is refused by the target; q is a law nevertheless, and the others go on as without it."""
    params = (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(seed=4), SamplingParams(top_p=0.5))
    texts = [sequence(number, replace(each, logit_bias=FORBIDDEN)) for number, each in enumerate(params)]
    texts.append(sequence(9, SamplingParams()))
    tree_of_all = grown(tree, texts, [AMPLE] * 5, narrow=True)
    alone = grown(tree, texts[4:], [AMPLE], narrow=True)
    assert paths_of(tree_of_all, 4) == paths_of(alone, 0)
    assert bool(torch.isin(tree_of_all.tokens[:, 1:], torch.cat([IDS, torch.tensor([0])])).all())
    if tree_of_all.q is not None:
        sums = tree_of_all.q.sum(-1)
        torch.testing.assert_close(sums[sums > 0], torch.ones(int((sums > 0).sum())))
        assert int((sums > 0).sum()) >= 3 * alone.size // 2


# --- a run that is a table --------------------------------------------------------------------------------------


@dataclass
class Table:
    """Needs no passes: logits[a, b] are those after tokens a and b. Every sequence ends with tokens 0 and `root`."""

    logits: Tensor  # [V, V, columns]
    batch: int
    root: int = 1
    ids: Tensor | None = None
    writes_ahead: bool = False

    def __post_init__(self) -> None:
        self.device = self.logits.device
        self.tokens = torch.zeros(self.batch, 0, dtype=torch.int64, device=self.device)  # of all nodes asked about

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[2]

    @property
    def takes_part(self) -> list[bool]:
        return [True] * self.batch

    def roots(self) -> Rows:
        logits = self.logits[0, self.root].expand(self.batch, -1)
        return Rows.of([1] * self.batch, Output(logits))

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        above = self.tokens.gather(1, parents.clamp_min(0)) if self.tokens.shape[1] else torch.zeros_like(parents)
        above = torch.where(parents >= 0, above, self.root)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        rows = Rows.of(counts, Output(self.logits))
        at = (rows.sequence, rows.column)
        return replace(rows, logits=self.logits[above[at], tokens[at]])

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        raise AssertionError("it says that it does not write ahead")


def table(vocabulary: int, columns: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(vocabulary, vocabulary, columns, generator=torch.Generator().manual_seed(seed))


def text(number: int, params: SamplingParams, *, coupled: bool = False) -> Sequence:
    return Sequence([0, 1], 10_000, id=number, params=params, seed=977 * number + 1, coupled=coupled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("tree", TREES)
def test_a_device_is_not_waited_for(tree: str) -> None:
    """Truncation and coupling included; penalties look at texts, which are on the host."""
    params = (*PLAIN, SamplingParams(logit_bias={3: -2.0}))
    for requests in (PLAIN, params):
        texts = [text(number, each, coupled=each.seed is not None) for number, each in enumerate(requests)]
        trees = []
        for place in ("cpu", "cuda"):
            run = Table(table(60, 20).to(place), len(texts), ids=torch.arange(0, 60, 3, device=place))
            history = History(60, place)
            torch.cuda.set_sync_debug_mode("error" if place == "cuda" else "default")
            try:
                trees.append(grow(spec_of(tree), 60, history, texts, run, [AMPLE] * len(texts), taus=Taus(0.8, 0.6)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        here, there = trees
        assert torch.equal(there.tokens.cpu(), here.tokens)
        assert torch.equal(there.parents.cpu(), here.parents)


@st.composite
def breadth_first(draw: st.DrawFn) -> TreeShape:
    """Any shape: where parents never fall, nodes come breadth first."""
    parents = [-1, 0]
    for node in range(2, draw(st.integers(2, 14))):
        parents.append(draw(st.integers(parents[-1], min(node - 1, parents[-1] + 2))))
    return TreeShape(tuple(parents))


@given(shape=breadth_first(), budgets=st.lists(st.builds(Budget, st.integers(0, 14), st.integers(0, 6)), min_size=2))
def test_any_shape_is_filled_node_by_node(shape: TreeShape, budgets: list[Budget]) -> None:
    logits = table(20, 20)
    spec = TreeSpec("static", (14,), shape)
    texts = [text(number, SamplingParams(temperature=0.0)) for number in range(len(budgets))]
    run = Table(logits, len(budgets))
    tree = grow(spec, 20, History(20), texts, run, budgets)
    for row, budget in enumerate(budgets):
        cut = spec.cut(budget)
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(cut.parents[1:], cut.ranks[1:], strict=True):
            above = (0, 1, *paths[parent])
            paths.append((*paths[parent], int(logits[above[-2], above[-1]].argsort(descending=True)[rank])))
        assert paths_of(tree, row) == paths
    most = max((spec.cut_size(budget) for budget in budgets), default=1)
    if most > 1:
        parents = shape.parents[:most]
        assert run.tokens.shape[1] == len(set(parents)) - 2, "leaves are not asked about"


def test_shapes_of_these_tests_are_uneven() -> None:
    for tree in ("static:14", "sequoia:14,4"):
        plans = levels_of(spec_of(tree).shape)
        assert any(plan.picks is not None for plan in plans)
        assert (
            any(tuple(range(plan.nodes[0], plan.nodes[-1] + 1)) != plan.nodes for plan in plans) or tree != "static:14"
        )


def test_levels_of_a_product_need_no_picking() -> None:
    for cut in range(2, 17):
        plans = levels_of(spec_of("fixed:3,2,1").cut(Budget(cut, 9)))
        assert all(plan.picks is None for plan in plans)
    with pytest.raises(AssertionError, match="breadth first"):
        levels_of(TreeShape((-1, 0, 1, 0, 3)))


def test_who_takes_part_without_a_budget_gets_its_root() -> None:
    texts = [text(number, SamplingParams()) for number in range(3)]
    for tree in TREES:
        for budget in (Budget(0, 0), AMPLE):
            budgets = [Budget(0, 4), budget, Budget(3, 0)]
            found = grow(spec_of(tree), 8, History(8), texts, Table(table(8, 8), 3), budgets)
            assert [len(paths_of(found, row)) for row in range(3)] == [1, found.size, 1]
            assert (found.size == 1) == (budget != AMPLE)


# --- confidence ----------------------------------------------------------------------------------


WAYS = ("coupled", "greedy", "drawn")


def confidences(logits: Tensor, taus: Taus, *, way: str = "coupled") -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and log confidences [R, 4] of rows of logits [R, V], each a sequence's root, and q/E or q [R, V]."""
    count, vocabulary = logits.shape
    coupled, params = way == "coupled", SamplingParams(temperature=float(way != "greedy"))
    texts = [text(number, params, coupled=coupled) for number in range(count)]
    run = Table(table(2, vocabulary), count)
    step = growing._Step(spec_of("dynamic:4,3,9"), vocabulary, History(vocabulary), texts, run, taus)
    level = step._level(Rows.of([1] * count, Output(logits)), 0, torch.zeros(count, 1, 0, dtype=torch.int64))
    tokens, found = step._confident(level, 4)
    noise = StepNoise(torch.tensor([item.seed for item in texts]), torch.full((count,), 2))
    race = noise.race(torch.zeros(count, dtype=torch.int64), vocabulary) if coupled else torch.ones(count, vocabulary)
    return tokens, found, law(logits, LawSettings.of([SamplingParams()] * count)) / race


def test_at_tau_1_confidences_are_shares_of_the_race() -> None:
    for way in WAYS:
        tokens, found, scores = confidences(3 * table(6, 40)[0], Taus(), way=way)
        assert torch.equal(tokens, top_children(scores, 4))
        wanted = (scores.gather(1, tokens) / scores.sum(1, keepdim=True)).log()
        torch.testing.assert_close(found.double(), wanted.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.5, 0.999, 1.7, 6.0])
def test_tau_sharpens_or_flattens_them(tau: float) -> None:
    logits = 3 * table(6, 40)[0]
    for way, taus in (("coupled", Taus(coupled=tau)), ("greedy", Taus(greedy=tau))):
        tokens, found, scores = confidences(logits, taus, way=way)
        assert torch.equal(tokens, top_children(scores, 4)), "the order stays"
        powers = scores.double() ** (1 / tau)
        wanted = (powers.gather(1, tokens) / powers.sum(1, keepdim=True)).log()
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        for other in {*WAYS} - {way}:
            plain = confidences(logits, taus, way=other)
            torch.testing.assert_close(plain[1], confidences(logits, Taus(), way=other)[1], atol=0, rtol=0)


def test_extreme_laws_have_confidences_too() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 7], logits[:, 8], logits[0, 9:] = 80.0, 20.0, -torch.inf
    for tau in (0.01, 100.0):
        tokens, found, _ = confidences(logits, Taus(coupled=tau))
        assert bool((found <= 0).all())
        assert bool((found[tokens >= 0] > -torch.inf).all())
        assert tokens[:, 0].tolist() == [7, 7]


def test_a_sharper_tau_makes_deeper_trees() -> None:
    spec, count = TreeSpec.parse("dynamic:4,6,12"), 64
    depths = {}
    for way in WAYS:
        params = SamplingParams(temperature=float(way != "greedy"))
        texts = [text(number, params, coupled=way == "coupled") for number in range(count)]
        for tau in (0.3, 1.0, 3.0):
            run = Table(table(30, 30, spread=2.0), count)
            tree = grow(spec, 30, History(30), texts, run, [AMPLE] * count, taus=Taus(tau, tau))
            depths[way, tau] = float(tree.depths.amax(1).double().mean())
    for way in ("coupled", "greedy"):
        assert depths[way, 0.3] > depths[way, 1.0] + 0.2 > depths[way, 3.0] + 0.4
    assert depths["drawn", 0.3] == depths["drawn", 1.0] == depths["drawn", 3.0]
