"""Tiny models, sequences and a slow, plain way to ask a model for a law."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from forerun.core.law import Context, LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.find import Setup
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.config import Layer, ModelConfig
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer

VOCABULARY = 40


def tiny(seed: int = 0, vocabulary: int = VOCABULARY, context_length: int = 4096, window: int = 6) -> Transformer:
    """Random weights, but sharp enough that tokens differ in probability; one layer sees a window only."""
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        heads=2,
        kv_heads=1,
        head_dim=8,
        layers=(Layer(), Layer(window=window)),
        context_length=context_length,
    )
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.5, generator=generator)
    return model


def setup(target: TargetModel | None = None, draft: TargetModel | None = None, slots: int = 2048) -> Setup:
    return Setup(target or tiny(), slots, lambda name: draft or tiny(1))


def sequence(
    number: int, params: SamplingParams | None = None, length: int = 12, vocabulary: int = VOCABULARY
) -> Sequence:
    """A prompt of random tokens; the number is its id and makes it different from others."""
    chosen = random.Random(number)
    params = params or SamplingParams()
    seed = params.seed if params.seed is not None else chosen.randrange(2**63)
    prompt = [chosen.randrange(vocabulary) for _ in range(length)]
    coupled = params.seed is not None and not params.greedy
    return Sequence(prompt, 10_000, id=number, params=params, seed=seed, coupled=coupled)


def twin(original: Sequence) -> Sequence:
    return Sequence(
        list(original.prompt),
        original.max_tokens,
        output=list(original.output),
        id=original.id,
        params=original.params,
        seed=original.seed,
        coupled=original.coupled,
    )


def slow_logits(model: Transformer, text: Iterable[int]) -> Tensor:
    """[V] the logits after a text, read in one pass without any cache."""
    tokens = torch.tensor(list(text))
    nothing = torch.zeros(0, dtype=torch.int64)
    places = torch.arange(tokens.shape[0])
    segment = Segment(0, tokens, places, None, nothing, places, 1)
    return model.forward_rows(Batch.pack([segment]), model.new_storage(tokens.shape[0])).logits[0]


def slow_law(model: Transformer, text: Sequence, path: list[int], params: SamplingParams, vocabulary: int) -> Tensor:
    """[V] the law after a text and a drafted path, padded or cut to the vocabulary."""
    logits = slow_logits(model, [*text.tokens, *path])
    fitted = torch.full((1, vocabulary), -torch.inf)
    if model.ids is not None:
        fitted[0, model.ids] = logits
    else:
        shared = min(vocabulary, logits.shape[0])
        fitted[0, :shared] = logits[:shared]
    drafted = torch.tensor([path or [-1]])
    context = Context.of([text.prompt], [text.output], vocabulary, torch.zeros(1, dtype=torch.int64), drafted)
    return law(fitted, LawSettings.of([params]), context)[0]


def read_to_roots(model: Transformer, cache: KVCache, texts: Iterable[Sequence]) -> None:
    """What an engine has done before it asks for drafts: all of a text but its root is in the target's cache."""
    for text in texts:
        read = cache.committed(text.id)
        rows = text.position - read
        if rows:
            cache.reserve(text.id, rows)
            tokens, positions = torch.tensor(text.tokens[read:-1]), torch.arange(read, text.position)
            segment = Segment(text.id, tokens, positions, None, *cache.slots(text.id), 0)
            model.forward_rows(Batch.pack([segment]), cache.storage)
            cache.commit({text.id: range(rows)})


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The token path to every node that is there, in node order."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, parent in enumerate(parents):
        if parent >= 0:
            paths[node] = (*paths[parent], tokens[node])
    return list(paths.values())


def accept_some(tree: DraftTree, row: int, chosen: random.Random, vocabulary: int = VOCABULARY) -> list[int]:
    """What a verification might commit: the beginning of some path, and a token more."""
    path = list(chosen.choice(paths_of(tree, row)))
    return [*path[: chosen.randint(0, len(path)) if chosen.random() < 0.3 else len(path)], chosen.randrange(vocabulary)]
