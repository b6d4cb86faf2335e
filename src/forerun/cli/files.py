"""How a command writes a file: whole or not at all, and never over something that is not a file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def check_writable(path: Path) -> None:
    """Refuse a path that `write_whole` would refuse. Call it before the work, so that none is done in vain."""
    _target(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the file that `path` leads to, then rename: a reader sees the old content or the new one.

    Links stay links, and an existing file keeps its permissions.
    """
    target = _target(path)
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:  # a new file, with the permissions that the umask leaves
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(content)
        os.replace(part, target)
    except OSError as error:
        raise _refusal(path, error) from None
    finally:
        part.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file behind all links, which need not exist; its folder must."""
    try:
        target = Path(os.path.realpath(path))
        folder = target.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise ValueError(f"cannot write {path}: make the folder {folder} first")
        # Of `path`, not of `target`: /dev/stdout may lead to a pipe, which has no path of its own.
        mode = path.stat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise _refusal(path, error) from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"cannot write {path}: it is a folder, so name a file in it")
    if not stat.S_ISREG(mode):
        raise ValueError(f"cannot write {path}: it is a device or a pipe, so name a regular file")
    if not os.access(target, os.W_OK):  # a rename would replace it all the same
        raise ValueError(f"cannot write {path}: Permission denied")
    return target


def _refusal(path: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot write {path}: {error.strerror or error}")
