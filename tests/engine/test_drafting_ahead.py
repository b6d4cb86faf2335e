"""Runs of drafting on a device: the same texts, drafts and figures as step by step. Here in the plain form of the
kernels, without a graph; on a device the same launches are captured."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters import head_ahead
from forerun.drafters.device_growth import DeviceGrowth
from forerun.drafters.drafter import Budget
from forerun.drafters.head_ahead import HeadAhead
from forerun.drafters.none import NoDrafter
from forerun.drafters.recycling import Options, Recycling
from forerun.drafters.rounds import Rounds
from forerun.drafters.side_growth import SideGrowth
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine import engine as engine_module
from forerun.engine.controller import Controller
from forerun.engine.drafting_ahead import DraftingAhead
from forerun.engine.engine import Engine
from forerun.engine.experience import WHOLE
from forerun.engine.request import DraftOptions, Request, Update
from forerun.models.heads.side_heads import SideHeads
from forerun.models.static.static_pass import StaticPass
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of
from tests.drafters.test_heads import SIDE, shaken
from tests.models.rows import with_static_pass
from tests.models.test_feature_head import head_of, target_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(1, 41)), [9], [3, 3, 4], [100, 20, 7]]


def target() -> Transformer:
    made = target_of(torch.float32).to(DEVICE)
    return with_static_pass(made)


def side_drafter(model: Transformer, method: str, tree: str = "dynamic:3,3,12") -> SideDrafter:
    heads = shaken(method, model, torch.arange(0, 128, 2))
    assert isinstance(heads, SideHeads)
    return SideDrafter(heads, TreeSpec.parse(tree), 128)


def drafter(
    model: Transformer, method: str = "eagle3", tree: str = "dynamic:3,4,12", slots: int = 1024
) -> FeatureDrafter:
    head = head_of(method, model)
    generator = torch.Generator().manual_seed(2)
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):  # so that what a row sees counts
        weight = head.get_parameter(f"model.layers.0.self_attn.{part}.weight")
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    with_static_pass(head)
    return FeatureDrafter(head, slots, TreeSpec.parse(tree), 128)


def any_drafter(model: Transformer, method: str) -> FeatureDrafter | SideDrafter:
    return side_drafter(model, method) if method in SIDE else drafter(model, method)


def request(number: int, length: int = 40, **more: Any) -> Request:
    chosen = {"seed": 1000 + number, "max_tokens": length, "ignore_eos": True, **more}
    draft = DraftOptions(**chosen.pop("draft", {}))
    return Request(list(PROMPTS[number % len(PROMPTS)]), SamplingParams(**chosen), draft)


def finished(engine: Engine, requests: list[Request]) -> list[list[int]]:
    numbers = [engine.add(each) for each in requests]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for update in engine.step():
            _refuse_odd(update)
            texts[update.request].extend(update.tokens)
        engine.check_integrity()
        if isinstance(engine.drafter, FeatureDrafter):
            engine.drafter.ahead.cache.check_integrity()
        for tensor in (*engine.cache.storage.keys, *engine.cache.storage.values):
            tensor[engine.cache.unused_slots()] = 1e3  # what stands there must not matter
    return [texts[number] for number in numbers]


def _refuse_odd(update: Update) -> None:
    assert len(update.kinds) == len(update.tokens)
    assert update.tokens or update.finish_reason is None


def plain(requests: list[Request]) -> list[list[int]]:
    return [finished(Engine(target(), NoDrafter(), slots=512), [each])[0] for each in requests]


def test_the_first_engine_of_a_target_goes_in_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that nobody has prepared yet, as when a server starts."""
    prepare = Transformer.prepare

    def prepared(model: Transformer) -> None:
        model.learned_through = True
        prepare(model)
        model.static = StaticPass(model) if model.static is None else model.static

    monkeypatch.setattr(Transformer, "prepare", prepared)
    fresh = target_of(torch.float32).to(DEVICE)
    made = drafter(fresh)
    assert not fresh.prepared
    assert Engine(fresh, made, slots=512).ahead is not None


