"""Conversions in the cache: made once, whole or not at all, and noticed when they change."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun.models import convert
from forerun.models.checkpoint import WEIGHTS, Progress, load_tensors
from forerun.models.load import Source, load_tokenizer, resolve
from forerun.models.store import MANIFEST, Store, fresh_file, fresh_folder, sha256_of
from tests.models.checkpoints import make, write_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(make("Llama"), tmp_path_factory.mktemp("gguf") / "model.gguf", Kind.Q8_0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def take(path: Path, store: Store, dtype: torch.dtype = torch.float32, progress: Progress | None = None) -> Source:
    return resolve(str(path), dtype=dtype, store=store, progress=progress)


def leftovers(store: Store) -> list[Path]:
    return [path for path in store.root.rglob("*") if path.name.endswith(".part") or ".part/" in str(path)]


def test_made_once_per_format(gguf_file: Path, store: Store) -> None:
    told: list[tuple[str, int, int]] = []
    first = take(gguf_file, store, progress=lambda *what: told.append(what))
    assert (told[0][0], told[-1][0]) == ("Reading model.gguf", "Converting")
    assert told[-1][1] == told[-1][2] > 0
    stamp = (first.folder / WEIGHTS).stat().st_mtime_ns
    told.clear()
    again = take(gguf_file, store, progress=lambda *what: told.append(what))
    assert all(what == "Reading model.gguf" for what, *_ in told)
    assert (again.folder, (again.folder / WEIGHTS).stat().st_mtime_ns) == (first.folder, stamp)
    other = take(gguf_file, store, torch.bfloat16)
    assert other.folder != first.folder
    assert first.config is not None
    wide = load_tensors(first.folder, first.config, torch.float32)
    narrow = load_tensors(other.folder, first.config, torch.bfloat16)
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    assert leftovers(store) == []


def test_what_a_conversion_holds(gguf_file: Path, store: Store) -> None:
    folder = take(gguf_file, store).folder
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["name"] == "model.gguf"
    assert manifest["source"] == {"sha256": sha256_of(gguf_file), "bytes": gguf_file.stat().st_size}
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == sha256_of(folder / name)
    assert set(manifest["files"]) | {MANIFEST} == {path.name for path in folder.iterdir()}


def test_a_changed_file_is_converted_again(
    gguf_file: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.store._SETTLED", -1.0)  # so that its hash is remembered at once
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(gguf_file.read_bytes())
    first = take(mine, store)
    stamp = mine.stat()
    content = bytearray(mine.read_bytes())
    content[-40] ^= 1
    mine.write_bytes(content)
    os.utime(mine, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # and pretends to be the same
    assert take(mine, store).folder != first.folder


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_flipped_bit_is_noticed(name: str, gguf_file: Path, store: Store) -> None:
    path = take(gguf_file, store).folder / name
    stamp = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(ValueError, match=f"{name} is damaged: delete the folder"):
        take(gguf_file, store)


def test_large_weights_are_hashed_when_touched_or_asked(
    gguf_file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.store._LARGE", 100)
    path = take(gguf_file, store).folder / WEIGHTS
    stamp = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):  # its time has changed
        take(gguf_file, store)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    take(gguf_file, store)  # trusted, for it looks untouched
    with pytest.raises(ValueError, match="is damaged"):
        store.conversions()[0].check(whole=True)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_missing_or_shorter_file_is_noticed(name: str, gguf_file: Path, store: Store) -> None:
    path = take(gguf_file, store).folder / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="is damaged"):
        take(gguf_file, store)
    path.unlink()
    with pytest.raises(ValueError, match="is damaged"):
        take(gguf_file, store)


def test_remains_without_a_manifest_are_replaced(gguf_file: Path, store: Store) -> None:
    folder = take(gguf_file, store).folder
    (folder / MANIFEST).unlink()
    assert take(gguf_file, store).folder == folder
    store.conversions()[0].check(whole=True)


@pytest.mark.parametrize("key", ["size", "sha256", "files", "name", "model.safetensors"])
def test_a_flipped_bit_in_the_manifest_is_noticed(key: str, gguf_file: Path, store: Store) -> None:
    manifest = take(gguf_file, store).folder / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{key}"', f'"{chr(ord(key[0]) ^ 1)}{key[1:]}"'))
    with pytest.raises(ValueError, match="is damaged: delete the folder"):
        take(gguf_file, store)
    with pytest.raises(ValueError, match="is damaged: delete the folder"):
        store.conversions()[0].check(whole=True)


def test_a_new_version_of_the_converter_makes_a_new_folder(
    gguf_file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = take(gguf_file, store).folder
    monkeypatch.setattr(convert, "CONVERTER", convert.CONVERTER + 1)
    second = take(gguf_file, store).folder
    assert first != second
    assert json.loads((second / MANIFEST).read_text())["converter"] == convert.CONVERTER


def test_a_garbled_manifest_is_refused(gguf_file: Path, store: Store) -> None:
    folder = take(gguf_file, store).folder
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        take(gguf_file, store)
    assert [each.name for each in store.conversions()] == [folder.name]
    with pytest.raises(ValueError, match="is damaged"):
        store.conversions()[0].check()


# --- interrupted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(error: type[BaseException], gguf_file: Path, store: Store) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "Converting" and done > total / 2:
            assert leftovers(store)  # it is under way
            raise error

    with pytest.raises(error):
        take(gguf_file, store, progress=stop)
    assert leftovers(store) == []
    assert not any(store.converted.iterdir())
    take(gguf_file, store)


def test_a_full_disk_leaves_nothing(gguf_file: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "_write_weights", full)
    with pytest.raises(ValueError, match=r"no space is left for .*: free some, or set FORERUN_CACHE"):
        take(gguf_file, store)
    assert not any(store.converted.iterdir())


def test_too_little_space_is_known_before_the_work(
    gguf_file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(convert, "_write_weights", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ValueError, match="no space is left"):
        take(gguf_file, store)
    assert leftovers(store) == []


@pytest.mark.parametrize("share", [0.001, 0.3, 0.6, 0.99])
def test_a_truncated_file_leaves_nothing(share: float, gguf_file: Path, store: Store, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    content = gguf_file.read_bytes()
    broken.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="fetch the file again"):
        take(broken, store)
    assert not store.converted.exists() or not any(store.converted.iterdir())


def test_what_a_killed_process_left_is_swept(gguf_file: Path, store: Store) -> None:
    """At once, and not what a process is still at work on."""
    code = """
