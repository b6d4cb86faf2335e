"""The engine against decoding done by hand: one full forward per token, no cache, no batch, no drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import replace

import pytest
import torch

from forerun.core.law import Context, LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.step_record import StepRecord
from forerun.drafters.drafter import Observation
from forerun.engine.engine import Engine
from forerun.engine.request import DraftOptions, Request
from forerun.models.batch import Batch, Segment
from forerun.models.transformer import Transformer
from tests.engine.tiny import (
    EOS,
    VOCABULARY,
    Nothing,
    Oracle,
    RandomTrees,
    drafters,
    drain,
    step_checked,
    tiny_model,
)

MODEL = tiny_model()


def forward(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a text, in one pass over an empty cache."""
    storage = model.new_storage(len(tokens))
    rows = torch.arange(len(tokens))
    segment = Segment(0, torch.tensor(tokens), rows, None, torch.tensor([], dtype=torch.int64), rows, len(tokens))
    return model.forward_rows(Batch.pack([segment]), storage).logits


def by_hand(prompt: list[int], params: SamplingParams, model: Transformer = MODEL) -> list[int]:
    """Plain decoding with the noise of the request's seed."""
    output: list[int] = []
    settings = LawSettings.of([params])
    while len(output) < params.max_tokens:
        logits = forward(model, prompt + output)[-1:]
        context = Context.of([prompt], [output], VOCABULARY, torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64))
        p = law(logits, settings, context)
        if params.greedy:
            token = int(p.argmax())
        else:
            noise = StepNoise(torch.tensor([params.seed]), torch.tensor([len(prompt) + len(output)]))
            token = int(noise.first_arrival(p, torch.tensor([0])))
        output.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
    return output


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=20),
    SamplingParams(temperature=1.2, top_k=8, seed=6, max_tokens=17, ignore_eos=True),
    replace(GREEDY, repetition_penalty=1.3, max_tokens=30),
    SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.4, seed=2**62, max_tokens=9),
    replace(GREEDY, logit_bias={7: 2.5, 9: -torch.inf}),
    SamplingParams(seed=0, max_tokens=1),
    SamplingParams(temperature=0.5, seed=11, max_tokens=25),
]
SETTINGS.append(replace(GREEDY, frequency_penalty=1.5, presence_penalty=1.0, max_tokens=40, ignore_eos=True))
SETTINGS.append(replace(GREEDY, stop_token_ids=tuple(range(7, 50, 7)), max_tokens=40, ignore_eos=True))
PROMPTS = prompts(len(SETTINGS))
EXPECTED = [by_hand(prompt, params) for prompt, params in zip(PROMPTS, SETTINGS, strict=True)]
KNOWN = {tuple(prompt): text for prompt, text in zip(PROMPTS, EXPECTED, strict=True)}
REQUESTS = [Request(prompt, params) for prompt, params in zip(PROMPTS, SETTINGS, strict=True)]


@pytest.mark.parametrize("name", drafters(KNOWN))
@pytest.mark.parametrize("max_batch", [1, 8])
def test_the_text_is_that_of_plain_decoding(name: str, max_batch: int) -> None:
    engine = Engine(MODEL, drafters(KNOWN)[name], slots=1024, max_batch=max_batch)
    texts = drain(engine, REQUESTS)
    assert [text for (text,) in texts] == EXPECTED


@pytest.mark.parametrize("max_rows", [9, 17, 64])
def test_prompts_are_read_in_chunks_beside_running_texts(max_rows: int) -> None:
    records: list[StepRecord] = []
    engine = Engine(MODEL, RandomTrees(8, KNOWN), slots=1024, max_rows=max_rows, trace=records.append)
    texts = drain(engine, REQUESTS)
    assert [text for (text,) in texts] == EXPECTED
    assert all(record.rows <= max_rows for record in records)
    mixed = [r for r in records if any(s.committed for s in r.sequences) and any(not s.tokens for s in r.sequences)]
    assert mixed or max_rows == 64


def test_a_short_cache_makes_texts_step_back_and_changes_none() -> None:
    engine = Engine(MODEL, RandomTrees(9, KNOWN), slots=112)
    texts = drain(engine, REQUESTS)
    assert [text for (text,) in texts] == EXPECTED
    assert engine.cache.free_blocks == engine.cache.total_blocks
    assert engine.cache.holders == set()