class Foresight:
    """Puts what a text will say into its trees, on a path of theirs and for some nodes: a head that knows nothing has
    hardly any draft accepted. By the seeds of texts, which tell them apart, and their positions."""

    def __init__(self, requests: list[Request], texts: list[list[int]]) -> None:
        self.whole = {each.params.seed: [*each.prompt, *text] for each, text in zip(requests, texts, strict=True)}
        self.drafted: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self.launch = DeviceGrowth._launch

    @property
    def of(self) -> Callable[[DeviceGrowth], DraftTree]:
        """As a method of `DeviceGrowth`."""

        def launch(growth: DeviceGrowth) -> DraftTree:
            return self._tree(growth)

        return launch

    def _tree(self, growth: DeviceGrowth) -> DraftTree:
        tree = self.launch(growth)
        seeds, positions = growth.told["seeds"].tolist(), growth.told["positions"].tolist()
        tokens = tree.tokens.clone()
        for text, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            if not growth.text.packed.counts[text] or seed not in self.whole:
                continue
            parents = tree.parents[text].tolist()
            if growth.told["depths"][text] >= growth.spec.depth:  # near its end a text gets smaller trees step by step
                self.drafted.setdefault((seed, position), (tree.tokens[text].tolist(), parents))
                assert self.drafted[seed, position] == (tree.tokens[text].tolist(), parents)
            true = self.whole[seed][position + 1 :][: (3 * seed + position) % 5]
            path = max((_path(parents, node) for node in range(len(parents))), key=len)
            for node, token in zip(path, true, strict=False):
                tokens[text, node] = token
        return replace(tree, tokens=tokens)


