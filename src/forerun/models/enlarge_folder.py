"""An enlarged model as a folder that everything reads: shards of safetensors, config.json, the small model's tokenizer.

Written tensor by tensor into `NAME.partial`, which becomes the folder when it is whole. It has gigabytes that say no
more than the small model does, so it is made where it is used.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.checkpoint import INDEX, WEIGHTS, Progress, load_tensors, raw_bytes, read_config
from forerun.models.config import ModelConfig
from forerun.models.enlarge import SHAPES, Shape, enlarged_config, enlarged_tensors
from forerun.models.folders import copy_tokenizer, safetensors_header, write_json
from forerun.models.hf_config import config_from_hf
from forerun.models.load import Source
from forerun.models.names import expected_shapes
from forerun.models.precision import dtype_name

SHARD = 4 * 10**9
"""Bytes of weights in one file, at most, unless one tensor has more."""

MARGIN = 1 << 26
"""Bytes for what is in the folder besides weights."""

_MARK = "unfinished"


@dataclass(frozen=True)
class Enlarged:
    """What was made."""

    folder: Path
    config: ModelConfig
    weights: int
    """How many numbers they are."""
    bytes: int


def find_shape(name: str) -> Shape:
    """A shape by its name, or of the model in a folder, of which only config.json is read."""
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    folder = folder.parent if folder.name == "config.json" else folder
    if not folder.is_dir():
        raise ValueError(
            f"there is no shape {name!r}: choose {' or '.join(SHAPES)}, or name a folder that has a config.json"
        )
    return Shape.of(config_from_hf(read_config(folder), where=str(folder / "config.json")))


def enlarge_folder(
    source: Source, like: Shape, out: Path, *, dtype: torch.dtype, seed: int = 0, progress: Progress | None = None
) -> Enlarged:
    """Write the model of `source`, enlarged to `like`, as the folder `out`."""
    if source.config is None:
        family = source.hf_config.get("model_type")
        raise ValueError(f"a model of the family {family} cannot be enlarged: take a Llama, Mistral or Qwen")
    wide = enlarged_config(source.config, like)
    hf = _hf_config(source, wide, dtype, seed)
    shapes = expected_shapes(wide)
    count = sum(math.prod(shape) for shape in shapes.values())
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: delete it, or choose another --out")
    try:
        with _partial(out) as part:
            _check_space(part, out, count * dtype.itemsize)
            weights = load_tensors(source.folder, source.config, torch.float32, progress=progress)
            tensors = enlarged_tensors(weights, source.config, wide, seed=seed, dtype=dtype, device="cpu")
            _write_shards(part, tensors, shapes, dtype, progress)
            write_json(part / "config.json", hf)
            copy_tokenizer(source.folder, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(out, count * dtype.itemsize) from None
        raise
    return Enlarged(out, wide, count, count * dtype.itemsize)


# --- the folder -----------------------------------------------------------------------------------------------


@contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """`out` with `.partial` behind it, to be filled; it becomes `out`, or it is gone. One that a killed process left is
    known by its mark and made anew; a folder of that name that is somebody else's is not touched."""
    part = out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    part.mkdir(exist_ok=True)
    handle = os.open(part, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {part}: wait for it, or choose another --out") from None
        left = list(part.iterdir())
        if left and part / _MARK not in left:
            raise ValueError(f"{part} is in the way and not from here: move it, or choose another --out")
        try:
            (part / _MARK).touch()
            for file in left:
                if file.name != _MARK:
                    file.unlink()
            yield part
            (part / _MARK).unlink()
            os.fsync(handle)
            os.rename(part, out)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _check_space(part: Path, out: Path, needed: int) -> None:
    if shutil.disk_usage(part).free < needed + MARGIN:
        raise _no_space(out, needed)


def _no_space(out: Path, needed: int) -> ValueError:
    free = shutil.disk_usage(out.parent).free
    return ValueError(
        f"{out} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: free some, or choose an --out on "
        "another disk"
    )


def _hf_config(source: Source, wide: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """The small model's config.json with the sizes of the large one."""
    hf, layers = dict(source.hf_config), len(wide.layers)
    hf |= {
        "hidden_size": wide.hidden_size,
        "intermediate_size": wide.intermediate_size,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": wide.head_dim,
        "num_hidden_layers": layers,
        "rms_norm_eps": wide.norm_eps,
        "dtype": dtype_name(dtype),
        "forerun_enlarged": {"from": source.name, "seed": seed},
    }
    hf.pop("torch_dtype", None)
    for key in ("layer_types", "no_rope_layers"):  # one entry per layer
        if isinstance(hf.get(key), list):
            hf[key] = hf[key] + hf[key][-1:] * (layers - len(hf[key]))
    assert source.config is not None
    kept = len(source.config.layers)
    assert config_from_hf(hf).layers[:kept] == wide.layers[:kept], "the config says something else of the layers"
    return hf


# --- weights --------------------------------------------------------------------------------------------------


def _write_shards(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    """`tensors` come in the order of `shapes`, which says beforehand how much goes where."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + size > SHARD:
            shards.append([])
        shards[-1].append(name)
    total, done = sum(sizes.values()), 0
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        with (folder / file).open("xb") as out:
            out.write(safetensors_header({name: shapes[name] for name in names}, dtype))
            for name in names:
                made, tensor = next(tensors)
                assert made == name, "tensors come in their order"
                out.write(raw_bytes(tensor))
                done += sizes[name]
                if progress is not None:
                    progress("Enlarging", done, total)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
