"""What is found out about a trained drafter, against what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.drafters import parallel
from forerun.drafters.confidence import Taus
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.none import NoDrafter
from forerun.drafters.parallel import Parallel
from forerun.drafters.run_ahead import RunAhead
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.trained_folder import Calibration
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.heads.feature_head import new_head
from forerun.models.heads.files import HeadFolder, read_head, update_manifest, write_head
from forerun.models.heads.shared_draft import frozen_shared_draft, new_shared_draft
from forerun.models.heads.side_heads import SideHeads, new_side_heads
from forerun.models.transformer import Transformer
from forerun.train.examine import BINS, STRIDE, TAUS, TOP, Findings, Trust, examine
from tests.drafters.models import slow_logits as slow_read
from tests.drafters.test_growing import confidences as tree_confidences
from tests.drafters.test_heads import STEM, ids_of, shaken, slow_logits
from tests.engine.tiny import drain, tiny_model


def greedy_texts(target: Transformer, count: int = 3, length: int = 40) -> list[tuple[list[int], int]]:
    engine = Engine(target, NoDrafter(), slots=1024)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    prompts = [[7 + n, 8, 9, 10 + n] for n in range(count)]
    told = drain(engine, [Request(prompt, params) for prompt in prompts])
    return [(prompt + own[0], len(prompt) - 1) for prompt, own in zip(prompts, told, strict=True)]


def ranks_of(
    texts: list[tuple[list[int], int]], depth: int, say: Callable[[list[int], list[int]], list[int]]
) -> tuple[Tensor, Tensor]:
    """Places that were reached and candidates that were right, by `say`: tokens by their rank, behind a text and what
    the target said after it."""
    seen, right = torch.zeros(depth), torch.zeros(depth, TOP)
    for text, start in texts:
        for at in range(max(2, start), len(text) - depth, STRIDE):
            for d in range(depth):
                ranked = say(text[: at + 1], text[at + 1 : at + 1 + d])[:TOP]
                seen[d] += 1
                if text[at + 1 + d] not in ranked:
                    break
                right[d, ranked.index(text[at + 1 + d])] += 1
    assert float(right.sum()) > 5
    assert float(seen[1]) > 2
    return seen, right


@pytest.mark.parametrize("method", ["mtp", "eagle3", "medusa", STEM])
def test_accuracies_are_those_of_the_slow_way(method: str) -> None:
    """Led along the text, everything computed anew at every place."""
    target, depth = tiny_model(), 3
    head = shaken(method, target, torch.arange(0, 50))
    texts = greedy_texts(target, count=6)
    drafter: FeatureDrafter | SideDrafter
    if isinstance(head, SideHeads):
        drafter = SideDrafter(head, TreeSpec.parse("3"), target.vocab_size)
    else:
        drafter = FeatureDrafter(head, 512, TreeSpec.parse("3"), target.vocab_size)
    found = examine(drafter, target, texts, depth)
    seen, right = ranks_of(
        texts, depth, lambda text, path: ids_of(head, slow_logits(head, target, text, path).argsort(descending=True))
    )
    assert torch.equal(found.seen, seen)
    assert torch.equal(found.right, right)


def test_draft_models() -> None:
    """Also one that knows some of the tokens only."""
    target, ids = tiny_model(), torch.arange(0, 50)
    draft = frozen_shared_draft(new_shared_draft(target, 2, ids=ids), target)
    texts = greedy_texts(target, count=4)

    def say(text: list[int], path: list[int]) -> list[int]:
        said: list[int] = ids[slow_read(draft, [*text, *path]).argsort(descending=True)].tolist()
        return said

    found = examine(DraftModel(RunAhead(draft, 512), TreeSpec.parse("3"), target.vocab_size), target, texts, 3)
    seen, right = ranks_of(texts, 3, say)
    assert torch.equal(found.seen, seen)
    assert torch.equal(found.right, right)


@pytest.mark.parametrize("rows", [512, 5])
def test_look_ahead_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind the token before the root: they have not seen the root, nor what came after it."""
    monkeypatch.setattr("forerun.train.examine.PASS_ROWS", rows)
    target = tiny_model()
    some = target.model.embed_tokens.weight[[3, 9]] + 0.1
    drafter = Parallel(parallel.Options(), target, some)
    texts = greedy_texts(target, count=6)
    first = target.vocab_size

    def say(text: list[int], path: list[int]) -> list[int]:
        rows = range(first, first + len(path) + 1)
        said: list[int] = slow_read(target, [*text[:-1], *rows]).argsort(descending=True).tolist()
        return said

    found = examine(drafter, target, texts, 8)
    assert found.depth == 2
    seen, right = ranks_of(texts, 2, say)
    assert torch.equal(found.seen, seen)
    assert torch.equal(found.right, right)


def test_heads_on_one_state() -> None:
    target = tiny_model()
    heads = new_side_heads("medusa", target, 2, ids=torch.arange(0, 50, 2))
    found = examine(SideDrafter(heads, TreeSpec.parse("2"), target.vocab_size), target, greedy_texts(target), 5)
    assert found.depth == 2
    assert float(found.seen[0]) > 10


def laws(spread: float, seed: int) -> Tensor:
    return spread * torch.randn(400, 30, generator=torch.Generator().manual_seed(seed))


def test_a_drafter_that_is_the_target_is_always_right_and_knows_it() -> None:
    found, noise = Findings(1), torch.Generator().manual_seed(0)
    p = laws(2.0, 1)
    assert bool(found.learn(0, p, p, None, noise).all())
    assert found.accuracies[0][0] == 1.0
    assert found.coupled.best == found.greedy.best == TAUS[0]  # the race is decided: the sharpest there is


