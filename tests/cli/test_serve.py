"""`forerun serve` as a process: it drains when told to stop, comes back after it was killed, and says what is wrong."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    address: str
    lines: list[str]

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    command = [sys.executable, "-m", "forerun.cli.main", "serve", "--device", "cpu", *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line)
                found = re.search(r"is served at (\S+)", line)
                if found:
                    break
            else:
                raise AssertionError("".join(lines))
            reading = threading.Thread(target=lambda: lines.extend(process.stderr or []), daemon=True)
            reading.start()
            yield Serving(process, found[1], lines)
        finally:
            process.kill()
            process.wait()
            reading.join(10)


LONG = {"model": "model", "prompt": "the the", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


def test_it_is_killed_comes_back_and_drains(folder: Path) -> None:
    options = ["--model", str(folder), "--drafter", "ngram", "--dtype", "float32", "--max-batch", "2"]
    options += ["--cache-tokens", "1024"]
    with serving(*options, "--port", "0") as first:
        port = first.port
        with httpx.stream("POST", f"{first.address}/v1/completions", json=LONG, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            first.process.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
        assert first.process.wait(10) == -signal.SIGKILL
    with serving(*options, "--port", port) as again, ThreadPoolExecutor(6) as pool:
        assert httpx.get(f"{again.address}/health").json() == {"status": "ok"}
        begun = threading.Semaphore(0)

        def read() -> str:
            with httpx.stream("POST", f"{again.address}/v1/completions", json=LONG, timeout=60) as answer:
                begun.release()
                return answer.read().decode()

        def ask() -> httpx.Response:
            return httpx.post(f"{again.address}/v1/completions", json={**LONG, "stream": False}, timeout=60)

        streams = [pool.submit(read) for _ in range(4)]
        whole = [pool.submit(ask) for _ in range(2)]
        assert begun.acquire(timeout=30)
        time.sleep(0.3)
        again.process.send_signal(signal.SIGTERM)
        texts = [each.result(60) for each in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts), texts[0][-300:]
        assert len({"".join(re.findall(r'"text":"(.*?)","logprobs"', text)) for text in texts}) == 1
        assert [each.result(60).status_code for each in whole] == [200, 200]
        assert again.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{again.address}/health")
    assert any('"event": "stopping"' in line for line in again.lines)
    assert sum('"event": "request"' in line and '"status": 200' in line for line in again.lines) == 6
    assert "Traceback" not in "".join(again.lines)


def test_a_used_port_is_told_before_anything_is_loaded(run: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("serve", "--model", "there-is-no-such-model", "--port", str(port))
    assert ended.code == 1
    reason = "(Address already in use): choose another --port, or end who uses it"
    assert ended.err == f"forerun: cannot listen on 127.0.0.1:{port} {reason}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "there-is-no-such-model", "--offline"], "there-is-no-such-model"),
        (["--drafter", "nobody"], "there is no drafter 'nobody'"),
        (["--also", "nobody"], "there is no drafter 'nobody'"),
        (["--drafter", "ngram", "--also", "elsewhere/ngram"], "elsewhere/ngram"),
        (["--rule", "none-such"], "there is no verification rule 'none-such'"),
        (["--api-key-file", "missing-file"], "cannot open missing-file"),
        (["--host", "no.such.host.invalid"], "there is no address 'no.such.host.invalid'"),
        (["--log-level", "loud"], "--log-level is 'loud'"),
        (["--tree", "a,b", "--drafter", "ngram"], "a,b"),
    ],
)
def test_what_is_wrong_is_one_sentence(run: Terminal, arguments: list[str], said: str) -> None:
    ended = run("serve", "--port", "0", *arguments)
    assert ended.code == 1
    assert ended.out == ""
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("forerun: ")


def test_a_bad_key_file(run: Terminal, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    ended = run("serve", "--port", "0", "--api-key-file", str(keys))
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "key 1 of" in ended.err
    assert "at least 8 ASCII characters" in ended.err


def test_help_is_worth_reading(run: Terminal) -> None:
    ended = run("serve", "--help")
    assert ended.code == 0
    for word in ("--api-key-file", "--max-batch", "/v1/chat/completions", "SIGTERM"):
        assert word in ended.out
