"""What is in the caches, Forerun's own and the Hugging Face hub's: to list, to verify, to remove."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.models.builtin import BUILTINS, check_builtin
from forerun.models.checkpoint import Progress
from forerun.models.store import Conversion, Store, folder_size, sha256_of


@dataclass(frozen=True)
class Cached:
    """A model that is known by name or that lies in a cache."""

    name: str
    kind: Literal["built-in", "gguf", "hub"]
    bytes: int
    """On disk; 0 for one that was not fetched."""
    formats: tuple[str, ...]
    paths: tuple[Path, ...]
    conversions: tuple[Conversion, ...] = ()

    @property
    def present(self) -> bool:
        return bool(self.paths)


def inventory(store: Store) -> list[Cached]:
    """Built-in models, fetched or not, then conversions of GGUF files, then the hub's."""
    groups: dict[str, list[Conversion]] = {}
    contents = {builtin.sha256: name for name, builtin in BUILTINS.items()}
    for conversion in store.conversions():
        source = conversion.manifest.get("source")
        content = source.get("sha256") if isinstance(source, dict) else None
        # a built-in model's file that was named by its path gave the folder that the built-in name uses too
        groups.setdefault(contents.get(str(content), conversion.name), []).append(conversion)
    found = []
    for name, builtin in BUILTINS.items():
        path = builtin.path(store)
        found.append(_cached(name, "built-in", groups.pop(name, []), (path,) if path.exists() else ()))
    found += [_cached(name, "gguf", group, ()) for name, group in sorted(groups.items())]
    return found + _hub()


def _cached(
    name: str, kind: Literal["built-in", "gguf"], conversions: list[Conversion], files: tuple[Path, ...]
) -> Cached:
    size = sum(path.stat().st_size for path in files) + sum(conversion.bytes for conversion in conversions)
    formats = tuple(str(conversion.manifest.get("dtype", "damaged")) for conversion in conversions)
    paths = (*files, *(conversion.folder for conversion in conversions))
    return Cached(name, kind, size, (*("gguf" for _ in files), *formats), paths, tuple(conversions))


def _hub() -> list[Cached]:
    """Folders of the hub's cache, `models--owner--name`, that hold a snapshot."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    if not root.is_dir():
        return []
    folders = [path for path in sorted(root.glob("models--*--*")) if (path / "snapshots").is_dir()]
    return [
        Cached(path.name.removeprefix("models--").replace("--", "/"), "hub", folder_size(path / "blobs"), (), (path,))
        for path in folders
    ]


def find(name: str, store: Store) -> Cached:
    known = inventory(store)
    for cached in known:
        if cached.name == name:
            return cached
    raise ValueError(f"there is no model {name!r} in the cache: choose {', '.join(each.name for each in known)}")


def verify(cached: Cached, progress: Progress | None = None) -> int:
    """Hash everything, and refuse what differs from when it was fetched or made. Returns how many files were hashed."""
    if cached.kind == "hub":
        return _verify_hub(cached, progress)
    files = [path for path in cached.paths if path.is_file()]
    for path in files:
        check_builtin(BUILTINS[cached.name], path, progress)
    count = len(files)
    for conversion in cached.conversions:
        conversion.check(whole=True, progress=progress)
        count += len(conversion.manifest["files"])
    return count


def _verify_hub(cached: Cached, progress: Progress | None) -> int:
    """The hub names a file after the hash of its content: SHA-256 of large ones, git's of small ones."""
    blobs = [path for path in sorted((cached.paths[0] / "blobs").iterdir()) if len(path.name) in (40, 64)]
    for path in blobs:
        if (sha256_of(path, progress) if len(path.name) == 64 else _git_hash(path)) != path.name:
            fix = f"run `forerun models remove {cached.name}` and fetch it again"
            raise ValueError(f"{path} of {cached.name} is damaged: {fix}")
    return len(blobs)


def _git_hash(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def remove(cached: Cached) -> None:
    for path in cached.paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
