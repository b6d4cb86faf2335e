"""Trained heads against a slow, plain way to draft with them, through an engine that refuses most of what they say."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters import head_ahead
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import make_drafter
from forerun.drafters.kinds import FLOATS, FOLDED, NARROW_FLOATS, WIDE_FLOATS, kind_of
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.trained_folder import Calibration
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment
from forerun.models.heads.feature_head import FeatureHead, load_head, new_head
from forerun.models.heads.files import HeadFolder, expanded, read_head, reduced, write_head
from forerun.models.heads.side_heads import SideHeads, frozen_side_heads, load_side_heads, new_side_heads
from forerun.models.heads.vocabulary import from_offsets, most_frequent, to_offsets
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of, setup, tiny
from tests.engine.tiny import drain, tiny_model

STEM = "medusa with a stem"
FEATURE, SIDE = ("eagle", "eagle3", "mtp"), ("blockwise", "medusa", STEM)
NOTHING = torch.zeros(0, dtype=torch.int64)


def new(method: str, target: Transformer, ids: Tensor | None, count: int = 3) -> FeatureHead | SideHeads:
    if method not in SIDE:
        return new_head(method, target, ids=ids)
    name, stem = ("medusa", 24) if method == STEM else (method, 0)
    return new_side_heads(name, target, count, ids=ids, stem=stem)


def shaken(method: str, target: Transformer, ids: Tensor | None) -> FeatureHead | SideHeads:
    """A head whose weights are not those it begins with, ready to draft."""
    made = new(method, target, ids)
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: tensor
        if name == "d2t"
        else tensor + 0.2 * torch.randn(tensor.shape, generator=generator).to(tensor.device)
        for name, tensor in made.trained().items()
    }
    folder = HeadFolder(made.method, {"num_heads": 3}, noisy)
    return load_side_heads(folder, target) if method in SIDE else load_head(folder, target)


def whole_pass(model: Transformer, tokens: Many[int], layers: Many[int], features: Tensor | None = None) -> Tensor:
    """One chain, nothing cached: logits and asked-for states of all rows, side by side."""
    places = torch.arange(len(tokens))
    segment = Segment(0, torch.tensor(tokens), places, None, NOTHING, places, len(tokens))
    batch = Batch.pack([segment], features=features)
    output = model.forward_rows(batch, model.new_storage(len(tokens)), tuple(layers))
    return torch.cat([*(output.features[layer] for layer in layers), output.logits.float()], 1)


def slow_logits(head: FeatureHead | SideHeads, target: Transformer, text: list[int], path: Many[int]) -> Tensor:
    """What the head says behind a text and a drafted path, all computed anew."""
    hidden = target.config.hidden_size
    if isinstance(head, SideHeads):
        state = whole_pass(target, text[:-1], (head.layer,))[-1, :hidden]
        said: Tensor = head(state, torch.tensor(text[-1]))
        return said[len(path)]
    states = whole_pass(target, text[:-1], head.taps)
    rows = head.fuse({tap: states[:, i * hidden : (i + 1) * hidden] for i, tap in enumerate(head.taps)})
    tokens = text[1:]
    for token in path:
        made = whole_pass(head, tokens, (1,), rows)
        rows = torch.cat([rows, made[-1:, :hidden]])
        tokens = [*tokens, token]
    return whole_pass(head, tokens, (1,), rows)[-1, hidden:]


def ids_of(head: FeatureHead | SideHeads, columns: Tensor) -> list[int]:
    found: list[int] = (columns if head.ids is None else head.ids[columns]).tolist()
    return found


class Compared:
    """A drafter that is asked beside the slow way; texts whose states were seen must get drafts."""

    def __init__(self, drafter: Drafter, head: FeatureHead | SideHeads, target: Transformer, spec: TreeSpec) -> None:
        self.own, self.head, self.target, self.spec = drafter, head, target, spec
        self.drawing, self.branches, self.layers, self.top = drafter.drawing, drafter.branches, drafter.layers, 0
        self.seen: set[int] = set()
        self.compared = 0

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tree = self.own.draft(sequences, budgets)
        for row, (text, budget) in enumerate(zip(sequences, budgets, strict=True)):
            if text.id in self.seen and min(budget.nodes, budget.depth) > 0:
                assert paths_of(tree, row) == self.expected(text.tokens, budget)  # in the order of their values
                self.compared += 1
        return tree

    def expected(self, text: list[int], budget: Budget) -> list[tuple[int, ...]]:
        if not self.spec.dynamic:
            drafted: list[int] = []
            for _ in range(min(self.spec.depth, budget.depth, budget.nodes)):
                drafted += ids_of(self.head, slow_logits(self.head, self.target, text, drafted).argmax()[None])
            return [tuple(drafted[:size]) for size in range(len(drafted) + 1)]
        width, depth, size = self.spec.numbers
        values: dict[tuple[int, ...], float] = {(): 0.0}
        level: list[tuple[int, ...]] = [()]
        for _ in range(min(depth, budget.depth, budget.nodes)):
            frontier = sorted(level, key=lambda path: -values[path])[:width]
            level = []
            for path in frontier:
                best = slow_logits(self.head, self.target, text, path).log_softmax(-1).topk(width)
                for token, chance in zip(ids_of(self.head, best.indices), best.values.tolist(), strict=True):
                    level.append((*path, token))
                    values[level[-1]] = values[path] + chance
        return sorted(values, key=lambda path: -values[path])[: 1 + min(size, budget.nodes)]

    def observe(self, observations: Many[Observation]) -> None:
        self.seen |= {seen.sequence.id for seen in observations}
        self.own.observe(observations)

    def forget(self, sequence: Sequence) -> None:
        self.seen.discard(sequence.id)
        self.own.forget(sequence)


def engine_with(method: str, tree: str, *, vocabulary: bool, slots: int = 1024) -> tuple[Engine, Compared]:
    target = tiny_model()
    ids = torch.arange(0, target.vocab_size, 2) if vocabulary else None
    head, spec = shaken(method, target, ids), TreeSpec.parse(tree)
    drafter: Drafter
    if isinstance(head, SideHeads):
        drafter = SideDrafter(head, spec, target.vocab_size)
    else:
        drafter = FeatureDrafter(head, slots, spec, target.vocab_size)
    compared = Compared(drafter, head, target, spec)
    return Engine(target, compared, slots=slots), compared


@pytest.mark.parametrize("tree", ["3", "dynamic:3,3,7"])
@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("method", [*FEATURE, *SIDE])
def test_drafts_are_those_of_the_slow_way(method: str, tree: str, vocabulary: bool) -> None:
    """Texts of different lengths in one batch, most drafts refused: nothing of a refused guess may stay."""
    engine, compared = engine_with(method, tree, vocabulary=vocabulary)
    lengths = (1, 2, 9, 40)
    greedy = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True) for _ in lengths]
    asked = [
        Request([(3 * place + n) % 50 for place in range(n)], params) for n, params in zip(lengths, greedy, strict=True)
    ]
    plain = drain(Engine(tiny_model(), make_drafter("none", setup()), slots=1024), asked)
    assert drain(engine, asked) == plain
    assert compared.compared >= 15


@pytest.mark.parametrize("method", FEATURE)
@pytest.mark.parametrize("rows", [512, 11])
@pytest.mark.parametrize("when", ["observed", "drafted"])
def test_what_is_seen_of_long_texts_is_read_at_once(
    method: str, rows: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all of them together, in as many passes as it takes."""
    if when == "observed":
        monkeypatch.setattr(head_ahead, "MOST_WAITING", 5)
    else:
        monkeypatch.setattr(head_ahead, "MOST_UNREAD", 5)
    monkeypatch.setattr(head_ahead, "PASS_ROWS", rows)
    read: list[int] = []
    reading = head_ahead.HeadAhead._read

    def counted(ahead: head_ahead.HeadAhead, texts: Many[Sequence]) -> None:
        read.extend(ahead._texts[text.id].rows for text in texts)
        reading(ahead, texts)
        assert all(ahead._texts[text.id].rows == 1 for text in texts)

    monkeypatch.setattr(head_ahead.HeadAhead, "_read", counted)
    test_drafts_are_those_of_the_slow_way(method, "dynamic:3,3,7", False)
    assert {min(read) > 5, max(read) >= 40} == {True}


