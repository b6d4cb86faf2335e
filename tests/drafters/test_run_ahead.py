"""A tree read level by level gives what it gives in one pass."""

from __future__ import annotations

import pytest
import torch

from forerun.drafters.run_ahead import RunAhead
from forerun.models.batch import Batch, Segment
from forerun.models.transformer import Transformer
from tests.drafters.models import sequence, slow_logits, tiny


def test_levels_see_the_text_and_their_own_ancestors() -> None:
    model, texts = tiny(1, window=2), [sequence(1, length=9), sequence(2, length=5)]
    ahead = RunAhead(model, slots=256)
    run = ahead.start(texts, [7, 7])
    roots = run.roots()
    # Numbers of the nodes:   0 1 2 | 3 4 5 | 6; parents are these numbers, -1 is the root.
    levels = [([7, 8, 9], [-1, -1, -1]), ([1, 2, 3], [0, 2, 2]), ([4], [5])]
    paths: list[list[int]] = []
    for row, text in enumerate(texts):
        torch.testing.assert_close(roots.logits[row], slow_logits(model, text.tokens), atol=1e-4, rtol=1e-4)
    for tokens, parents in levels:
        places = torch.tensor([parents, parents])
        rows = run.level(torch.tensor([tokens, tokens]), places, [len(tokens)] * 2)
        paths += [
            [*(paths[parent] if parent >= 0 else []), token] for token, parent in zip(tokens, parents, strict=True)
        ]
        for logits, b, column in zip(rows.logits, rows.sequence.tolist(), rows.column.tolist(), strict=True):
            path = paths[len(paths) - len(tokens) + column]
            torch.testing.assert_close(logits, slow_logits(model, [*texts[b].tokens, *path]), atol=1e-4, rtol=1e-4)
    ahead.cache.check_integrity()


def test_a_segment_may_see_a_part_of_its_context() -> None:
    """Two branches read in one pass, then a child of the second: it must not see the first, in no layer, and for the
    layer with a window the second stands right before it."""
    model, text = tiny(2), [3, 1, 4, 1, 5, 9, 2, 6]
    storage, slots = model.new_storage(16), torch.arange(16)
    eye = torch.eye(2, dtype=torch.bool)
    length = len(text)
    nothing = slots[:0]
    branches = Segment(
        0,
        torch.tensor([*text, 7, 8]),
        torch.tensor([*range(length), length, length]),
        eye,
        nothing,
        slots[: length + 2],
        0,
    )
    model.forward_rows(Batch.pack([branches]), storage)
    visible = torch.ones(1, length + 2, dtype=torch.bool)
    visible[0, length] = False
    positions = torch.tensor([*range(length), length, length])
    child = Segment(
        0,
        torch.tensor([5]),
        torch.tensor([length + 1]),
        None,
        slots[: length + 2],
        slots[length + 2 : length + 3],
        1,
        visible,
        positions,
    )
    found = model.forward_rows(Batch.pack([child]), storage).logits[0]
    torch.testing.assert_close(found, slow_logits(model, [*text, 8, 5]), atol=1e-4, rtol=1e-4)
    assert (found - slow_logits(model, [*text, 7, 5])).abs().max() > 1e-2


def test_a_tree_larger_than_the_cache_sits_out() -> None:
    """Also where all blocks are free: there are never more than that."""
    ahead = RunAhead(tiny(1), slots=32)
    text = sequence(1, length=20)
    assert ahead.start([text], [13]).takes_part == [False]
    assert ahead.start([text], [12]).takes_part == [True]
    ahead.cache.check_integrity()


class Encoding(Transformer):
    """Its text starts from token 0, whatever the prompt."""

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return [0]


def test_a_draft_that_has_an_encoder_is_refused_at_once() -> None:
    """Not in the middle of a step; and also where the target has one too, so that both texts start alike."""
    model = tiny(1)
    model.__class__ = Encoding
    with pytest.raises(ValueError, match="choose a decoder-only model as the draft"):
        RunAhead(model, slots=32)


def test_a_step_that_came_to_nothing_can_be_drafted_again() -> None:
    """The text has not grown: the same root is read again, and gives the same."""
    model, text = tiny(1), sequence(3, length=6)
    ahead = RunAhead(model, slots=256)
    found = []
    for _ in range(3):
        run = ahead.start([text], [2])
        first = run.roots().logits
        second = run.level(torch.tensor([[7]]), torch.tensor([[-1]]), [1]).logits
        found.append(torch.cat([first, second]))
        ahead.cache.check_integrity()
    for again in found[1:]:
        torch.testing.assert_close(again, found[0])
