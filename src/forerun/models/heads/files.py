"""The folder of a trained drafter: config.json, model.safetensors and forerun.json.

Tensors have the names that other engines give them. A matrix may be stored in 8, 6 or 4 bits, as `NAME` with scales in
`NAME.scale`: a fraction of the size of float32, and the drafts hardly change, since rounding is far below what a head
is wrong by anyway. 8 bits are int8; 6 bits are uint8, four numbers in three bytes; 4 bits are uint8, two in a byte.
Every 64 numbers of a row have a scale: the inputs of a matrix can differ much in size, and where one scale serves a
whole row, the weights of the large ones are lost. forerun.json says which method it is, which target it was made for,
how it was trained and what was measured since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forerun.models.checkpoint import WEIGHTS, read_header
from forerun.models.fields import read_json
from forerun.models.folders import write_json
from forerun.models.store import MANIFEST, fresh_file, fresh_folder

SCALE = ".scale"
LEVELS = {8: 127, 6: 31, 4: 7}
"""The largest number, by bits."""
BLOCK = 64
"""Numbers of a row that share a scale, where the row can be divided so."""
NARROWER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Scales that are tried for 4 bits, as shares of the one that the largest number asks for: with so few numbers cutting
it off may serve the others."""


@dataclass(frozen=True)
class HeadFolder:
    """What a folder holds. Matrices are as they will be used, whatever they were stored as."""

    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def target(self) -> str:
        """What the target it was made for is told by; empty where that is not known."""
        made_for = self.manifest.get("target")
        return str(made_for.get("identity", "")) if isinstance(made_for, dict) else ""

    def fitting(self, name: str, like: Tensor) -> Tensor:
        """The tensor of that name; one that is not there, or of another shape, is refused."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != like.shape:
            found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}, not {list(like.shape)}"
            raise ValueError(f"{self.path}: {name} {found}: it was made for another target")
        return tensor


def is_head(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / "config.json").is_file()


def method_of(folder: Path) -> str:
    """Which drafter the folder is for."""
    try:
        method = read_json(folder / MANIFEST).get("method")
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {MANIFEST}, so it is no trained drafter: make one with `forerun train`"
        ) from None
    if not isinstance(method, str):
        raise ValueError(f"{folder / MANIFEST} names no method, so it is no trained drafter's")
    return method


def read_head(folder: Path, method: str | None = None) -> HeadFolder:
    """The drafter in a folder; one of another method than asked for is refused."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: name that of a trained drafter")
    found = method_of(folder)
    if method is not None and found != method:
        raise ValueError(f"{folder} holds a drafter of the method {found}, not {method}: use `--drafter {found}`")
    file = folder / WEIGHTS
    try:
        config = read_json(folder / "config.json")
        read_header(file)  # refuses one that is not whole, in words
        tensors = load(file.read_bytes())
    except IsADirectoryError as error:
        raise ValueError(f"{error.filename} is a folder: name that of a trained drafter") from None
    except FileNotFoundError as error:
        raise ValueError(f"{folder} lacks {Path(str(error.filename)).name}: fetch or train it again") from None
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}): fetch or train it again") from None
    whole = expanded(tensors)
    for name, tensor in whole.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{file}: {name} holds numbers that are not finite: fetch or train it again")
    return HeadFolder(found, config, whole, read_json(folder / MANIFEST), folder)


def write_head(out: Path, head: HeadFolder, *, bits: int = 16) -> None:
    """All of it or nothing; matrices in bfloat16, or in 8, 6 or 4 bits."""
    few = bits in LEVELS
    tensors = reduced(head.tensors, bits) if few else {name: _half(tensor) for name, tensor in head.tensors.items()}
    with fresh_folder(out) as part:
        (part / WEIGHTS).write_bytes(save({name: t.contiguous() for name, t in tensors.items()}, {"format": "pt"}))
        write_json(part / "config.json", head.config)
        write_json(part / MANIFEST, {"method": head.method, **head.manifest})


def update_manifest(folder: Path, **entries: Any) -> None:
    """Add what was measured since."""
    content = read_json(folder / MANIFEST) | entries
    with fresh_file(folder / MANIFEST) as part:
        write_json(part, content)


