"""Trees grown in plain numbers are those that grow in tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.history import History
from forerun.core.native import choice
from forerun.core.noise import uniform
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters import growth_in_c, host_growth
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.growing import grow
from forerun.drafters.growth_in_c import GrowthInC
from forerun.drafters.head_ahead import HeadRun
from forerun.drafters.level_run import Rows
from forerun.drafters.trained import FeatureDrafter
from forerun.drafters.tree_spec import TreeSpec
from tests.drafters.models import paths_of, sequence
from tests.models.rows import each_pass
from tests.models.test_feature_head import head_of, target_of

pytestmark = pytest.mark.skipif(choice.library() is None, reason="no compiler")

VOCABULARY = 200


class Random:
    """A run whose logits depend on the path alone, asked either way."""

    writes_ahead = False
    device = torch.device("cpu")

    def __init__(self, sequences: Many[Sequence], takes_part: list[bool], ids: Tensor | None, quick: bool) -> None:
        self.sequences, self.takes_part, self.ids, self.quick = sequences, takes_part, ids, quick
        self.vocabulary = VOCABULARY if ids is None else ids.shape[0]
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in sequences]
        self.columns = 0

    def logits(self, b: int, path: tuple[int, ...]) -> Tensor:
        made = torch.Generator().manual_seed(hash((self.sequences[b].id, path)) % 2**31)
        return 3 * torch.randn(self.vocabulary, generator=made)

    def roots(self) -> Rows:
        counts = [int(part) for part in self.takes_part]
        return self._rows(counts, [[()] if part else [] for part in self.takes_part])

    def level(self, tokens: Tensor, parents: Tensor, counts: list[int]) -> Rows:
        asked = []
        for b, count in enumerate(counts):
            above = [self.paths[b][parent] if parent >= 0 else () for parent in parents[b].tolist()]
            paths = [(*path, token) for path, token in zip(above, tokens[b].tolist(), strict=True)]
            self.paths[b] += paths
            asked.append(paths[:count])
        return self._rows(counts, asked)

    def quick_roots(self) -> Tensor:
        return self.roots().logits

    def quick_level(self, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        asked = []
        for b, (own, numbers) in enumerate(zip(tokens, parents, strict=True)):
            above = [self.paths[b][parent] if parent >= 0 else () for parent in numbers]
            paths = [(*path, token) for path, token in zip(above, own, strict=True)]
            self.paths[b] += paths
            asked.append(paths)
        return self._rows([len(paths) for paths in asked], asked).logits

    def chain(self, tokens: Tensor, count: int) -> Tensor:
        raise AssertionError

    def grow(self, spec: TreeSpec, sequences: Many[Sequence], budgets: Many[Budget], taus: Taus) -> DraftTree | None:
        return host_growth.grow_on_host(spec, sequences, self, budgets, taus) if self.quick else None

    def _rows(self, counts: list[int], asked: list[list[tuple[int, ...]]]) -> Rows:
        members = [b for b, count in enumerate(counts) for _ in range(count)]
        columns = [place for count in counts for place in range(count)]
        logits = torch.stack([self.logits(b, path) for b, paths in enumerate(asked) for path in paths])
        return Rows(counts, torch.tensor(members), torch.tensor(columns), logits)


@pytest.mark.parametrize("tree", ["dynamic:4,4,20", "dynamic:1,3,3", "dynamic:8,2,60"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("taus", [Taus(), Taus(1.7, 0.6)])
def test_the_trees_are_the_same(tree: str, reduced: bool, taus: Taus) -> None:
    requests = [SamplingParams(temperature=0.0), SamplingParams(seed=7), SamplingParams(seed=9, temperature=0.6)]
    texts = [sequence(number, params) for number, params in enumerate([*requests, *requests])]
    budgets = [Budget(*pair) for pair in ((60, 9), (60, 9), (5, 2), (0, 0), (9, 1), (60, 3))]
    part = [True, True, True, False, True, True]
    ids = torch.arange(0, VOCABULARY, 3) if reduced else None

    def trees(quick: bool) -> list[list[tuple[int, ...]]]:
        run = Random(texts, part, ids, quick)
        history = History(VOCABULARY, torch.device("cpu"))
        made = grow(TreeSpec.parse(tree), VOCABULARY, history, texts, run, budgets, taus=taus)
        return [paths_of(made, row) for row in range(len(texts))]

    slow = trees(False)
    assert trees(True) == slow
    assert max(map(len, slow)) > 3


def test_other_laws_are_left_to_tensors() -> None:
    for params in (SamplingParams(), SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=1, presence_penalty=1.0)):
        assert not host_growth.plain_laws([sequence(0, SamplingParams(seed=1)), sequence(1, params)])
    assert host_growth.plain_laws([sequence(1, SamplingParams(temperature=0.0)), sequence(2, SamplingParams(seed=1))])
    assert host_growth.fits(TreeSpec.parse("dynamic:2,2,4"))
    assert not host_growth.fits(TreeSpec.parse("fixed:2,2"))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size", [64, 100, 8192])
def test_candidates_are_the_best_with_their_shares(half: bool, size: int) -> None:
    logits = 4 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    logits = logits.to(torch.bfloat16) if half else logits
    ids, keys = torch.arange(size) * 5 + 2, [3, 3, -(2**62), 8, 8]
    raced = [True, True, True, False, True]
    heats = [0.7, 0.7, 1.0, 0.3, 2.0]
    places, shares = choice.candidates(logits, ids, 9, temperature=heats, keys=keys, raced=raced, taus=(0.6, 1.4))
    noise = -(-uniform(torch.tensor(keys)[:, None], ids).log()).log()
    for row in range(5):
        scores = logits[row].double()
        scores = (scores / heats[row] + noise[row]) / 1.4 if raced[row] else scores / 0.6
        law = scores.log_softmax(0)
        best = law.topk(9).values
        torch.testing.assert_close(torch.tensor(shares[row]).double(), best, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(law[places[row]], best, atol=1e-5, rtol=1e-5)  # equal ones in any order


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_next_to_no_temperature_is_none(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    places, shares = choice.candidates(
        logits, torch.arange(3), 1, temperature=[temperature], keys=[5], raced=[True], taus=(1.0, 1.0)
    )
    assert places == [[1]]
    assert shares == [[0.0]]


def test_what_is_no_number_is_not_drafted() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, nan, nan], [1.0, nan, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf]])
    for raced in (False, True):
        places, shares = choice.candidates(
            logits, torch.arange(3), 2, temperature=[1.0] * 4, keys=[5] * 4, raced=[raced] * 4, taus=(1.0, 1.0)
        )
        assert places[0] == places[3] == [-1, -1]
        assert shares[0] == shares[3] == [-inf, -inf]
        assert sorted(places[1]) == [0, 2]
        assert places[2][0] == 1
        assert not any(math.isnan(share) for row in shares for share in row)


class Broken(Random):
    def logits(self, b: int, path: tuple[int, ...]) -> Tensor:
        return torch.full((self.vocabulary,), torch.nan) if path else super().logits(b, path)


def test_a_head_that_breaks_off_drafts_no_further() -> None:
    texts = [sequence(1, SamplingParams(temperature=0.0)), sequence(2, SamplingParams(seed=3))]
    run = Broken(texts, [True, True], None, True)
    made = grow(
        TreeSpec.parse("dynamic:3,4,9"), VOCABULARY, History(VOCABULARY, torch.device("cpu")), texts, run,
        [Budget(9, 4)] * 2,
    )  # fmt: skip
    assert [max(map(len, paths_of(made, row))) for row in range(2)] == [1, 1]


def test_a_row_without_so_many_says_so() -> None:
    places, shares = choice.candidates(
        torch.tensor([[1.0, -torch.inf, 2.0]]),
        torch.arange(3),
        3,
        temperature=[0.0],
        keys=[0],
        raced=[False],
        taus=(0.7, 1.0),
    )
    assert places == [[2, 0, -1]]
    assert shares[0][2] == -float("inf")


@each_pass
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("requests", [("greedy", "seeded"), ("greedy",), ("seeded",)])
def test_a_head_in_c_drafts_what_it_drafts_in_tensors(
    dtype: torch.dtype, method: str, requests: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text alone grows in C altogether, several with Python between the levels."""
    target = target_of(dtype)
    kinds = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(seed=7, temperature=0.8)}
    itself = HeadRun.grow
    calls: list[int] = []
    in_c = GrowthInC.grow

    def counted(*given: Any) -> DraftTree:
        calls.append(1)
        return in_c(*given)

    monkeypatch.setattr(GrowthInC, "grow", counted)
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)  # to its last level, as in tensors

    def live(quick: bool) -> list[list[tuple[int, ...]]]:
        monkeypatch.setattr(HeadRun, "grow", itself if quick else lambda *given: None)
        head = head_of(method, target)
        for part in ("q_proj", "v_proj", "o_proj"):  # so that what a row sees counts
            head.get_parameter(f"model.layers.0.self_attn.{part}.weight").data.mul_(2.5)
        drafter: Drafter = FeatureDrafter(head, 512, TreeSpec.parse("dynamic:3,4,12"), 128, Taus(1.3, 0.7))
        texts = [sequence(n, kinds[kind], length=9 + 20 * n, vocabulary=128) for n, kind in enumerate(requests)]
        states = torch.Generator().manual_seed(1)
        found, start = [], [0] * len(texts)
        for step in range(6):
            tree = drafter.draft(texts, [Budget(12 - 2 * step, 4 - step % 3) for _ in texts])
            # Logits of bfloat16 are often equal, and equal candidates come in any order.
            listed = [sorted(paths_of(tree, row)) for row in range(len(texts))]
            found += listed
            for row, text in enumerate(texts):
                text.commit([*listed[row][-1][: step % 3], 5 + step])
            seen = [
                {layer: torch.randn(text.position - at, 64, generator=states).to(dtype) for layer in drafter.layers}
                for text, at in zip(texts, start, strict=True)
            ]
            drafter.observe([Observation(text, [], own, at) for text, own, at in zip(texts, seen, start, strict=True)])
            start = [text.position for text in texts]
        return found

    in_tensors = live(False)
    assert not calls
    assert live(True) == in_tensors
    assert len(calls) == (5 if len(requests) == 1 else 0)
    assert sum(map(len, in_tensors)) > 25
