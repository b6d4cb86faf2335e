"""The cache on disk: what lies in it, and how something gets in whole or not at all.

gguf/        files of built-in models, as they were fetched
converted/   folders made from GGUF files, one per content, number format and version of the converter
hashes/      the hash of a large file, valid while the file's size and times stay
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.native.build import cache_folder
from forerun.models.checkpoint import Progress
from forerun.models.fields import read_json

MANIFEST = "forerun.json"
_PART = ".part"
_SETTLED = 2.0
"""Seconds that a file must be old for its times to tell whether it changed since."""
_LARGE = 1 << 24
"""Bytes above which a file of the cache is not hashed at every load."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Store:
    """A folder that is made when something is first put in."""

    root: Path

    @classmethod
    def default(cls) -> Store:
        """`FORERUN_CACHE`, or `forerun` in the user's cache folder."""
        return cls(cache_folder())

    @property
    def gguf(self) -> Path:
        return self.root / "gguf"

    @property
    def converted(self) -> Path:
        return self.root / "converted"

    def conversions(self) -> list[Conversion]:
        """All of them; one whose manifest cannot be read has the name of its folder, and fails its check."""
        if not self.converted.is_dir():
            return []
        found = []
        for folder in sorted(self.converted.iterdir()):
            if folder.name.endswith(_PART) or not folder.is_dir():
                continue
            try:
                found.append(Conversion.read(folder))
            except (OSError, ValueError):
                found.append(Conversion(folder, {"name": folder.name, "files": {MANIFEST: {"size": -1}}}))
        return found

    def sha256(self, path: Path, progress: Progress | None = None) -> str:
        """Of a file's content; remembered while its size and times stay, so that gigabytes are not read each time."""
        status = path.stat()
        stamp = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
        key = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
        memo = self.root / "hashes" / f"{key}.json"
        try:
            known = read_json(memo)
            if {name: known.get(name) for name in stamp} == stamp and isinstance(known.get("sha256"), str):
                return str(known["sha256"])
        except (OSError, ValueError):
            pass  # no memo, or none that can be used: the file itself is asked
        digest = sha256_of(path, progress)
        if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED:
            with suppress(OSError):  # where nothing can be written, nothing is remembered
                memo.parent.mkdir(parents=True, exist_ok=True)
                _write(memo, json.dumps({**stamp, "sha256": digest}).encode())
        return digest


@dataclass(frozen=True)
class Conversion:
    """A folder made from a GGUF file, and its manifest: what it was made from, and the hashes of its files."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Conversion:
        manifest = read_json(folder / MANIFEST)
        files, known = manifest.get("files"), {"size", "sha256"}
        if not isinstance(files, dict) or not isinstance(manifest.get("name"), str):
            raise _damaged(folder, MANIFEST)
        if not all(isinstance(entry, dict) and known <= entry.keys() for entry in files.values()):
            raise _damaged(folder, MANIFEST)
        return cls(folder, manifest)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def bytes(self) -> int:
        return folder_size(self.folder)

    def check(self, *, whole: bool = False, progress: Progress | None = None) -> None:
        """Sizes always, and hashes; of a large file only if asked, or if it was touched since it was written."""
        for name, entry in self.manifest["files"].items():
            path = self.folder / name
            try:
                status = path.stat()
            except FileNotFoundError:
                raise _damaged(self.folder, name) from None
            if status.st_size != entry["size"]:
                raise _damaged(self.folder, name)
            trusted = status.st_size > _LARGE and status.st_mtime_ns == entry.get("mtime_ns")
            if (whole or not trusted) and sha256_of(path, progress) != entry["sha256"]:
                raise _damaged(self.folder, name)


def _damaged(folder: Path, name: str) -> ValueError:
    return ValueError(f"{folder / name} is damaged: delete the folder {folder}, and it is made again")


def file_entry(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """What a manifest says about a file."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256 or sha256_of(path)}


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    digest = hashlib.sha256()
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"Reading {path.name}", done, total)
    return digest.hexdigest()


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- whole or not at all --------------------------------------------------------------------------------------


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A hidden folder in `folder`, gone afterwards; if this process is killed, gone when the next one wants its own.

    A process holds its workplace by a lock that ends with it. `folder` is locked while one is made, so that nobody
    sweeps a workplace that is not held yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    door = _lock(folder, wait=True)
    try:
        _sweep(folder)
        part = folder / f".{secrets.token_hex(8)}{_PART}"
        part.mkdir()
        held = _lock(part)
    finally:
        _unlock(door)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _unlock(held)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing names the file: the system does so where a file is opened, not where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A place to write a file that appears as `path` once it is whole."""
    with naming(path), workplace(path.parent) as folder:
        part = folder / path.name
        yield part
        _flush(part)
        os.replace(part, path)
        _flush(path.parent)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that appears as `path` once it is whole. If another process was quicker, its result stays."""
    with naming(path), workplace(path.parent) as part:
        yield part
        for file in part.iterdir():
            _flush(file)
        _flush(part)
        if path.exists() and not (path / MANIFEST).is_file():  # the remains of one that was deleted in part
            shutil.rmtree(path)
        try:
            os.rename(part, path)
        except OSError:
            if not (path / MANIFEST).is_file():
                raise
        _flush(path.parent)


def _flush(path: Path) -> None:
    """To the disk, so that what the rename makes visible is there even after the power fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for part in folder.glob(f".*{_PART}"):
        try:
            held = _lock(part)
        except OSError:
            continue  # it has just gone
        if held is not None:
            shutil.rmtree(part, ignore_errors=True)
            _unlock(held)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """A handle that holds the folder until it is closed or this process ends. None if another process holds it, or if
    the file system knows no locks: then nothing is swept."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def _unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
