"""What a result was measured with: enough to judge and repeat it, and nothing about whose machine it was."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forerun

_ROOT = Path(forerun.__file__).parents[2]  # of a checkout; of an installed package it holds no .git


def provenance(arguments: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Versions, hardware, time and the arguments of a run on `device`, ready for JSON.

    Host names, user names and paths stay out; keep them out of `arguments` too.
    """
    import numpy as np
    import torch

    return {
        "forerun": forerun.__version__,
        "git": git_state(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": dict(arguments),
    }


def git_state(root: Path = _ROOT) -> dict[str, Any] | None:
    """The commit, whether the sources differ from it, and then by what (a digest of the differences); None outside a
    checkout or without git.

    A copy that travelled without its history is told the commit by the variable FORERUN_COMMIT.
    """
    if told := os.environ.get("FORERUN_COMMIT"):
        return {"commit": told, "dirty": False}
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "--no-optional-locks", "status", "--porcelain", "--", "src")
    if not commit or changes is None:
        return None
    if not changes:
        return {"commit": commit, "dirty": False}
    said = changes + (_output("git", "-C", str(root), "diff", "HEAD", "--", "src") or "")
    return {"commit": commit, "dirty": True, "changes": hashlib.sha256(said.encode()).hexdigest()[:16]}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name. ARM kernels give numbers only, which lscpu knows names for; the last resort is the
    architecture."""
    try:
        listing = cpuinfo.read_text()
    except OSError:
        listing = ""
    name = _field(listing, "model name") or _field(_output("lscpu") or "", "Model name")
    return name or platform.processor() or platform.machine() or "unknown"


def _field(listing: str, key: str) -> str | None:
    """The first `key : value` of a listing that says anything."""
    for line in listing.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip() not in {"", "-"}:
            return " ".join(value.split())
    return None


def _cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _output(*command: str) -> str | None:
    """What a program prints; None where it is missing, fails or hangs."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
