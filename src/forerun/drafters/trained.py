"""What drafts with heads that were trained for one target."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from forerun.core.history import History
from forerun.core.sequence import Sequence
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import AS_IT_IS, Taus
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.growing import grow
from forerun.drafters.head_ahead import HeadAhead
from forerun.drafters.kinds import kind_of
from forerun.drafters.side_run import SideRun
from forerun.drafters.trained_folder import Calibration, HeadOptions, find_head
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.feature_head import FeatureHead, load_head
from forerun.models.heads.side_heads import SideHeads, load_side_heads

# --- heads that go on from state to state --------------------------------------------------------------------------


class FeatureDrafter(DraftModel):
    gains: tuple[float, ...] = ()

    def __init__(self, head: FeatureHead, slots: int, spec: TreeSpec, vocabulary: int, taus: Taus = AS_IT_IS) -> None:
        """`vocabulary` is the target's."""
        ahead = HeadAhead(head, slots)
        super().__init__(ahead, spec, vocabulary, taus=taus)
        self._states = ahead
        self.layers = head.taps

    def gain(self, nodes: int | None) -> float:
        return _expected(self.gains, nodes)

    def observe(self, observations: Many[Observation]) -> None:
        self._states.observe(observations)

    def late(self) -> float:
        seconds, self._states.reading = self._states.reading, 0.0
        return seconds

    def keep(self, keeps: bool) -> None:
        """Whether `resume` will be asked: then all that was seen of a text is kept when it is over."""
        self._states.keeps = keeps

    def resume(self, sequence: Sequence, rows: int) -> int:
        return self._states.resume(sequence, rows)


def feature_drafter(method: str, options: HeadOptions, setup: Setup) -> Drafter:
    folder, target = find_head(method, options.path, setup)
    calibration = Calibration.of(folder.manifest)
    spec = calibration.spec(options.tree, kind_of(target))
    head = load_head(folder, target)
    made = FeatureDrafter(head, setup.slots, spec, target.vocab_size, calibration.taus)
    made.gains = calibration.gains(spec)
    return made


# --- heads that guess from one state ---------------------------------------------------------------------------


class SideDrafter:
    top: int = 0
    gains: tuple[float, ...] = ()

    def __init__(self, heads: SideHeads, spec: TreeSpec, vocabulary: int, taus: Taus = AS_IT_IS) -> None:
        """`vocabulary` is the target's."""
        self.heads, self.spec, self.vocabulary, self.taus = heads, spec.within(heads.count), vocabulary, taus
        self.drawing, self.branches = spec.drawing, spec.branches
        self.layers = (heads.layer,)
        self.history = History(vocabulary, heads.device)
        self._seen: dict[int, Observation] = {}  # what was observed of each text last

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        budgets = [Budget(budget.nodes, min(budget.depth, self.heads.count)) for budget in budgets]
        states = [
            self.state(sequence) if budget.nodes > 0 and budget.depth > 0 else None
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        present = [
            (state, sequence.tokens[-1]) for state, sequence in zip(states, sequences, strict=True) if state is not None
        ]
        logits = None
        if present:
            with torch.inference_mode():
                tokens = to_device([token for _, token in present], self.heads.device)
                logits = self.heads(torch.stack([state for state, _ in present]), tokens)
        run = SideRun(logits, [state is not None for state in states], self.heads.device, self.heads.ids)
        return grow(self.spec, self.vocabulary, self.history, sequences, run, budgets, taus=self.taus)

    def observe(self, observations: Many[Observation]) -> None:
        """Where nothing is drafted this should cost nothing."""
        self._seen.update((seen.sequence.id, seen) for seen in observations)

    def go_on(self, sequences: Many[Sequence], states: Tensor) -> None:
        """With states [B, H] at their last tokens but one, as if these had been observed."""
        for sequence, state in zip(sequences, states, strict=True):
            features = {self.heads.layer: state[None]}
            self._seen[sequence.id] = Observation(sequence, [], features, sequence.position - 1)

    def gain(self, nodes: int | None) -> float:
        return _expected(self.gains, nodes)

    def last_state(self, sequence: Sequence) -> Tensor:
        """[H] what was observed of it last."""
        state: Tensor = self._seen[sequence.id].features[self.heads.layer][-1]
        return state

    def state(self, sequence: Sequence) -> Tensor | None:
        """[H] at the last token but one; None where that was not observed."""
        seen = self._seen.get(sequence.id)
        if seen is None:
            return None
        states = seen.features[self.heads.layer]
        return states[-1] if len(states) and seen.start + len(states) == sequence.position else None

    def forget(self, sequence: Sequence) -> None:
        self._seen.pop(sequence.id, None)
        self.history.forget(sequence)


def side_drafter(method: str, options: HeadOptions, setup: Setup) -> Drafter:
    folder, target = find_head(method, options.path, setup)
    calibration = Calibration.of(folder.manifest)
    heads = load_side_heads(folder, target)
    spec = calibration.spec(options.tree, kind_of(target))
    made = SideDrafter(heads, spec, target.vocab_size, calibration.taus)
    made.gains = calibration.gains(spec)
    return made


# --- both --------------------------------------------------------------------------------------------------------


def _expected(gains: tuple[float, ...], nodes: int | None) -> float:
    """`gains` of trees of 0, 1, 2, … nodes."""
    if not gains:
        return 0.0
    return gains[-1 if nodes is None else min(nodes, len(gains) - 1)]
