"""Trees that grow on an accelerator in one piece are those that grow level by level. Here in the plain form of the
kernels, without a graph; on a device the same launches are captured."""

from __future__ import annotations

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.tree import DraftTree
from forerun.drafters.device_growth import DeviceGrowth, fits
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.head_ahead import HeadRun
from forerun.drafters.trained import FeatureDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.static.static_pass import StaticPass
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of, sequence
from tests.models.test_feature_head import head_of, target_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REQUESTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(seed=8, temperature=0.7),
    SamplingParams(temperature=0.0),
)


def lived(method: str, tree: str, tau: float, count: int, *, vocabulary: bool = True) -> list[list[tuple[int, ...]]]:
    """Some steps of some texts, with budgets that end at different depths; what was drafted."""
    target: Transformer = target_of(torch.float32).to(DEVICE)
    head = head_of(method.removeprefix("published "), target)
    head.published = method.startswith("published")  # then its states go on normed
    if head.published:
        head.get_parameter("model.norm.weight").data.copy_(torch.linspace(0.1, 3, 64))
    for part in ("q_proj", "v_proj", "o_proj"):  # so that what a row sees counts
        head.get_parameter(f"model.layers.0.self_attn.{part}.weight").data.mul_(2.5)
    if not vocabulary:
        head.ids = None
    if DEVICE.type == "cpu":
        head.prepare()
        head.static = StaticPass(head)
    drafter = FeatureDrafter(head, 1024, TreeSpec.parse(tree), 128, tau)
    texts = [sequence(n, REQUESTS[n % len(REQUESTS)], length=5 + 9 * n, vocabulary=128) for n in range(count)]
    states = torch.Generator().manual_seed(1)
    found: list[list[tuple[int, ...]]] = []
    start = [0] * count
    for step in range(5):
        budgets = [Budget(12 - n, max(1, 4 - (step + n) % 4)) for n in range(count)]
        made = drafter.draft(texts, budgets)
        listed = [paths_of(_here(made), row) for row in range(count)]
        for paths, budget in zip(listed, budgets, strict=True):
            assert len(paths) <= 1 + budget.nodes
            assert max(map(len, paths)) <= budget.depth
        found += listed
        for row, text in enumerate(texts):
            text.commit([*listed[row][-1][: step % 3], 5 + step])
        for row, text in enumerate(texts):
            shape = text.position - start[row], 64
            seen = {layer: torch.randn(shape, generator=states).to(DEVICE) for layer in drafter.layers}
            drafter.observe([Observation(text, [], seen, start[row])])
            start[row] = text.position
    drafter.ahead.cache.check_integrity()
    return found


def _here(tree: DraftTree) -> DraftTree:
    return tree.on(torch.device("cpu"))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "published mtp"])
@pytest.mark.parametrize(("tree", "count"), [("dynamic:3,4,12", 1), ("dynamic:4,3,9", 3), ("dynamic:2,4,6", 4)])
@pytest.mark.parametrize("tau", [1.0, 1.6])
def test_the_trees_are_the_same(
    method: str, tree: str, count: int, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    grow = DeviceGrowth.grow

    def counted(*given: object) -> DraftTree:
        grown.append(1)
        return grow(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceGrowth, "grow", counted)
    in_one_piece = lived(method, tree, tau, count)
    assert len(grown) == 4  # at the first step no states were seen
    monkeypatch.setattr(HeadRun, "grow", lambda *given: None)
    level_by_level = lived(method, tree, tau, count)
    assert len(grown) == 4
    assert in_one_piece == level_by_level
    assert max(map(len, in_one_piece)) > 5


def test_rows_below_the_root_fit_in_a_word() -> None:
    assert fits(TreeSpec.parse("dynamic:10,6,60"))
    assert not fits(TreeSpec.parse("dynamic:10,8,60"))
    assert not fits(TreeSpec.parse("fixed:3,2"))


def test_nothing_is_written_beyond_what_a_text_has_reserved() -> None:
    """Where a budget ends early there are no slots for the levels below."""
    target = target_of(torch.float32)
    head = head_of("eagle3", target)
    head.prepare()
    head.static = StaticPass(head)
    drafter = FeatureDrafter(head, 256, TreeSpec.parse("dynamic:4,5,20"), 128)
    text = sequence(0, SamplingParams(temperature=0.0), length=30, vocabulary=128)
    drafter.draft([text], [Budget(8, 8)])
    text.commit([3])
    states = {layer: torch.randn(30, 64) for layer in drafter.layers}
    drafter.observe([Observation(text, [3], states, 0)])
    cache = drafter.ahead.cache
    for layer in (*cache.storage.keys, *cache.storage.values):
        layer.fill_(7.0)
    drafter.draft([text], [Budget(20, 2)])
    written = (cache.storage.keys[0] != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
    _, own = cache.slots(text.id)
    assert written == sorted(own.tolist())
    assert len(written) == 30 + 4  # the text, and one level below its root
