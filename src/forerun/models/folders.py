"""What is written into folders of models, whoever makes them."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.models.hub import WANTED

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_OWN = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""What a model has of its own, whose tokenizer is another's."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def copy_tokenizer(folder: Path, part: Path) -> None:
    """And how to end a text."""
    own = {path for pattern in _OWN for path in folder.glob(pattern)}
    for file in {path for pattern in WANTED for path in folder.glob(pattern)} - own:
        if file.is_file():
            shutil.copyfile(file, part / file.name)


def safetensors_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Its length in 8 bytes, then JSON, padded so that tensors lie at multiples of 64."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text
