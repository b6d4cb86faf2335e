"""Prints what the exactness suite covered, whichever process ran it.

Where there is no GPU, Triton's interpreter runs the kernels. It is chosen before anything imports Triton: PyTorch may.

Hypothesis tries the same examples in every run, so that a red run is one that can be seen again;
`--hypothesis-profile=explore` tries others.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # one test process per core; the tensors here are small


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    errors: dict[str, list[float]] = {"exactness": [], "exactness_extra": []}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name in errors:
                errors[name].append(value)
    cases, extra = errors["exactness"], errors["exactness_extra"]
    if not cases:
        return
    terminalreporter.section("exactness")
    terminalreporter.write_line(
        f"{len(cases)} cases (rule, drawing, tree shape, law setting) and {len(extra)} further laws enumerated; "
        f"the law of the committed text differs from the target's by at most {max(cases + extra):.2e}"
    )
