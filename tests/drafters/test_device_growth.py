"""Trees that grow on an accelerator in one piece are those that grow level by level. Here in the plain form of the
kernels, without a graph; on a device the same launches are captured."""

from __future__ import annotations

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.device_growth import DeviceGrowth, fits
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.head_ahead import HeadRun
from forerun.drafters.trained import FeatureDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.feature_head import frozen_head, new_head
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of, sequence
from tests.models.rows import with_static_pass
from tests.models.test_feature_head import head_of, target_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REQUESTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(seed=8, temperature=0.7),
    SamplingParams(temperature=0.0),
)


Told = list[dict[tuple[int, ...], float] | None]


def lived(
    method: str, tree: str, taus: Taus, count: int, *, newcomer: bool = False, told: Told | None = None
) -> list[list[tuple[int, ...]]]:
    """Some steps of some texts, with budgets that end at different depths; what was drafted, and into `told` how likely
    its drafter found it. A newcomer's states are seen later than those of the others."""
    target: Transformer = target_of(torch.float32).to(DEVICE)
    head = head_of(method.removeprefix("published "), target)
    head.published = method.startswith("published")  # then its states go on normed
    if head.published:
        head.get_parameter("model.norm.weight").data.copy_(torch.linspace(0.1, 3, 64))
    for part in ("q_proj", "v_proj", "o_proj"):  # so that what a row sees counts
        head.get_parameter(f"model.layers.0.self_attn.{part}.weight").data.mul_(2.5)
    with_static_pass(head)
    drafter = FeatureDrafter(head, 1024, TreeSpec.parse(tree), 128, taus)
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
        if told is not None:
            for paths, nodes, shares in zip(listed, made.lists(), made.confidences(), strict=True):
                told.append(None if shares is None else {p: shares[n] for p, n in zip(paths, nodes[0], strict=True)})
        for row, text in enumerate(texts):
            text.commit([*listed[row][-1][: step % 3], 5 + step])
        for row, text in enumerate(texts):
            shape = text.position - start[row], 64
            seen = {layer: torch.randn(shape, generator=states).to(DEVICE) for layer in drafter.layers}
            drafter.observe([Observation(text, [], seen, start[row])])
            start[row] = text.position
            if newcomer and row == 1 and step < 2:
                drafter.forget(text)
                start[row] = 0
    drafter.ahead.cache.check_integrity()
    return found


def _here(tree: DraftTree) -> DraftTree:
    return tree.on(torch.device("cpu"))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "published mtp"])
