"""A folder of safetensors files: what it holds, checked before anything large is read, then read tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.fields import Fields, read_json
from forerun.models.hf_config import config_from_hf
from forerun.models.names import Place, Shape, expected_shapes, plan

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes are done, and of how many."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LONGEST_HEADER = 100_000_000  # as the format says


@dataclass(frozen=True)
class Stored:
    """One tensor of a file."""

    file: Path
    shape: Shape
    offset: int  # from the start of the file
    size: int  # bytes
    kind: str


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: name the folder of a Hugging Face model") from None


def model_config(folder: Path, hf: Mapping[str, Any]) -> ModelConfig:
    """Of `hf`, and of `generation_config.json` where there is one."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else None
    return config_from_hf(hf, generation, str(folder / "config.json"))


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards of its index; all there."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        others = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")))
        fix = f"{others} is of another format, so save it as safetensors" if others else "fetch the model again"
        raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}: {fix}")
    table = Fields(read_json(index), {}, str(index)).table("weight_map")
    names = sorted({str(name) for name in table.values()})
    if not names:
        raise ValueError(f"{index} lists no files: fetch it again")
    for name in names:
        if Path(name).name != name:  # never leave the folder
            raise ValueError(f"{index} names {name!r}, which is no file of this folder: fetch it again")
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its index names: fetch that file too")
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder, from the headers alone."""
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder):
        for name, stored in read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"{name} is in {tensors[name].file.name} and in {file.name}: remove one of these files"
                )
            tensors[name] = stored
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Refuses a file that is not safetensors, or that ends before its last tensor does."""
    broken = f"{file} is not a whole safetensors file"
    total = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, total - 8):
            raise ValueError(f"{broken}: fetch it again")
        text = stream.read(length)
    try:
        table = json.loads(text)
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        tensors = {name: _stored(file, entry, 8 + length) for name, entry in entries.items()}
        end = _end(tensors.values(), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ValueError(f"{broken}: fetch it again") from None
    if total != end:
        raise ValueError(f"{file} has {total:,} bytes and should have {end:,}: fetch it again")
    return tensors


def _stored(file: Path, entry: Mapping[str, Any], start: int) -> Stored:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    kind = str(entry["dtype"])
    if any(type(number) is not int or number < 0 for number in (first, last, *shape)) or first > last:
        raise ValueError
    if kind in TYPES and math.prod(shape) * TYPES[kind].itemsize != last - first:
        raise ValueError
    return Stored(file, shape, start + first, last - first, kind)


def _end(tensors: Iterable[Stored], start: int) -> int:
    """Where the last tensor ends; each begins where another one ended, as the format says."""
    for stored in sorted(tensors, key=lambda stored: (stored.offset, stored.size)):
        if stored.offset != start:
            raise ValueError
        start += stored.size
    return start


def check(folder: Path, config: ModelConfig) -> dict[str, Place]:
    """That the folder has every tensor of the model; where each goes."""
    tensors = stored_tensors(folder)
    for name, stored in tensors.items():
        if stored.kind not in TYPES:
            raise ValueError(
                f"{stored.file}: {name} is of the type {stored.kind}, a quantisation that Forerun does not read: "
                "take the model in BF16, F16 or F32, or a GGUF file of it"
            )
    return plan({name: stored.shape for name, stored in tensors.items()}, config, str(folder))


def load_tensors(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The tensors of our transformer, in memory of their own: read, not mapped, which is faster where pages come one
    by one, and later changes to the files do not reach them."""
    places = check(folder, config)
    shapes = expected_shapes(config)
    tensors = stored_tensors(folder)
    total, done = sum(tensors[name].size for name in places), 0
    loaded: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with file.open("rb") as stream:
            for name, goal in places.items():
                if tensors[name].file != file:
                    continue
                if goal.name not in loaded:
                    loaded[goal.name] = torch.empty(shapes[goal.name], dtype=dtype, device=device)
                _read(stream, tensors[name], goal.part(loaded[goal.name]))
                done += tensors[name].size
                if progress is not None:
                    progress("Loading", done, total)
    return {name: loaded[name] for name in shapes}


def read_tensor(stored: Stored) -> Tensor:
    """A single one, as it is stored."""
    tensor = torch.empty(stored.shape, dtype=TYPES[stored.kind])
    with stored.file.open("rb") as stream:
        _read(stream, stored, tensor)
    return tensor


def _read(stream: BinaryIO, stored: Stored, out: Tensor) -> None:
    """Straight into `out` where it has the type and the place for it, else by way of a copy."""
    kind = TYPES[stored.kind]
    direct = out.dtype == kind and out.device.type == "cpu" and out.is_contiguous()
    into = out if direct else torch.empty(stored.shape, dtype=kind)
    stream.seek(stored.offset)
    if stored.size and stream.readinto(raw_bytes(into)) != stored.size:  # type: ignore[attr-defined]
        raise ValueError(f"{stored.file} became shorter while it was read: fetch it again")
    if not direct:
        out.copy_(into)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
