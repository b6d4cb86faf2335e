"""From a GGUF file to a folder that loads like any other: `config.json`, one safetensors file, the tokenizer.

Done once per content and number format. The folder is in Hugging Face's own form, so `transformers` reads it too.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

import torch

from forerun.models.checkpoint import WEIGHTS, Progress, raw_bytes
from forerun.models.folders import safetensors_header, write_json
from forerun.models.gguf_config import Target, hf_config, read_target, targets
from forerun.models.gguf_file import GGUFFile
from forerun.models.gguf_tokenizer import tokenizer_from_gguf
from forerun.models.hf_config import config_from_hf
from forerun.models.names import Shape, expected_shapes, plan
from forerun.models.precision import dtype_name
from forerun.models.store import MANIFEST, Conversion, Store, file_entry, fresh_folder

CONVERTER = 1
"""Raised whenever the same GGUF file would give another folder."""


def converted(
    gguf: Path, dtype: torch.dtype, store: Store, *, name: str, sha256: str, progress: Progress | None = None
) -> Conversion:
    """The conversion of `gguf`, whose content has the hash `sha256`: from the cache, or made now."""
    folder = conversion_folder(store, sha256, dtype)
    if not (folder / MANIFEST).is_file():
        _convert(gguf, dtype, folder, name=name, sha256=sha256, progress=progress)
    conversion = Conversion.read(folder)
    conversion.check()
    return conversion


def conversion_folder(store: Store, sha256: str, dtype: torch.dtype) -> Path:
    return store.converted / f"{sha256[:24]}-{dtype_name(dtype)}-v{CONVERTER}"


def _convert(
    gguf: Path, dtype: torch.dtype, folder: Path, *, name: str, sha256: str, progress: Progress | None
) -> None:
    file = GGUFFile.open(gguf)
    hf = {**hf_config(file), "dtype": dtype_name(dtype)}
    config = config_from_hf(hf, where=str(gguf))
    goals = targets(file, hf)
    places = plan({key: file.tensors[key].shape for key in goals}, config, str(gguf), goes=lambda key: goals[key].place)
    chosen = {key: goals[key] for key in places}
    shapes = expected_shapes(config)
    tokenizer = tokenizer_from_gguf(file, config.vocab_size)
    try:
        with fresh_folder(folder) as part:
            _check_space(part, shapes, dtype)
            weights = part / WEIGHTS
            digest = _write_weights(file, chosen, shapes, dtype, weights, progress)
            write_json(part / "config.json", hf)
            tokenizer.save_pretrained(part)
            others = sorted(path for path in part.iterdir() if path != weights)
            manifest = {
                "name": name,
                "source": {"sha256": sha256, "bytes": gguf.stat().st_size},
                "dtype": dtype_name(dtype),
                "converter": CONVERTER,
                "files": {WEIGHTS: file_entry(weights, digest), **{path.name: file_entry(path) for path in others}},
            }
            write_json(part / MANIFEST, manifest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder.parent) from None
        if error.filename == str(folder):  # a write, such as one beyond the largest file that is allowed
            fix = "set FORERUN_CACHE to another folder"
            raise ValueError(f"cannot write in {folder.parent} ({error.strerror or error}): {fix}") from None
        raise


def _check_space(part: Path, shapes: dict[str, Shape], dtype: torch.dtype) -> None:
    needed = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    if shutil.disk_usage(part).free < needed + (1 << 26):
        raise _no_space(part.parent)


def _no_space(folder: Path) -> ValueError:
    return ValueError(f"no space is left for {folder}: free some, or set FORERUN_CACHE to a folder on another disk")


def _write_weights(
    file: GGUFFile,
    chosen: dict[str, Target],
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    path: Path,
    progress: Progress | None,
) -> str:
    """Tensor by tensor, so that a model larger than the memory can be converted. Returns the hash of the file.

    The format: the length of a JSON header in 8 bytes, the header, then the tensors.
    """
    sources: dict[str, list[str]] = {}
    for name, target in chosen.items():
        sources.setdefault(target.place.name, []).append(name)
    header = safetensors_header(shapes, dtype)
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    digest = hashlib.sha256(header)
    done = 0
    with path.open("xb") as out:
        out.write(header)
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=dtype)
            for source in sources[name]:
                read_target(file, source, chosen[source], chosen[source].place.part(whole))
            content = raw_bytes(whole)
            out.write(content)
            digest.update(content)
            done += len(content)
            if progress is not None:
                progress("Converting", done, total)
    return digest.hexdigest()
