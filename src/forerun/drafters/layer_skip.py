"""The target drafts for itself, with some of its layers (Zhang et al., "Draft & Verify", 2023; LayerSkip, 2024).

A draft is a pass through the chosen layers, the final norm and the head. There is no second model and no second cache:
the chosen layers read the keys and values that the target's own passes left for the text, so there is nothing to catch
up with. Rows of the root and of drafted nodes lie in slots that are reserved for the time of drafting, behind the
committed ones, and are given back before the target's pass, which writes all layers of the same rows itself.

Which layers draft best is found by `forerun calibrate layer_skip`, once for a model. A model that was not trained for
this may guess badly with any of them. So how far to draft is decided anew in every step (`draft_length.py`, or by the
engine where that is adaptive), and the worst that can happen is plain decoding with a try now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from forerun.core.sequence import Sequence
from forerun.core.transfer import Homeward
from forerun.core.tree import DraftTree
from forerun.drafters.draft_length import DraftLength, Rate
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.layer_choice import Choice, by_hand, guessed, load, parse_layers
from forerun.drafters.none import roots_only
from forerun.drafters.run_ahead import Run
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.batch import Batch, TextEnds
from forerun.models.cache import KVCache
from forerun.models.static.static_pass import Choose
from forerun.models.storage import Storage
from forerun.models.store import Store
from forerun.models.target import Output, Written
from forerun.models.transformer import Transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    layers: str = ""
    """The layers that draft, as in "0,1,5-9"; by default those that `forerun calibrate layer_skip` has found."""
    tree: str = "6"
    """What to draft at most: "6" for a chain of six, "3,2,1" for a sampled tree, "fixed:3,2,1", "dynamic:8,5,40"."""
    adaptive: bool = True
    """Draft as deep as pays, by what came true so far; if false, always the whole tree. An adaptive engine sees to that
    itself."""

    def __post_init__(self) -> None:
        TreeSpec.parse(self.tree)
        if self.layers:
            parse_layers(self.layers)
        adaptive: object = self.adaptive
        if not isinstance(adaptive, bool):
            raise ValueError(f"the layer_skip option adaptive is {adaptive!r}: give true or false")


def make(options: Options, setup: Setup) -> Drafter:
    model = setup.target
    if not isinstance(model, Transformer):
        raise ValueError(
            "layer_skip runs single layers of the target, which the adapter for this model cannot: choose another "
            "drafter, such as ngram or draft_model"
        )
    adaptive = options.adaptive and not setup.adaptive
    return LayerSkip(model, _choose(options, model), TreeSpec.parse(options.tree), adaptive=adaptive)


def _choose(options: Options, model: Transformer) -> Choice:
    count = len(model.config.layers)
    if options.layers:
        layers = parse_layers(options.layers)
        if layers[-1] >= count:
            raise ValueError(
                f"the layer_skip option layers names layer {layers[-1]}: the layers of this model are 0 to {count - 1}"
            )
        return by_hand(model.config, layers)
    found = load(model, Store.default())
    if found is not None:
        return found
    log.info("layer_skip guesses which layers draft best: `forerun calibrate layer_skip` finds out")
    return guessed(model.config)


class SomeLayers:
    """A model of which the other layers are skipped."""

    branches = True

    def __init__(self, model: Transformer, layers: tuple[int, ...]) -> None:
        self.whole, self.only = model, layers
        self.vocab_size, self.context_length, self.eos = model.vocab_size, model.context_length, model.eos

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def new_storage(self, slots: int) -> Storage:
        return self.whole.new_storage(slots)

    def forward_rows(self, batch: Batch, storage: Storage, layers: Many[int] = ()) -> Output:
        return self.whole.forward_rows(batch, storage, layers, only=self.only)

    @property
    def writes_ahead(self) -> bool:
        return self.whole.writes_ahead

    def write_ahead(
        self,
        ends: TextEnds,
        storage: Storage,
        count: int,
        choose: Choose | None = None,
        layers: Many[int] = (),
        top: int = 0,
    ) -> Written:
        return self.whole.write_ahead(ends, storage, count, choose, layers, top, only=self.only)

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return prompt

    def forget(self, sequence: int) -> None:
        """The target keeps its own books."""


class InTargetsCache:
    """Runs behind the texts that the target has read. A text that it has not read to its root sits out."""

    def __init__(self, model: SomeLayers) -> None:
        self.model = model
        self.shared: KVCache | None = None
        self._held: list[int] = []

    @property
    def cache(self) -> KVCache:
        assert self.shared is not None, "share the target's cache first"
        return self.shared

    def start(self, sequences: Many[Sequence], wanted: Many[int | None]) -> Run:
        free = self.cache.free_blocks
        room: list[int | None] = []
        for sequence, rows in zip(sequences, wanted, strict=True):
            needed = self.cache.blocks_for(sequence.id, 1 + (rows or 0))
            if rows is None or needed > free or self.cache.committed(sequence.id) != sequence.position:
                room.append(None)
            else:
                free -= needed
                room.append(rows)
        self._held = [sequence.id for sequence, rows in zip(sequences, room, strict=True) if rows is not None]
        return Run(self.model, self.cache, sequences, room)

    def give_back(self) -> None:
        """Nothing that was read while drafting stays, also where a pass broke off. Who came last gives back first, so
        that the target's pass gets the very blocks that it would have had."""
        self.cache.commit({text: () for text in reversed(self._held) if self.cache.holds(text)})
        self._held = []

    def forget(self, sequence: Sequence) -> None:
        """Nothing was kept."""


class LayerSkip:
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, model: Transformer, choice: Choice, spec: TreeSpec, *, adaptive: bool = True) -> None:
        self.choice = choice
        self.drawing, self.branches = spec.drawing, spec.branches
        self.length = DraftLength(spec, choice.costs, Rate(choice.acceptance, choice.weight))
        self.adaptive = adaptive
        self._ahead = InTargetsCache(SomeLayers(model, choice.layers))
        self._drafts = DraftModel(self._ahead, spec, model.vocab_size)
        self._guesses: dict[int, tuple[Homeward, int]] = {}  # parents and tokens [B, 2, N], and which are its own

    def share(self, cache: KVCache) -> None:
        self._ahead.shared = cache

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        if not any(min(budget.nodes, budget.depth) > 0 for budget in budgets):
            return roots_only(sequences)
        if self.adaptive:
            depth = self.length.next()
            if not depth:
                return roots_only(sequences)
            budgets = [Budget(budget.nodes, min(budget.depth, depth)) for budget in budgets]
        try:
            tree = self._drafts.draft(sequences, budgets)
        finally:
            self._ahead.give_back()
        if self.adaptive:
            drafted = Homeward(torch.stack([tree.parents, tree.tokens], 1))
            self._guesses |= {sequence.id: (drafted, b) for b, sequence in enumerate(sequences)}
        return tree

    def observe(self, observations: Many[Observation]) -> None:
        for seen in observations:
            guess = self._guesses.pop(seen.sequence.id, None)
            if guess is not None:
                drafted, b = guess
                parents, tokens = drafted.here()[b].tolist()
                self.length.learn(parents, tokens, seen.tokens)

    def forget(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence.id, None)
        self._drafts.forget(sequence)
