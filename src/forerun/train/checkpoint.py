"""The checkpoint of a run: a file that is always whole, and of which nothing is run when it is read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.train.files import write_whole


def write_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    made = io.BytesIO()
    torch.save(dict(content), made)  # in memory first: to a file it would not tell that the disk is full
    write_whole(path, made.getvalue())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Its tensors are on the CPU."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return content
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError):
        raise ValueError(f"{path} is damaged: delete it, and --resume trains anew with the answers there are") from None
