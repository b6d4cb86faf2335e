"""How likely a text was to the model, token by token: for prompts that are told back with their log probabilities."""

from __future__ import annotations

import torch

from forerun.engine.logprobs import logprobs
from forerun.engine.request import TokenLogprob
from forerun.models.batch import KEYS, Batch, TextRows
from forerun.models.cache import KVCache
from forerun.models.target import TargetModel

CHUNK = 128
"""Rows of a pass: all of them have logits, and those of a long text at once would not fit."""
BLOCK = 16


@torch.inference_mode()
def score(target: TargetModel, tokens: list[int], count: int) -> list[TokenLogprob | None]:
    """Under the model's own law, with the `count` likeliest; None for the first token, which follows nothing. The text
    is read in a cache of its own, gone afterwards, so it waits for nobody's."""
    sequence = -1
    if target.begin(sequence, tokens) != tokens:
        target.forget(sequence)
        raise ValueError("this model reads prompts with an encoder, which gives them no probability: leave echo out")
    cache = KVCache(target.new_storage(-(-(len(tokens) + KEYS) // BLOCK) * BLOCK))
    scored: list[TokenLogprob | None] = [None]
    try:
        for start in range(0, len(tokens) - 1, CHUNK):
            rows = min(CHUNK, len(tokens) - 1 - start)
            cache.reserve(sequence, rows)
            text = TextRows(
                sequence=sequence,
                rows=rows,
                tokens=tokens[start : start + rows],
                parents=None,
                before=start,
                blocks=cache.blocks(sequence),
                block_size=cache.block_size,
                logits=rows,
                run=cache.run(sequence, KEYS),
            )
            output = target.forward_rows(Batch(texts=(text,)), cache.storage, ())
            found = logprobs(output.logits, list(range(rows)), tokens[start + 1 : start + 1 + rows], count)
            assert found is not None
            scored += found
            cache.commit({sequence: range(rows)})
    finally:
        target.forget(sequence)
    return scored
