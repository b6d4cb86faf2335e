"""What a method is, and what all of them are given."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup, make_drafter
from forerun.models.heads.files import HeadFolder, write_head
from forerun.models.heads.vocabulary import from_offsets, most_frequent
from forerun.models.transformer import Transformer
from forerun.train.files import told_when_full
from forerun.train.law_loss import Distance
from forerun.train.loss import Loss
from forerun.train.measure import CHAIN
from forerun.train.texts import Text, TextBatch

FADING = 0.8
"""What a draft one place further ahead counts (Medusa's and EAGLE-3's figure): it is reached only through those
before."""

VOCABULARY = 8192
"""Tokens that can be drafted, where nothing else is said."""


@dataclass(frozen=True)
class Task:
    """For whom something is trained, and with what."""

    target: Transformer
    hf: dict[str, Any]
    """The target's config.json."""
    folder: Path
    """Where its files are."""
    texts: Sequence[Text]
    seed: int = 0
    beside: Mapping[str, Transformer] = field(default_factory=dict)
    """Draft models that will draft beside the one to be trained, by the names they are loaded by."""
    begin: HeadFolder | None = None
    """A drafter of the same method, whose weights are the first ones."""


class Method(Protocol):
    name: str

    @property
    def module(self) -> nn.Module:
        """What learns."""
        ...

    def loss(self, batch: TextBatch) -> Loss: ...

    def write(self, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
        """A folder with the weights as they are now."""
        ...

    def drafter(self, setup: Setup, bits: int) -> Drafter:
        """What drafts a chain with the weights as they are now."""
        ...


class HeadMethod(Protocol):
    """A method whose folder is that of a head."""

    name: str
    depth: int
    """How many tokens ahead it can see."""

    def folder(self) -> HeadFolder: ...


def write_method(method: HeadMethod, out: Path, manifest: Mapping[str, Any], bits: int) -> None:
    made = method.folder()
    with told_when_full(out):
        write_head(out, HeadFolder(made.method, made.config, made.tensors, dict(manifest)), bits=bits)


@torch.no_grad()
def take_over(weights: Mapping[str, Tensor], other: HeadFolder) -> None:
    """The weights of a drafter that was trained before. Units of a stem that it lacks stay as they begin: they change
    nothing."""
    units, own = (_stem_units(tensors) for tensors in (other.tensors, weights))
    if units > own:
        raise ValueError(f"--begin: {other.path} has a stem of {units} units: give --stem {units}, or more")
    for name, weight in weights.items():
        of_stem = name.startswith("stem.")
        if name == "d2t" or (of_stem and not units):
            continue
        known = weight[tuple(slice(size) for size in other.tensors.get(name, weight).shape)] if of_stem else weight
        known.copy_(other.fitting(name, known))


def _stem_units(tensors: Mapping[str, Tensor]) -> int:
    """Of Medusa's stem, which other methods do not have."""
    bias = tensors.get("stem.inner.bias")
    return 0 if bias is None else len(bias)


def head_drafter(method: HeadMethod, setup: Setup, bits: int) -> Drafter:
    """By way of a folder, so that what is measured is what will be used, rounded as it will be."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / method.name
        write_method(method, out, {}, bits)
        return make_drafter(method.name, setup, {"path": str(out), "tree": str(min(CHAIN, method.depth))})


def fading(steps: int, device: torch.device) -> Tensor:
    """[K] 1, 0.8, 0.64, …"""
    return torch.pow(FADING, torch.arange(steps, device=device, dtype=torch.float32))


def draft_vocabulary(task: Task, size: int) -> Tensor | None:
    """The tokens that the target's answers have most often; None for all, which is also what `size` 0 says. One that
    goes on from another has that one's."""
    if task.begin is not None:
        offsets = task.begin.tensors.get("d2t")
        return None if offsets is None else from_offsets(offsets, task.target.vocab_size)
    if not size:
        return None
    answers = np.concatenate([text.answer for text in task.texts])
    return most_frequent([answers], size, task.target.vocab_size)


def label_places(ids: Tensor | None, vocabulary: int, device: torch.device) -> Tensor | None:
    """[V] the place of each token in the draft vocabulary, -1 for those outside; None where that has all."""
    if ids is None:
        return None
    places = torch.full((vocabulary,), -1, dtype=torch.int64, device=device)
    places[ids.to(device)] = torch.arange(ids.shape[0], device=device)
    return places


def figures(found: Distance) -> dict[str, Tensor]:
    """Of the first draft, and the agreement of the last."""
    told = {"agreement": found.agreed[0], "overlap": found.overlap[0]}
    return told if found.agreed.shape[0] == 1 else {**told, "agreement_last": found.agreed[-1]}