def _path(parents: list[int], node: int) -> list[int]:
    path = []
    while parents[node] >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts every round had room for."""
    seen: list[int] = []
    settle = Rounds.settle

    def counted(self: Rounds, *given: Any) -> Any:
        seen.append(self.texts)
        return settle(self, *given)

    monkeypatch.setattr(Rounds, "settle", counted)
    return seen


needs_launches = pytest.mark.skipif(DEVICE.type != "cpu", reason="what was captured cannot be changed")


@needs_launches
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_texts_drafts_and_figures_are_those_of_single_steps(
    method: str, params: dict[str, Any], count: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(number, 30 + 7 * number, **params) for number in range(count)]
    expected = plain(requests)
    foresight = Foresight(requests, expected)
    monkeypatch.setattr(DeviceGrowth, "_launch", foresight.of)
    model = target()
    engine = Engine(model, drafter(model, method), slots=1024)
    assert finished(engine, requests) == expected
    assert len(rounds) > 6
    together, drafted = engine.statistics, len(foresight.drafted)
    single = Engine(model, drafter(model, method), slots=1024, max_ahead=1)
    assert finished(single, requests) == expected  # and `foresight` found the same drafts at the same places
    assert drafted > 6 * count
    assert len(foresight.drafted) - drafted <= drafted // 4  # most places were met twice
    apart = single.statistics
    assert together.accepted > 10 * count
    assert together.tokens == apart.tokens
    if count == 1:  # else they end within runs at different steps, and the others read beside them
        assert abs(together.target_passes - apart.target_passes) <= 1
        pairs = zip(together.offered_by_depth, apart.offered_by_depth, strict=False)
        assert all(abs(one - other) <= 1 for one, other in pairs)


class SideForesight:
    """As `Foresight`, for heads that guess from one state. What single steps draft is grown on the host, so it is told
    by paths."""

    def __init__(self, requests: list[Request], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = {each.params.seed: [*each.prompt, *text] for each, text in zip(requests, texts, strict=True)}
        self.drafted: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        self.checked = 0
        launch, draft = SideGrowth._launch, SideDrafter.draft

        def launched(growth: SideGrowth) -> DraftTree:
            tree = launch(growth)
            tokens = tree.tokens.clone()
            places = zip(growth.told["seeds"].tolist(), growth.told["positions"].tolist(), strict=True)
            for text, (seed, position) in enumerate(places):
                if seed in self.whole:
                    if growth.told["depths"][text] >= growth.spec.depth:
                        self.drafted[seed, position] = set(paths_of(tree, text))
                    self._foresee(tokens[text], tree.parents[text].tolist(), seed, position)
            return replace(tree, tokens=tokens)

        def on_host(own: SideDrafter, sequences: list[Sequence], budgets: list[Budget]) -> DraftTree:
            tree = draft(own, sequences, budgets)
            tokens = tree.tokens.clone()
            for text, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
                there = self.drafted.get((sequence.seed, sequence.position))
                if there is not None and budget.nodes >= own.spec.size and budget.depth >= own.spec.depth:
                    assert set(paths_of(tree, text)) == there
                    self.checked += 1
                self._foresee(tokens[text], tree.parents[text].tolist(), sequence.seed, sequence.position)
            return DraftTree.build(tokens, tree.parents, tree.positions[:, 0], tree.drawing)

        monkeypatch.setattr(SideGrowth, "_launch", launched)
        monkeypatch.setattr(SideDrafter, "draft", on_host)

    def _foresee(self, tokens: torch.Tensor, parents: list[int], seed: int, position: int) -> None:
        true = self.whole[seed][position + 1 :][: (3 * seed + position) % 4]
        path = max((_path(parents, node) for node in range(len(parents))), key=len)
        for node, token in zip(path, true, strict=False):
            tokens[node] = token


@needs_launches
@pytest.mark.parametrize("method", SIDE)
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_side_heads_go_in_rounds_and_draft_what_they_would_step_by_step(
    method: str, params: dict[str, Any], count: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(number, 30 + 7 * number, **params) for number in range(count)]
    expected = plain(requests)
    foresight = SideForesight(requests, expected, monkeypatch)
    model = target()
    engine = Engine(model, side_drafter(model, method), slots=1024)
    assert finished(engine, requests) == expected
    assert len(rounds) > 6
    assert engine.statistics.accepted > 10 * count
    assert len(foresight.drafted) > 6 * count
    single = Engine(model, side_drafter(model, method), slots=1024, max_ahead=1)
    assert finished(single, requests) == expected
    assert foresight.checked > 4 * count
    assert engine.statistics.tokens == single.statistics.tokens


@pytest.mark.parametrize("method", SIDE)
def test_side_heads_among_requests_that_come_and_go(method: str, rounds: list[int]) -> None:
    """With newcomers, a small cache, and requests of which every step is looked at."""
    requests = [request(number, 9 + 5 * number % 23, **(SEEDED if number % 3 else GREEDY)) for number in range(9)]
    requests.insert(3, request(9, 15, **GREEDY, logprobs=1))
    expected = plain(requests)
    for slots in (1024, 176):
        model = target()
        engine = Engine(model, side_drafter(model, method), slots=slots, max_batch=3)
        assert finished(engine, requests) == expected
    assert 4 in rounds
    assert min(rounds) < 4
    assert DEVICE.type != "cpu" or 2 in rounds


def test_requests_that_come_and_go(rounds: list[int]) -> None:
    """Newcomers are read between two runs, and a small cache ends runs early or none begins."""
    requests = [request(number, 9 + 5 * number % 23, **(SEEDED if number % 3 else GREEDY)) for number in range(9)]
    expected = plain(requests)
    for slots in (1024, 176):
        model = target()
        engine = Engine(model, drafter(model, slots=slots), slots=slots, max_batch=3)
        assert finished(engine, requests) == expected
    assert set(rounds) >= {2, 4}


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 2}, {"presence_penalty": 0.5}, {"top_p": 0.9, "temperature": 0.8}, {"logit_bias": {5: 2.0}}],
)
def test_what_takes_more_than_logits_is_looked_at_in_every_step(more: dict[str, Any], rounds: list[int]) -> None:
    requests = [request(0, 12, **{**GREEDY, **more})]
    model = target()
    assert finished(Engine(model, drafter(model), slots=512), requests) == plain(requests)
    assert not rounds


def test_a_trace_sees_every_step(rounds: list[int]) -> None:
    model = target()
    seen: list[Any] = []
    engine = Engine(model, drafter(model), slots=512, trace=seen.append)
    requests = [request(0, 12, **GREEDY)]
    assert finished(engine, requests) == plain(requests)
    assert not rounds
    assert sum(len(record.sequences[0].committed) for record in seen) == 12


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
@pytest.mark.parametrize("draft", [{"nodes": 5}, {"nodes": 1}, {"depth": 2}, {"depth": 1}, {"nodes": 0}])
def test_a_request_limits_what_is_drafted(method: str, draft: dict[str, int], rounds: list[int]) -> None:
    requests = [request(0, 20, draft=draft, **GREEDY)]
    model = target()
    engine = Engine(model, any_drafter(model, method), slots=512)
    assert finished(engine, requests) == plain(requests)
    assert bool(rounds) == (draft != {"nodes": 0})
    statistics = engine.statistics
    if "nodes" in draft:
        assert statistics.drafted <= draft["nodes"] * statistics.target_passes
    else:
        assert len(statistics.offered_by_depth) <= draft["depth"]
        assert statistics.drafted <= (3 if draft["depth"] == 1 else 12) * statistics.target_passes


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_who_may_not_draft_goes_along(method: str, rounds: list[int]) -> None:
    allowed = (None, 0, 6)
    requests = [request(n, 20, draft={"nodes": nodes}, **GREEDY) for n, nodes in enumerate(allowed)]
    model = target()
    engine = Engine(model, any_drafter(model, method), slots=512)
    numbers = [engine.add(each) for each in requests]
    drafted: dict[int, int] = {}
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for update in engine.step():
            texts[update.request] += update.tokens
            drafted[update.request] = update.statistics.drafted
    assert [texts[number] for number in numbers] == plain(requests)
    assert rounds
    assert [bool(drafted[number]) for number in numbers] == [True, False, True]


def test_nothing_is_drafted_beside_long_prompts(rounds: list[int]) -> None:
    """On an accelerator; and what was not drafted for in the meantime is read before the next run."""
    model = target()
    for beside, drafts in ((20, False), (512, True)):
        engine = Engine(model, drafter(model), slots=512)
        engine.scheduler.max_beside = beside
        first, second = request(0, 60, **GREEDY), request(1, 20, **GREEDY)
        number = engine.add(first)
        texts: dict[int, list[int]] = {number: []}
        for step in range(100):
            if step == 3:
                texts[engine.add(second)] = []
                rows, passes = engine.statistics.rows, engine.statistics.target_passes
            for update in engine.step():
                texts[update.request] += update.tokens
            if step == 3:  # 40 rows of the second's, and of the first its root, with or without drafts
                assert (engine.statistics.rows - rows > 41) == drafts
                assert engine.statistics.target_passes > passes
            if not engine.has_work:
                break
        assert list(texts.values()) == plain([first, second])
    assert rounds


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_text_that_ends_within_a_run_ends_there(method: str) -> None:
    """By its length, by a token, and by the context's end."""
    whole = plain([request(1, 60, **GREEDY)])[0]
    model = target()
    for stop in (7, 8, 9, 10, 11):
        asked = request(1, 60, **GREEDY, stop_token_ids=(whole[stop],))
        assert finished(Engine(model, any_drafter(model, method), slots=512), [asked]) == [
            whole[: whole.index(whole[stop]) + 1]
        ]
        assert finished(Engine(model, any_drafter(model, method), slots=512), [request(1, stop, **GREEDY)]) == [
            whole[:stop]
        ]
    long = request(1, 1000, **GREEDY)
    assert finished(Engine(model, any_drafter(model, method), slots=1024), [long]) == plain([long])


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_broken_model_is_an_error_and_leaves_no_cache_behind(method: str) -> None:
    model = target()
    engine = Engine(model, any_drafter(model, method), slots=512)
    engine.add(request(0, 30, **GREEDY))
    for _ in range(3):
        engine.step()
    model.get_parameter("model.norm.weight").data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the model's output is broken"):
        engine.step()
    engine.cache.check_integrity()


