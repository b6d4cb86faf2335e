"""Every family against transformers: plain texts, and trees, where each node must equal the forward of its own path."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.models.batch import Batch, Segment
from forerun.models.cache import KVCache
from forerun.models.load import load_model, resolve
from forerun.models.transformer import Transformer

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FITTING = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
"""So that the pass is in C where there is one."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3, tied": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA31}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 24}),
    "llama 3.1, in C": ("Llama", FITTING | {"rope_parameters": LLAMA31}),
    "qwen2, in C": ("Qwen2", FITTING),
    "qwen3, in C": ("Qwen3", FITTING | {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "gemma 3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    """A model of transformers and ours, loaded from the folder that it wrote."""
    name, settings = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(sum(map(ord, request.param)))
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**(SMALL | settings))
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():  # norms and biases start as ones and zeros, which would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    oracle.save_pretrained(folder)
    model = load_model(resolve(str(folder), dtype=torch.float32), dtype=torch.float32, device="cpu")
    assert isinstance(model, Transformer), "ours, not the adapter"
    return oracle, model


def expected(oracle: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(tokens[None]).logits[0]
    return logits


def near(found: Tensor, right: Tensor) -> bool:
    """As far as rounding lets float32 be: sums are added up in another order on every machine, and large numbers in a
    vector round off for the small ones."""
    largest = float(right.abs().max())
    return float((found - right).abs().max()) < 3e-4 + 1e-5 * largest


def segment(cache: KVCache, sequence: int, tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> Segment:
    cache.reserve(sequence, tokens.shape[0])
    context, slots = cache.slots(sequence)
    return Segment(sequence, tokens, positions, ancestors, context, slots, tokens.shape[0])


def random_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def test_plain_texts(pair: tuple[Any, Transformer]) -> None:
    """Three texts of different lengths in one batch, in chunks of different sizes."""
    oracle, model = pair
    texts = [random_tokens(count, seed) for seed, count in enumerate((100, 41, 3))]
    cache = KVCache(model.new_storage(256))
    found: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for chunk in (1, 20, 2, 40, 64):
        parts = {}
        for number, text in enumerate(texts):
            end = min(done[number] + chunk + number, text.shape[0])
            if end > done[number]:
                positions = torch.arange(done[number], end)
                parts[number] = segment(cache, number, text[positions], positions, None)
                done[number] = end
        rows = model.forward_rows(Batch.pack(list(parts.values())), cache.storage).logits
        for number, own in zip(parts, torch.split(rows, [p.rows for p in parts.values()]), strict=True):
            found[number].append(own)
        cache.commit({number: range(part.rows) for number, part in parts.items()})
    for text, logits in zip(texts, found, strict=True):
        assert near(torch.cat(logits), expected(oracle, text))


def test_trees(pair: tuple[Any, Transformer]) -> None:
    """Two random trees behind texts, one of which still has tokens to be read before its root."""
    oracle, model = pair
    cache = KVCache(model.new_storage(256))
    texts = [random_tokens(30, 7), random_tokens(12, 8)]
    read = [30 - 1, 8]
    parts = [segment(cache, n, texts[n][: read[n]], torch.arange(read[n]), None) for n in (0, 1)]
    model.forward_rows(Batch.pack(parts), cache.storage)
    cache.commit({n: range(read[n]) for n in (0, 1)})

    generator = torch.Generator().manual_seed(9)
    size = 12
    parents = (torch.rand(2, size, generator=generator) * torch.arange(size)).long()  # anyone before
    parents[:, 0] = -1
    tokens = torch.stack([random_tokens(size, 10), random_tokens(size, 11)])
    tokens[:, 0] = torch.stack([text[-1] for text in texts])
    tree = DraftTree.build(tokens, parents, torch.tensor([29, 11]), Drawing.FIXED)
    parts = []
    for n in (0, 1):
        own = torch.cat([texts[n][read[n] : -1], tree.tokens[n]])
        positions = torch.cat([torch.arange(read[n], texts[n].shape[0] - 1), tree.positions[n]])
        parts.append(segment(cache, n, own, positions, tree.ancestors[n]))
    logits = torch.split(model.forward_rows(Batch.pack(parts), cache.storage).logits, [part.rows for part in parts])
    for n in (0, 1):
        for node in range(size):
            path = tree.ancestors[n, node].nonzero()[:, 0]  # in the order of depth, since parents come first
            whole = torch.cat([texts[n][:-1], tree.tokens[n, path]])
            own = logits[n][parts[n].rows - size + node]
            assert near(own, expected(oracle, whole)[-1])


def test_hidden_states(pair: tuple[Any, Transformer]) -> None:
    oracle, model = pair
    text = random_tokens(20, 12)
    cache = KVCache(model.new_storage(64))
    batch = Batch.pack([segment(cache, 0, text, torch.arange(20), None)])
    features = model.forward_rows(batch, cache.storage, layers=(0, 2, 3)).features
    with torch.no_grad():
        # In float64 they are the same on any machine; transformers has no experts in it.
        exact = oracle if model.config.experts else deepcopy(oracle).double()
        states = exact(text[None], output_hidden_states=True).hidden_states
    for layer in (0, 2, 3):
        assert near(features[layer], states[layer][0])


@pytest.mark.parametrize("name", ["llama 2", "qwen3", "gemma 3"])
def test_bfloat16_is_as_near_to_float32_as_the_familys_own(name: str, tmp_path: Path) -> None:
    """We round less often than transformers does, not in the same places; so the same weights in float32 judge both."""
    family, settings = FAMILIES[name]
    torch.manual_seed(5)
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**(SMALL | settings | {"hidden_size": 48}))
    built = getattr(transformers, f"{family}ForCausalLM")
    with torch.no_grad():
        random = built(config)
        for parameter in random.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    random.save_pretrained(tmp_path)
    oracle = built.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model = load_model(resolve(str(tmp_path), dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert isinstance(model, Transformer)
    text = random_tokens(64, 13)
    cache = KVCache(model.new_storage(64))
    batch = Batch.pack([segment(cache, 0, text, torch.arange(64), None)])
    features = model.forward_rows(batch, cache.storage, layers=(0, 1, 4)).features
    with torch.no_grad():
        theirs = oracle(text[None], output_hidden_states=True).hidden_states
        exact = oracle.float()(text[None], output_hidden_states=True).hidden_states
    assert torch.equal(features[0], theirs[0][0])
    ours = (features[1].float() - exact[1][0]).norm()
    assert ours < 1.05 * (theirs[1][0].float() - exact[1][0]).norm()
    assert ours < 0.03 * exact[1][0].norm()
