"""Folders of trained drafters: where they are found, and what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from forerun.drafters.confidence import AS_IT_IS, Taus
from forerun.drafters.find import Setup
from forerun.drafters.kinds import FOLDED, NARROW_FLOATS, WIDE_FLOATS
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.fields import read_json
from forerun.models.heads.checkpoint_mtp import read_mtp
from forerun.models.heads.files import HeadFolder, is_head, read_head
from forerun.models.identity import weights_identity
from forerun.models.store import MANIFEST
from forerun.models.transformer import Transformer
from forerun.trees.static import greedy

TREES = {
    "cpu": "dynamic:6,5,24",
    FOLDED: "dynamic:2,2,2",
    NARROW_FLOATS: "dynamic:4,4,5",
    WIDE_FLOATS: "dynamic:6,8,15",
    "cuda": "dynamic:10,6,60",
}
"""Where nothing was measured."""


@dataclass(frozen=True)
class HeadOptions:
    path: str = ""
    """The folder of the trained drafter; by default the one that comes with Forerun for this target."""
    tree: str = ""
    """What to draft: "4" for a chain, "static:26" for the best tree of a fixed shape, "dynamic:10,6,60" for one that
    grows where the drafter is sure, "sequoia:26,6", "3,2,1"; by default what was found best for this device."""

    def __post_init__(self) -> None:
        if self.tree:
            TreeSpec.parse(self.tree)


@dataclass(frozen=True)
class Calibration:
    """What was measured of a trained drafter."""

    accuracies: tuple[tuple[float, ...], ...] = ()
    """By depth and rank: how often the target said the drafter's candidate, where it had said all those above."""
    taus: Taus = AS_IT_IS
    trees: Mapping[str, str] = field(default_factory=dict)
    """By kind of device, the tree that wrote fastest."""

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Calibration:
        """What forerun.json has of it."""
        found = manifest.get("calibration") or {}
        try:
            accuracies = tuple(tuple(float(a) for a in row) for row in found.get("accuracies", ()))
            trees = {str(kind): str(tree) for kind, tree in dict(found.get("trees", {})).items()}
            for tree in trees.values():
                TreeSpec.parse(tree)
            taus = Taus.of(found)
            if not all(0.01 <= tau <= 100 for tau in vars(taus).values()) or not all(
                0 <= a <= 1 for row in accuracies for a in row
            ):
                raise ValueError("a number in it cannot be")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the calibration in {MANIFEST} is damaged ({error}): run `forerun calibrate` again"
            ) from None
        return cls(accuracies, taus, trees)

    def gains(self, spec: TreeSpec) -> tuple[float, ...]:
        """The tokens that trees of 0, 1, 2, … nodes, as wide and as deep as `spec` at most, are expected to gain, by
        the accuracies; empty where they promise nothing."""
        table = [row[: spec.width] for row in self.accuracies[: spec.depth]]
        paths = greedy(table, 1 + spec.size).rank_paths[1:]
        values = [math.prod(table[depth][rank] for depth, rank in enumerate(path)) for path in paths]
        found = list(accumulate(sorted(values, reverse=True), initial=0.0))
        return tuple(found + found[-1:] * (1 + spec.size - len(found))) if found[-1] else ()

    def spec(self, asked: str, kind: str) -> TreeSpec:
        """The tree that is asked for, or the one for that kind of device (`kind_of`)."""
        tree = asked or self.trees.get(kind) or TREES.get(kind, TREES["cuda"])
        spec = TreeSpec.parse(tree)
        if spec.needs_measurement:
            if not self.accuracies:
                raise ValueError(
                    f"the shape of the tree {tree} comes from a measurement, which this drafter has none of: run "
                    "`forerun calibrate`, or name a shape, as in fixed:3,2,1"
                )
            spec = spec.measured(self.accuracies)
        return spec


def find_head(method: str, path: str, setup: Setup) -> tuple[HeadFolder, Transformer]:
    """The folder that was named, or the one that comes with Forerun, or what the target's own files have of the kind;
    one for another target is refused."""
    target = setup.target
    if not isinstance(target, Transformer):
        raise ValueError(
            f"{method} reads states of the target, which the adapter for this model does not give: choose another "
            "drafter, such as ngram or draft_model"
        )
    identity = weights_identity(target)
    if path:
        folder = read_head(Path(path).expanduser(), method)
        if folder.target and folder.target != identity:
            raise ValueError(
                f"{path} was trained for another target ({folder.manifest['target'].get('name', 'unknown')}): train "
                f"one for this model with `forerun train {method} --target MODEL --prompts FILE --out DIR`"
            )
        return folder, target
    shipped = shipped_head(method, identity)
    if shipped is not None:
        return read_head(shipped, method), target
    own = read_mtp(setup.folder, target.config) if method == "mtp" and setup.folder is not None else None
    if own is None:
        raise ValueError(
            f"no {method} drafter for this model comes with Forerun: train one with `forerun train {method} --target "
            "MODEL --prompts FILE --out DIR`, and name it with path=DIR"
        )
    return own, target


def shipped_head(method: str, identity: str) -> Path | None:
    place = Path(str(files("forerun"))) / "trained"
    for folder in sorted(place.glob(f"*/{method}")):
        made_for = read_json(folder / MANIFEST).get("target", {}) if is_head(folder) else {}
        if isinstance(made_for, dict) and made_for.get("identity") == identity:
            return folder
    return None