def test_preemption_happens_and_is_counted() -> None:
    requests = [Request([5 + i] * 20, replace(GREEDY, max_tokens=40, ignore_eos=True)) for i in range(4)]
    roomy = drain(Engine(MODEL, Nothing(), slots=1024), requests)
    engine = Engine(MODEL, Nothing(), slots=128)
    finished = {}
    ids = [engine.add(request) for request in requests]
    texts: dict[int, list[int]] = {number: [] for number in ids}
    while engine.has_work:
        for update in step_checked(engine):
            texts[update.request] += update.tokens
            if update.finish_reason:
                finished[update.request] = update.statistics
    assert sum(statistics.preemptions for statistics in finished.values()) == engine.statistics.preemptions > 0
    assert [[texts[number]] for number in ids] == roomy
    assert finished[ids[0]].preemptions == 0


def test_requests_join_and_leave_while_others_run() -> None:
    engine = Engine(MODEL, RandomTrees(10, KNOWN), slots=1024, max_batch=3)
    texts: dict[int, list[int]] = {}
    waiting = list(REQUESTS)
    order = []
    while engine.has_work or waiting:
        if waiting:
            number = engine.add(waiting.pop(0))
            texts[number] = []
            order.append(number)
        for update in step_checked(engine):
            texts[update.request] += update.tokens
    assert [texts[number] for number in order] == EXPECTED


def test_cancel_at_any_time() -> None:
    engine = Engine(MODEL, RandomTrees(11, KNOWN), slots=256, max_batch=4)
    ids = [engine.add(request) for request in REQUESTS]
    engine.cancel(ids[7])  # before it ran
    ended = {}
    texts: dict[int, list[int]] = {number: [] for number in ids}
    for count in range(1000):
        if not engine.has_work:
            break
        if count == 2:
            engine.cancel(ids[0])
            engine.cancel(ids[0])
        for update in step_checked(engine):
            assert update.request not in ended
            texts[update.request] += update.tokens
            if update.finish_reason:
                ended[update.request] = update.finish_reason
    assert ended[ids[0]] == ended[ids[7]] == "cancelled"
    assert texts[ids[7]] == []
    for number in range(1, 7):
        assert texts[ids[number]] == EXPECTED[number]
    engine.cancel(ids[3])  # over already
    assert not engine.has_work
    assert engine.cache.holders == set()


def test_finish_reasons_and_cuts() -> None:
    long = by_hand(PROMPTS[0], replace(GREEDY, max_tokens=40, ignore_eos=True))
    known = {tuple(PROMPTS[0]): long}
    for stop_after in (1, 4, 7):
        token = long[stop_after - 1]
        first = long.index(token) + 1
        for params, length, reason in (
            (replace(GREEDY, max_tokens=stop_after, ignore_eos=True), stop_after, "length"),
            (replace(GREEDY, stop_token_ids=(token,), ignore_eos=True, max_tokens=40), first, "stop"),
        ):
            engine = Engine(MODEL, Oracle(known, right=True), slots=256)
            engine.add(Request(PROMPTS[0], params))
            updates = []
            while engine.has_work:
                updates += step_checked(engine)
            assert [token for update in updates for token in update.tokens] == long[:length]
            assert updates[-1].finish_reason == reason
            assert all(len(update.tokens) == len(update.kinds) for update in updates)


def test_a_watcher_ends_the_text_inside_an_accepted_path() -> None:
    long = by_hand(PROMPTS[0], replace(GREEDY, max_tokens=40, ignore_eos=True))
    engine = Engine(MODEL, Oracle({tuple(PROMPTS[0]): long}, right=True), slots=256)
    request = Request(
        PROMPTS[0], replace(GREEDY, max_tokens=40, ignore_eos=True), ends=lambda: lambda output: len(output) == 9
    )
    assert drain(engine, [request]) == [[long[:9]]]


