"""The engine with grammars: texts are those of decoding by hand with the mask of every token, whatever drafts them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.core.drawing import Drawing
from forerun.core.law import Context, LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Drafter
from forerun.engine import drafting
from forerun.engine.controller import Controller
from forerun.engine.engine import Engine
from forerun.engine.grammar_trees import Room, constrain
from forerun.engine.grammar_walk import Walk
from forerun.engine.request import DraftOptions, Request
from tests.engine.test_engine import forward, prompts
from tests.engine.tiny import EOS, VOCABULARY, Nothing, RandomSamples, RandomTrees, drafters, drain, tiny_model
from tests.exactness.grammars import Automaton, AutomatonState

MODEL = tiny_model()
Plant = Callable[[pytest.MonkeyPatch], None]


def some_grammar(seed: int) -> Automaton:
    """Twelve states: in a third of them one token is forced, in others up to thirty may come; some may end, and one
    must."""
    rng = np.random.default_rng(seed)
    follows: dict[int, dict[int, int]] = {11: {}}
    for state in range(11):
        tokens = rng.choice(np.arange(4, VOCABULARY), 1 if state % 3 == 2 else rng.integers(2, 30), replace=False)
        follows[state] = {int(token): int(rng.integers(12)) for token in tokens}
    return Automaton(follows, whole=frozenset({3, 7, 11}), guesses={1: (next(iter(follows[1])),)})


def by_hand(request: Request) -> list[int]:
    """Plain decoding with a fresh state for every token."""
    prompt, params = request.prompt, request.params
    output: list[int] = []
    assert params.grammar is not None
    while len(output) < params.max_tokens:
        state = params.grammar.start()
        assert all(state.take(token) for token in output)
        if state.must_end:
            break
        mask = state.allowed(VOCABULARY)
        mask[EOS] = state.may_end and not params.ignore_eos
        context = Context.of([prompt], [output], VOCABULARY, torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64))
        p = law(forward(MODEL, prompt + output)[-1:], LawSettings.of([params]), context, mask[None])
        noise = StepNoise(torch.tensor([params.seed or 0]), torch.tensor([len(prompt) + len(output)]))
        token = int(p.argmax()) if params.greedy else int(noise.first_arrival(p, torch.tensor([0])))
        output.append(token)
        if token == EOS:
            break
    return output


GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETTINGS = [
    GREEDY,
    SamplingParams(seed=5, max_tokens=30),
    SamplingParams(temperature=1.4, seed=6, max_tokens=17, ignore_eos=True),
    replace(GREEDY, repetition_penalty=1.3, max_tokens=30, ignore_eos=True),
    SamplingParams(min_p=0.05, presence_penalty=0.5, frequency_penalty=0.4, seed=2**62, max_tokens=20),
    SamplingParams(temperature=0.9, top_k=3, seed=8, max_tokens=25),
    SamplingParams(seed=0, max_tokens=1),
]
REQUESTS = [
    Request(prompt, replace(params, grammar=some_grammar(number)))
    for number, (prompt, params) in enumerate(zip(prompts(len(SETTINGS), seed=3), SETTINGS, strict=True))
]
EXPECTED = [by_hand(request) for request in REQUESTS]
KNOWN = {tuple(request.prompt): text for request, text in zip(REQUESTS, EXPECTED, strict=True)}


@pytest.mark.parametrize("name", drafters(KNOWN))
@pytest.mark.parametrize("max_batch", [1, 8])
def test_the_text_is_that_of_masked_plain_decoding(name: str, max_batch: int) -> None:
    engine = Engine(MODEL, drafters(KNOWN)[name], slots=1024, max_batch=max_batch)
    assert [text for (text,) in drain(engine, REQUESTS)] == EXPECTED


@pytest.mark.parametrize("name", ["half right trees", "sampled trees"])
def test_texts_with_and_without_grammars_share_a_step(name: str) -> None:
    """Those without are what they are alone; a short cache makes some step back."""
    free = [replace(request, params=replace(request.params, grammar=None)) for request in REQUESTS]
    alone = drain(Engine(MODEL, Nothing(), slots=1024), free)
    mixed = [request for pair in zip(REQUESTS, free, strict=True) for request in pair]
    texts = drain(Engine(MODEL, drafters(KNOWN)[name], slots=192), mixed)
    assert [text for (text,) in texts[::2]] == EXPECTED
    assert texts[1::2] == alone


def test_plain_decoding_and_what_is_forced_give_one_text() -> None:
    off = [replace(request, draft=DraftOptions(nodes=0)) for request in REQUESTS]
    plain = Engine(MODEL, Nothing(), slots=1024)
    assert [text for (text,) in drain(plain, off)] == EXPECTED
    assert plain.statistics.drafted == 0
    forced = Engine(MODEL, Nothing(), slots=1024)
    drain(forced, REQUESTS)
    assert 0 < forced.statistics.accepted <= forced.statistics.drafted
    assert forced.statistics.target_passes < plain.statistics.target_passes


def test_what_is_forced_is_drafted_also_where_the_controller_drafts_nothing() -> None:
    controller = Controller()
    controller.limits = lambda texts: [0] * len(texts)  # type: ignore[method-assign]
    engine = Engine(MODEL, RandomTrees(3), slots=1024, controller=controller)
    assert [text for (text,) in drain(engine, REQUESTS)] == EXPECTED
    assert engine.statistics.accepted > 0


def test_n_texts_have_a_state_each() -> None:
    request = replace(REQUESTS[1], params=replace(REQUESTS[1].params, n=3))
    (texts,) = drain(Engine(MODEL, RandomTrees(3), slots=1024), [request])
    assert texts[0] == EXPECTED[1]
    assert texts == drain(Engine(MODEL, Nothing(), slots=1024), [request])[0]


def test_a_forbidding_bias_yields_to_the_grammar() -> None:
    """Token 5 is forbidden and the only one that may come; 6 is forbidden where 7 may come instead."""
    grammar = Automaton({0: {5: 1}, 1: {6: 2, 7: 2}, 2: {}}, whole=frozenset({2}))
    bias = {5: -torch.inf, 6: -torch.inf}
    for drafter in (Nothing(), RandomTrees(1)):
        for params in (GREEDY, SamplingParams(), SamplingParams(seed=1)):
            request = Request([9], replace(params, grammar=grammar, logit_bias=bias))
            assert drain(Engine(MODEL, drafter, slots=256), [request]) == [[[5, 7]]]


def test_a_grammar_that_does_not_fit_the_model_is_refused() -> None:
    engine = Engine(MODEL, Nothing(), slots=256)
    with pytest.raises(ValueError, match="allows no token that this model can write"):
        engine.add(Request([9], SamplingParams(grammar=Automaton({0: {VOCABULARY: 1}, 1: {}}))))
    with pytest.raises(ValueError, match="made by json_schema, lark or regex"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    assert not engine.has_work


class GivesUp(Automaton):
    """A grammar that stops at a limit of its own: behind the third token nothing is allowed, and nothing is whole."""

    def start(self) -> AutomatonState:
        return Stopping(self)


class Stopping(AutomatonState):
    must_end = False

    def allowed(self, width: int) -> torch.Tensor:
        return super().allowed(width) & (len(self.path) < 4)


@pytest.mark.parametrize("name", ["nothing", "random trees", "sampled chains"])
def test_a_text_is_cut_where_its_grammar_gives_up(name: str) -> None:
    request = Request([9], SamplingParams(grammar=GivesUp({0: dict.fromkeys(range(5, 30), 0)}), seed=1))
    engine = Engine(MODEL, drafters(KNOWN)[name], slots=256)
    engine.add(request)
    updates = []
    while engine.has_work:
        updates += engine.step()
    text = [token for update in updates for token in update.tokens]
    assert (updates[-1].finish_reason, len(text)) == ("length", 3)
    assert all(5 <= token < 30 for token in text)


# --- the law of unseeded texts -------------------------------------------------------------------------------------

SMALL = Automaton({0: {5: 1, 6: 1, 8: 2}, 1: {7: 2}, 2: {5: 3, 9: 3, 10: 0}, 3: {}}, whole=frozenset({3}))


def exact_law(prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], chance: float) -> None:
        state = SMALL.start()
        assert all(state.take(token) for token in output)
        if state.must_end or len(output) == length:
            found[output] = chance
            return
        logits = forward(MODEL, [*prompt, *output])[-1:]
        p = law(logits, LawSettings.of([SamplingParams()]), mask=state.allowed(VOCABULARY)[None])[0]
        for token in p.nonzero()[:, 0].tolist():
            grow((*output, token), chance * float(p[token]))

    grow((), 1.0)
    return found


def distance(drafter: Drafter, rule: str, texts: int = 1200) -> float:
    """Between what an engine writes and the law, in total variation."""
    prompt = [11, 12]
    params = SamplingParams(max_tokens=4, n=600, grammar=SMALL)
    engine = Engine(MODEL, drafter, slots=16 * 64, max_batch=64)
    requests = [Request(prompt, params, rule=rule)] * (texts // params.n)
    counts = Counter(tuple(text) for batch in drain(engine, requests) for text in batch)
    wanted = exact_law(prompt, params.max_tokens)
    assert set(counts) <= set(wanted), "every text follows the grammar"
    return sum(abs(counts[text] / texts - chance) for text, chance in wanted.items()) / 2


LIKELY = (5, 6, 7, 8, 9, 10, 20)


@pytest.mark.parametrize(("paths", "rule"), [(1, "block"), (3, "recursive_iid")])
def test_unseeded_texts_have_the_masked_law(paths: int, rule: str) -> None:
    assert distance(RandomSamples(5, paths, LIKELY), rule) < 0.06


# --- planted faults ------------------------------------------------------------------------------------------------


def drafts_that_break(drafter: Drafter) -> int:
    """Of the rows of all passes."""
    records: list[StepRecord] = []
    drain(Engine(MODEL, drafter, slots=1024, trace=records.append), REQUESTS)
    texts: dict[tuple[int, int], list[int]] = {}
    broken = 0
    for record in records:
        for own in record.sequences:
            text = texts.setdefault((own.request, own.index), [])
            walk = Walk(some_grammar(own.request), frozenset({EOS}), VOCABULARY)
            assert all(walk.commit(token) for token in text)
            for node in range(1, len(own.tokens)):
                path: list[int] = []
                above = node
                while above:
                    path.insert(0, own.tokens[above])
                    above = own.parents[above]
                broken += not walk.mask(path[:-1])[path[-1]]
            text += own.committed
    return broken


@pytest.mark.parametrize("name", ["random trees", "half right trees", "sampled chains", "sampled trees"])
def test_no_row_of_a_pass_is_spent_on_what_breaks_the_grammar(name: str) -> None:
    assert drafts_that_break(drafters(KNOWN)[name]) == 0


def test_pruning_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "constrain", lambda tree, walks, rooms: (tree, [frozenset()] * len(walks)))
    assert drafts_that_break(RandomTrees(3)) > 0


def mask_of_the_root(patch: pytest.MonkeyPatch) -> None:
    mask = Walk.mask
    patch.setattr(Walk, "mask", lambda self, path: mask(self, ()))


def forced_taken_unseen(patch: pytest.MonkeyPatch) -> None:
    """What the grammar calls forced is the only token of the law."""
    mask = Walk.mask

    def only_the_forced(self: Walk, path: list[int]) -> torch.Tensor:
        allowed = mask(self, path)
        if not path and self.forced():
            allowed = torch.zeros_like(allowed)
            allowed[self.forced()[0]] = True
        return allowed

    patch.setattr(Walk, "mask", only_the_forced)


def state_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A path of a draft is entered and not taken back."""
    patch.setattr(Walk, "leave", lambda self: None)


