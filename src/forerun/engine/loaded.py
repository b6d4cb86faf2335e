"""A model in memory with its tokenizer, and how much cache to give it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun.engine.controller import Controller
from forerun.models.checkpoint import Progress
from forerun.models.load import Source, load_model, load_tokenizer, resolve
from forerun.models.precision import dtype_name, parse_dtype
from forerun.models.target import TargetModel
from forerun.models.tokenizer import Tokenizer
from forerun.models.transformer import Transformer

BLOCK = 16
DEVICES = ("cpu", "cuda")
CPU_SHARE, GPU_SHARE = 0.125, 0.25
"""What the cache may take of the memory of the machine, or of what is free on a graphics card. A drafter's own cache
may take as much again."""
UNKNOWN_MEMORY = 8 << 30
"""Assumed where the system does not tell."""


def _alone(name: str) -> TargetModel:
    raise ValueError(f"cannot load {name} beside a model that was not loaded by name: use another drafter")


@dataclass(frozen=True)
class LoadedModel:
    target: TargetModel
    tokenizer: Tokenizer
    folder: Path | None = None
    """Where its files are; none for a model that was made in memory."""
    load_beside: Callable[[str], TargetModel] = _alone
    """Loads a draft model in the same precision and on the same device; one with other tokens is refused."""
    controllers: dict[str, Controller] = field(default_factory=dict, compare=False)
    """By drafter and options, of the last engine: what it has learnt of their times is where the next one begins."""

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> LoadedModel:
        place = find_device(device)
        precision = parse_dtype(dtype, place)

        def find(name: str, revision: str | None = None) -> Source:
            return resolve(name, dtype=precision, revision=revision, offline=offline, progress=progress)

        def load(source: Source) -> tuple[TargetModel, Tokenizer]:
            tokenizer = load_tokenizer(source)
            rounds = dtype == "auto"
            return load_model(source, dtype=precision, device=place, rounds=rounds, progress=progress), tokenizer

        def load_beside(other: str) -> TargetModel:
            target, theirs = load(find(other))
            if theirs.fingerprint != tokenizer.fingerprint:
                raise ValueError(f"{other} and {name} have different tokenizers: draft with a model of the same family")
            return target

        source = find(str(name), revision)
        target, tokenizer = load(source)
        return cls(target, tokenizer, source.folder, load_beside)


def precision_of(target: TargetModel) -> str:
    """The numbers that it computes with."""
    if isinstance(target, Transformer):
        if not target.prepared:
            target.prepare()
        if target.rounded:
            return f"{dtype_name(target.dtype)}, rows of 16 bits"
    return dtype_name(target.dtype)


def find_device(name: str | None) -> torch.device:
    """A graphics card where there is one, unless another device is named."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}: use cpu or cuda") from None
    if device.type not in DEVICES:  # PyTorch knows more names than there are kernels for here
        raise ValueError(f"Forerun does not run on the device {name!r}: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"the device {name} is not there: use cpu, or check the driver and the PyTorch build")
    return device


def default_slots(target: TargetModel, max_batch: int) -> int:
    """Room for `max_batch` texts of full length, or what fits into a share of the memory."""
    per_token = target.new_storage(BLOCK).bytes_per_slot
    slots = min(target.context_length * max_batch, _memory_for_cache(target.device) // max(1, per_token))
    return max(BLOCK, slots // BLOCK * BLOCK)


def _memory_for_cache(device: torch.device) -> int:
    return int((GPU_SHARE if device.type == "cuda" else CPU_SHARE) * memory_of(device))


def memory_of(device: torch.device) -> int:
    """Bytes: all of the machine, or what is free on a graphics card."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return UNKNOWN_MEMORY