def test_who_has_no_room_in_the_heads_cache_goes_on_without(rounds: list[int]) -> None:
    requests = [request(number, 40, **GREEDY) for number in range(3)]
    model = target()
    engine = Engine(model, drafter(model, slots=96), slots=1024)
    assert finished(engine, requests) == plain(requests)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_runs_are_short_where_somebody_waits_or_has_ended(method: str, rounds: list[int]) -> None:
    model = target()
    for called, most in ((True, 2), (False, 8)):
        engine = Engine(model, any_drafter(model, method), slots=512)
        engine.called = lambda called=called: called  # type: ignore[misc]
        for number in range(2):
            engine.add(request(number, 60, **GREEDY))
        engine.add(request(2, 12, **GREEDY))
        lengths, ended = [], []
        while engine.has_work:
            before = len(rounds)
            ended.append(any(update.finish_reason for update in engine.step()))
            lengths.append(len(rounds) - before)
        assert max(lengths) == most
        assert engine.statistics.tokens == 132
        assert sum(ended) >= 2  # a text that ended early did not wait for the others


def test_a_controller_tries_in_short_runs_and_leaves_nobody_out(rounds: list[int]) -> None:
    """Of a step's texts all have rows, so none gains by being left out; and what is tried is not tried for long."""
    requests = [request(number, 60, **GREEDY) for number in range(4)]
    model, controller = target(), Controller()
    engine = Engine(model, drafter(model), slots=1024, controller=controller)
    assert controller.together
    numbers = [engine.add(each) for each in requests]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    lengths: dict[bool, list[int]] = {True: [], False: []}
    while engine.has_work:
        before = len(rounds)
        for update in engine.step():
            texts[update.request] += update.tokens
        lengths[controller.trying].append(len(rounds) - before)
    assert [texts[number] for number in numbers] == plain(requests)
    assert rounds
    assert max(lengths[True]) <= 2
    assert any(lengths[True])
    known = sum(each.tries[size] for each in controller.times.values() for size in range(1, 5))
    assert DEVICE.type != "cpu" or known >= 2  # a step in which something is captured is not counted


