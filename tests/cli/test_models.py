"""`forerun models`: the list, and fetching, verifying and removing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from forerun.models.builtin import BUILTINS, Builtin
from forerun.models.checkpoint import WEIGHTS
from forerun.models.load import resolve
from forerun.models.store import Store
from tests.cli.conftest import Terminal
from tests.models.checkpoints import make, save, write_gguf


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Store(tmp_path / "cache")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(make("Llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def tiny(original: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model that is already in the cache."""
    content = original.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    tiny = Builtin("tiny", "a model for tests", "none", "tiny==1", "tiny/tiny.gguf", len(content), sha256)
    monkeypatch.setitem(BUILTINS, "tiny", tiny)
    tiny.path(store).parent.mkdir(parents=True)
    tiny.path(store).write_bytes(content)
    return tiny


def put_on_hub(root: Path, content: bytes) -> Path:
    """A model as the hub's library keeps it: files named after their hashes."""
    folder = root / "models--owner--name"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "blobs").mkdir()
    large = folder / "blobs" / hashlib.sha256(content).hexdigest()
    large.write_bytes(content)
    small = hashlib.sha1(b"blob 2\0{}", usedforsecurity=False).hexdigest()
    (folder / "blobs" / small).write_bytes(b"{}")
    return large


def test_an_empty_cache(run: Terminal, store: Store) -> None:
    answer = run.json("models")
    assert answer["cache"] == str(store.root)
    assert answer["models"] == [
        {"name": "smollm2-135m", "kind": "built-in", "present": False, "bytes": 0, "formats": [], "paths": []}
    ]
    shown = run("models")
    assert (shown.code, shown.err) == (0, "")
    assert "not fetched" in shown.out
    assert "Apache-2.0" in shown.out
    assert not store.root.exists()  # to look is not to touch


def test_the_list(run: Terminal, tiny: Builtin, original: Path, tmp_path: Path) -> None:
    put_on_hub(tmp_path / "hub", b"weights")
    other = tmp_path / "other.gguf"
    write_gguf(make("Qwen2"), other)
    assert run("models", "fetch", "tiny", "--dtype", "float32").code == 0
    assert run("models", "fetch", str(other), "--dtype", "bfloat16").code == 0
    found = {each["name"]: each for each in run.json("models")["models"]}
    assert list(found) == ["smollm2-135m", "tiny", "other.gguf", "owner/name"]
    assert (found["tiny"]["kind"], found["tiny"]["formats"]) == ("built-in", ["gguf", "float32"])
    assert (found["other.gguf"]["kind"], found["other.gguf"]["formats"]) == ("gguf", ["bfloat16"])
    assert (found["owner/name"]["kind"], found["owner/name"]["bytes"]) == ("hub", 9)
    for each in found.values():
        files = [file for path in map(Path, each["paths"]) for file in (path.rglob("*") if path.is_dir() else [path])]
        assert each["bytes"] == sum(file.stat().st_size for file in files if file.is_file())
    shown = run("models").out
    assert all(name in shown for name in found)


def test_a_built_in_file_that_was_named_by_its_path(run: Terminal, tiny: Builtin, store: Store, original: Path) -> None:
    """Its conversion is the one that the built-in name uses, so it is listed, verified and removed under that name."""
    tiny.path(store).unlink()
    assert run("models", "fetch", str(original), "--dtype", "float32").code == 0
    found = {each["name"]: each for each in run.json("models")["models"]}
    assert list(found) == ["smollm2-135m", "tiny"]
    assert found["tiny"]["formats"] == ["float32"]
    assert run("models", "verify", "tiny").code == 0


