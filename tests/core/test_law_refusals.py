"""What sampling settings and `law` refuse, and that the message names it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.law import Context, LawSettings, law
from forerun.core.params import SamplingParams

INF = math.inf


def plain(logits: Tensor, *params: SamplingParams) -> Tensor:
    return law(logits, LawSettings.of(params))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        *(
            ({"temperature": value}, "temperature")
            for value in (-0.1, -1e-300, math.nan, INF, -INF, "1", None, True, 10**400)
        ),
        *(({"top_p": value}, "top_p") for value in (0, 0.0, -0.1, 1.0000001, 2, math.nan, INF, "0.5", None)),
        *(({"top_k": value}, "top_k") for value in (-1, 1.0, 2.5, math.nan, "3", None, True, 2**63, 10**40)),
        *(({"min_p": value}, "min_p") for value in (-1e-9, 1.001, math.nan, INF, None)),
        *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1.0, math.nan, INF)),
        *(({"presence_penalty": value}, "presence_penalty") for value in (math.nan, INF, -INF, "1")),
        *(({"frequency_penalty": value}, "frequency_penalty") for value in (math.nan, INF, -INF, -(10**400))),
        *(({"seed": value}, "seed") for value in (-1, 2**63, 1.0, "7", True)),
        *(({"logit_bias": {3: value}}, r"logit_bias\[3\]") for value in (math.nan, INF, "1", None, True, 10**400)),
        *(({"logit_bias": {value: 1.0}}, "logit_bias") for value in (-1, 1.5, "3", True)),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is "):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_extreme_but_sound_settings_pass() -> None:
    sound = SamplingParams(
        temperature=5e-324, top_k=2**63 - 1, top_p=5e-324, min_p=1, seed=2**63 - 1, logit_bias={2: -INF, 0: -5}
    )
    assert LawSettings.of([sound]).largest_top_k == 2**63 - 1
    assert plain(torch.tensor([[1.0, 2.0, 3.0]]), sound).tolist() == [[0, 1, 0]]


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        LawSettings.of([])


EVERY_KIND = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(repetition_penalty=2.0, presence_penalty=9.0),
    SamplingParams(logit_bias={1: -INF}),
    SamplingParams(logit_bias={1: -INF}, temperature=0),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("params", EVERY_KIND)
@pytest.mark.parametrize(("value", "message"), [(math.nan, "row 2 hold NaN"), (INF, r"row 2 hold \+infinity")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_broken_logits_are_refused_wherever_they_hide(
    params: SamplingParams, value: float, message: str, masked: bool, dtype: torch.dtype
) -> None:
    """Token 1 is what masks, bias and penalties hit, and it is broken in row 2."""
    logits = torch.tensor([[3.0, 1.0, 0.0]] * 4, dtype=dtype)
    logits[2, 1] = value
    mask = torch.tensor([[True, False, True]] * 4) if masked else None
    context = Context.of([[1]] * 4, [[1]] * 4, 3, torch.arange(4), torch.full((4, 1), 1))
    with pytest.raises(ValueError, match=message):
        law(logits, LawSettings.of([params] * 4), context, mask)


@pytest.mark.parametrize("params", EVERY_KIND)
def test_rows_without_a_token_are_refused(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [-INF, -INF, -INF]])
    context = Context.of([[1]] * 2, [[1]] * 2, 3, torch.arange(2), torch.full((2, 1), -1))
    with pytest.raises(ValueError, match="row 1 has no token left"):
        law(logits, LawSettings.of([params] * 2), context)
    mask = torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(ValueError, match="mask of row 1 is empty"):
        law(torch.zeros(2, 3), LawSettings.of([params] * 2), context, mask)


def test_mask_and_bias_that_leave_nothing_together_are_refused() -> None:
    mask = torch.tensor([[True, False], [True, False]])
    params = [SamplingParams(logit_bias={1: -INF}), SamplingParams(logit_bias={0: -INF})]
    with pytest.raises(ValueError, match=r"row 1 has no token left.*logit_bias"):
        law(torch.zeros(2, 2), LawSettings.of(params), mask=mask)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=1e39),
        SamplingParams(logit_bias={1: 1e39}),
        SamplingParams(repetition_penalty=1e-44),
    ],
)
def test_settings_that_overflow_float32_are_refused(params: SamplingParams) -> None:
    context = Context.of([[1]], [[1]], 3, torch.tensor([0]), torch.full((1, 1), -1))
    with pytest.raises(ValueError, match="row 0 overflow"):
        law(torch.tensor([[1.0, 1.0, 1.0]]), LawSettings.of([params]), context)


def test_bias_outside_the_vocabulary_is_refused() -> None:
    params = [SamplingParams(), SamplingParams(logit_bias={4: 1.0})]
    assert plain(torch.zeros(2, 5), *params).shape == (2, 5)
    with pytest.raises(ValueError, match=r"logit_bias names token 4.*ends at 3"):
        plain(torch.zeros(2, 4), *params)


@pytest.mark.parametrize("shape", [(3,), (2, 5), (4, 5), (3, 5, 1), (3, 0), ()])
def test_logits_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits of shape .* settings of 3 rows"):
        plain(torch.zeros(shape), *[SamplingParams()] * 3)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4) > 0,
        torch.ones(1, 4) > 0,
        torch.ones(3, 1) > 0,
        torch.ones(3, 5) > 0,
        torch.ones(3, 4, dtype=torch.int64),
    ],
)
def test_masks_that_would_be_broadcast_are_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"the mask is .* it must be bool"):
        law(torch.zeros(3, 4), LawSettings.of([SamplingParams()] * 3), mask=mask)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-1),
    ],
)
def test_penalties_without_a_context_are_refused(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="penalties need the context"):
        plain(torch.zeros(2, 3), SamplingParams(), params)


def test_contexts_that_do_not_fit_are_refused() -> None:
    """A context of one row would otherwise be used for all three."""
    penal = LawSettings.of([SamplingParams(presence_penalty=1.0)] * 3)
    fitting = Context.of([[0]], [[1]], 4, torch.zeros(3, dtype=torch.int64), torch.full((3, 2), -1))
    assert law(torch.zeros(3, 4), penal, fitting).shape == (3, 4)
    misfits = [
        replace(fitting, sequence=fitting.sequence[:1], path=fitting.path[:1]),
        replace(fitting, path=fitting.path[:1]),
        replace(fitting, sequence=fitting.sequence[:2]),
        Context.of([[0]], [[1]], 5, fitting.sequence, fitting.path),
        Context.of([[0]], [[0]], 1, fitting.sequence, fitting.path),
    ]
    for misfit in misfits:
        with pytest.raises(ValueError, match="the context does not fit"):
            law(torch.zeros(3, 4), penal, misfit)


@pytest.mark.parametrize(
    ("prompt", "output", "named"), [([-1], [0], "prompt token -1"), ([0], [0, 4], "output token 4")]
)
def test_context_tokens_outside_the_vocabulary_are_refused(prompt: list[int], output: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Context.of([prompt], [output], 4, torch.tensor([0]), torch.tensor([[-1]]))


def test_a_drafted_token_outside_the_vocabulary() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    context = Context(nothing, nothing.long(), torch.tensor([0]), torch.tensor([[1, 4]]))
    with pytest.raises(ValueError, match="drafted token lies outside the vocabulary of 4"):
        law(torch.zeros(1, 4), LawSettings.of([SamplingParams(presence_penalty=1.0)]), context)
