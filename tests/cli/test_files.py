"""What a command writes: whole files, behind links, and never over a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.cli.files import check_writable, write_whole
from tests.cli.conftest import Terminal

PLOT = ("simulate", "--rounds", "50", "--plot")
MEASURE = ("rules", "--measure", "--vocabulary", "16", "--samples", "2", "--depth", "1", "--distance", "0.3", "--out")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    real, link, dangling = tmp_path / "deep" / "real", tmp_path / "link", tmp_path / "dangling"
    real.write_text("older")
    real.chmod(0o640)
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "deep" / "new")
    write_whole(link, b"newer")
    write_whole(dangling, b"first")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert (real.read_text(), dangling.read_text()) == ("newer", "first")
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in real.parent.iterdir()) == ["new", "real"]


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(ValueError, match="it is a device or a pipe, so name a regular file"):
            check_writable(path)
        with pytest.raises(ValueError, match="it is a device or a pipe, so name a regular file"):
            write_whole(path, b"")
    assert Path("/dev/null").is_char_device()


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "lost").symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(ValueError, match=r"cannot write .*round: Too many levels"):
        check_writable(tmp_path / "round")
    with pytest.raises(ValueError, match=r"make the folder .*gone first"):
        check_writable(tmp_path / "lost")


@pytest.mark.parametrize("command", [PLOT, MEASURE])
def test_commands_refuse_devices_and_missing_folders(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")
    for path, sentence in (("pipe.png", "a device or a pipe"), ("gone/a.png", "make the folder gone first")):
        ended = run(*command, path)
        assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
        assert ended.err.startswith(f"forerun: cannot write {path}: ")
        assert sentence in ended.err
    assert Path("pipe.png").is_fifo()


@pytest.mark.parametrize("command", [PLOT, MEASURE])
def test_commands_follow_links_and_report_a_full_disk(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real.png").write_text("older")
    Path("link.png").symlink_to("real.png")
    assert run(*command, "link.png").code == 0
    assert Path("link.png").is_symlink()
    written = Path("real.png").read_bytes()
    assert written != b"older"
    monkeypatch.setattr("os.replace", full)
    ended = run(*command, "link.png")
    assert (ended.code, ended.err) == (1, "forerun: cannot write link.png: No space left on device\n")
    assert Path("real.png").read_bytes() == written
    assert sorted(each.name for each in Path().iterdir()) == ["link.png", "real.png"]


def test_a_file_named_like_markup(run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("[").mkdir()
    ended = run(*PLOT, "[/]x.png")  # closes a tag that was never opened
    assert (ended.code, ended.err) == (0, "")
    assert "Picture: [/]x.png" in ended.out