def test_confidence_is_compared_with_what_came_true() -> None:
    """Targets whose likeliest token is drawn from the drafter's own law: confidences are chances then."""
    found, noise = Findings(1), torch.Generator().manual_seed(0)
    q = laws(2.0, 1).repeat(10, 1)
    said = torch.multinomial(q.softmax(-1), 1, generator=noise)
    found.learn(0, q, torch.zeros_like(q).scatter_(1, said, 9.0), None, noise)
    assert found.greedy.best == pytest.approx(1.0, abs=0.11)
    rows = found.greedy.trust[TAUS.index(1.0)].rows
    assert len(rows) == BINS
    for row in rows:
        assert row["acceptance"] == pytest.approx(row["confidence"], abs=0.08)


def test_an_overconfident_drafter_is_found_out() -> None:
    """Its first candidate, of which it is sure, is right one time in four."""
    found, q = Findings(1), torch.zeros(400, 30)
    q[:, 3] = 20.0
    p = torch.zeros_like(q)
    p[:100, 3], p[100:, 20] = 60.0, 60.0
    found.learn(0, q, p, None, torch.Generator().manual_seed(0))
    unlikely, sure = found.greedy.trust[TAUS.index(1.0)].rows
    assert sure == {"from": 0.9, "to": 1.0, "candidates": 400, "confidence": 1.0, "acceptance": 0.25}
    assert (unlikely["to"], unlikely["candidates"], unlikely["confidence"]) == (0.1, (TOP - 1) * 400, 0.0)
    assert found.coupled.best == found.greedy.best == TAUS[-1], "the flattest there is"


def test_confidences_under_coupling_are_chances_with_the_tau_that_was_found() -> None:
    found, noise = Findings(1), torch.Generator().manual_seed(0)
    q = laws(2.0, 1).repeat(10, 1)
    found.learn(0, q, q + laws(1.0, 2).repeat(10, 1), None, noise)
    assert int(found.coupled.trusted.candidates.sum()) == q.shape[0] * TOP

    def miss(trust: Trust) -> float:
        return max(abs(row["confidence"] - row["acceptance"]) for row in trust.rows)

    assert miss(found.coupled.trusted) < 0.1
    assert miss(found.coupled.trust[-1]) > 0.3


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_every_candidate_is_counted_once(method: str) -> None:
    target = tiny_model()
    head = new_head(method, target, ids=torch.arange(0, 50))
    found = examine(FeatureDrafter(head, 512, TreeSpec.parse("3"), 128), target, greedy_texts(target, count=6), 3)
    for trust in (*found.greedy.trust, *found.coupled.trust):
        assert int(trust.candidates.sum()) == int(found.seen.sum()) * TOP
    assert int(found.greedy.trusted.taken.sum()) == int(found.right.sum())


@pytest.mark.parametrize("way", ["greedy", "coupled"])
def test_confidences_are_those_of_the_tree(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same candidates in the same bins, with the noise that the tree's texts meet."""
    monkeypatch.setattr("forerun.train.examine.TOP", 4)  # as many as the tree has
    q = laws(2.0, 1)
    for place, tau in list(enumerate(TAUS))[::7]:
        _, confidences, scores = tree_confidences(q, Taus(tau, tau), way=way)
        wanted = Trust()
        wanted.count(confidences.flatten(), torch.zeros(confidences.numel()))
        race = q.double().softmax(-1) / scores
        with monkeypatch.context() as patch:
            patch.setattr("torch.rand", lambda *_, race=race, **__: (-race).exp())
            found = Findings(1)
            found.learn(0, q, q, None, torch.Generator())
        trust = (found.coupled if way == "coupled" else found.greedy).trust[place]
        assert torch.equal(trust.candidates, wanted.candidates)
        torch.testing.assert_close(trust.confidence, wanted.confidence, atol=1e-3, rtol=1e-4)


def test_the_further_the_laws_are_apart_the_flatter_the_confidences() -> None:
    taus = []
    for apart in (0.3, 1.0, 2.5):
        found, noise = Findings(1), torch.Generator().manual_seed(0)
        q = laws(2.0, 1)
        found.learn(0, q, q + laws(apart, 2), None, noise)
        taus.append(found.coupled.best)
    assert taus == sorted(taus)
    assert taus[0] < taus[-1]


def test_a_token_outside_the_draft_vocabulary_is_never_right() -> None:
    found = Findings(1)
    p = torch.zeros(4, 30)
    p[:, 29] = 9.0
    went_on = found.learn(0, torch.randn(4, 10), p, torch.arange(10), torch.Generator().manual_seed(0))
    assert not bool(went_on.any())
    assert sum(found.accuracies[0]) == 0


def test_too_little_text_is_refused() -> None:
    target = tiny_model()
    drafter = FeatureDrafter(new_head("eagle", target), 512, TreeSpec.parse("3"), target.vocab_size)
    with pytest.raises(ValueError, match="too little text"):
        examine(drafter, target, [([1, 2, 3], 1)], 3)


def test_what_was_found_is_kept_beside_the_weights(tmp_path: Path) -> None:
    target = tiny_model()
    write_head(tmp_path / "head", HeadFolder("eagle", {}, new_head("eagle", target).trained(), {"steps": 5}))
    update_manifest(
        tmp_path / "head",
        calibration={"accuracies": [[0.5, 0.1]], "tau": 1.2, "greedy_tau": 0.8, "trees": {"cpu": "3"}},
    )
    manifest = read_head(tmp_path / "head").manifest
    assert manifest["steps"] == 5
    assert Calibration.of(manifest).taus == Taus(1.2, 0.8)
    assert json.loads((tmp_path / "head" / "forerun.json").read_text())["method"] == "eagle"
