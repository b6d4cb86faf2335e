"""The default model end to end: greedy text against `transformers`, seeded text between drafters, in a mixed batch.

Needs the model in the cache, where `make test` puts it. `python -m benchmarks.identity` does the same on many prompts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.short_model import first_layers

import forerun
from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.models.builtin import BUILTINS
from forerun.models.load import resolve
from forerun.models.store import Store

NAME = "smollm2-135m"
PROMPTS = [
    "Repeat word for word: the quick brown fox jumps over the lazy dog near the quiet river bank.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three rivers in Europe and the countries they flow through.",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = [
    SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=16),
    SamplingParams(temperature=1.2, top_k=50, seed=2, max_tokens=12, frequency_penalty=0.3),
    SamplingParams(temperature=0.6, min_p=0.05, seed=3, max_tokens=16),
]

pytestmark = [
    pytest.mark.skipif(
        not BUILTINS[NAME].path(Store.default()).exists(),
        reason=f"{NAME} is not in the cache: run `forerun models fetch {NAME}`",
    ),
    pytest.mark.xdist_group("real model"),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.load(NAME, dtype="float32", device="cpu", offline=True)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve(NAME, dtype=torch.float32, offline=True).folder


@pytest.fixture(scope="module")
def expected(model: LoadedModel, folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([model.tokenizer.apply_chat([{"role": "user", "content": prompt}])])
        with torch.inference_mode():
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False
            )
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> list[list[int]]:
    with LLM(model, cache_tokens=2048, max_batch=1) as llm:
        return [llm.generate(p, params).token_ids for p, params in zip(PROMPTS, SEEDED, strict=True)]


@pytest.fixture(scope="module")
def short(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(folder, tmp_path_factory.mktemp("short") / "model", layers=20)


SHIPPED = ("blockwise", "draft_model", "eagle", "eagle3", "medusa", "mtp", "parallel")
"""What was trained for this model and comes with Forerun."""


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        ("none", None),
        ("ngram", None),
        ("draft_model", "3"),
        ("draft_model", "2,2,1"),
        *((name, "") for name in SHIPPED),
    ],
)
def test_the_text_is_the_models_own(
    drafter: str,
    tree: str | None,
    model: LoadedModel,
    short: Path,
    expected: list[list[int]],
    plain: list[list[int]],
) -> None:
    """Greedy and seeded requests in one batch, with one that samples freely beside them."""
    options = {"model": str(short)} if drafter == "draft_model" and tree else {}
    with LLM(model, drafter, drafter_options=options, tree=tree or None, cache_tokens=4096) as llm:
        prompts = [*PROMPTS, *PROMPTS, PROMPTS[0]]
        params = [*[GREEDY] * len(PROMPTS), *SEEDED, SamplingParams(max_tokens=8)]
        done = llm.generate(prompts, params)
        statistics = llm.statistics
    assert [completion.token_ids for completion in done[:3]] == expected
    assert [completion.token_ids for completion in done[3:6]] == plain
    assert (statistics.accepted > 0) == (drafter != "none")


def test_what_comes_with_it_is_small_and_has_cards() -> None:
    folders = [path.parent for path in Path(forerun.__file__).parent.glob("trained/*/*/forerun.json")]
    assert {folder.name for folder in folders} == {name.removesuffix("_model") for name in SHIPPED}
    assert all("## How it was trained" in (folder / "README.md").read_text("utf-8") for folder in folders)
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 24 * 2**20


def test_log_probabilities_do_not_depend_on_the_drafter(model: LoadedModel) -> None:
    params = replace(GREEDY, max_tokens=16, logprobs=2)
    found = []
    for drafter in ("none", "ngram"):
        with LLM(model, drafter, cache_tokens=2048) as llm:
            logprobs = llm.generate(PROMPTS[0], params).logprobs
            assert logprobs is not None
            found.append([(item.token, item.logprob) for item in logprobs])
    assert [token for token, _ in found[0]] == [token for token, _ in found[1]]
    assert [value for _, value in found[0]] == pytest.approx([value for _, value in found[1]], abs=1e-3)
