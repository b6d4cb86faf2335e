"""Tokenizers out of GGUF files, and the face that the engine sees."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from forerun.models.gguf_file import GGUFFile
from forerun.models.gguf_tokenizer import CUTS, tokenizer_from_gguf
from forerun.models.tokenizer import Tokenizer
from tests.models.checkpoints import BYTES, MERGES, TEMPLATE, TOKENS, add_value, finish

TRICKY = [
    "hello world",
    "  two  spaces ",
    "12 123 1234567",
    "x 1\n\n\ty\r\n",
    "héllo, 日本語 👩‍👩‍👧‍👦 ½²",
    "def f(x):\n    return x['a'] ** 2  # it's\n",
    "a\u0301",
    "",
    " ",
    "\x00\x1f",
]


def build(tmp_path: Path, architecture: str = "llama", **values: Any) -> Tokenizer:
    """From a file with nothing but a tokenizer."""
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add_value(writer, "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}", value)
    finish(writer)
    return Tokenizer(tokenizer_from_gguf(GGUFFile.open(path), 10_000))


def byte_level(tmp_path: Path, pre: str = "smollm", **more: Any) -> Tokenizer:
    kinds = [3 if token.startswith("<|") else 1 for token in TOKENS]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": kinds,
        "merges": MERGES,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return build(tmp_path, **{**values, **more})


def pieces(tokenizer: Tokenizer, text: str, special: bool = False) -> list[str]:
    names = {index: token for token, index in tokenizer.vocab.items()}
    return [names[index] for index in tokenizer.encode(text, special=special)]


# --- byte-level -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", CUTS)
def test_every_rule_gives_the_text_back(pre: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pre)
    for text in TRICKY:
        expected = "\u00e1" if text == "a\u0301" and CUTS[pre].compose else text
        assert tokenizer.decode(tokenizer.encode(text, special=False), skip_special=False) == expected


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["12", "12", "12"]),
        ("smollm", ["1", "2", "1", "2", "1", "2"]),
        ("llama-bpe", ["12", "1", "2", "12"]),  # 121 212: the tokens of 121 and of 212
        ("qwen2", ["1", "2", "1", "2", "1", "2"]),
        ("tekken", ["1", "2", "1", "2", "1", "2"]),
    ],
)
def test_digits(pre: str, digits: list[str], tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path, pre), "121212") == digits


def test_merges(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert pieces(tokenizer, "hello") == ["hello"]
    assert pieces(tokenizer, "hell") == ["he", "ll"]
    assert pieces(tokenizer, "a w") == ["a", "Ġw"]
    assert pieces(tokenizer, "é") == ["Ã", "©"]


def test_spaces_before_digits(tmp_path: Path) -> None:
    """The digits are cut off first, so that all spaces before them stay together."""
    tokens, merges = [*TOKENS, "ĠĠ"], [*MERGES, "Ġ Ġ"]
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    options: dict[str, Any] = {"tokens": tokens, "merges": merges, "token_type": kinds}
    assert pieces(byte_level(tmp_path, "smollm", **options), "a  1") == ["a", "ĠĠ", "1"]
    assert pieces(byte_level(tmp_path, "gpt-2", **options), "a  1") == ["a", "Ġ", "Ġ", "1"]


def test_a_whole_word_needs_no_merges(tmp_path: Path) -> None:
    """Llama 3 and Tekken take a word that is a token as it is; GPT-2 only where merges lead to it."""
    for pre in ("llama-bpe", "tekken"):
        assert pieces(byte_level(tmp_path, pre, merges=["h e"]), "hello", special=False) == ["hello"]
    assert pieces(byte_level(tmp_path, "gpt-2", merges=["h e"]), "hello") == ["he", "l", "l", "o"]


def test_capitals_cut_in_tekken(tmp_path: Path) -> None:
    tokens = [*TOKENS, "oW"]
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    options: dict[str, Any] = {"tokens": tokens, "token_type": kinds, "merges": ["o W"]}
    assert pieces(byte_level(tmp_path, "gpt-2", **options), "oW") == ["oW"]
    assert pieces(byte_level(tmp_path, "tekken", **options), "oW") == ["o", "W"]


def test_control_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.encode("<|start|>hello<|end|>") == [256, tokenizer.vocab["hello"], 257]
    assert tokenizer.decode([256, tokenizer.vocab["hello"], 257]) == "hello"
    assert tokenizer.decode([256], skip_special=False) == "<|start|>"


def test_user_defined_tokens_stay_whole_and_visible(tmp_path: Path) -> None:
    tokens = [*TOKENS, "<think>"]
    kinds = [3 if token.startswith("<|") else 4 if token == "<think>" else 1 for token in tokens]
    tokenizer = byte_level(tmp_path, tokens=tokens, token_type=kinds)
    assert tokenizer.encode("<think>") == [len(TOKENS)]
    assert tokenizer.decode([len(TOKENS)]) == "<think>"


@pytest.mark.parametrize(
    ("pre", "flag", "starts"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_start_token(pre: str, flag: bool | None, starts: bool, tmp_path: Path) -> None:
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = byte_level(tmp_path, pre, **more)
    assert (tokenizer.encode("hello")[0] == 256) == starts
    assert tokenizer.encode("hello", special=False) == [tokenizer.vocab["hello"]]
    assert tokenizer.bos == 256


def test_the_end_token(tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path), "12", special=True) == ["1", "2"]
    assert pieces(byte_level(tmp_path, add_eos_token=True), "12", special=True) == ["1", "2", "<|end|>"]


# --- SentencePiece --------------------------------------------------------------------------------------------

WORDS = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "▁▁", "cab"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]


def sentencepiece(tmp_path: Path, scores: list[float] | None = None, **more: Any) -> Tokenizer:
    scores = scores or [0.0] * 259 + [-float(rank) for rank in range(len(WORDS))]
    values = {
        "model": "llama",
        "tokens": PIECES,
        "scores": scores,
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return build(tmp_path, **{**values, **more})


def best_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, word for word: join the neighbours whose union scores best, the leftmost among equals."""
    symbols = list(text)
    while True:
        unions = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not unions:
            return symbols
        _, place = min(unions)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]