@pytest.mark.parametrize("plant", [mask_of_the_root, forced_taken_unseen, state_left_behind])
def test_a_planted_fault_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    engine = Engine(MODEL, drafters(KNOWN)["half right trees"], slots=1024)
    try:
        texts = [text for (text,) in drain(engine, REQUESTS)]
    except AssertionError:
        return
    assert texts != EXPECTED


# --- what becomes of a tree ----------------------------------------------------------------------------------------

RUN = Automaton({**{state: {5 + state: state + 1} for state in range(6)}, 6: {20: 7, 21: 7}, 7: {5: 6}})
"""5 6 7 8 9 10, then 20 or 21 and 5, over and over."""


def lists_of(tree: DraftTree) -> tuple[list[int], list[int]]:
    ((_, tokens, parents),) = tree.rows()
    return tokens, parents


@pytest.mark.parametrize(("room", "count"), [(Room(3, 9), 3), (Room(9, 2), 2), (Room(0, 0), 0), (Room(9, 9), 6)])
def test_forced_tokens_stay_within_the_room(room: Room, count: int) -> None:
    walk = Walk(RUN, frozenset(), VOCABULARY)
    tree, _ = constrain(DraftTree.of_lists([([30], [-1])], [4]), [walk], [room])
    tokens, parents = lists_of(tree)
    assert tokens == [30, 5, 6, 7, 8, 9, 10][: 1 + count]
    assert parents == list(range(-1, len(tokens) - 1))