@pytest.mark.parametrize(("tree", "count"), [("dynamic:3,4,12", 1), ("dynamic:4,3,9", 3), ("dynamic:2,4,6", 4)])
@pytest.mark.parametrize("taus", [Taus(), Taus(1.6, 0.6)])
def test_the_trees_are_the_same(
    method: str, tree: str, count: int, taus: Taus, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    grow = DeviceGrowth.grow

    def counted(*given: object) -> DraftTree:
        grown.append(1)
        return grow(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceGrowth, "grow", counted)
    told: Told = []
    again: Told = []
    in_one_piece = lived(method, tree, taus, count, told=told)
    assert len(grown) == 4  # at the first step no states were seen
    monkeypatch.setattr(HeadRun, "grow", lambda *given: None)
    level_by_level = lived(method, tree, taus, count, told=again)
    assert len(grown) == 4
    assert in_one_piece == level_by_level
    assert sum(each is not None for each in told) >= 4 * count
    for one, other in zip(told, again, strict=True):
        assert one == (None if other is None else pytest.approx(other, abs=1e-4))
    assert max(map(len, in_one_piece)) > 5


def test_a_text_without_states_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its root alone, and the others grow in one piece."""
    told: Told = []
    in_one_piece = lived("eagle3", "dynamic:3,4,12", Taus(), 3, newcomer=True, told=told)
    assert told[3 + 1] is None
    assert len(told[3 + 2] or ()) == len(in_one_piece[3 + 2])
    assert in_one_piece[3 + 1] == in_one_piece[6 + 1] == [()]  # the newcomer, in the second and the third step
    assert len(in_one_piece[3 + 2]) > 1
    assert len(in_one_piece[9 + 1]) > 1
    with monkeypatch.context() as patch:
        patch.setattr(HeadRun, "grow", lambda *given: None)
        assert lived("eagle3", "dynamic:3,4,12", Taus(), 3, newcomer=True) == in_one_piece
    grown: list[int] = []
    patched = DeviceGrowth.grow

    def counted(*given: object) -> DraftTree:
        grown.append(1)
        return patched(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceGrowth, "grow", counted)
    lived("eagle3", "dynamic:3,4,12", Taus(), 3, newcomer=True)
    assert len(grown) == 4


def drafter_with(tree: str, ids: torch.Tensor | None = None, context: int = 256) -> FeatureDrafter:
    target = target_of(torch.float32)
    head = frozen_head(new_head("eagle3", target, ids=ids), target)
    head.context_length = context
    with_static_pass(head)
    return FeatureDrafter(head, 256, TreeSpec.parse(tree), 128)


def seen_by(drafter: FeatureDrafter, text: Sequence) -> None:
    states = {layer: torch.randn(text.position, 64) for layer in drafter.layers}
    drafter.observe([Observation(text, [], states, 0)])


def test_at_the_end_of_the_context_positions_do_not_leave_their_table() -> None:
    drafter = drafter_with("dynamic:4,5,20")
    text = sequence(0, SamplingParams(temperature=0.0), length=254, vocabulary=128)
    seen_by(drafter, text)
    tree = drafter.draft([text], [Budget(20, 8)])
    assert max(map(len, paths_of(tree, 0))) <= 2


def test_fewer_nodes_than_levels() -> None:
    drafter = drafter_with("dynamic:4,5,20")
    text = sequence(0, SamplingParams(temperature=0.0), length=30, vocabulary=128)
    seen_by(drafter, text)
    cache = drafter.ahead.cache
    for layer in (*cache.storage.keys, *cache.storage.values):
        layer.fill_(7.0)
    drafter.draft([text], [Budget(2, 5)])
    written = (cache.storage.keys[0] != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
    reserved = sorted(cache.slots(text.id)[1].tolist())
    assert written == reserved[:-1]  # two nodes call for a width of three, and there is room for four


def test_a_draft_vocabulary_below_the_width_goes_the_other_way() -> None:
    drafter = drafter_with("dynamic:4,3,9", torch.tensor([3, 50, 90]))
    text = sequence(0, SamplingParams(temperature=0.0), vocabulary=128)
    seen_by(drafter, text)
    drafted = {token for path in paths_of(drafter.draft([text], [Budget(9, 3)]), 0) for token in path}
    assert drafted
    assert drafted <= {3, 50, 90}


def test_texts_that_left_a_batch_leave_nothing_behind() -> None:
    """Four texts, then three in the same buffers: the place of the fourth is padding, and writes nowhere."""
    drafter = drafter_with("dynamic:2,3,6")
    texts = [sequence(n, SamplingParams(temperature=0.0), length=12, vocabulary=128) for n in range(4)]
    for text in texts:
        seen_by(drafter, text)
    for _ in range(2):
        drafter.draft(texts, [Budget(6, 3)] * 4)
        for text in texts:
            text.commit([7])
            states = {tap: torch.randn(1, 64) for tap in drafter.layers}
            drafter.observe([Observation(text, [7], states, text.position - 1)])
    drafter.forget(texts[3])
    cache = drafter.ahead.cache
    drafter.draft(texts[:3], [Budget(0, 0)] * 3)  # which settles what the last step left
    held = {slot for text in texts[:3] for slot in cache.slots(text.id)[0].tolist()}
    before = cache.storage.keys[0].clone()
    drafter.draft(texts[:3], [Budget(6, 3)] * 3)
    changed = (cache.storage.keys[0] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    reserved = {slot for text in texts[:3] for slot in cache.slots(text.id)[1].tolist()}
    assert changed
    assert held
    assert set(changed) <= reserved - held


def test_rows_below_the_root_fit_in_a_word() -> None:
    assert fits(TreeSpec.parse("dynamic:10,6,60"))
    assert not fits(TreeSpec.parse("dynamic:10,8,60"))
    assert not fits(TreeSpec.parse("fixed:3,2"))


def test_nothing_is_written_beyond_what_a_text_has_reserved() -> None:
    """Where a budget ends early there are no slots for the levels below."""
    target = target_of(torch.float32)
    head = head_of("eagle3", target)
    with_static_pass(head)
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