class Whole(Controller):
    """Has all drafted that there is."""

    def limits(self, texts: Many[int]) -> list[int | None]:
        super().limits(texts)
        self._size, self._drafting, self.trying = WHOLE, set(texts), False
        return [None] * len(texts)


def test_texts_that_are_over_leave_nothing_with_the_controller(rounds: list[int]) -> None:
    model, controller = target(), Whole()
    engine = Engine(model, side_drafter(model, "medusa"), slots=1024, controller=controller)
    for number in range(3):
        finished(engine, [request(number, 30, **GREEDY)])
    assert rounds
    assert controller.level.count > 10  # it has learnt
    assert not controller.texts


@pytest.mark.parametrize("tree", ["3", "fixed:2,2", "dynamic:3,3,12"])
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_only_dynamic_trees_grow_in_rounds(method: str, tree: str) -> None:
    model = target()
    made = side_drafter(model, method, tree) if method in SIDE else drafter(model, method, tree)
    engine = Engine(model, made, slots=512, controller=Controller())
    assert (engine.ahead is not None) == tree.startswith("dynamic")
    assert engine.controller is not None
    assert engine.controller.together == tree.startswith("dynamic")


def test_a_model_of_another_kind_has_no_rounds() -> None:
    model = target()
    assert DraftingAhead.of(model, NoDrafter(), Engine(model, NoDrafter(), slots=64).cache) is None


def after_plain_runs(method: str, ahead: int, params: dict[str, Any]) -> tuple[list[list[tuple[int, ...]]], int]:
    """What is drafted for two texts of which 17 tokens were written without drafts, and in how many steps."""
    model = target()
    own = drafter(model, method)
    engine = Engine(model, own, slots=512, max_ahead=ahead)
    for number in range(2):
        engine.add(request(number, draft={"nodes": 0}, **params))
    steps = 0
    while not all(len(job.sequence.output) >= 17 for job in engine.scheduler.running) or not steps:
        engine.step()
        steps += 1
    texts = [job.sequence for job in engine.scheduler.running]
    assert [len(text.output) for text in texts] == [17, 17]
    made = own.draft(texts, [Budget(12, 4)] * 2).on(torch.device("cpu"))
    return [paths_of(made, row) for row in range(2)], steps


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_head_sees_what_was_written_in_runs(method: str, params: dict[str, Any]) -> None:
    """Where nothing is drafted for a while, plain decoding goes in runs, and the head drafts on as if it had not."""
    in_runs, few = after_plain_runs(method, 8, params)
    one_by_one, many = after_plain_runs(method, 1, params)
    assert in_runs == one_by_one
    assert min(map(len, in_runs)) > 5
    assert few == 3 < many


def test_a_drafter_sees_what_was_likely_also_where_nothing_is_drafted() -> None:
    """Plain decoding goes in runs then, and brings along what single steps would have shown."""
    tables = []
    for ahead in (1, 8):
        model = target()
        made = Recycling(Options(top=3), model.vocab_size)
        engine = Engine(model, made, slots=512, max_ahead=ahead)
        asked = [request(number, 20, **GREEDY, draft={"nodes": 0}) for number in range(3)]
        assert finished(engine, asked) == plain(asked)
        tables.append(made.table.copy())
    assert (tables[0] == tables[1]).all()
    assert (tables[0] >= 0).any(1).sum() > 5