def test_the_best_score_is_merged_first(tmp_path: Path) -> None:
    generator = random.Random(0)
    for attempt in range(5):
        ranks = generator.sample(range(100), len(WORDS))
        scores = {word: -float(rank) for word, rank in zip(WORDS, ranks, strict=True)}
        folder = tmp_path / str(attempt)
        folder.mkdir()
        tokenizer = sentencepiece(folder, [0.0] * 259 + list(scores.values()))
        for _ in range(50):
            text = "".join(generator.choices("abc ", k=12))
            assert pieces(tokenizer, text) == best_first("▁" + text.replace(" ", "▁"), scores), text


def test_sentencepiece_round_trip(tmp_path: Path) -> None:
    for prefix in (True, False):
        tokenizer = sentencepiece(tmp_path, add_space_prefix=prefix)
        for text in TRICKY:
            assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text
    assert pieces(sentencepiece(tmp_path), "ab") == ["▁ab"]
    assert pieces(sentencepiece(tmp_path, add_space_prefix=False), "ab") == ["ab"]
    assert pieces(sentencepiece(tmp_path), "é", special=True) == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_gemma_merges_in_the_order_of_its_vocabulary(tmp_path: Path) -> None:
    """Its scores say nothing, and its texts begin without a space."""
    scores = [-1000.0] * len(PIECES)
    tokenizer = sentencepiece(tmp_path, scores, architecture="gemma3")
    order = {word: -float(rank) for rank, word in enumerate(WORDS)}
    for text in ("abc", "cabc", "ab cab"):
        assert pieces(tokenizer, text) == best_first(text.replace(" ", "▁"), order)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pre": "invented"}, "rule 'invented', and Forerun knows"),
        ({"model": "t5"}, "kind 't5'"),
        ({"tokens": []}, "has no tokenizer"),
        ({"token_type": [1]}, "tokens for a vocabulary"),
        ({"eos_token_id": 9999}, "eos_token_id 9999 is no token"),
        ({"model": "llama"}, "has no scores"),
    ],
)
def test_refusals(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    if more.get("tokens") == []:
        with pytest.raises(ValueError, match=message):
            build(tmp_path, model="gpt2")
        return
    with pytest.raises(ValueError, match=message):
        byte_level(tmp_path, **more)


# --- the face -------------------------------------------------------------------------------------------------


def saved(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer._wrapped.save_pretrained(folder)
    return Tokenizer.from_folder(folder)


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    for name, tokenizer in (
        ("bytes", byte_level(tmp_path, chat_template=TEMPLATE)),
        ("pieces", sentencepiece(tmp_path)),
    ):
        again = saved(tokenizer, tmp_path / name)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.vocab == tokenizer.vocab
        assert again.has_chat_template == tokenizer.has_chat_template
        for text in TRICKY:
            assert again.encode(text) == tokenizer.encode(text)
            assert again.decode(again.encode(text)) == text


def test_chats(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat(messages)
    assert tokenizer.decode(ids, skip_special=False) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert (ids[0], ids.count(256)) == (256, 2)


def test_where_a_turn_ends(tmp_path: Path) -> None:
    assert byte_level(tmp_path, chat_template=TEMPLATE).eos == {257}
    assert byte_level(tmp_path, chat_template=TEMPLATE, eos_token_id=256).eos == {256, 257}
    assert byte_level(tmp_path).eos == {257}
    plain = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    assert byte_level(tmp_path, chat_template=plain, eos_token_id=256).eos == {256}
    strict = "{{ raise_exception('no assistants here') }}"
    assert byte_level(tmp_path, chat_template=strict).eos == {257}


def test_templates_that_refuse(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "x"}]
    with pytest.raises(ValueError, match="has no chat template: give plain text"):
        byte_level(tmp_path).apply_chat(messages)
    refusing = "{{ raise_exception('only users\n may speak') }}"
    with pytest.raises(ValueError, match=r"\(only users may speak\): change them"):
        byte_level(tmp_path, chat_template=refusing).apply_chat(messages)
    with pytest.raises(ValueError, match="refuses these messages"):
        byte_level(tmp_path, chat_template="{% for %}").apply_chat(messages)
    with pytest.raises(ValueError, match="refuses these messages"):
        byte_level(tmp_path, chat_template=TEMPLATE).apply_chat([{"role": "user"}])


def test_fingerprints_differ(tmp_path: Path) -> None:
    other = [*TOKENS[:-1], "21"]
    first, second = byte_level(tmp_path), byte_level(tmp_path, tokens=other)
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == byte_level(tmp_path, "gpt-2").fingerprint


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer: put the model's tokenizer\.json there"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the tokenizer in"):
        Tokenizer.from_folder(tmp_path)
    assert len(BYTES) == 256
