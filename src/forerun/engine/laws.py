"""The target's laws at the nodes of a step's trees."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property

import torch
from torch import Tensor

from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.native import choice as native
from forerun.core.params import SamplingParams
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.engine.packing import Packed
from forerun.engine.request import Job


class StepLaws:
    """p [B, N, V] from the logits of the rows that there were. A rule that walks down a path needs a few of them, and
    a law takes longer than the walk: so rows are made when they are asked for, or all at once by `dense`."""

    def __init__(
        self,
        logits: Tensor,
        jobs: Many[Job],
        tree: DraftTree,
        packed: Packed,
        history: History,
        settings: LawSettings,
        *,
        checked: bool = False,
    ) -> None:
        """`settings` has one row for each job; `checked` is as in `law`."""
        self.logits = logits
        self.checked = checked
        self.sequences = [job.sequence for job in jobs]
        self.walks = [job.walk for job in jobs]
        self.tree = tree
        self.packed = packed
        self.history = history
        self.settings = settings
        self.shape = (tree.batch, tree.size, logits.shape[1])
        self.device = logits.device
        self._made: dict[int, Tensor] = {}

    @cached_property
    def _row(self) -> dict[int, int]:
        """For each node that is a row, by its place among all nodes: which row."""
        size = self.tree.size
        places = [b * size + node for b, nodes in enumerate(self.packed.nodes) for node in nodes]
        return {place: row for row, place in enumerate(places)}

    def at(self, nodes: Many[tuple[int, int]]) -> Tensor:
        """[C, V] for C pairs of a sequence and a node that is a row."""
        places = [b * self.shape[1] + node for b, node in nodes]
        return self._laws(places, self.logits[[self._row[place] for place in places]])

    @property
    def can_race(self) -> bool:
        """Whether `winners` can be asked: nothing but the settings of a law stands between logits and tokens."""
        plain = not self.settings.penalises and not self.settings.bias_tokens.shape[1]
        floats = self.logits.dtype in (torch.float32, torch.bfloat16)
        here = self.device.type == "cpu" and native.library() is not None
        return plain and floats and here and all(walk is None for walk in self.walks)

    def winners(self, nodes: Many[tuple[int, int]], keys: list[int]) -> list[int] | None:
        """The first to arrive under the laws of such nodes, in races of these keys, without a law being made; None
        where logits are broken, about which `at` has more to say."""
        size, settings = self.shape[1], self.settings
        columns = [settings.temperature, settings.top_k, settings.top_p, settings.min_p]
        if len(self.sequences) > 1:
            owners = torch.tensor([b for b, _ in nodes])
            columns = [column[owners] for column in columns]
        found = native.chosen(self.logits, [self._row[b * size + node] for b, node in nodes], keys, *columns)
        return None if min(found) < 0 else found

    def rows(self, sequences: Tensor, nodes: Tensor) -> Tensor:
        if not sequences.shape[0]:
            exact = torch.promote_types(self.logits.dtype, torch.float32)
            return self.logits.new_empty(0, self.shape[2], dtype=exact)
        return torch.stack(self._laws_at((sequences * self.shape[1] + nodes).tolist()))

    def entries(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        start = torch.arange(self.shape[0], device=self.device) * self.shape[1]
        places = start.view(-1, *[1] * (nodes.dim() - 1)) + nodes
        asked = zip(self._laws_at(places.flatten().tolist()), tokens.flatten().tolist(), strict=True)
        return torch.stack([p[token] for p, token in asked]).view(tokens.shape)

    def every(self) -> Tensor:
        """[W, V] of all rows, in their order."""
        return self._laws(list(self._row), self.logits)

    def dense(self) -> Tensor:
        """p [B, N, V], zero where a tree has no such node."""
        places = list(self._row)
        p = self.every()
        if len(places) == self.shape[0] * self.shape[1]:
            return p.view(self.shape)
        padded = p.new_zeros(self.shape[0] * self.shape[1], self.shape[2])
        return padded.index_copy_(0, torch.tensor(places, device=self.device), p).view(self.shape)

    def _laws_at(self, places: list[int]) -> list[Tensor]:
        """Nodes that are no rows are asked about too, by rules that look at all sequences: for them any law will do."""
        missing = [place for place in dict.fromkeys(places) if place not in self._made]
        if missing:
            rows = [self._row.get(place, 0) for place in missing]
            made = self._laws(missing, self.logits[torch.tensor(rows, device=self.device)])
            self._made.update(zip(missing, made.unbind(), strict=True))
        return [self._made[place] for place in places]

    def _laws(self, places: list[int], logits: Tensor) -> Tensor:
        owners = [place // self.shape[1] for place in places]
        settings, context = self.settings, None
        if owners != list(range(len(self.sequences))):
            settings = settings.take(to_device(owners, self.device))
        if settings.penalises:
            lies_on = self.tree.tokens.device
            owner = to_device(owners, lies_on)
            nodes = to_device([place % self.shape[1] for place in places], lies_on)
            paths = self.tree.paths()[owner, nodes].to(self.device)
            context = self.history.context(self.sequences, owner.to(self.device), paths)
        return law(logits, settings, context, self._masks(places), checked=self.checked)

    def _masks(self, places: list[int]) -> Tensor | None:
        """[C, V] what the grammars allow, each node in the state that its own path leads to; None without any."""
        if all(walk is None for walk in self.walks):
            return None
        masks = torch.ones(len(places), self.shape[2], dtype=torch.bool)
        for mask, place in zip(masks, places, strict=True):
            b, node = divmod(place, self.shape[1])
            walk = self.walks[b]
            if walk is not None and place in self._row:
                mask.copy_(walk.mask(self.packed.path(b, node)))
        return masks.to(self.device)


class SettingsMemo:
    """The settings of the last step, which are those of this one unless somebody came or went."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._settings: LawSettings | None = None

    def of(self, jobs: Many[Job], device: torch.device) -> LawSettings:
        params = [job.sequence.params for job in jobs]
        same = len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))
        if self._settings is None or not same:
            self._params, self._settings = params, LawSettings.of(params, device)
        return self._settings