def test_a_draft_is_pruned_and_silent_rows_go_with_what_they_stand_behind() -> None:
    """Behind 5 … 10: 20 (5 behind it) and 21 may come, 22 may not; rows 50 and 51 stand behind 20 and 22."""
    walk = Walk(RUN, frozenset(), VOCABULARY)
    for token in range(5, 11):
        assert walk.commit(token)
    trees = [([10, 20, 22, 21, 5, 6, 50, 51], [-1, 0, 0, 0, 1, 2, 1, 2])]
    tree, broken = constrain(DraftTree.of_lists(trees, [9], [2]), [walk], [Room(8, 3)])
    assert lists_of(tree) == ([10, 20, 21, 5, 5, 50], [-1, 0, 0, 1, 2, 1])
    assert tree.silent == [1]
    assert broken == [frozenset()]


def test_a_drawn_token_that_breaks_the_grammar_stays_a_draw_without_a_row() -> None:
    walk = Walk(RUN, frozenset(), VOCABULARY)
    for token in range(5, 11):
        assert walk.commit(token)
    q = torch.full((1, 2, VOCABULARY), 1 / VOCABULARY)
    drawn = DraftTree.chain(torch.tensor([[10, 22, 5]]), torch.tensor([9]), Drawing.IID, q=q)
    tree, broken = constrain(drawn, [walk], [Room(2, 2)])
    assert broken == [frozenset({1})]
    assert tree.children[0, 0].tolist() == [1]
    assert tree.present.tolist() == [[True, True, False]]


