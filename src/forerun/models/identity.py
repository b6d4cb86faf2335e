"""What tells a model from others: in memory, wherever it runs, and in its files.

In memory it is the same in any number format, on any device, laid out for speed or not. What is trained for one model
is refused by another with it. Norms and some rows of the embedding stand for all weights: they are small, training
changes them, and no pass lays them out anew. Files are told apart by what is in them.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.checkpoint import check, read_tensor, stored_tensors
from forerun.models.config import ModelConfig
from forerun.models.norm import RMSNorm
from forerun.models.transformer import Transformer

VERSION = 1
ROWS = 64
"""Of the embedding, spread from the first to the last."""
PIECE, PIECES = 1 << 18, 1 << 10
"""Bytes that are read in one go, and how many such pieces of a folder at most, but for one of each file."""
WEIGHTS = (".safetensors", ".bin")
BESIDE_THE_WEIGHTS = ("context_length", "eos", "bos", "family")
"""Fields of a config that say nothing about what the weights compute."""


def weights_identity(model: Transformer) -> str:
    """The same for a model in float32 and in bfloat16: weights are rounded to bfloat16."""
    digest = hashlib.sha256(f"{VERSION} {_shape(model.config)}".encode())
    embedding = model.model.embed_tokens.weight
    chosen = torch.linspace(0, model.vocab_size - 1, min(ROWS, model.vocab_size)).long()
    digest.update(_rounded(embedding.detach()[chosen.to(embedding.device)]))
    for name, module in sorted(model.named_modules()):
        if isinstance(module, RMSNorm):
            digest.update(name.encode())
            digest.update(_rounded(module.weight.detach()))
    return digest.hexdigest()[:32]


def files_digest(place: Path) -> str:
    """Of a folder's weights and its config.json, or of a single file. 256 MB are read whole; of more, pieces from the
    first to the last stand for all: training changes nearly every number."""
    files = [place]
    if not place.is_file():
        files = sorted(file for file in place.iterdir() if file.name == "config.json" or file.suffix in WEIGHTS)
    sizes = [file.stat().st_size for file in files]
    step = max(PIECE, sum(sizes) // PIECES)
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.relative_to(place)} {size} ".encode())
        with file.open("rb") as stream:
            for start in range(0, size, step):
                stream.seek(start)
                digest.update(stream.read(PIECE))
    return digest.hexdigest()[:32]


def outline(folder: Path, config: ModelConfig) -> Transformer:
    """A model with what it is told by, and no memory for the rest: to know it, or to ask for its sizes, without reading
    gigabytes."""
    with torch.device("meta"):
        model = Transformer(config)
    stored = stored_tensors(folder)
    places = {name: goal.name for name, goal in check(folder, config).items()}
    tensors = {
        goal: read_tensor(stored[name])
        for name, goal in places.items()
        if goal.endswith("norm.weight") or goal == "model.embed_tokens.weight"
    }
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.requires_grad_(False).eval()


def _shape(config: ModelConfig) -> str:
    fields = {name: value for name, value in asdict(config).items() if name not in BESIDE_THE_WEIGHTS}
    return repr(sorted(fields.items()))


def _rounded(weight: Tensor) -> bytes:
    # Minus zero is a zero too: a conversion may have lost its sign.
    exact = weight.to("cpu", torch.bfloat16) + torch.zeros((), dtype=torch.bfloat16)
    return exact.contiguous().view(torch.int16).numpy().tobytes()
