"""The tokenizer inside a GGUF file, built with the `tokenizers` library.

A file keeps the vocabulary and the name of the rule that cuts text into words before merges apply; the rules
themselves are below. A wrong rule gives other tokens than the model was trained on and no error, so that an unknown
name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.models.fields import Fields
from forerun.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern of GPT-4 and its kin, which differ in how many digits make a number."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"


def _cased() -> str:
    """Mistral's Tekken: a word ends where a capital letter follows a small one."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return rf"{start}{upper}*{lower}+|{start}{upper}+{lower}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"


@dataclass(frozen=True)
class Cut:
    """How text is cut into words before merges apply."""

    pattern: str | None = None
    """None for GPT-2's own."""
    single_digits: bool = False
    """Every digit is a word, whatever the pattern says."""
    compose: bool = False
    """Unicode is composed (NFC) first."""
    whole_words: bool = False
    """A word that is a token stays one, whether or not merges lead to it."""
    starts: bool = False
    """A text begins with the start token unless the file says otherwise."""


_GPT2 = Cut()
_DIGITS = Cut(single_digits=True)
_LLAMA3 = Cut(_words(r"\p{N}{1,3}"), whole_words=True, starts=True)
_QWEN2 = Cut(_words(r"\p{N}"), compose=True)
CUTS: dict[str, Cut] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Cut(_cased(), whole_words=True),
}
"""By `tokenizer.ggml.pre`, as llama.cpp names them."""


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]
    fields: Fields

    @classmethod
    def read(cls, file: GGUFFile, size: int) -> _Vocabulary:
        prefix = "tokenizer.ggml."
        values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        fields = Fields(values, {}, f"{file.path}, tokenizer")
        tokens = fields.items("tokens")
        if not tokens:
            raise ValueError(f"{file.path} has no tokenizer: take a GGUF file that has one")
        kinds = fields.items("token_type") or [1] * len(tokens)
        if len(kinds) != len(tokens) or len(tokens) > size:
            raise ValueError(f"{file.path} has {len(tokens)} tokens for a vocabulary of {size}: fetch the file again")
        return cls(tokens, kinds, fields)

    def of_kind(self, *kinds: int) -> Iterator[str]:
        return (token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds)

    def ids(self) -> dict[str, int]:
        """Without the padding that makes a vocabulary a round number."""
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return {
            token: index
            for index, (token, kind) in pairs
            if not (kind in (_UNUSED, _USER_DEFINED) and re.fullmatch(r"\[PAD\d+\]", token))
        }

    def named(self, key: str) -> str | None:
        index = self.fields.maybe_integer(key, least=0)
        if index is None:
            return None
        if index >= len(self.tokens):
            raise ValueError(f"{self.fields.where}: {key} {index} is no token: fetch the file again")
        return self.tokens[index]


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary.read(file, vocab_size)
    kind = vocabulary.fields.text("model")
    if kind == "gpt2":
        tokenizer, starts = _byte_level(vocabulary)
    elif kind == "llama":
        gemma = file.metadata.get("general.architecture") == "gemma3"
        tokenizer, starts = _sentencepiece(vocabulary, by_index=gemma), True
    else:
        raise ValueError(
            f"{file.path} has a tokenizer of the kind {kind!r}, and Forerun reads gpt2 and llama: take another file"
        )
    _add_tokens(tokenizer, vocabulary)
    if vocabulary.fields.raw("add_bos_token") is not None:
        starts = vocabulary.fields.flag("add_bos_token")
    ends = vocabulary.fields.flag("add_eos_token")
    _add_ends(tokenizer, vocabulary, starts, ends)
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    special: dict[str, Any] = {name: vocabulary.named(key) for name, key in names.items()}
    special["pad_token"] = vocabulary.named("padding_token_id")
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        wrapped.chat_template = template
    return wrapped


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.fields.raw("pre")
    if name not in CUTS:
        raise ValueError(
            f"{vocabulary.fields.where} cuts words by the rule {name!r}, and Forerun knows {', '.join(CUTS)}: "
            "take the model as a Hugging Face folder"
        )
    cut = CUTS[name]
    merges = vocabulary.fields.items("merges")
    if merges is None:
        raise ValueError(f"{vocabulary.fields.where} has no merges: fetch the file again")
    ids = vocabulary.ids()
    pairs = [_pair(merge) for merge in merges]
    known = [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=known, fuse_unk=False, ignore_merges=cut.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.starts


def _pair(merge: Any) -> tuple[str, str]:
    """Two tokens with a space between; the second may not be cut again, for a token of its own may hold a space."""
    left, _, right = str(merge).partition(" ")
    return left, right


def _sentencepiece(vocabulary: _Vocabulary, *, by_index: bool) -> Tokenizer:
    """SentencePiece's BPE merges whatever pair gives the token of the best score. `by_index`: Gemma's files have scores
    that say nothing, and the order of its vocabulary is the order of merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = vocabulary.fields.items("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{vocabulary.fields.where} has no scores: fetch the file again")
    ids = vocabulary.ids()
    apart = set(vocabulary.of_kind(_CONTROL, _USER_DEFINED, _UNKNOWN, _UNUSED, _BYTE))
    ranked: list[tuple[float, int, str, str]] = []
    for token, index in ids.items():
        if token in apart:
            continue
        rank = float(index) if by_index else -float(scores[index])
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in ids and right in ids and left not in apart and right not in apart:
                ranked.append((rank, index, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    unknown = vocabulary.named("unknown_token_id")
    bytes_there = any(kind == _BYTE for kind in vocabulary.kinds)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bytes_there,
        )
    )
    prefix = vocabulary.fields.raw("add_space_prefix")
    prefixed = vocabulary.fields.flag("add_space_prefix") if prefix is not None else not by_index
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in text as they stand, before anything is cut or merged."""
    from tokenizers import AddedToken

    ids = vocabulary.ids()
    special = [AddedToken(token, special=True, normalized=False) for token in vocabulary.of_kind(_CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token in vocabulary.of_kind(_USER_DEFINED)]
    tokenizer.add_special_tokens([token for token in special if token.content in ids])
    tokenizer.add_tokens([token for token in plain if token.content in ids])


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, starts: bool, ends: bool) -> None:
    from tokenizers import processors

    bos = vocabulary.named("bos_token_id") if starts else None
    eos = vocabulary.named("eos_token_id") if ends else None
    if bos is None and eos is None:
        return
    ids = vocabulary.ids()
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    second = [part if part != "$A" else "$B" for part in parts]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts,
        pair=[*parts, *(f"{part}:1" for part in second)],
        special_tokens=[(token, ids[token]) for token in (bos, eos) if token is not None],
    )