def test_several_texts_for_one_prompt() -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12)
    engine = Engine(MODEL, RandomTrees(12), slots=1024)
    (texts,) = drain(engine, [Request(PROMPTS[1], params)])
    assert len({tuple(text) for text in texts}) == 3
    assert texts[0] == by_hand(PROMPTS[1], replace(params, n=1))
    plain = drain(Engine(MODEL, Nothing(), slots=1024, max_batch=1), [Request(PROMPTS[1], params)])
    assert plain == [texts]


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, seed=4, max_tokens=15, logprobs=3, repetition_penalty=1.2)
    text = by_hand(PROMPTS[2], params)
    expected = torch.log_softmax(forward(MODEL, PROMPTS[2] + text), -1)[len(PROMPTS[2]) - 1 :]
    for drafter in (Nothing(), Oracle({tuple(PROMPTS[2]): text}, right=True), RandomTrees(13)):
        engine = Engine(MODEL, drafter, slots=1024)
        engine.add(Request(PROMPTS[2], params))
        found = []
        while engine.has_work:
            for update in step_checked(engine):
                found += update.logprobs or []
        assert [item.token for item in found] == text
        for row, item in zip(expected, found, strict=False):
            assert item.logprob == pytest.approx(float(row[item.token]), abs=1e-4)
            values, tokens = row.topk(3)
            assert [token for token, _ in item.top] == tokens.tolist()
            assert [value for _, value in item.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_request_may_forbid_speculation() -> None:
    for draft, longest in ((DraftOptions(nodes=0), 1), (DraftOptions(depth=0), 1), (DraftOptions(nodes=3, depth=2), 3)):
        records: list[StepRecord] = []
        engine = Engine(MODEL, Oracle(KNOWN, right=True), slots=512, trace=records.append)
        texts = drain(engine, [replace(REQUESTS[0], draft=draft)])
        assert texts == [[EXPECTED[0]]]
        assert max(len(sequence.committed) for record in records for sequence in record.sequences) == longest


def test_statistics_add_up() -> None:
    records: list[StepRecord] = []
    engine = Engine(MODEL, Oracle(KNOWN, right=True, length=4), slots=512, trace=records.append)
    drain(engine, REQUESTS[:1])
    statistics = engine.statistics
    assert statistics.tokens == len(EXPECTED[0])
    assert statistics.target_passes == len(records)
    assert statistics.drafted == sum(len(s.tokens) - 1 for record in records for s in record.sequences)
    assert statistics.accepted == sum(len(s.accepted) for record in records for s in record.sequences)
    assert statistics.rows == sum(record.rows for record in records)
    assert statistics.acceptance_by_depth == [1.0] * len(statistics.acceptance_by_depth)
    assert statistics.tokens_per_pass > 3
    assert statistics.total_seconds == pytest.approx(sum(sum(record.seconds.values()) for record in records))
    assert 0 < statistics.cache_peak <= 1
    wrong = Engine(MODEL, Oracle(KNOWN, right=False), slots=512)
    drain(wrong, REQUESTS[:1])
    assert wrong.statistics.tokens_per_pass == 1
    assert wrong.statistics.acceptance_by_depth == [0.0]
    assert wrong.statistics.rows_wasted == wrong.statistics.drafted > 0


def test_the_prompt_of_an_encoder_counts_as_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "begin", lambda sequence, prompt: [0])
    engine = Engine(model, Nothing(), slots=64)
    engine.add(Request([5, 6, 7], GREEDY))
    assert step_checked(engine)[0].statistics.prompt_tokens == engine.statistics.prompt_tokens == 3