@pytest.mark.parametrize("nodes", [0, None])
def test_what_was_seen_is_there_for_the_next_turn(nodes: int | None) -> None:
    """Also where nothing was drafted, so that the head had read nothing yet."""
    model = target()
    made = drafter(model)
    made.keep(True)
    engine = Engine(model, made, slots=1024)
    engine.scheduler.reuse, engine.scheduler.resume = True, made.resume
    prompt = [(7 * place) % 120 + 1 for place in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    said = finished(engine, [Request(prompt, params, DraftOptions(nodes=nodes))])[0]
    assert engine.scheduler.reused == 0
    finished(engine, [Request([*prompt, *said, 5, 6, 7], params, DraftOptions(nodes=nodes))])
    assert engine.scheduler.reused > 190


def test_the_states_of_a_prompt_do_not_stay_with_others() -> None:
    model = target()
    made = drafter(model)
    engine = Engine(model, made, slots=1024)
    short, long = request(0, 30, **GREEDY, draft={"nodes": 0}), request(0, 5, **GREEDY, draft={"nodes": 0})
    first = engine.add(short)
    for _ in range(2):
        engine.step()
    engine.add(replace(long, prompt=list(range(1, 101))))
    engine.step()
    assert isinstance(made.ahead, HeadAhead)
    waiting = made.ahead._texts[first].states
    assert all(piece.whole.fused.shape[0] <= 32 for piece in waiting)
    assert made.ahead._texts[first].rows > 8


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_prompt_is_read_while_the_target_works_where_drafts_are_made(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the head drafts what it would if it read it later."""
    drafts, waiting = [], []
    for along in (True, False):
        if not along:
            monkeypatch.setattr(DraftingAhead, "read_along", lambda *_: False)
        model = target()
        own = drafter(model, method)
        engine = Engine(model, own, slots=1024, max_rows=32)
        engine.scheduler.max_beside = 0
        engine.add(request(0, 60, **GREEDY))
        for _ in range(3):
            engine.step()
        engine.add(request(1, 20, **GREEDY))
        while any(not job.sequence.output for job in (*engine.scheduler.waiting, *engine.scheduler.running)):
            engine.step()  # 40 tokens in two passes
        assert isinstance(own.ahead, HeadAhead)
        waiting.append([text.rows for text in own.ahead._texts.values()])
        texts = [job.sequence for job in engine.scheduler.running]
        made = own.draft(texts, [Budget(12, 4)] * 2).on(torch.device("cpu"))
        drafts.append([paths_of(made, row) for row in range(2)])
    assert drafts[0] == drafts[1]
    assert min(map(len, drafts[0])) > 5
    assert max(waiting[0]) == 2
    assert waiting[1][1] == 40


def test_a_step_that_fails_after_a_prompt_was_read_along_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For that text nothing may be drafted any more; what it says is the same."""
    model = target()
    own = drafter(model)
    engine = Engine(model, own, slots=1024, max_rows=32)
    asked = [request(1, 20, **GREEDY), request(0, 20, **GREEDY)]
    numbers = [engine.add(each) for each in asked]
    engine.step()

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "judge", broken)
        with pytest.raises(RuntimeError, match="gone"):
            engine.step()
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for update in engine.step():
            texts[update.request] += update.tokens
        engine.check_integrity()
        own.ahead.cache.check_integrity()
    assert list(texts.values()) == plain(asked)


def test_a_prompt_waits_where_nothing_was_drafted_last() -> None:
    model = target()
    own = drafter(model)
    engine = Engine(model, own, slots=1024)
    for number in range(2):
        engine.add(request(number, 20, **GREEDY, draft={"nodes": 0}))
        engine.step()
        engine.step()
    assert isinstance(own.ahead, HeadAhead)
    assert own.ahead._texts[1].rows > 40


def test_all_texts_together_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_ahead, "MOST_WAITING_TOGETHER", 24)
    requests = [request(number, 40, **GREEDY, draft={"nodes": 0}) for number in range(3)]
    model = target()
    made = drafter(model)
    engine = Engine(model, made, slots=1024)
    most = 0
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
        assert isinstance(made.ahead, HeadAhead)
        most = max([most, *(text.rows for text in made.ahead._texts.values())])
    assert most <= 8
