"""Which layers of a model draft for it, and what is known about that: chosen by hand, found by a calibration and kept
in the cache on disk, or a guess."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun.drafters.draft_length import Costs
from forerun.models.config import ModelConfig
from forerun.models.fields import read_json
from forerun.models.store import Store, fresh_file
from forerun.models.transformer import Transformer

VERSION = 1
HOPEFUL, LIGHTLY = 0.9, 4
"""Where nothing was measured: so good, counted as so many tokens. A few drafts will tell."""
ROW_COST = {1: 1.0, 16: 1.3}
"""What a pass over more rows costs, where nothing was measured."""
STEP_COST = 0.05
"""What a level of drafting costs besides its layers, where nothing was measured."""


@dataclass(frozen=True)
class Choice:
    layers: tuple[int, ...]
    acceptance: float = HOPEFUL
    """The chance that a drafted token is what the model says: expected at first, then learnt."""
    weight: int = LIGHTLY
    """As if that had been seen so many times."""
    level_cost: float = 1.0
    """Of one drafted level, in passes of the whole model."""
    row_costs: Mapping[int, float] = field(default_factory=lambda: ROW_COST)
    """Of a pass over so many rows."""
    speedup: float | None = None
    """What was expected of the best length, where it was measured; 1 says that nothing pays."""

    @property
    def costs(self) -> Costs:
        return Costs(self.level_cost, self.row_costs)

    @property
    def pays(self) -> bool:
        return self.speedup is None or self.speedup > 1


def by_hand(config: ModelConfig, layers: Sequence[int]) -> Choice:
    """These layers, of which nothing more is known."""
    return Choice(tuple(layers), level_cost=min(1.0, share(config, layers) + STEP_COST))


def guessed(config: ModelConfig) -> Choice:
    """The first and the last quarter, where layers differ most, and every second one between."""
    count = len(config.layers)
    edge = count // 4
    kept = [layer for layer in range(count) if layer < edge or layer >= count - edge or layer % 2 == 0]
    return by_hand(config, kept)


def parse_layers(text: str) -> tuple[int, ...]:
    """As users write them: "0,1,5-9"."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first.strip(), last.strip()) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() and len(end) < 6 for end in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(f'the layer_skip option layers is {text!r}: write the layers that draft, as in "0,1,5-9"')
        layers.extend(range(int(ends[0]), int(ends[1]) + 1))
    if len(set(layers)) < len(layers):
        raise ValueError(f"the layer_skip option layers is {text!r}: name each layer once")
    return tuple(sorted(layers))


def write_layers(layers: Sequence[int]) -> str:
    """The other way, with runs drawn together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def share(config: ModelConfig, layers: Sequence[int]) -> float:
    """What a pass through these layers reads of the weights that a whole one does; the head is in both."""
    attention = 2 * config.hidden_size * config.head_dim * (config.heads + config.kv_heads)
    sizes = [
        attention
        + 3
        * config.hidden_size
        * (config.experts_per_token * config.expert_size if layer.experts else config.intermediate_size)
        for layer in config.layers
    ]
    head = config.vocab_size * config.hidden_size
    return (head + sum(sizes[layer] for layer in layers)) / (head + sum(sizes))


# --- on disk --------------------------------------------------------------------------------------------------


def identity(model: Transformer) -> str:
    """Tells a model from others, in its number format and on its kind of device: costs differ there. Of the weights,
    norms and a corner of the embedding stand for all; they are small, and training changes them."""
    digest = hashlib.sha256(f"{VERSION} {model.config!r} {model.dtype} {model.device.type}".encode())
    for name, weight in sorted(model.named_parameters()):
        if "norm" in name or "embed" in name:
            corner = weight.detach().reshape(-1)[:1024]
            digest.update(name.encode())
            digest.update(corner.to(device="cpu", dtype=torch.float32).numpy().tobytes())
    return digest.hexdigest()[:32]


def place(model: Transformer, store: Store) -> Path:
    return store.root / "layer_skip" / f"{identity(model)}.json"


def save(choice: Choice, model: Transformer, store: Store, **about: Any) -> Path:
    """`about` is for people who look into the file."""
    path = place(model, store)
    content = {"identity": path.stem, **asdict(choice), **about}
    with fresh_file(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return path


def load(model: Transformer, store: Store) -> Choice | None:
    """What a calibration of this very model has found; None if there was none."""
    path = place(model, store)
    if not path.is_file():
        return None
    try:
        return _read(read_json(path), path.stem, len(model.config.layers))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no calibration of this model ({error}): delete it, or run `forerun calibrate layer_skip` again"
        ) from None


def _read(content: dict[str, Any], wanted: str, count: int) -> Choice:
    if content["identity"] != wanted:
        raise ValueError("it is for another model")
    layers = tuple(int(layer) for layer in content["layers"])
    if not isinstance(content["row_costs"], dict):
        raise TypeError("row_costs is no table")
    row_costs = {int(rows): float(cost) for rows, cost in content["row_costs"].items()}
    choice = Choice(
        layers,
        float(content["acceptance"]),
        int(content["weight"]),
        float(content["level_cost"]),
        row_costs,
        float(content["speedup"]),
    )
    sound = list(layers) == sorted({*layers}) and all(0 <= layer < count for layer in layers)
    sound = sound and 0 <= choice.acceptance <= 1 and choice.weight >= 1 and choice.level_cost > 0
    if not sound or not all(rows >= 1 and cost > 0 for rows, cost in row_costs.items()):
        raise ValueError("a number in it cannot be")
    return choice
