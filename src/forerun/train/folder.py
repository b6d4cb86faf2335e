"""The folder of a trained draft model: it loads like any other model, and says how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from forerun.models.checkpoint import WEIGHTS
from forerun.models.folders import copy_tokenizer, write_json
from forerun.models.names import expected_shapes
from forerun.models.store import MANIFEST, fresh_folder
from forerun.models.transformer import Transformer
from forerun.train.files import told_when_full


def write_draft(
    out: Path, student: Transformer, hf: Mapping[str, Any], target: Path, manifest: Mapping[str, Any]
) -> None:
    """`hf` is the student's config.json, `target` the folder whose tokenizer it shares."""
    weights = student.state_dict()
    names = expected_shapes(student.config)
    tensors = {name: weights[name].to("cpu", torch.bfloat16).contiguous() for name in names}
    with told_when_full(out), fresh_folder(out) as part:
        (part / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
        write_json(part / "config.json", hf)
        copy_tokenizer(target, part)
        write_json(part / MANIFEST, manifest)
