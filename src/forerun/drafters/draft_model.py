"""A smaller model with the same tokenizer drafts (Leviathan et al., Chen et al., 2023; trees: SpecInfer, Sequoia).

The model runs ahead of the text (`run_ahead.py`), one pass for each level of a tree, over the nodes of all sequences;
which children a node gets is told in `growing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.history import History
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import AS_IT_IS, Taus
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.growing import grow, rows_below_root
from forerun.drafters.kinds import kind_of
from forerun.drafters.run_ahead import Ahead, RunAhead
from forerun.drafters.trained_folder import Calibration, find_head
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.fields import read_json
from forerun.models.heads.files import HeadFolder, is_head
from forerun.models.heads.shared_draft import is_shared_draft, load_shared_draft
from forerun.models.store import MANIFEST
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer

METHOD = "draft"
"""What such drafts are trained by."""
UNMEASURED = "4"
"""The tree where nothing was measured."""


@dataclass(frozen=True)
class Options:
    model: str = ""
    """The draft: a name, a folder, a file or a Hugging Face id, as for the target; by default the one that comes with
    Forerun for this target."""
    tree: str = ""
    """What to draft: "4" for a chain of four, "3,2,1" for a sampled tree, "fixed:3,2,1", "dynamic:8,5,40", "static:26"
    for a draft that was measured; by default what was found best for this device, else a chain of four."""

    def __post_init__(self) -> None:
        if self.tree:
            TreeSpec.parse(self.tree)


def make(options: Options, setup: Setup) -> Drafter:
    shared = _find_shared(options.model, setup)
    known = Calibration.of(_manifest(options.model) if shared is None else shared.manifest)
    tree = options.tree or known.trees.get(kind_of(setup.target)) or UNMEASURED
    spec = _settled(TreeSpec.parse(tree), known.accuracies or None)
    model = load_draft(options.model, setup) if shared is None else _load_shared(shared, setup)
    if spec.branches and not model.branches:
        raise ValueError(f"the draft model {options.model} cannot read the tree {tree}: ask for a chain, as tree=4")
    return DraftModel(RunAhead(model, setup.slots), spec, setup.target.vocab_size, taus=known.taus)


def load_draft(name: str, setup: Setup) -> TargetModel:
    """A model of its own, or layers that were trained to draft for the target and share its matrices."""
    shared = _find_shared(name, setup)
    if shared is not None:
        return _load_shared(shared, setup)
    if not name:
        raise ValueError("the drafter draft_model needs a model: name a smaller one of the family with model=NAME")
    return setup.load(name)


def _load_shared(folder: HeadFolder, setup: Setup) -> TargetModel:
    assert isinstance(setup.target, Transformer)
    return load_shared_draft(folder, setup.target)


def _find_shared(name: str, setup: Setup) -> HeadFolder | None:
    """The draft of that name where it shares the target's matrices; without a name the one that comes with Forerun."""
    folder = Path(name).expanduser()
    if name and not (is_head(folder) and is_shared_draft(read_json(folder / "config.json"))):
        return None
    try:
        return find_head(METHOD, name, setup)[0]
    except ValueError:
        if name:
            raise
        return None  # none comes with Forerun for this target


def _manifest(name: str) -> dict[str, Any]:
    """What the folder of a model that was trained to draft says of itself."""
    folder = Path(name).expanduser()
    return read_json(folder / MANIFEST) if name and is_head(folder) else {}


def _settled(spec: TreeSpec, accuracies: Many[Many[float]] | None = None) -> TreeSpec:
    """With its shape, if that comes from a measurement."""
    if accuracies is not None:
        spec = spec.measured(accuracies)
    if spec.needs_measurement:
        raise ValueError(
            f"the shape of the tree {spec} comes from a measurement, which there is none of here: name a shape, as in "
            f'"fixed:3,2,1" or "3,2,1", or let it grow, as in "dynamic:8,5,40"'
        )
    return spec


class DraftModel:
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(
        self,
        ahead: Ahead,
        spec: TreeSpec,
        vocabulary: int,
        accuracies: Many[Many[float]] | None = None,
        taus: Taus = AS_IT_IS,
    ) -> None:
        """`vocabulary` is the target's; `accuracies` are for a tree that is `measured` by them."""
        self.spec = _settled(spec, accuracies)
        self.drawing = self.spec.drawing
        self.branches = self.spec.branches
        self.vocabulary = vocabulary
        self.ahead = ahead
        self.taus = taus
        self.history = History(vocabulary, ahead.model.device)

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        reach = self.ahead.model.context_length
        budgets = [
            Budget(budget.nodes, min(budget.depth, reach - sequence.position))
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        run = self.ahead.start(sequences, [rows_below_root(self.spec, budget) for budget in budgets])
        tree = grow(self.spec, self.vocabulary, self.history, sequences, run, budgets, taus=self.taus)
        if any(run.takes_part):
            run.send_home()
        return tree

    def observe(self, observations: Many[Observation]) -> None:
        """Committed tokens are read from the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        self.ahead.forget(sequence)
        self.history.forget(sequence)
