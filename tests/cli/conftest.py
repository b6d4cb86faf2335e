"""A terminal to run the command in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from forerun.cli.main import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Terminal:
    """Runs `main` as the installed script does, errors turned into sentences included."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Ended:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        streams = self.capture.readouterr()
        assert isinstance(stop.value.code, int)
        return Ended(stop.value.code, streams.out, streams.err)

    def json(self, *arguments: str) -> Any:
        ended = self(*arguments, "--json")
        assert (ended.code, ended.err) == (0, "")
        return json.loads(ended.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)
