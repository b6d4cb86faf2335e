"""The folder of a trained draft model: it loads like any other model, and says how it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from forerun.models.checkpoint import WEIGHTS
from forerun.models.hub import WANTED
from forerun.models.names import expected_shapes
from forerun.models.store import MANIFEST, fresh_folder
from forerun.models.transformer import Transformer
from forerun.train.files import told_when_full

OWN = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""Of the target's files, those that the student has of its own."""


def write_draft(
    out: Path, student: Transformer, hf: Mapping[str, Any], target: Path, manifest: Mapping[str, Any]
) -> None:
    """`hf` is the student's config.json, `target` the folder whose tokenizer it shares."""
    weights = student.state_dict()
    names = expected_shapes(student.config)
    tensors = {name: weights[name].to("cpu", torch.bfloat16).contiguous() for name in names}
    with told_when_full(out), fresh_folder(out) as part:
        (part / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
        _write_json(part / "config.json", hf)
        _copy_tokenizer(target, part)
        _write_json(part / MANIFEST, manifest)


def _copy_tokenizer(folder: Path, part: Path) -> None:
    """And where a text ends."""
    own = {path for pattern in OWN for path in folder.glob(pattern)}
    for file in {path for pattern in WANTED for path in folder.glob(pattern)} - own:
        if file.is_file():
            shutil.copyfile(file, part / file.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