def test_records_are_json_lines() -> None:
    records: list[StepRecord] = []
    engine = Engine(MODEL, RandomTrees(14, KNOWN), slots=512, trace=records.append)
    drain(engine, REQUESTS[:3])
    committed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for record in records:
        line = json.loads(record.as_json())
        assert set(line["seconds"]) == {"draft", "target", "verify", "rest"}
        for sequence in line["sequences"]:
            for node, parent in enumerate(sequence["parents"]):
                assert -1 <= parent < max(node, 1)
            accepted = [sequence["tokens"][node] for node in sequence["accepted"]]
            assert sequence["committed"][: len(accepted)] == accepted[: len(sequence["committed"])]
            committed[sequence["request"]] += sequence["committed"]
    assert [committed[number] for number in range(3)] == EXPECTED[:3]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], GREEDY), "empty"),
        (Request([1] * 160, GREEDY), "160 tokens"),
        (Request([1, VOCABULARY], GREEDY), f"token {VOCABULARY}"),
        (Request([1], replace(GREEDY, logit_bias={99: 1.0})), "token 99"),
        (Request([1], replace(GREEDY, logit_bias={9: 1e308})), r"logit_bias of token 9 is 1e\+308"),
        (Request([1], replace(GREEDY, logit_bias=dict.fromkeys(range(VOCABULARY), -1e308))), "forbids every token"),
        (Request([1], replace(GREEDY, frequency_penalty=1e300)), r"frequency_penalty is 1e\+300"),
        (Request([1], replace(GREEDY, repetition_penalty=1e300)), r"repetition_penalty is 1e\+300"),
        (Request([1], replace(GREEDY, repetition_penalty=1e-300)), "repetition_penalty is 1e-300"),
        (Request([1], GREEDY, rule="magic"), "no verification rule"),
        (Request([1], SamplingParams(), rule="block"), "block"),
        (Request([1], SamplingParams(), rule="greedy"), "temperature 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: Request, words: str) -> None:
    engine = Engine(MODEL, RandomTrees(0), slots=512)
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert not engine.has_work


def test_a_prompt_must_fit_a_small_cache() -> None:
    engine = Engine(MODEL, Nothing(), slots=32)
    with pytest.raises(ValueError, match="context holds 32"):
        engine.add(Request([1] * 32, GREEDY))
    engine.add(Request([5] * 20, replace(GREEDY, max_tokens=100, ignore_eos=True)))
    count = 0
    while engine.has_work:
        count += sum(len(update.tokens) for update in step_checked(engine))
    assert count == 12


def test_a_model_that_breaks_leaves_the_engine_whole() -> None:
    model = tiny_model()
    engine = Engine(model, RandomTrees(15, KNOWN), slots=512)
    number = engine.add(REQUESTS[0])
    text = [token for update in step_checked(engine) for token in update.tokens]
    good = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        engine.step()
    engine.check_integrity()
    model.lm_head.weight.data.copy_(good)
    while engine.has_work:
        for update in step_checked(engine):
            assert update.request == number
            text += update.tokens
    assert text == EXPECTED[0]


class Curious(RandomTrees):
    """Wants to see what the target found likely, and the hidden states after two layers."""

    top = 3
    layers = (2,)

    def __init__(self) -> None:
        super().__init__(16, KNOWN)
        self.seen: list[Observation] = []

    def observe(self, observations: Many[Observation]) -> None:
        self.seen += observations


def test_a_drafter_sees_what_it_asks_for() -> None:
    drafter = Curious()
    engine = Engine(MODEL, drafter, slots=512, max_rows=40)
    assert [text for (text,) in drain(engine, REQUESTS[:3])] == EXPECTED[:3]
    for number in range(3):
        own = [seen for seen in drafter.seen if seen.sequence.id == number]
        text = PROMPTS[number] + EXPECTED[number]
        assert [token for seen in own for token in seen.tokens] == EXPECTED[number]
        states = torch.cat([seen.features[2] for seen in own])[: len(text) - 1]
        assert [seen.start for seen in own] == sorted({seen.start for seen in own})
        assert torch.allclose(states, forward_states(text)[: states.shape[0]], atol=1e-4)
        for seen in own:
            if seen.checked is None:
                assert not seen.tokens, "only a chunk of a prompt has no tree"
                continue
            assert len(seen.checked.tokens) == len(seen.checked.parents) == seen.checked.top.shape[0]
            root_place = position_of_root(own, seen, number)
            for node in range(len(seen.checked.tokens)):
                path: list[int] = []
                at = node
                while at >= 0:
                    path.insert(0, seen.checked.tokens[at])
                    at = seen.checked.parents[at]
                logits = forward(MODEL, text[:root_place] + path)[-1]
                assert seen.checked.top[node].tolist() == logits.topk(3).indices.tolist()


def position_of_root(own: list[Observation], seen: Observation, number: int) -> int:
    """The root is the last token that was committed before the step."""
    before = sum(len(other.tokens) for other in own[: own.index(seen)])
    return len(PROMPTS[number]) + before - 1


def forward_states(text: list[int]) -> torch.Tensor:
    storage = MODEL.new_storage(len(text))
    rows = torch.arange(len(text))
    segment = Segment(0, torch.tensor(text), rows, None, torch.tensor([], dtype=torch.int64), rows, 0)
    return MODEL.forward_rows(Batch.pack([segment]), storage, layers=(2,)).features[2]