import os, signal, sys
from pathlib import Path
from forerun.models.store import fresh_folder
with fresh_folder(Path(sys.argv[1])) as part:
    (part / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, store.converted / "killed"], check=False, timeout=120)
    (left,) = leftovers(store)[:1]
    assert (left / WEIGHTS).read_bytes() == b"half"
    with fresh_folder(store.converted / "running") as running:
        assert not left.exists()
        take(gguf_file, store)
        assert running.exists()
        (running / MANIFEST).write_text("{}")
    assert leftovers(store) == []
    assert (store.converted / "running").exists()


def test_a_file_that_may_not_grow_so_large(gguf_file: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> str:
        raise OSError(errno.EFBIG, "File too large")  # as a write has it: without a name

    monkeypatch.setattr(convert, "_write_weights", too_large)
    with pytest.raises(ValueError, match=r"cannot write in .*converted \(File too large\): set FORERUN_CACHE"):
        take(gguf_file, store)
    assert not any(store.converted.iterdir())


def test_two_converters_do_not_hurt_one_another(gguf_file: Path, store: Store) -> None:
    meeting = threading.Barrier(3)
    folders: list[Path] = []

    def work() -> None:
        once = iter([True])

        def together(what: str, done: int, total: int) -> None:
            if what == "Converting" and next(once, False):
                meeting.wait(20)

        folders.append(take(gguf_file, store, progress=together).folder)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    store.conversions()[0].check(whole=True)
    assert leftovers(store) == []


# --- the store ------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "here"))
    assert Store.default().root == tmp_path / "here"
    monkeypatch.delenv("FORERUN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store.default().root == tmp_path / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.default().root == tmp_path / ".cache" / "forerun"


def test_hashes_are_remembered_until_the_file_changes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"one")
    monkeypatch.setattr("forerun.models.store._SETTLED", -1.0)
    first = store.sha256(path)
    assert first == sha256_of(path)
    monkeypatch.setattr("forerun.models.store.sha256_of", lambda *_: "asked")
    assert store.sha256(path) == first
    path.write_bytes(b"two")
    assert store.sha256(path) == "asked"
    for memo in (store.root / "hashes").iterdir():
        memo.write_text("garbage")
    monkeypatch.undo()
    assert store.sha256(path) == sha256_of(path)


def test_a_file_that_was_just_written_is_not_remembered(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "young"
    path.write_bytes(b"one")
    store.sha256(path)
    assert not (store.root / "hashes").exists()


def interrupted(fresh: Callable[[Path], AbstractContextManager[Path]], path: Path) -> None:
    with fresh(path) as part:
        (part / "file" if part.is_dir() else part).write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", [fresh_file, fresh_folder])
def test_nothing_appears_after_an_error(fresh: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(fresh, tmp_path / "deep" / "x")
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("fresh", [fresh_file, fresh_folder])
def test_a_full_disk_is_told_with_the_file(
    fresh: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="No space left") as told, fresh(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write, which names no file
    assert told.value.filename == str(tmp_path / "x")


def test_the_tokenizer_comes_along(gguf_file: Path, store: Store) -> None:
    tokenizer = load_tokenizer(take(gguf_file, store))
    ids = tokenizer.apply_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids, skip_special=False) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
