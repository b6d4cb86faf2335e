"""What a request may ask for; the sampling numbers themselves are tested with the law."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core.params import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"n": 0},
        {"n": True},
        {"logprobs": -1},
        {"logprobs": 5000},
        {"stop": "end"},
        {"stop": ["end"]},
        {"stop": ("end", "")},
        {"stop_token_ids": 5},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (True,)},
        {"logit_bias": None},
        {"logit_bias": {-1: 0.0}},
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"^{name}.*: it must be "):
        SamplingParams(**wrong)


def test_the_rest_is_taken() -> None:
    params = SamplingParams(max_tokens=1, n=3, logprobs=0, stop=("a", "bc"), stop_token_ids=(0, 7), ignore_eos=True)
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy
