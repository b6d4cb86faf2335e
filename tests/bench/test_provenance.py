"""The record beside a result: complete, and silent about whose machine it was."""

from __future__ import annotations

import getpass
import json
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import forerun
from forerun.bench import provenance as module
from forerun.bench.provenance import cpu_model, git_state, provenance

ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


def test_it_says_what_was_used() -> None:
    record = provenance({"samples": 10})
    assert record["forerun"] == forerun.__version__
    assert record["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["arguments"] == {"samples": 10}
    assert record["device"] == "cpu"
    assert record["cpu"]
    assert record["cores"] >= 1
    age = datetime.now(UTC) - datetime.fromisoformat(record["time"])
    assert abs(age.total_seconds()) < 60
    assert json.loads(json.dumps(record)) == record


def test_no_host_user_or_path() -> None:
    record = provenance({})
    values = [str(value) for value in (record.pop("git") or {}).values()] + [str(value) for value in record.values()]
    for value in values:
        assert "/" not in value
        assert "\\" not in value
        assert value not in {platform.node(), getpass.getuser()}
    host = platform.node()
    assert len(host) < 6 or not any(host in value for value in values)


def test_cpu_model_where_the_kernel_names_it(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2.00GHz\nmodel name\t: Another\n")
    assert cpu_model(listing) == "Some CPU @ 2.00GHz"


def test_cpu_model_on_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text(ARM)
    monkeypatch.setattr(module, "_output", lambda *command: "Vendor ID:  ARM\nModel name:   Neoverse-N1\n")
    assert cpu_model(listing) == "Neoverse-N1"
    monkeypatch.setattr(module, "_output", lambda *command: "Vendor ID:  ARM\nModel name:   -\n")
    assert cpu_model(listing) == (platform.processor() or platform.machine())


def test_cpu_model_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_output", lambda *command: None)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert cpu_model(tmp_path / "absent") == "riscv64"


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_no_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")
        command = ["git", *who, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    assert git_state(tmp_path) is None  # nothing committed yet
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "module.py"
    source.write_text("x = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "start")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "notes.txt").write_text("not a source")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    source.write_text("x = 2\n")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed == git_state(tmp_path)
    assert {**changed, "changes": ""} == {"commit": commit, "dirty": True, "changes": ""}
    source.write_text("x = 3\n")
    assert git_state(tmp_path) not in (changed, None)