def test_fetch_says_where(run: Terminal, tiny: Builtin, tmp_path: Path) -> None:
    answer = run.json("models", "fetch", "tiny", "--dtype", "float32")
    assert (answer["kind"], answer["family"]) == ("built-in", "llama")
    assert (Path(answer["folder"]) / WEIGHTS).exists()
    folder = save(make("Llama"), tmp_path / "folder")
    answer = run.json("models", "fetch", str(folder))
    assert (answer["kind"], answer["folder"]) == ("folder", str(folder))
    shown = run("models", "fetch", "tiny", "--dtype", "float32")
    assert (shown.code, shown.err) == (0, "")
    assert "tiny is ready: llama" in shown.out


def test_fetch_checks_the_tensors(run: Terminal, tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path / "folder")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])
    ended = run("models", "fetch", str(folder))
    assert (ended.code, ended.out) == (1, "")
    assert "fetch it again" in ended.err


def test_verify(run: Terminal, tiny: Builtin, store: Store) -> None:
    source = resolve("tiny", dtype=torch.float32, store=store)
    answer = run.json("models", "verify", "tiny")
    assert answer["files"] == 1 + len(store.conversions()[0].manifest["files"])
    assert "tiny is whole" in run("models", "verify", "tiny").out
    weights = source.folder / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = run("models", "verify", "tiny")
    assert (ended.code, "is damaged" in ended.err) == (1, True)
    weights.write_bytes(content)
    tiny.path(store).write_bytes(b"x" * tiny.size)
    ended = run("models", "verify", "tiny")
    assert (ended.code, "tiny.gguf is damaged" in ended.err) == (1, True)


def test_verify_on_the_hub(run: Terminal, tmp_path: Path) -> None:
    blob = put_on_hub(tmp_path / "hub", b"weights")
    assert run.json("models", "verify", "owner/name") == {"name": "owner/name", "files": 2, "bytes": 9}
    blob.write_bytes(b"wEights")
    ended = run("models", "verify", "owner/name")
    assert ended.code == 1
    assert "run `forerun models remove owner/name` and fetch it again" in ended.err


def test_remove(run: Terminal, tiny: Builtin, store: Store, tmp_path: Path) -> None:
    resolve("tiny", dtype=torch.float32, store=store)
    answer = run.json("models", "remove", "tiny", "--yes")
    assert len(answer["removed"]) == 2
    assert not any(path.is_file() for path in store.root.rglob("*"))
    ended = run("models", "remove", "tiny", "--yes")
    assert (ended.code, "nothing to remove" in ended.err) == (1, True)
    own = write_gguf(make("Qwen2"), tmp_path / "own.gguf")
    resolve(str(own), dtype=torch.float32, store=store)
    assert run("models", "remove", "own.gguf", "-y").code == 0
    assert own.exists()  # what is the user's stays


def test_remove_asks(run: Terminal, tiny: Builtin, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(question: str, *, abort: bool) -> None:
        asked.append(question)
        raise SystemExit(1)

    monkeypatch.setattr("typer.confirm", refuse)
    assert run("models", "remove", "tiny").code == 1
    assert asked[0].startswith("Remove tiny (")
    assert tiny.path(store).exists()
    assert "add --yes" in run("models", "remove", "tiny", "--json").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fetch", "nonsense"), "there is no model 'nonsense'"),
        (("fetch", "smollm2-135m", "--dtype", "int3"), "'int3' is no number format"),
        (("fetch", "smollm2-135m", "--revision", "main"), "has no revisions"),
        (("verify", "nonsense"), "there is no model 'nonsense' in the cache: choose smollm2-135m"),
        (("verify", "smollm2-135m"), "was not fetched yet: run `forerun models fetch smollm2-135m`"),
        (("remove", "nonsense"), "there is no model 'nonsense' in the cache"),
        (("--json", "verify", "smollm2-135m"), "--json comes last"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, run: Terminal) -> None:
    ended = run("models", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err


@pytest.mark.parametrize("command", [(), ("fetch",), ("verify",), ("remove",)])
def test_help_has_examples(command: tuple[str, ...], run: Terminal) -> None:
    ended = run("models", *command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert "forerun models" in ended.out
