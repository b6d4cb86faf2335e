"""`forerun generate` with a tiny model from a folder."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cli import model_options
from forerun.cli.streaming import printable
from tests.cli.conftest import Terminal
from tests.tiny_folder import CONTEXT, save_tiny_model

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def flags(folder: str) -> tuple[str, ...]:
    return ("--model", folder, "--dtype", "float32", "--max-tokens", "30")


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, Any]:
    """What the Python API gives for the same."""
    with LLM(folder, dtype="float32") as llm:
        done = llm.generate("what is it?", SamplingParams(temperature=0, max_tokens=30))
    return done.as_dict()


def test_json(run: Terminal, flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    plain = run.json("generate", "what is it?", *flags)
    drafted = run.json("generate", "what is it?", *flags, "--drafter", "ngram", "--drafter-option", "min_match=1")
    for answer in (plain, drafted):
        assert {key: answer[key] for key in ("text", "token_ids", "finish_reason", "prompt_tokens")} == {
            key: expected[key] for key in ("text", "token_ids", "finish_reason", "prompt_tokens")
        }
        assert answer["stats"]["tokens"] == len(answer["token_ids"])
        assert answer["stats"]["seconds"] > 0
        assert "choices" not in answer
        assert "logprobs" not in answer
        assert "compare" not in answer
    assert (plain["drafter"], plain["stats"]["tokens_per_pass"], plain["stats"]["acceptance_by_depth"]) == (
        "none",
        1,
        [],
    )
    stats = drafted["stats"]
    assert stats["tokens_per_pass"] == stats["tokens"] / stats["target_passes"] > 1
    assert 0 < stats["acceptance_by_depth"][0] <= 1


def test_the_text_goes_to_standard_output_and_the_figures_to_the_other(
    run: Terminal, flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    ended = run("generate", "what is it?", *flags, "--drafter", "ngram")
    assert ended.code == 0
    assert ended.out == expected["text"] + "\n"
    for part in (f"{len(expected['token_ids'])} tokens from", "tokens per pass", "tokens/s", "accepted at depth 1", "█",
                 "rows wasted", "% of the cache", "target", "draft", "verify", "rest", "ended by length"):  # fmt: skip
        assert part in ended.err
    assert "\x1b" not in ended.err


def test_colors(run: Terminal, flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    ended = run("generate", "what is it?", *flags, "--drafter", "ngram", "--color")
    assert ANSI.sub("", ended.out) == expected["text"] + "\n"
    for code in ("\x1b[32m", "\x1b[1;31m", "\x1b[1;34m"):  # accepted, corrected, bonus
        assert code in ended.out
    for kind in ("accepted", "corrected", "bonus"):
        assert kind in ended.err


def test_compare(run: Terminal, flags: tuple[str, ...]) -> None:
    answer = run.json("generate", "what is it?", *flags, "--drafter", "ngram", "--compare")
    compared = answer["compare"]
    assert compared["identical"] is True
    assert compared["parts_at"] is None
    assert compared["plain"]["token_ids"] == answer["token_ids"]
    assert compared["plain"]["stats"]["tokens_per_pass"] == 1
    rates = [each["tokens"] / each["seconds"] for each in (answer["stats"], compared["plain"]["stats"])]
    assert compared["speedup"] == pytest.approx(rates[0] / rates[1])
    ended = run("generate", "what is it?", *flags, "--drafter", "ngram", "--compare")
    assert re.search(r"ngram +[\d.]+ +[\d.]+ +[\d.]+× +yes", ended.err)
    assert re.search(r"plain +[\d.]+ +1.00 +1.00×", ended.err)


def test_compare_says_where_texts_part(run: Terminal, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LLM.generate

    def differ(self: LLM, *arguments: Any, **named: Any) -> Any:
        done = whole(self, *arguments, **named)
        if len(done.token_ids) > 9:
            done.token_ids[7] = (done.token_ids[7] + 1) % 200
        return done

    monkeypatch.setattr(LLM, "generate", differ)  # plain decoding; the drafted text is streamed
    ended = run("generate", "what is it?", *flags, "--drafter", "ngram", "--compare")
    assert "until token 7" in ended.err
    assert "The texts part at token 7, after" in " ".join(ended.err.split())
    sampled = run("generate", "what is it?", *flags, "--compare", "--temperature", "1")
    assert "add --seed to compare them" in " ".join(sampled.err.split())


def test_a_rule_that_breaks_the_promise_says_so(run: Terminal, flags: tuple[str, ...]) -> None:
    """Ties have nothing to do with it."""
    more = ("--drafter", "ngram", "--temperature", "1", "--seed", "3", "--max-tokens", "12")
    law = run("generate", "what is it?", *flags, *more, "--compare", "--rule", "sample_match")
    assert "sample_match keeps the law of the text and not the text of a seed" in " ".join(law.err.split())
    assert "equally likely" not in law.err
    lossy = run("generate", "what is it?", *flags, *more, "--rule", "typical")
    assert "typical is lossy" in lossy.err
    assert run.json("generate", "what is it?", *flags, *more, "--rule", "typical")["lossless"] is False
    assert run.json("generate", "what is it?", *flags, *more)["lossless"] is True


def test_several_texts_and_log_probabilities(run: Terminal, flags: tuple[str, ...]) -> None:
    more = ("--n", "2", "--temperature", "1", "--seed", "3", "--logprobs", "1", "--max-tokens", "5", "--ignore-eos")
    answer = run.json("generate", "hi", *flags, *more)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [5, 5]
    assert answer["choices"][0]["text"] == answer["text"]
    assert [each["token"] for each in answer["logprobs"]] == answer["token_ids"]
    assert len(answer["logprobs"][0]["top"]) == 1
    ended = run("generate", "hi", *flags, *more)
    assert f"{answer['text']}\n\n--- text 2 of 2\n{answer['choices'][1]['text']}\n" in ended.out
    assert "log probability" in ended.out
    assert ended.err.count("tokens per pass") == 2


def test_stop(run: Terminal, flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    stop = expected["text"][4:6]
    answer = run.json("generate", "what is it?", *flags, "--stop", stop, "--stop", "never")
    assert answer["text"] == expected["text"][: expected["text"].index(stop)]
    assert answer["finish_reason"] == "stop"


def test_where_a_prompt_comes_from(
    run: Terminal, flags: tuple[str, ...], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("what is it?\n")
    assert run.json("generate", "--file", str(tmp_path / "prompt.txt"), *flags)["text"] == expected["text"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"what is it?\n")))
    assert run.json("generate", "-", *flags)["text"] == expected["text"]
    raw = run.json("generate", "what is it?", *flags, "--raw")
    told = run.json("generate", "what is it?", *flags, "--system", "Be brief.")
    assert raw["prompt_tokens"] == len("what is it?")
    assert told["prompt_tokens"] > expected["prompt_tokens"] > raw["prompt_tokens"]


def test_trace(run: Terminal, flags: tuple[str, ...], tmp_path: Path) -> None:
    answer = run.json("generate", "hi", *flags, "--trace", str(tmp_path / "steps.jsonl"))
    records = [json.loads(entry) for entry in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [token for record in records for token in record["sequences"][0]["committed"]] == answer["token_ids"]
    again = run.json("generate", "hi", *flags, "--trace", str(tmp_path / "steps.jsonl"), "--compare")
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == again["stats"]["target_passes"]


BAD = [
    ((), "give one prompt"),
    (("hi", "--file", "x.txt"), "give one prompt"),
    (("",), "the prompt is empty"),
    (("--file", "absent.txt"), "cannot open absent.txt"),
    (("--file", "bytes.txt"), "bytes.txt is not text"),
    (("hi", "--raw", "--system", "x"), "drop one of them"),
    (("hi", "--temperature", "-1"), "temperature is -1.0"),
    (("hi", "--max-tokens", "0"), "max_tokens is 0"),
    (("hi", "--n", "0"), "n is 0"),
    (("hi", "--drafter", "fast"), "there is no drafter 'fast': use one of"),
    (("hi", "--drafter-option", "tokens"), "write it as KEY=VALUE"),
    (("hi", "--drafter", "ngram", "--drafter-option", "tokens=many"), "give a whole number"),
    (("hi", "--drafter", "ngram", "--drafter-option", "speed=3"), "has no option 'speed'"),
    (("hi", "--tree", "5"), "the drafter none has no option 'tree'"),
    (("hi", "--rule", "quick"), "quick"),
    (("hi", "--model", "no/where/at/all"), "there is no model 'no/where/at/all'"),
    (("hi", "--trace", "nowhere/x.jsonl"), "make the folder nowhere first"),
    (("x" * CONTEXT,), "shorten the prompt"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_a_user_gets_wrong_is_one_sentence(
    run: Terminal,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    ended = run("generate", "--model", folder, "--dtype", "float32", *arguments, *more)
    assert (ended.code, ended.out.strip()) == (1, "")
    assert sentence in ended.err
    assert ended.err.startswith("forerun: ")
    assert ended.err.count("\n") == 1


def test_draft_model(run: Terminal, folder: str, flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    answer = run.json("generate", "what is it?", *flags, "--draft-model", folder, "--tree", "2")
    assert answer["drafter"] == "draft_model"
    assert answer["token_ids"] == expected["token_ids"]
    assert answer["stats"]["tokens_per_pass"] > 2


def test_control_characters_do_not_reach_a_terminal() -> None:
    text = "a\x1b[31mb\x9bc\td\ne\u200d🏽"
    assert printable(text, terminal=False) == text
    assert printable(text, terminal=True) == "a�[31mb�c\td\ne\u200d🏽"


def test_values_take_the_type_of_their_option() -> None:
    assert model_options.parse_value("x", "5", int) == 5
    assert model_options.parse_value("x", "5", str) == "5"
    assert model_options.parse_value("x", "True", bool) is True
    assert model_options.parse_value("x", "0.5", float) == 0.5
    with pytest.raises(ValueError, match="x is 'maybe': give true or false"):
        model_options.parse_value("x", "maybe", bool)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_has_examples_and_the_shared_flags(run: Terminal, command: str) -> None:
    out = run(command, "--help").out
    assert f"forerun {command}" in out.split("Options")[0].split("Examples")[1]
    flags = "model drafter draft-model drafter-option rule tree temperature top-p seed max-tokens dtype device revision"
    for flag in (*flags.split(), "offline", "json"):
        assert f"--{flag} " in out


def test_a_closed_pipe_is_quiet(folder: str) -> None:
    command = f"{sys.executable} -m forerun.cli.main generate hi --model {folder} --ignore-eos --max-tokens 200 | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr
