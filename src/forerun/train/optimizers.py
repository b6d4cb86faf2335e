"""How weights are moved by their gradients.

adamw   every number by its own scale (Loshchilov and Hutter, 2019)
muon    a matrix as a whole, in all its directions alike (Jordan, 2024); its steps are made as large as AdamW's, so
        that one learning rate serves for both, and what is no matrix of a layer is left to AdamW
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import nn

Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
BETAS = (0.9, 0.95)
DECAY = 0.01
BY_TOKEN = ("embed", "lm_head", "look_ahead")
"""Parts of the names of matrices whose rows stand for tokens: those learn one by one."""


class Learns(Protocol):
    @property
    def module(self) -> nn.Module:
        """What learns."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A learner whose weights do not all learn alike, and whose loss changes as the run goes on."""

    def pace(self, name: str) -> float:
        """What the learning rate of a weight is multiplied by."""
        ...

    def proceed(self, done: float) -> None:
        """That share of the run is over."""
        ...


def optimizers(method: Learns, kind: Optimizer, device: torch.device) -> list[torch.optim.Optimizer]:
    """For the weights that learn; each group has its `pace`, which its learning rate is multiplied by."""
    learning = [(name, weight) for name, weight in method.module.named_parameters() if weight.requires_grad]
    whole = [(name, weight) for name, weight in learning if kind == "muon" and _is_matrix(name, weight)]
    names = {name for name, _ in whole}
    rest = [(name, weight) for name, weight in learning if name not in names]
    made: list[torch.optim.Optimizer] = []
    if whole:
        made.append(
            torch.optim.Muon(_groups(method, whole), lr=0.0, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        )
    if rest:
        groups = _groups(method, rest)
        made.append(torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=DECAY, fused=device.type == "cuda"))
    return made


def _is_matrix(name: str, weight: nn.Parameter) -> bool:
    return weight.ndim == 2 and not any(part in name for part in BY_TOKEN)


def _groups(method: Learns, weights: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in weights:
        groups.setdefault(method.pace(name) if isinstance(method, Paced) else 1.0, []).append(weight)
    return [{"params": own, "pace": pace} for pace, own in groups.items()]
