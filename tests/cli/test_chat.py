"""`forerun chat` with a tiny model, fed through a pipe; and what a conversation keeps."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun import LLM, Piece, SamplingParams
from forerun.cli.chat import COMMANDS, Talk
from forerun.cli.conversation import Conversation
from forerun.engine.llm import Writing
from tests.cli.conftest import Ended, Terminal
from tests.tiny_folder import CONTEXT, save_tiny_model

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, dtype="float32") as llm:
        yield llm


class Piped:
    """Runs `forerun chat` with these lines on standard input."""

    def __init__(self, run: Terminal, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.folder, self.monkeypatch = run, folder, monkeypatch

    def __call__(self, *lines: str, flags: tuple[str, ...] = ()) -> Ended:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return self.run(
            "chat", "--model", self.folder, "--dtype", "float32", "--max-tokens", str(TOKENS), "--ignore-eos", *flags
        )

    def texts(self, *lines: str, flags: tuple[str, ...] = ()) -> list[str]:
        ended = self(*lines, flags=(*flags, "--json"))
        assert (ended.code, ended.err) == (0, "")
        return [json.loads(entry)["text"] for entry in ended.out.splitlines()]


@pytest.fixture
def piped(run: Terminal, folder: str, monkeypatch: pytest.MonkeyPatch) -> Piped:
    return Piped(run, folder, monkeypatch)


def answers(llm: LLM, *said: str, system: str | None = None) -> list[str]:
    """What the Python API answers, turn by turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for text in said:
        messages.append({"role": "user", "content": text})
        done = llm.generate(messages, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        messages.append({"role": "assistant", "content": done.text})
        texts.append(done.text)
    return texts


def test_a_conversation_remembers(piped: Piped, llm: LLM) -> None:
    expected = answers(llm, "hello", "again", "bye")
    assert piped.texts("hello", "", "again", "bye") == expected
    assert piped.texts("hello", "/reset", "again") == [expected[0], *answers(llm, "again")]
    assert answers(llm, "again") != expected[1:2]
    assert piped.texts("hello", "/quit", "again") == expected[:1]


def test_answers_stream_with_a_line_of_figures(piped: Piped, llm: LLM) -> None:
    ended = piped("hello", "again", flags=("--drafter", "ngram"))
    assert ended.code == 0
    assert ended.out == "".join(f"{text}\n" for text in answers(llm, "hello", "again"))
    assert ended.err.count(f"{TOKENS} tokens in") == 2
    assert ended.err.count("tokens/s") == 2


def test_system(piped: Piped, llm: LLM) -> None:
    told = answers(llm, "hello", system="Be brief.")
    assert piped.texts("/system Be brief.", "hello") == told
    assert piped.texts("hello", flags=("--system", "Be brief.")) == told
    assert piped.texts("/system", "hello", flags=("--system", "Be brief.")) == answers(llm, "hello") != told


def test_retry_and_set(piped: Piped, llm: LLM) -> None:
    first, second = answers(llm, "hello", "again")
    assert piped.texts("hello", "again", "/retry") == [first, second, second]
    hot = piped.texts(
        "hello", "/set temperature 1.5", "/set seed 4", "/retry", "/set seed none", "/set max_tokens 2", "/retry"
    )
    assert hot[0] == first != hot[1]
    ended = piped("/set", "/set top_p 0.5", "/set")
    assert "temperature 0.0" in ended.err
    assert ended.err.count("top_p 1.0") == 1
    assert ended.err.count("top_p 0.5") == 2


def test_save_and_load(piped: Piped, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    expected = answers(llm, "hello", "again", system="Be brief.")
    piped.texts("/system Be brief.", "hello", f"/save {file}")
    assert json.loads(file.read_text()) == {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": expected[0]}],
    }
    assert piped.texts(f"/load {file}", "again") == expected[1:]
    assert piped.texts("again", flags=("--load", str(file))) == expected[1:]


def test_stats_and_help(piped: Piped) -> None:
    ended = piped("hello", "again", "/stats", "/help")
    assert f"{2 * TOKENS} tokens from" in ended.err
    for command in (*COMMANDS, "/quit"):
        assert f"\n{command}" in ended.err
    assert all(command.summary for command in COMMANDS.values())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/fly", "there is no command /fly: /help lists them"),
        ("/set wings 2", "there is no setting wings: use one of"),
        ("/set temperature hot", "temperature is 'hot': give a number"),
        ("/set top_p 3", "top_p is 3.0"),
        ("/save", "/save needs a file"),
        ("/save nowhere/at/all.json", "make the folder nowhere/at first"),
        ("/load absent.json", "cannot open absent.json"),
        ("/load words.json", "words.json holds no conversation"),
        ("/load other.json", "other.json holds no conversation"),
        ("/retry", "nothing was said yet"),
        ("x" * CONTEXT, "shorten the prompt"),
    ],
)
def test_mistakes_are_told_and_the_conversation_goes_on(
    piped: Piped, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.json").write_text("words")
    Path("other.json").write_text('{"system": null, "messages": [{"role": "king", "content": "!"}]}')
    ended = piped(line, "hello")
    assert sentence in ended.err
    assert "Traceback" not in ended.err
    assert ended.out.splitlines() == "\n".join(answers(llm, "hello")).splitlines()
    assert ended.code == 1  # not all that was asked for was done


def test_a_model_without_a_template_is_refused(run: Terminal, tmp_path: Path) -> None:
    ended = run("chat", "--model", str(save_tiny_model(tmp_path, chat=False)))
    assert ended.code == 1
    assert "has no chat template: use `forerun generate --raw`" in ended.err


def test_bytes_that_are_no_text_are_refused(run: Terminal, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    ended = run("chat", "--model", folder)
    assert (ended.code, ended.err) == (1, "forerun: standard input is not text: give UTF-8\n")


def test_the_oldest_messages_are_left_out_when_the_context_is_full(piped: Piped) -> None:
    long = "y" * 60
    ended = piped(*[f"{number} {long}" for number in range(6)])
    assert ended.code == 0
    assert "no longer fit and are left out" in ended.err
    assert ended.err.count(f"{TOKENS} tokens in") == 6


def test_a_message_that_is_no_text_was_never_said(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """Also later in a conversation, where it is counted before it is sent."""
    talk = Talk(llm, Conversation(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    for said in ("hello", "half \ud800", "again"):
        talk.take(said)
    assert [message["content"] for message in talk.conversation.messages[::2]] == ["hello", "again"]
    assert capsys.readouterr().err.count("give valid Unicode") == 1


def test_a_large_max_tokens_does_not_forget_the_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(llm, Conversation(), SamplingParams(temperature=0, max_tokens=CONTEXT, stop=("e", "a", "\ufffd")))
    for said in ("hello", "again", "bye"):
        talk.take(said)
    assert "left out" not in capsys.readouterr().err


def test_what_fits() -> None:
    talk = Conversation(system="s")
    for number in range(3):
        talk.say(f"u{number}")
        talk.answer(f"a{number}")
    talk.say("u3")
    head = {"role": "system", "content": "s"}
    for room, left_out in ((8, 0), (7, 2), (6, 2), (5, 4), (2, 6), (0, 6)):
        messages, count = talk.fitting(len, room)
        assert count == left_out
        assert messages == [head, *talk.messages[left_out:]]
    assert talk.take_back() == "u3"
    assert talk.take_back() == "u2"
    assert len(talk.messages) == 4


def test_an_interruption_stops_the_answer_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Writing.pieces

    def interrupted(self: Writing) -> Iterator[Piece]:
        for number, piece in enumerate(whole(self)):
            yield piece
            if number == 2:
                raise KeyboardInterrupt

    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    talk = Talk(llm, Conversation(), params, watched=True)
    monkeypatch.setattr(Writing, "pieces", interrupted)
    assert talk.take("hello") is True
    streams = capsys.readouterr()
    stopped = re.search(r"stopped; (\d+) tokens in", streams.err)
    assert stopped is not None
    assert 3 <= int(stopped[1]) < params.max_tokens  # the engine may be some steps ahead of its reader
    assert talk.conversation.messages[1] == {"role": "assistant", "content": streams.out.removesuffix("\n")}
    monkeypatch.undo()
    talk.params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert talk.take("again") is True
    assert "4 tokens in" in capsys.readouterr().err
    assert not talk.failed
