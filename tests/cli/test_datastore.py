"""`forerun datastore`: from a folder to a file, and a text drafted from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.cli.datastore import PIECE, pieces
from forerun.drafters.datastore import Datastore
from forerun.models.tokenizer import Tokenizer
from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with another tokenizer."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "other", words=("the", "Ġof")))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "a.txt").write_text("the quick brown fox\n" * 300, "utf-8")
    (folder / "deep" / "b.py").write_text("def main() -> None: ...\n", "utf-8")
    (folder / "deep" / "empty.py").write_text("", "utf-8")
    (folder / "deep" / ".git" / "c.py").write_text("hidden", "utf-8")
    (folder / ".hidden.py").write_text("hidden", "utf-8")
    (folder / "d.bin").write_bytes(b"MZ\0\1")
    (folder / "e.txt").write_bytes("naïve".encode("latin-1"))
    return folder


def built(run: Terminal, folder: Path, out: Path, model: str, *more: str) -> Any:
    return run.json("datastore", "build", str(folder), "--out", str(out), "--model", model, *more)


def test_build_and_info(run: Terminal, texts: Path, tmp_path: Path, model: str) -> None:
    out = tmp_path / "my.store"
    answer = built(run, texts, out, model)
    assert answer["files"] == {"read": 3, "binary": 1, "undecodable": 1, "unreadable": 0, "cut": False}
    tokenizer = Tokenizer.from_folder(Path(model))
    wanted = [tokenizer.encode((texts / name).read_text("utf-8"), special=False) for name in ("a.txt", "deep/b.py")]
    store = Datastore.open(out)
    separator = 0xFFFF
    assert store.tokens.tolist() == [*wanted[0], separator, *wanted[1], separator]
    told = run.json("datastore", "info", str(out))
    assert told == {
        "store": str(out),
        "model": model,
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": len(tokenizer.vocab),
        "documents": 2,
        "tokens": answer["tokens"],
        "sorted_by": 32,
        "bytes": answer["bytes"],
    }
    assert answer["tokens"] == sum(map(len, wanted))
    shown = run("datastore", "info", str(out))
    assert (shown.code, shown.err) == (0, "")
    assert tokenizer.fingerprint in shown.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.store", "texts"]


def test_what_is_said(run: Terminal, texts: Path, tmp_path: Path, model: str) -> None:
    ended = run("datastore", "build", str(texts), "--out", str(tmp_path / "x"), "--model", model)
    assert (ended.code, ended.err) == (0, "")
    assert "is ready: 6," in ended.out
    assert "of 2 files" in ended.out
    assert "skipped 1 binary and 1 undecodable" in ended.out


def test_glob_and_limit(run: Terminal, texts: Path, tmp_path: Path, model: str) -> None:
    out = tmp_path / "x"
    assert built(run, texts, out, model, "--glob", "*.py")["files"]["read"] == 2
    assert built(run, texts, out, model, "--glob", "*.py", "--glob", "a.*")["files"]["read"] == 3
    answer = built(run, texts, out, model, "--limit-tokens", "100")
    assert (answer["tokens"], answer["files"]["cut"]) == (100, True)
    whole = built(run, texts, out, model)["tokens"]
    exact = built(run, texts, out, model, "--limit-tokens", str(whole))
    assert exact["tokens"] == whole
    assert "stopped at 100 tokens" in run(
        "datastore", "build", str(texts), "--out", str(out), "--model", model, "--limit-tokens", "100"
    ).out  # fmt: skip


def test_a_text_is_drafted_from_it(run: Terminal, tmp_path: Path, model: str, other: str) -> None:
    """The store holds what the model writes: the text is the same, and takes fewer passes."""
    flags = ("--model", model, "--dtype", "float32", "--max-tokens", "40", "--raw")
    plain = run.json("generate", "what is it?", *flags)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("what is it?" + plain["text"], "utf-8")
    built(run, folder, tmp_path / "s", model)
    chosen = ("--drafter", "retrieval", "--drafter-option")
    drafted = run.json("generate", "what is it?", *flags, *chosen, f"store={tmp_path / 's'}")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["tokens_per_pass"] > 1
    ended = run("generate", "what is it?", *flags, *chosen, f"store={tmp_path / 'nothing'}")
    assert (ended.code, ended.out) == (1, "")
    assert "there is no datastore" in ended.err
    built(run, folder, tmp_path / "t", other)
    ended = run("generate", "what is it?", *flags, *chosen, f"store={tmp_path / 't'}")
    assert (ended.code, ended.out) == (1, "")
    assert "which is not that of this model: build it again" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "{}/nowhere", "--out", "{}/x"), "is not a folder: name one with text files"),
        (("build", "{}/texts", "--out", "{}/none/x"), "make the folder"),
        (("build", "{}/texts", "--out", "{}/x", "--glob", "*.md"), "has no files named *.md: name another folder"),
        (("build", "{}/texts", "--out", "{}/x", "--glob", "*.bin"), "there is no text to put in the datastore"),
        (("info", "{}/texts/a.txt"), "is no datastore: make one with `forerun datastore build`"),
        (("info", "{}/nothing"), "there is no datastore"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, run: Terminal, texts: Path, tmp_path: Path, model: str
) -> None:
    own = [each.replace("{}", str(tmp_path)) for each in arguments]
    ended = run("datastore", *own, *(("--model", model) if own[0] == "build" else ()))
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_info_reads_everything(run: Terminal, texts: Path, tmp_path: Path, model: str) -> None:
    out = tmp_path / "x"
    built(run, texts, out, model)
    content = out.read_bytes()
    out.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = run("datastore", "info", str(out))
    assert (ended.code, "is damaged: build it again" in ended.err) == (1, True)


@pytest.mark.parametrize("command", [("build",), ("info",)])
def test_help_has_examples(command: tuple[str, ...], run: Terminal) -> None:
    ended = run("datastore", *command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert "forerun datastore" in ended.out


def test_pieces_end_with_lines() -> None:
    text = "word " * 20 + "\n"
    parts = list(pieces(text * 100 + "x" * (2 * PIECE + 5) + "\n" + text))
    assert "".join(parts) == text * 100 + "x" * (2 * PIECE + 5) + "\n" + text
    assert max(map(len, parts)) <= PIECE
    assert all(part.endswith("\n") for part in parts[:4])
    assert list(pieces("")) == []
