"""Models of transformers behind the contract of `TargetModel`: what they answer has to be their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.models.batch import Batch
from tests.models.test_adapter_models import (
    ALL,
    RECOMPUTED,
    TREES,
    VOCABULARY,
    WINDOW,
    Text,
    adapted,
    close,
    reference,
    tokens,
)

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 0]


def split(rows: Tensor, counts: list[int]) -> list[Tensor]:
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]


def path_of(parents: Sequence[int], node: int) -> list[int]:
    return [*path_of(parents, parents[node]), node] if node >= 0 else []


@pytest.mark.parametrize("name", ALL)
def test_a_text_read_in_pieces_is_a_text_read_whole(name: str) -> None:
    model, adapter = adapted(name)
    text = tokens(2 * WINDOW + 5)
    right = reference(model, text).logits[0]
    reader = Text(adapter, adapter.new_storage(40))
    assert reader.read(text[:6], wanted=0).logits.shape == (0, VOCABULARY)
    close(reader.read(text[6:16], wanted=4).logits, right[12:16])
    close(reader.read(text[16:18]).logits, right[16:18])
    for place in range(18, len(text)):
        close(reader.read(text[place : place + 1]).logits, right[place : place + 1])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("before", [0, 3, 2 * WINDOW])
def test_every_node_sees_its_own_path(name: str, before: int) -> None:
    model, adapter = adapted(name)
    text, drafted = tokens(before + 2), tokens(len(PARENTS), seed=1)
    reader = Text(adapter, adapter.new_storage(40))
    if before:
        reader.read(text[:before], wanted=0)
    got = reader.read(text[before:] + drafted, len(PARENTS), PARENTS, layers=(1,))
    for node in range(len(PARENTS)):
        path = text + [drafted[place] for place in path_of(PARENTS, node)]
        right = reference(model, path, output_hidden_states=True)
        close(got.logits[node], right.logits[0, -1])
        close(got.features[1][2 + node], right.hidden_states[1][0, -1])


@pytest.mark.parametrize("name", TREES)
def test_a_tree_may_be_read_level_by_level(name: str) -> None:
    """As a drafter does that grows one: the context ends with earlier levels, of which a node sees its ancestors."""
    model, adapter = adapted(name)
    text, (left, right, under_left, under_right) = tokens(2 * WINDOW), tokens(4, seed=1)
    reader = Text(adapter, adapter.new_storage(40))
    reader.read(text, wanted=0)
    reader.read([left, right], parents=[-1, -1])
    level = reader.segment([under_left, under_right], parents=[-1, -1])
    place, seen = torch.arange(len(text) + 2), torch.ones(2, len(text) + 2, dtype=torch.bool)
    place[-1] -= 1
    seen[0, -1] = seen[1, -2] = False
    positions = torch.full((2,), len(text) + 1)
    level = replace(level, positions=positions, context_visible=seen, context_positions=place)
    other = Text(adapter, reader.storage, 1, range(30, 40)).segment(text[:9])  # to be padded with
    got = adapter.forward_rows(Batch.pack([level, other]), reader.storage).logits
    for row, path in zip(got, ([left, under_left], [right, under_right]), strict=False):
        close(row, reference(model, text + path).logits[0, -1])
    close(got[2:], reference(model, text[:9]).logits[0])


def test_windows_are_counted_in_positions() -> None:
    """A context without its beginning, which the window hides anyway, gives the same logits."""
    model, adapter = adapted("mistral")
    text = tokens(2 * WINDOW)
    reader = Text(adapter, adapter.new_storage(40))
    reader.read(text[:-1], wanted=0)
    whole = reader.segment(text[-1:])
    cut = replace(whole, context=whole.context[4:], context_positions=torch.arange(4, len(text) - 1))
    got = adapter.forward_rows(Batch.pack([cut]), reader.storage).logits
    close(got, reference(model, text).logits[0, -1:])


@pytest.mark.parametrize("name", ALL)
def test_rejected_rows_leave_no_trace(name: str) -> None:
    model, adapter = adapted(name)
    text = tokens(18)
    reader = Text(adapter, adapter.new_storage(40))
    reader.read(text[:11], wanted=1)
    reader.read(tokens(6, seed=2), keep=False)
    close(reader.read(text[11:14]).logits, reference(model, text).logits[0, 11:14])
    reader.read(tokens(4, seed=3), keep=False)
    close(reader.read(text[14:]).logits, reference(model, text).logits[0, 14:])


@pytest.mark.parametrize("name", ALL)
def test_rows_may_be_moved(name: str) -> None:
    model, adapter = adapted(name)
    text = tokens(15)
    reader = Text(adapter, adapter.new_storage(40))
    reader.read(text[:12], wanted=0)
    source, target = reader.slots[-5:], reader.free[-5:]
    reader.storage.move([(source, target)])
    reader.slots[-5:] = target
    reader.free = source + reader.free[:-5]
    reader.read(tokens(8, seed=4), keep=False)  # over what was left behind
    close(reader.read(text[12:]).logits, reference(model, text).logits[0, 12:])


@pytest.mark.parametrize("name", TREES)
def test_an_accepted_path_is_kept_and_gone_on_from(name: str) -> None:
    model, adapter = adapted(name)
    text, drafted = tokens(10), tokens(len(PARENTS), seed=1)
    reader = Text(adapter, adapter.new_storage(40))
    reader.read(text[:-1], wanted=0)
    tree = reader.segment([text[-1], *drafted], len(PARENTS), PARENTS)
    adapter.forward_rows(Batch.pack([tree]), reader.storage)
    accepted = path_of(PARENTS, 5)
    assert accepted == [0, 2, 5]
    reader.storage.move([(tree.slots[[1 + node for node in accepted]].tolist(), tree.slots[1:4].tolist())])
    kept = len(text) + len(accepted)
    reader.slots, dropped = reader.slots[:kept], reader.slots[kept:]
    reader.free = dropped + reader.free
    whole = [*text, *(drafted[node] for node in accepted), *tokens(3, seed=5)]
    close(reader.read(whole[kept:]).logits, reference(model, whole).logits[0, kept:])


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_its_sequences_one_by_one(name: str) -> None:
    """Chains and, where they can be checked, trees; of several lengths, some alike."""
    model, adapter = adapted(name)
    lengths = [3, 9, 0, 9, 14]
    storage = adapter.new_storage(120)
    readers = [Text(adapter, storage, number, range(24 * number, 24 * number + 24)) for number in range(5)]
    texts = [tokens(length + 4, seed=number) for number, length in enumerate(lengths)]
    first = [readers[number].segment(texts[number][: lengths[number]], wanted=1) for number in (0, 1, 3, 4)]
    adapter.forward_rows(Batch.pack(first), storage)
    segments = []
    for number, (reader, text, length) in enumerate(zip(readers, texts, lengths, strict=True)):
        if adapter.branches and number in (1, 4):
            segments.append(reader.segment(text[length:], 2, [-1, -1]))
        else:
            segments.append(reader.segment(text[length : length + 1 + number], min(number, 2)))
    output = adapter.forward_rows(Batch.pack(segments), storage, layers=(1,))
    logits = split(output.logits, [segment.logits for segment in segments])
    features = split(output.features[1], [segment.rows for segment in segments])
    for number, (text, length, segment) in enumerate(zip(texts, lengths, segments, strict=True)):
        ends = [text[: length + segment.rows]]
        if not segment.is_chain:
            ends = [text[: length + 3], [*text[: length + 2], text[length + 3]]]
        alone = Text(adapter, adapter.new_storage(24))
        right = alone.read(ends[-1], layers=(1,))
        assert logits[number].shape == (segment.logits, VOCABULARY)
        assert features[number].shape == (segment.rows, 32)
        close(features[number][-1], right.features[1][-1])
        close(features[number][0], right.features[1][length])
        for row, end in enumerate(reversed(ends)):
            if segment.logits:
                close(logits[number][-1 - row], reference(model, end).logits[0, -1])


@pytest.mark.parametrize("name", [name for name in ALL if name not in RECOMPUTED])
def test_features_are_the_hidden_states_before_the_final_norm(name: str) -> None:
    model, adapter = adapted(name)
    text = tokens(7)
    key = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
    right = reference(model, text, output_hidden_states=True)[key]
    reader = Text(adapter, adapter.new_storage(10))
    reader.read(text[:4], wanted=0)
    features = reader.read(text[4:], wanted=1, layers=(0, 2, 1)).features
    assert list(features) == [0, 2, 1]
    close(features[0], right[0][0, 4:])
    close(features[1], right[1][0, 4:])
    norms = {"gpt2": "transformer.ln_f", "phi": "model.final_layernorm", "t5": "decoder.final_layer_norm"}
    if name in norms:
        with torch.inference_mode():
            close(model.get_submodule(norms[name])(features[2]), right[2][0, 4:])
            assert not torch.allclose(features[2], right[2][0, 4:])


@pytest.mark.parametrize(("name", "embedding"), [("mamba", "backbone.embeddings"), ("rwkv", "rwkv.embeddings")])
def test_features_are_counted_from_the_embedding_whatever_the_model_counts(name: str, embedding: str) -> None:
    """Why features come from hooks: a number in `hidden_states` of these models means the next layer."""
    model, adapter = adapted(name)
    text = tokens(7)
    states = reference(model, text, output_hidden_states=True).hidden_states
    features = Text(adapter, adapter.new_storage(10)).read(text, layers=(0, 1)).features
    close(features[0], model.get_submodule(embedding)(torch.tensor(text)))
    close(features[1], states[0][0])


def test_each_sequence_has_its_own_prompt() -> None:
    model, adapter = adapted("t5")
    storage = adapter.new_storage(20)
    prompts = {7: [4, 9, 30], 8: [60, 61, 62, 63, 64]}
    readers = {
        number: Text(adapter, storage, number, range(10 * (number - 7), 10 * (number - 6))) for number in prompts
    }
    assert all(adapter.begin(number, prompt) == [0] for number, prompt in prompts.items())
    text = [0, 11, 12]
    got = adapter.forward_rows(Batch.pack([readers[7].segment(text), readers[8].segment(text)]), storage).logits
    with torch.inference_mode():
        for rows, prompt in zip((got[:3], got[3:]), prompts.values(), strict=True):
            right = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text])).logits[0]
            close(rows, right)
    assert not torch.allclose(got[:3], got[3:])
    adapter.forget(7)
    close(readers[8].read([13]).logits, reference_after(model, prompts[8], [*text, 13]))
    with pytest.raises(AssertionError, match="not begun"):
        readers[7].read([13])
    adapter.forget(8)


def reference_after(model: torch.nn.Module, prompt: list[int], text: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text]), use_cache=False
        ).logits
    return logits[0, -1:]


@pytest.mark.parametrize("name", ["bloom", "mamba", "t5"])
def test_trees_are_refused_where_they_cannot_be_checked(name: str) -> None:
    _, adapter = adapted(name)
    with pytest.raises(ValueError, match="cannot check trees: choose a drafter"):
        Text(adapter, adapter.new_storage(10)).read([3, 4, 5], 2, [-1, -1])


def test_layers_that_are_not_there_are_refused() -> None:
    _, adapter = adapted("gpt2")
    with pytest.raises(ValueError, match="has no layer 3: choose a drafter that reads layers 0 to 2"):
        Text(adapter, adapter.new_storage(10)).read([3, 4], layers=(3,))


def test_prompts_that_an_encoder_cannot_read_are_refused() -> None:
    _, bart = adapted("bart")
    with pytest.raises(ValueError, match="shorten it to the 64"):
        bart.begin(1, tokens(65))
    with pytest.raises(ValueError, match="prompt is empty"):
        bart.begin(1, [])
    _, t5 = adapted("t5")
    assert t5.begin(1, tokens(600)) == [0]  # relative positions have no end
    t5.forget(1)


def test_a_storage_of_recomputed_texts_holds_tokens() -> None:
    _, adapter = adapted("mamba")
    reader = Text(adapter, adapter.new_storage(6))
    reader.read([50, 60, 70])
    assert reader.storage.keys[0][reader.slots].flatten().tolist() == [50, 60, 70]
    assert reader.storage.bytes_per_slot == 8


def test_what_comes_back_needs_no_gradient_and_storage_stays_usable() -> None:
    _, adapter = adapted("gpt2")
    storage = adapter.new_storage(6)
    output = Text(adapter, storage).read([50, 60, 70])
    assert not output.logits.requires_grad
    storage.move([([0], [1])])