def test_a_text_that_nobody_looked_at_for_a_while_gets_no_drafts_until_it_is_read_anew() -> None:
    target = tiny()
    head = shaken("eagle", target, None)
    assert isinstance(head, FeatureHead)
    drafter = FeatureDrafter(head, 256, TreeSpec.parse("2"), target.vocab_size)
    text = Sequence([5, 6, 7], 100, id=1)

    def states(start: int) -> None:
        rows = text.position - start
        drafter.observe([Observation(text, [], {layer: torch.randn(rows, 16) for layer in drafter.layers}, start)])

    assert drafter.draft([text], [Budget(4, 4)]).size == 1
    states(0)
    assert drafter.draft([text], [Budget(4, 4)]).size == 3
    text.commit([8, 9, 10])
    states(4)  # those of token 2 and 3 are missing
    assert drafter.draft([text], [Budget(4, 4)]).size == 1
    states(0)
    assert drafter.draft([text], [Budget(4, 4)]).size == 3
    assert drafter.draft([text], [Budget(4, 4)]).size == 3  # again, with nothing new


def test_a_full_cache_of_the_head_stops_drafts_only() -> None:
    engine, compared = engine_with("eagle3", "3", vocabulary=False, slots=96)
    compared.seen = set()
    compared.observe = compared.own.observe  # type: ignore[method-assign]  # whoever gets none is right
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asked = [Request([n, n + 1, n + 2], params) for n in range(6)]
    assert drain(engine, asked) == drain(Engine(tiny_model(), make_drafter("none", setup()), slots=1024), asked)