def reduced(tensors: Mapping[str, Tensor], bits: int = 8) -> dict[str, Tensor]:
    """Matrices of floats in 8 bits, 6 or 4, each with its scales; the rest in bfloat16 or as it is."""
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            small[name] = _half(tensor)
            continue
        numbers, scale, own = _whole_numbers(tensor.detach().to("cpu", torch.float32), bits)
        whole = numbers.to(torch.int8).view(tensor.shape)
        small[name] = _packed(whole) if own == 6 else _paired(whole) if own == 4 else whole
        small[name + SCALE] = scale
    return small


def as_stored(matrix: Tensor, bits: int) -> Tensor:
    """What is read again of a matrix in float32 that is stored in so few bits."""
    numbers, scale, _ = _whole_numbers(matrix, bits)
    return (numbers * scale.float()[:, :, None]).view(matrix.shape)


def _whole_numbers(matrix: Tensor, bits: int) -> tuple[Tensor, Tensor, int]:
    """Numbers [R, C, N] in blocks, the scales of these [R, C], and the bits: 8 where rows cannot be divided."""
    rows, columns = matrix.shape
    own = bits if columns % {8: 1, 6: 4, 4: BLOCK}[bits] == 0 else 8
    return *_rounded(matrix.reshape(rows, -1, BLOCK if columns % BLOCK == 0 else columns), LEVELS[own]), own


def _rounded(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to `most` for blocks [R, C, N], and the scales [R, C] with which they are nearest."""
    widest = blocks.abs().amax(2) / most
    best = torch.full_like(widest, torch.inf)
    numbers, scales = torch.zeros_like(blocks), torch.zeros_like(widest)
    for share in NARROWER if most == LEVELS[4] else NARROWER[:1]:
        scale = (share * widest).clamp_min(1e-30).to(torch.bfloat16).float()
        near = (blocks / scale[:, :, None]).round().clamp(-most, most)
        error = (near * scale[:, :, None] - blocks).square().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        numbers = torch.where(better[:, :, None], near, numbers)
    return numbers, scales.to(torch.bfloat16)


def expanded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            whole[name] = tensor
            continue
        scales = scale[:, None] if scale.dim() == 1 else scale  # one for a whole row
        numbers = _numbers(tensor, scales)
        fits = numbers is not None and scales.dim() == 2 and len(scales) == len(numbers)
        if numbers is None or not fits or numbers.shape[1] % scales.shape[1]:
            raise ValueError(f"the scale of {name} does not fit it: fetch or train the drafter again")
        parts = numbers.float().view(*scales.shape, -1) * scales.float()[:, :, None]
        whole[name] = parts.view(numbers.shape)
    return whole


def _numbers(stored: Tensor, scales: Tensor) -> Tensor | None:
    """[R, C]; None for what no matrix is stored as. Only matrices of whole blocks are stored in 4 bits."""
    if stored.dim() != 2 or scales.dim() != 2:
        return None
    if stored.dtype == torch.uint8:
        if 2 * stored.shape[1] == BLOCK * scales.shape[1]:
            return torch.stack([stored >> 4, stored & 15], 2).flatten(1).int() - 8
        return _unpacked(stored) if stored.shape[1] % 3 == 0 else None
    return stored if stored.dtype == torch.int8 else None


def _paired(numbers: Tensor) -> Tensor:
    """Numbers from -7 to 7, [R, 2 C] → [R, C]."""
    high, low = (numbers + 8).to(torch.uint8).view(len(numbers), -1, 2).unbind(2)
    return high << 4 | low


def _packed(numbers: Tensor) -> Tensor:
    """Numbers from -31 to 31, [R, 4 C] → [R, 3 C]: the first three each begin a byte, and the fourth has the two bits
    that each of them leaves."""
    a, b, c, d = (numbers.int() + 32).to(torch.uint8).view(len(numbers), -1, 4).unbind(2)
    return torch.stack([a << 2 | d >> 4, b << 2 | d >> 2 & 3, c << 2 | d & 3], 2).flatten(1)


def _unpacked(packed: Tensor) -> Tensor:
    parts = packed.view(len(packed), -1, 3)
    low = (parts & 3).unbind(2)
    last = low[0] << 4 | low[1] << 2 | low[2]
    return (torch.cat([parts >> 2, last[:, :, None]], 2).int() - 32).flatten(1)


def _half(tensor: Tensor) -> Tensor:
    """Floats in bfloat16, and whole numbers in 32 bits where these hold them."""
    tensor = tensor.detach().to("cpu")
    if tensor.is_floating_point():
        return tensor.to(torch.bfloat16)
    whole = tensor.to(torch.int32)
    return whole if torch.equal(whole.to(tensor.dtype), tensor) else tensor
