"""`law` against a per-row oracle, transform by transform and all together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.law import Context, LawSettings, law
from forerun.core.params import SamplingParams
from tests.core.law_oracle import Row, answer, mask_of

INF = math.inf
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def context_of(rows: Sequence[Row]) -> Context:
    depth = max(len(row.path) for row in rows)
    path = [list(row.path) + [-1] * (depth - len(row.path)) for row in rows]
    return Context.of(
        [row.prompt for row in rows],
        [row.output for row in rows],
        len(rows[0].logits),
        torch.arange(len(rows)),
        torch.tensor(path, dtype=torch.int64).view(len(rows), depth),
    )


def law_of(rows: Sequence[Row], dtype: torch.dtype = torch.float64) -> Tensor:
    """One call for all the rows."""
    logits = torch.tensor([row.logits for row in rows], dtype=dtype)
    mask = mask_of(rows)
    return law(
        logits,
        LawSettings.of([row.params for row in rows]),
        context_of(rows),
        None if mask is None else torch.tensor(mask),
    )


def plain(logits: Tensor, *params: SamplingParams) -> Tensor:
    return law(logits, LawSettings.of(params))


def one(logits: Sequence[float], **params: float) -> list[float]:
    """The law of a single row in float64, as a list."""
    row: list[float] = plain(torch.tensor([list(logits)], dtype=torch.float64), SamplingParams(**params))[0].tolist()  # type: ignore[arg-type]
    return row


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) if p > 0 else -INF for p in probabilities]


# --- each transform, by hand ---------------------------------------------------------------------------------


def test_no_transform_is_softmax() -> None:
    assert one(logs(0.1, 0.2, 0.7)) == pytest.approx([0.1, 0.2, 0.7], abs=1e-15)


def test_temperature_takes_powers() -> None:
    assert one(logs(0.2, 0.4, 0.4), temperature=0.5) == pytest.approx([1 / 9, 4 / 9, 4 / 9], abs=1e-15)
    assert one(logs(0.1, 0.9), temperature=2.0) == pytest.approx([0.25, 0.75], abs=1e-15)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-42, 1e-50, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cold_rows_are_one_hot(temperature: float, dtype: torch.dtype) -> None:
    row = plain(torch.tensor([[1.0, 3.0, -INF, 2.999]], dtype=dtype), SamplingParams(temperature=temperature))
    assert row.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_greedy_takes_the_first_maximum_and_cold_shares_it() -> None:
    assert one([0.0, 2.0, 1.0, 2.0, 2.0], temperature=0) == [0, 1, 0, 0, 0]
    assert one([0.0, 2.0, 1.0, 2.0, 2.0], temperature=1e-30) == pytest.approx([0, 1 / 3, 0, 1 / 3, 1 / 3])


def test_greedy_first_maximum_in_a_long_row() -> None:
    logits = torch.zeros(3, 50_001)
    logits[0, [777, 40_000, 50_000]] = 1.0
    logits[1, [50_000]] = 1.0
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=3, top_p=0.2)):
        rows = plain(logits, params, params, params)
        assert rows.argmax(-1).tolist() == [777, 50_000, 0]
        assert torch.equal(rows.sum(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hot_rows_are_uniform_over_what_is_allowed(dtype: torch.dtype) -> None:
    row = plain(torch.tensor([[1.0, 3.0, -INF, -50.0]], dtype=dtype), SamplingParams(temperature=1e300))
    assert row[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=1e-7)


def test_top_k() -> None:
    logits = logs(0.1, 0.3, 0.2, 0.4)
    assert one(logits, top_k=1) == [0, 0, 0, 1]
    assert one(logits, top_k=2) == pytest.approx([0, 3 / 7, 0, 4 / 7])
    for k in (0, 4, 5, 10_000, 2**62):
        assert one(logits, top_k=k) == pytest.approx([0.1, 0.3, 0.2, 0.4])


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert one([1.0, 0.0, 1.0, 1.0, -5.0], top_k=2) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert one([2.0, 0.0, 0.0, -1.0], top_k=2) == one([2.0, 0.0, 0.0, -1.0], top_k=3)


def test_top_p() -> None:
    logits = logs(0.15, 0.05, 0.5, 0.3)
    assert one(logits, top_p=0.4) == [0, 0, 1, 0]
    assert one(logits, top_p=0.6) == pytest.approx([0, 0, 5 / 8, 3 / 8])
    assert one(logits, top_p=0.9) == pytest.approx([3 / 19, 0, 10 / 19, 6 / 19])
    assert one(logits, top_p=1.0) == pytest.approx([0.15, 0.05, 0.5, 0.3])
    assert one(logits, top_p=1e-300) == [0, 0, 1, 0]


def test_top_p_exactly_at_a_boundary_takes_no_more() -> None:
    """Where the likeliest tokens hold top_p to the last unit of the cumulative sum, they are enough."""
    logits = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tried = 0
    for row, p in zip(logits.tolist(), plain(logits, *[SamplingParams()] * 100).tolist(), strict=True):
        counts = sorted((int(weight * 2**50) for weight in p), reverse=True)
        for kept in range(1, 5):
            held, total = sum(counts[:kept]), sum(counts)
            if held / total * total == held:
                tried += 1
                assert sum(weight > 0 for weight in one(row, top_p=held / total)) == kept
    assert tried > 50


def test_top_p_keeps_or_drops_ties_together() -> None:
    assert one([0.0, 0.0, -60.0], top_p=0.3) == [0.5, 0.5, 0.0]
    assert one([0.0] * 4, top_p=0.5) == [0.25] * 4
    assert one([0.0] * 4 + [-INF], top_p=0.2) == [0.25] * 4 + [0.0]
    # A tie group that begins below the boundary comes in whole, the next group stays out.
    assert one(logs(0.4, 0.2, 0.2, 0.15, 0.05), top_p=0.5) == pytest.approx([0.5, 0.25, 0.25, 0, 0])


def test_top_p_of_one_keeps_the_least_likely_token_beside_rows_that_truncate() -> None:
    logits = torch.tensor([[0.0, -50.0, -1.0]] * 2, dtype=torch.float64)
    rows = plain(logits, SamplingParams(top_p=0.9), SamplingParams())
    assert (rows > 0).tolist() == [[True, False, True], [True, True, True]]


def test_min_p() -> None:
    logits = logs(0.5, 0.3, 0.15, 0.05)
    assert one(logits, min_p=0.0) == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert one(logits, min_p=0.2) == pytest.approx([10 / 19, 6 / 19, 3 / 19, 0])
    assert one(logits, min_p=1.0) == [1, 0, 0, 0]
    assert one([0.0, 0.0, -0.01], min_p=1.0) == [0.5, 0.5, 0.0]


def test_min_p_measures_against_the_most_likely_token_also_after_top_p() -> None:
    assert one(logs(0.4, 0.3, 0.2, 0.1), top_p=0.85, min_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_top_p_counts_mass_after_temperature_and_top_k() -> None:
    # top_k leaves (0.4, 0.3) → (4/7, 3/7); of that 0.5 is held by the first token, of the whole law it is not.
    assert one(logs(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == [1, 0, 0, 0]
    assert one(logs(0.4, 0.3, 0.2, 0.1), top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert one(logs(0.4, 0.3, 0.2, 0.1), top_p=0.5, temperature=0.25)[1:] == [0, 0, 0]


def test_repetition_penalty_sees_prompt_output_and_path_and_the_sign() -> None:
    base = Row(
        [2.0, -1.0, 2.0, 2.0, 2.0], SamplingParams(repetition_penalty=2.0), prompt=(0, 1), output=(2,), path=(3,)
    )
    expected = torch.softmax(torch.tensor([1.0, -2.0, 1.0, 1.0, 2.0], dtype=torch.float64), 0)
    assert law_of([base])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-15)
    often = replace(base, prompt=(0, 0, 1, 0), output=(2, 2), path=(3, 2))  # how often does not matter
    assert torch.equal(law_of([often]), law_of([base]))


def test_presence_and_frequency_see_output_and_path_but_not_the_prompt() -> None:
    row = Row([0.0] * 4, SamplingParams(presence_penalty=0.5), prompt=(0, 0), output=(1, 1), path=(2, 1))
    expected = torch.softmax(torch.tensor([0.0, -0.5, -0.5, 0.0], dtype=torch.float64), 0)
    assert law_of([row])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-15)
    row = replace(row, params=SamplingParams(frequency_penalty=0.5))
    expected = torch.softmax(torch.tensor([0.0, -1.5, -0.5, 0.0], dtype=torch.float64), 0)
    assert law_of([row])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-15)
    row = replace(row, params=SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.25))  # rewards
    expected = torch.softmax(torch.tensor([0.0, 1.75, 1.25, 0.0], dtype=torch.float64), 0)
    assert law_of([row])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-15)


def test_path_padding_is_no_token() -> None:
    """Paths are padded with -1; neither the first nor the last token may be penalised for that."""
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=3.0)
    rows = [Row([1.0] * 3, params), Row([1.0] * 3, params, path=(1, 1, 1))]
    assert law_of(rows)[0].tolist() == pytest.approx([1 / 3] * 3)


def test_nodes_of_one_sequence_see_their_own_paths() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    context = Context.of([[3]], [[0]], 4, torch.tensor([0, 0, 0]), torch.tensor([[-1, -1], [1, -1], [1, 2]]))
    rows = law(torch.zeros(3, 4, dtype=torch.float64), LawSettings.of([params] * 3), context)
    for row, counts in zip(rows, ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]), strict=True):
        expected = torch.softmax(-torch.tensor(counts, dtype=torch.float64), 0)
        assert row.tolist() == pytest.approx(expected.tolist(), abs=1e-15)


def test_sequences_do_not_share_contexts() -> None:
    params = SamplingParams(presence_penalty=1.0)
    context = Context.of([[0], [0]], [[1], [2, 2]], 3, torch.tensor([1, 0]), torch.full((2, 1), -1))
    rows = law(torch.zeros(2, 3, dtype=torch.float64), LawSettings.of([params] * 2), context)
    assert rows[0, 2] < rows[0, 1] == rows[0, 0]
    assert rows[1, 1] < rows[1, 2] == rows[1, 0]


def test_bias_comes_after_penalties_and_before_temperature() -> None:
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, logit_bias={0: 1.0, 2: -INF})
    row = Row([2.0, 2.0, 9.0], params, prompt=(0,))
    expected = torch.softmax(torch.tensor([4.0, 4.0, -INF], dtype=torch.float64), 0)
    assert law_of([row])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-15)


def test_bias_of_token_zero_is_not_disturbed_by_the_padding_of_others() -> None:
    short, long = SamplingParams(logit_bias={0: 1.0}), SamplingParams(logit_bias={3: 0.5, 1: 2.0, 2: -1.0})
    logits = torch.zeros(3, 4, dtype=torch.float64)
    rows = plain(logits, short, long, SamplingParams())
    expected = torch.softmax(torch.tensor([[1.0, 0, 0, 0], [0, 2.0, -1.0, 0.5], [0, 0, 0, 0]], dtype=torch.float64), 1)
    assert torch.allclose(rows, expected, atol=1e-15)


def test_bias_can_lift_a_token_to_greedy() -> None:
    assert plain(torch.tensor([[5.0, 1.0, 0.0]]), SamplingParams(temperature=0, logit_bias={2: 100})).tolist() == [
        [0, 0, 1]
    ]
    assert plain(torch.tensor([[5.0, 1.0, 0.0]]), SamplingParams(temperature=0, logit_bias={0: -INF})).tolist() == [
        [0, 1, 0]
    ]


def test_mask_forbids_before_truncation() -> None:
    row = Row(logs(0.6, 0.2, 0.1, 0.1), SamplingParams(top_k=1), allowed=(False, True, True, True))
    assert law_of([row]).tolist() == [[0, 1, 0, 0]]
    row = replace(row, params=SamplingParams(top_p=0.4))
    assert law_of([row]).tolist() == [[0, 1, 0, 0]]
    row = replace(row, params=SamplingParams(temperature=0))
    assert law_of([row]).tolist() == [[0, 1, 0, 0]]


def test_huge_logits_do_not_overflow() -> None:
    for dtype in (torch.float32, torch.float64):
        big = torch.finfo(dtype).max
        rows = plain(
            torch.tensor([[big, -big, big], [-big, -big, -INF]], dtype=dtype), SamplingParams(), SamplingParams()
        )
        assert rows.tolist() == [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]


# --- everything together -------------------------------------------------------------------------------------

# Eighths and powers of two: penalised scores are exact in float32, so that the ties of the oracle are ties in `law`.
LOGITS = st.one_of(
    st.just(-INF), st.integers(-32, 32).map(lambda x: x / 8), st.sampled_from([-50.0, -2.0, -1.0, 0.0, 1.0, 2.0, 40.0])
)


@st.composite
def sampling(draw: st.DrawFn, vocabulary: int) -> SamplingParams:
    def sometimes(neutral: float, *others: float) -> float:
        return draw(st.sampled_from([neutral, neutral, *others]))

    biases = st.sampled_from([-INF, -4.0, -0.5, 0.0, 0.25, 8.0])
    return SamplingParams(
        temperature=sometimes(1.0, 0.0, 1e-30, 0.25, 0.7, 3.0, 1e30),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, vocabulary, vocabulary + 1, 10**6])),
        top_p=sometimes(1.0, 1e-9, 0.1, 0.37, 0.5, 0.83, 0.99),
        min_p=sometimes(0.0, 1e-9, 0.031, 0.21, 0.57, 1.0),
        repetition_penalty=sometimes(1.0, 0.5, 2.0, 4.0),
        presence_penalty=sometimes(0.0, -1.0, 0.5, 3.0),
        frequency_penalty=sometimes(0.0, -0.25, 0.5, 2.0),
        logit_bias=draw(st.dictionaries(st.integers(0, vocabulary - 1), biases, max_size=3)),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    vocabulary = draw(st.integers(1, 7))
    text = st.lists(st.integers(0, vocabulary - 1), max_size=4).map(tuple)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = Row(
            draw(st.lists(LOGITS, min_size=vocabulary, max_size=vocabulary)),
            draw(sampling(vocabulary)),
            draw(text),
            draw(text),
            draw(text),
            draw(st.none() | st.lists(st.booleans(), min_size=vocabulary, max_size=vocabulary).map(tuple)),
        )
        allowed = range(vocabulary) if row.allowed is None else [t for t in range(vocabulary) if row.allowed[t]]
        assume(any(row.logits[t] > -INF and row.params.logit_bias.get(t, 0.0) > -INF for t in allowed))
        rows.append(row)
    return rows


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([torch.float32, torch.float64]))
def test_all_transforms_together_equal_the_oracle(rows: list[Row], dtype: torch.dtype) -> None:
    answers = [answer(row) for row in rows]
    result = law_of(rows, dtype)
    assert result.dtype is dtype
    for index, expected in enumerate(answers):
        if expected.margin < (1e-4 if dtype is torch.float32 else 1e-11):
            continue  # which side of the boundary it falls on is rounding
        got = result[index].tolist()
        assert got == pytest.approx(expected.law, abs=TOLERANCE[dtype]), rows[index]
        for g, e in zip(got, expected.law, strict=True):
            assert g == 0 if e == 0 else g > 0 or e < 1e-30
    assert result.sum(-1).tolist() == pytest.approx([1.0] * len(rows), abs=TOLERANCE[dtype])


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from([torch.float32, torch.float64]))
def test_rows_together_equal_rows_alone_bit_for_bit(rows: list[Row], dtype: torch.dtype) -> None:
    together = law_of(rows, dtype)
    for index, row in enumerate(rows):
        assert torch.equal(together[index], law_of([row], dtype)[0]), (row, rows)
    backwards = law_of(rows[::-1], dtype)
    assert torch.equal(backwards.flip(0), together)


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.6, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=200, top_p=0.95, min_p=0.01, logit_bias={3: 2.0, 7: -INF}),
    SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Long rows are summed in parallel when they come alone: the order of summation must not show."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocabulary", [333, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_rows_together_equal_rows_alone_bit_for_bit(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(MIXED), vocabulary, generator=generator, dtype=dtype) * 3
    context = Context.of(
        [[5, 6]], [[7, 7, 8]], vocabulary, torch.zeros(len(MIXED), dtype=torch.int64), torch.full((7, 1), 9)
    )
    together = law(logits, LawSettings.of(MIXED), context)
    for index, params in enumerate(MIXED):
        own = replace(context, sequence=context.sequence[:1], path=context.path[:1])
        alone = law(logits[index : index + 1], LawSettings.of([params]), own)
        assert torch.equal(alone[0], together[index]), params
    assert together.sum(-1).tolist() == pytest.approx([1.0] * len(MIXED), abs=1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_computed_in_float32(half: torch.dtype) -> None:
    logits = (torch.randn(len(MIXED) - 1, 1000, generator=torch.Generator().manual_seed(1)) * 4).to(half)
    rows = plain(logits, *MIXED[:-1])
    assert rows.dtype is torch.float32
    assert torch.equal(rows, plain(logits.to(torch.float32), *MIXED[:-1]))
    assert not torch.equal(rows, rows.to(half).to(torch.float32))


def test_logits_are_left_alone() -> None:
    logits = torch.randn(len(MIXED), 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    mask = torch.ones(len(MIXED), 50, dtype=torch.bool)
    mask[:, 4] = False
    context = context_of([Row([0.0] * 50, params, output=(1,), path=(2,)) for params in MIXED])
    counts = context.output.clone()
    law(logits, LawSettings.of(MIXED), context, mask)
    assert torch.equal(logits, before)
    assert torch.equal(context.output, counts)
    assert int(mask.sum()) == len(MIXED) * 49


def test_noncontiguous_logits() -> None:
    wide = torch.randn(40, len(MIXED) - 1, generator=torch.Generator().manual_seed(3)).T
    assert torch.equal(plain(wide, *MIXED[:-1]), plain(wide.contiguous(), *MIXED[:-1]))


@pytest.mark.parametrize("rows", [[0], [6, 0, 0, 3], [1, 1], [5, 4, 3, 2, 1, 0], []])
def test_take_gives_the_settings_of_those_rows(rows: list[int]) -> None:
    logits = torch.randn(len(rows), 60, generator=torch.Generator().manual_seed(4))
    context = Context.of([[5]], [[7, 8]], 60, torch.zeros(len(rows), dtype=torch.int64), torch.full((len(rows), 1), 9))
    taken = law(logits, LawSettings.of(MIXED).take(torch.tensor(rows, dtype=torch.int64)), context)
    assert taken.shape == (len(rows), 60)
    if rows:
        assert torch.equal(taken, law(logits, LawSettings.of([MIXED[row] for row in rows]), context))


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("size", [500, 64, 1000])
def test_top_p_from_likely_tokens_is_top_p_from_all(spread: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat laws, whose likely tokens are nearly all, steep ones, ties, and rows without top_p beside them."""
    logits = (torch.randn(12, size, generator=torch.Generator().manual_seed(size)) * spread).round(decimals=1)
    settings = LawSettings.of([SamplingParams(top_p=(0.3, 0.9, 0.99, 1.0)[row % 4]) for row in range(12)])
    found = law(logits, settings)
    monkeypatch.setattr("forerun.core.law._likely", lambda p, top_p: p)
    assert torch.equal(law(logits, settings), found)