def test_a_pass_that_broke_off_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that it was to leave are not there: the text is read again."""
    target = tiny_model()
    head = shaken("eagle3", target, None)
    assert isinstance(head, FeatureHead)
    spec = TreeSpec.parse("3")
    drafter = FeatureDrafter(head, 256, spec, target.vocab_size)
    compared = Compared(drafter, head, target, spec)
    text = Sequence([5, 6, 7, 8], 100, id=1, params=SamplingParams(temperature=0.0))
    for token in (9, 10, 11):
        states = whole_pass(target, text.tokens, head.taps)
        start = text.position if token > 9 else 0
        text.commit([token])
        rows = {tap: states[start:, i * 32 : (i + 1) * 32] for i, tap in enumerate(head.taps)}
        compared.observe([Observation(text, [token], rows, start)])
        if token == 10:
            with monkeypatch.context() as patch:

                def broken(*given: object) -> None:
                    raise RuntimeError("no more")

                patch.setattr(head, "forward_rows", broken)
                with pytest.raises(RuntimeError, match="no more"):
                    drafter.draft([text], [Budget(3, 3)])
        else:
            compared.draft([text], [Budget(3, 3)])
    assert compared.compared == 2


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
@pytest.mark.parametrize("method", [*FEATURE, *SIDE])
def test_a_folder_gives_back_what_was_trained(tmp_path: Path, method: str, bits: int) -> None:
    target = tiny()
    ids = torch.arange(0, 40, 2)
    made = new(method, target, ids, count=2)
    write_head(tmp_path / "head", HeadFolder(made.method, {"num_heads": 2}, made.trained(), {"steps": 3}), bits=bits)
    folder = read_head(tmp_path / "head", made.method)
    assert (folder.method, folder.manifest["steps"]) == (made.method, 3)
    loaded = load_side_heads(folder, target) if method in SIDE else load_head(folder, target)
    assert loaded.ids is not None
    assert loaded.ids.tolist() == ids.tolist()
    for name, weight in made.state_dict().items():
        step = weight.abs().max() / {4: 9, 6: 50, 8: 200, 16: 100}[bits]
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=float(step), rtol=0.0)
    with pytest.raises(ValueError, match="not draft"):
        read_head(tmp_path / "head", "draft")


def test_eight_bits_are_within_half_a_step() -> None:
    matrix = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    small = reduced({"w": matrix, "norm": torch.ones(4), "d2t": torch.arange(3)})
    assert small["w"].dtype == torch.int8
    back = expanded(small)
    assert bool(((back["w"] - matrix).abs() <= matrix.abs().amax(1, keepdim=True) / 254 + 1e-9).all())
    assert back["d2t"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="does not fit"):
        expanded({"w": small["w"], "w.scale": torch.ones(6)})


def test_six_bits_are_four_numbers_in_three_bytes() -> None:
    matrix = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    matrix[4, :4] = torch.tensor([31.0, -31.0, 1.0, 0.0])  # the first row whose largest number is known
    matrix[4, 4:] = 2.0
    small = reduced({"w": matrix}, 6)
    assert (small["w"].dtype, small["w"].shape) == (torch.uint8, (7, 24))
    assert small["w"][4, :3].tolist() == [63 << 2 | 0b10, 1 << 2 | 0b00, 33 << 2 | 0b00]  # 0 is 32 = 0b100000
    back = expanded(small)["w"]
    assert bool(((back - matrix).abs() <= matrix.abs().amax(1, keepdim=True) / 62 + 1e-6).all())
    odd = reduced({"w": matrix[:, :31]}, 6)["w"]
    assert odd.dtype == torch.int8, "what cannot be packed has 8 bits"


def test_four_bits_are_two_numbers_in_a_byte() -> None:
    matrix = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    matrix[4, :64] = torch.tensor([7.0, -7.0, 1.0, 0.0] * 16)
    small = reduced({"w": matrix}, 4)
    assert (small["w"].dtype, small["w"].shape, small["w.scale"].shape) == (torch.uint8, (7, 96), (7, 3))
    assert small["w"][4, :2].tolist() == [15 << 4 | 1, 9 << 4 | 8]
    back = expanded(small)["w"]
    assert back[4, :64].tolist() == matrix[4, :64].tolist()
    widest = matrix.view(7, 3, 64).abs().amax(2, keepdim=True) / 7
    plain = (matrix.view(7, 3, 64) / widest.clamp_min(1e-9)).round() * widest
    assert float((back - matrix).square().sum()) < 0.97 * float((plain.view(7, 192) - matrix).square().sum())
    assert reduced({"w": matrix[:, :96]}, 4)["w"].dtype == torch.int8, "what cannot be packed has 8 bits"


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_small_weights_beside_large_ones_are_kept(bits: int) -> None:
    """As of inputs that differ much in size."""
    matrix = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    matrix[:, 64:] /= 100
    small = reduced({"w": matrix}, bits)
    assert small["w.scale"].shape == (5, 2)
    off = (expanded(small)["w"] - matrix).abs().amax(0)
    assert float(off[64:].max()) < 0.01 * {4: 12, 6: 3, 8: 1}[bits] * 2


def test_scales_of_whole_rows_are_read_too() -> None:
    matrix = torch.tensor([[1, -2, 3, 4], [5, 6, 7, -8]], dtype=torch.int8)
    back = expanded({"w": matrix, "w.scale": torch.tensor([0.5, 2.0])})["w"]
    assert back.tolist() == [[0.5, -1.0, 1.5, 2.0], [10.0, 12.0, 14.0, -16.0]]


def test_medusa_without_matrices_behind_its_blocks(tmp_path: Path) -> None:
    """As other engines train it, with an output head that is the target's."""
    target = tiny()
    made = new_side_heads("medusa", target, 2)
    with torch.no_grad():
        for weight in made.blocks.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(1))
    bare = {name: tensor for name, tensor in made.trained().items() if not name.startswith("outputs")}
    assert len(bare) < len(made.trained())
    write_head(tmp_path / "head", HeadFolder("medusa", {"num_heads": 2}, bare))
    loaded = load_side_heads(read_head(tmp_path / "head"), target)
    state = torch.randn(3, target.config.hidden_size, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(loaded.states(state, NOTHING), made.states(state, NOTHING), rtol=0.02, atol=0.05)


def test_medusa_may_have_several_blocks(tmp_path: Path) -> None:
    target = tiny()
    made = new_side_heads("medusa", target, 2, layers=3)
    with torch.no_grad():
        for weight in made.blocks.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(1))
    write_head(tmp_path / "head", HeadFolder("medusa", {"num_heads": 2}, made.trained()))
    loaded = load_side_heads(read_head(tmp_path / "head"), target)
    state = torch.randn(3, target.config.hidden_size, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(loaded.states(state, NOTHING), made.states(state, NOTHING), rtol=0.05, atol=0.3)
    assert loaded.layers == 3


@pytest.mark.parametrize("inner", [None, 24])
def test_blockwise_has_a_hidden_layer_of_any_width(tmp_path: Path, inner: int | None) -> None:
    target = tiny()
    made = new_side_heads("blockwise", target, 2, inner=inner)
    assert made.hidden.out_features == (inner or target.config.hidden_size)
    write_head(tmp_path / "head", HeadFolder("blockwise", {"num_heads": 2}, made.trained()))
    loaded = load_side_heads(read_head(tmp_path / "head"), target)
    assert loaded.hidden.weight.shape == made.hidden.weight.shape
    assert frozen_side_heads(loaded, target).hidden.weight.shape == made.hidden.weight.shape


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 6, "num_key_value_heads": "x"}, "num_key_value_heads is 'x'"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "cannot be shared out"),
        ({"num_attention_heads": 3}, "made for another target"),
    ],
)
def test_heads_that_cannot_be_are_refused(tmp_path: Path, said: dict[str, Any], complaint: str) -> None:
    target = tiny()
    write_head(tmp_path / "head", HeadFolder("eagle3", said, new_head("eagle3", target, heads=6).trained()))
    with pytest.raises(ValueError, match=complaint):
        load_head(read_head(tmp_path / "head"), target)


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    target = tiny()
    head = new_head("eagle", target)
    good = tmp_path / "good"
    manifest = {"target": {"name": "other", "identity": "0" * 32}}
    write_head(good, HeadFolder("eagle", {}, head.trained(), manifest))
    with pytest.raises(ValueError, match=r"trained for another target \(other\)"):
        make_drafter("eagle", setup(target), {"path": str(good)})
    with pytest.raises(ValueError, match="there is no folder"):
        make_drafter("eagle", setup(target), {"path": str(tmp_path / "nothing")})
    with pytest.raises(ValueError, match="holds a drafter of the method eagle, not mtp"):
        make_drafter("mtp", setup(target), {"path": str(good)})
    with pytest.raises(ValueError, match="no eagle drafter for this model comes with Forerun: train one"):
        make_drafter("eagle", setup(target))
    (good / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(ValueError, match="fetch it again"):
        read_head(good)
    (good / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        read_head(good)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no forerun\.json"):
        read_head(tmp_path / "empty")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [None]}, "reads the layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 99]}, "reads the layers"),
        ({"intermediate_size": -3}, "intermediate_size is -3"),
        ({"intermediate_size": True}, "intermediate_size is True"),
    ],
)
def test_an_odd_config_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    write_head(tmp_path / "head", HeadFolder("eagle3", config, new_head("eagle3", tiny()).trained()))
    with pytest.raises(ValueError, match=reason):
        make_drafter("eagle3", setup(tiny()), {"path": str(tmp_path / "head")})


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tensors = new_head("eagle", tiny()).trained()
    tensors["fc.weight"][0, 0] = torch.nan
    write_head(tmp_path / "head", HeadFolder("eagle", {}, tensors))
    with pytest.raises(ValueError, match=r"fc\.weight holds numbers that are not finite"):
        make_drafter("eagle", setup(tiny()), {"path": str(tmp_path / "head")})


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x", "x" * 5000])
def test_a_name_that_no_folder_can_have(name: str) -> None:
    with pytest.raises(ValueError, match="there is no drafter"):
        make_drafter(name, setup())