def test_what_a_drafter_told_of_its_drafts_outlasts_the_grammar() -> None:
    """What is forced is certain where it stands; what went is told nothing of."""
    walk = Walk(RUN, frozenset(), VOCABULARY)
    for token in range(5, 11):
        assert walk.commit(token)
    logs = [0.0, *map(math.log, (0.5, 0.3, 0.2, 0.1, 0.15))]
    trees = [([10, 20, 22, 21, 5, 6], [-1, 0, 0, 0, 1, 2])]
    for planted in (True, False):
        told = DraftTree.of_lists(trees, [9], log_values=lambda: [logs])
        if not planted:
            tokens, parents = (torch.tensor([own]) for own in trees[0])
            told = DraftTree.build(tokens, parents, torch.tensor([9]), Drawing.FIXED, log_values=lambda: [logs])
        tree, _ = constrain(told, [walk], [Room(8, 3)])
        (shares,) = tree.confidences()
        assert shares is not None
        there = [node for nodes, _, _ in tree.lists() for node in nodes]
        assert [shares[node] for node in there] == pytest.approx([1.0, 0.5, 0.2, 1.0, 1.0])


def test_a_forced_step_tells_the_confidences_of_the_texts_beside_it() -> None:
    walk = Walk(RUN, frozenset(), VOCABULARY)
    told = DraftTree.of_lists([([30], [-1]), ([7, 8], [-1, 0])], [4, 4], log_values=lambda: [None, [0.0, -1.0]])
    tree, _ = constrain(told, [walk, None], [Room(2, 2), Room(1, 1)])
    assert tree.confidences() == [None, pytest.approx([1.0, math.exp(-1.0)])]
