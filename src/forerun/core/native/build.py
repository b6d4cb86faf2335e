"""From C to a library in memory: compiled once for each machine, source and compiler, and kept in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SECONDS = 120
"""A compiler that takes longer hangs."""
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`FORERUN_CACHE`, or `forerun` in the user's cache folder."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()
    return home / "forerun"


def load(source: Path, flags: list[str]) -> ctypes.CDLL | None:
    """The library, or None where it cannot be built; the log says why."""
    compiler = _compiler()
    if not compiler:
        _log.info("no C compiler was found (on Debian: apt install gcc): passes run in PyTorch")
        return None
    try:
        library = _build(source, flags, compiler)
        _share_threads()
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        _log.warning("%s could not be compiled, passes run in PyTorch: %s", source.name, error.stderr.strip()[-500:])
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home folder
        _log.warning("%s could not be built, passes run in PyTorch: %s", source.name, error)
    return None


def _compiler() -> list[str]:
    """The command that compiles, as `CC` has it or as it is found; empty if there is none."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named if shutil.which(named[0]) else []
    found = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return [found] if found else []


def _build(source: Path, flags: list[str], compiler: list[str]) -> Path:
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    machine = f"{platform.machine()} {torch.cpu.get_capabilities()}"  # a cache may be shared by several
    recipe = [*compiler, _run([*compiler, "--version"]), machine, *flags]
    name = f"{source.stem}-{hashlib.sha256(b'|'.join([*texts, *map(str.encode, recipe)])).hexdigest()[:16]}.so"
    library = cache_folder() / "native" / name
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled, linked = Path(scratch, "pass.o"), Path(scratch, "pass.so")
        # Linked without OpenMP: the one that PyTorch brings is in memory already, and two would fight for the cores.
        _run([*compiler, *flags, "-fopenmp", "-fPIC", "-c", str(source), "-o", str(compiled)])
        _run([*compiler, "-shared", str(compiled), "-lm", "-o", str(linked)])
        os.replace(linked, library)
    return library


def _run(command: list[str]) -> str:
    finished = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=True
    )
    return finished.stdout


def _share_threads() -> None:
    """Make the symbols of the OpenMP library that PyTorch loaded visible to ours."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if ".so" in line}
    found = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    if not found:
        raise OSError("PyTorch runs without OpenMP here")
    for path in found:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