def test_a_head_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path / "head", HeadFolder("eagle", {}, new_head("eagle", tiny_model()).trained()))
    with pytest.raises(ValueError, match="made for another target"):
        make_drafter("eagle", setup(tiny()), {"path": str(tmp_path / "head")})


def test_the_draft_vocabulary() -> None:
    assert most_frequent([[1, 1, 2]], 100, 100) is None
    ids = most_frequent([[99, 99, 98, 3], [3]], 64, 200)
    assert ids is not None
    assert ids.tolist() == [*range(62), 98, 99]
    assert from_offsets(to_offsets(ids), 200).tolist() == ids.tolist()
    with pytest.raises(ValueError, match="does not fit"):
        from_offsets(torch.tensor([0, -1]), 200)
    for odd in (torch.tensor([], dtype=torch.int64), torch.tensor(3), torch.tensor([0.5])):
        with pytest.raises(ValueError, match="no list of whole numbers"):
            from_offsets(odd, 200)


def test_a_target_is_known_in_any_precision() -> None:
    assert weights_identity(tiny()) == weights_identity(tiny().to(torch.bfloat16))
    changed = tiny()
    changed.get_parameter("model.layers.0.input_layernorm.weight").data[0] += 0.1
    assert weights_identity(changed) != weights_identity(tiny())


def test_a_calibration_is_read_or_refused() -> None:
    found = Calibration.of(
        {"calibration": {"accuracies": [[0.5, 0.2]], "tau": 1.5, "greedy_tau": 0.7, "trees": {"cpu": "3"}}}
    )
    assert found.spec("", "cpu").depth == 3
    assert found.spec("static:2", "cpu").shape.size == 3
    assert Calibration.of({}).spec("", "cpu").dynamic
    assert [found.spec("", kind).size for kind in (FOLDED, NARROW_FLOATS, WIDE_FLOATS)] == [2, 5, 15]
    assert [kind_of(tiny()), kind_of(tiny().to(torch.bfloat16))] == [FLOATS, "cpu"]
    with pytest.raises(ValueError, match="run `forerun calibrate`"):
        Calibration.of({}).spec("static:2", "cpu")
    broken: list[Any] = [
        {"tau": "x"},
        {"tau": -1},
        {"greedy_tau": 0},
        {"accuracies": [[2.0]]},
        {"trees": {"cpu": "nonsense"}},
        [1],
    ]
    for damaged in broken:
        with pytest.raises(ValueError, match="is damaged"):
            Calibration.of({"calibration": damaged})
