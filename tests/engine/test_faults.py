"""Mistakes planted in the engine, one at a time: the comparison with decoding by hand must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.core.law import Context
from forerun.core.noise import StepNoise
from forerun.core.sequence import Sequence as Text
from forerun.engine import judge as judge_module
from forerun.engine.engine import Engine
from forerun.engine.laws import SettingsMemo
from forerun.models import batch as batch_module
from forerun.models.batch import Segment, TextRows
from forerun.models.cache import KVCache
from forerun.models.storage import Storage
from tests.engine.test_engine import EXPECTED, KNOWN, MODEL, REQUESTS
from tests.engine.tiny import Oracle, RandomTrees, drain

Plant = Callable[[pytest.MonkeyPatch], None]


def keep_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    """The cache takes the rows after the root as they come, whichever were accepted."""
    commit = KVCache.commit
    patch.setattr(
        KVCache, "commit", lambda self, kept: commit(self, {key: range(len(rows)) for key, rows in kept.items()})
    )


def keep_one_row_more(patch: pytest.MonkeyPatch) -> None:
    """A rejected node stays behind the accepted ones."""
    commit = KVCache.commit

    def spoiled(self: KVCache, kept: Mapping[int, Sequence[int]]) -> None:
        wrong = {}
        for key, rows in kept.items():
            left = sorted(set(range(self._entries[key].reserved)) - set(rows))
            wrong[key] = [*rows, *left[:1]]
        commit(self, wrong)

    patch.setattr(KVCache, "commit", spoiled)


def no_move(patch: pytest.MonkeyPatch) -> None:
    """Kept rows are counted and not moved to their places."""
    patch.setattr(Storage, "move", lambda self, texts: None)


def blind_to_the_path(patch: pytest.MonkeyPatch) -> None:
    """Penalties see the committed text and not the drafted path."""
    seen = Context.seen
    patch.setattr(Context, "seen", lambda self: seen(replace(self, path=torch.full_like(self.path, -1))))


def see_siblings(patch: pytest.MonkeyPatch) -> None:
    """The tree's mask is a causal one: a node sees everything before it."""
    patch.setattr(batch_module, "_ancestors", lambda parents: np.tri(len(parents), dtype=np.bool_))


def positions_in_row_order(patch: pytest.MonkeyPatch) -> None:
    """Nodes get the position of their row instead of their depth."""
    patch.setattr(TextRows, "positions", lambda text: list(range(text.before, text.before + text.rows)))


def no_cut(patch: pytest.MonkeyPatch) -> None:
    """An accepted path runs past the end of the text."""

    def spoiled(self: Text, tokens: Sequence[int]) -> int:
        for token in tokens:
            self.output.append(token)
            self.tokens.append(token)
            if token in self.eos:
                self.finish_reason = "stop"
            elif len(self.output) >= self.max_tokens:
                self.finish_reason = "length"
        return len(tokens)

    patch.setattr(Text, "commit", spoiled)


def settings_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Rows take the sampling settings of another request of the batch."""
    of = SettingsMemo.of
    patch.setattr(SettingsMemo, "of", lambda self, jobs, device: of(self, [*jobs[1:], jobs[0]], device))


def noise_of_the_step(patch: pytest.MonkeyPatch) -> None:
    """Noise counts from the start of the output instead of the absolute position."""
    patch.setattr(judge_module, "StepNoise", lambda seeds, starts: StepNoise(seeds, starts - starts.min()))


def forget_the_context(patch: pytest.MonkeyPatch) -> None:
    """A row sees what is new, and not what lies in the cache."""
    made = Segment.__init__

    def spoiled(self: Segment, *values: object, **named: object) -> None:
        made(self, *values, **named)  # type: ignore[arg-type]
        object.__setattr__(self, "context", self.context[:0])

    patch.setattr(Segment, "__init__", spoiled)


FAULTS: dict[str, Plant] = {
    "rejected rows are kept": keep_rejected_rows,
    "one row too many is kept": keep_one_row_more,
    "kept rows are not moved": no_move,
    "penalties forget the path": blind_to_the_path,
    "nodes see their siblings": see_siblings,
    "positions in row order": positions_in_row_order,
    "a path runs past the end": no_cut,
    "a neighbour's settings": settings_of_the_neighbour,
    "noise not keyed by position": noise_of_the_step,
    "the context is not seen": forget_the_context,
}


def check() -> None:
    """What `test_engine` checks, with drafts of which many are accepted."""
    for drafter in (RandomTrees(4, KNOWN), Oracle(KNOWN, right=True)):
        engine = Engine(MODEL, drafter, slots=1024)
        assert [text for (text,) in drain(engine, REQUESTS)] == EXPECTED


def test_without_a_fault_the_check_passes() -> None:
    check()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        check()
