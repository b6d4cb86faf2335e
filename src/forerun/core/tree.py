"""`DraftTree`: what a drafter proposes, for a batch of sequences, padded to one size.

Node 0 is the root, the last committed token, whose key/value entries do not exist yet. Every other node is a
drafted token. A parent comes before its child; padding comes as nodes without a parent.

A *draw* is one sample of a child. Usually every node is drawn once. Where equal tokens were drawn twice, as
happens with several independent drafts, they share a node (one row of the target's pass) and stay two draws:
`children` lists draws, not nodes, or the verified law would change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.core import tree_checks
from forerun.core.drawing import Drawing
from forerun.core.planted import Planted
from forerun.core.shape import TreeShape
from forerun.core.tree_tables import ancestors_of, children_of, structure_of, where_parents_are_accepted

LogValues = Callable[[], Sequence[Sequence[float] | None]]
"""For each tree and each node the log of its value: how likely its drafter finds it that all tokens between the root
and it, its own included, are right. Of padding any number; None for a tree of which it does not know. A call, since
few ask (traces, and `combine`): what a drafter has not at hand it computes then, and then alone."""


@dataclass(frozen=True)
class DraftTree:
    """B trees of N nodes each. Build one with `build`, `chain`, `from_shape` or `from_paths`."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]; -1 for the root and for padding
    depths: Tensor  # [B, N]; 0 for the root and for padding
    positions: Tensor  # [B, N] absolute positions in the text
    ancestors: Tensor  # [B, N, N] bool: [b, i, j] says that j lies on the path root..i; padding sees itself
    drawing: Drawing
    children: Tensor  # [B, N, K]: the node of the k-th draw at a node, in the order drawn; -1 for none
    q: Tensor | None  # [B, R, V]: the laws that tokens were really drawn from; None where fixed
    q_rows: Tensor | None  # [B, N, K]: the row of q behind each draw; beside the draws any row that is there
    max_depth: int  # bounds known on the host, so that loops need not ask the device:
    max_draws: int  # no walk from the root meets more draws than this
    log_values: LogValues | None = None  # where the drafter knows them
    planted: ClassVar[Planted | None] = None  # of a tree of lists: these lists

    @classmethod
    def build(
        cls,
        tokens: Tensor,
        parents: Tensor,
        root_positions: Tensor,
        drawing: Drawing,
        *,
        q: Tensor | None = None,
        children: Tensor | None = None,
        q_rows: Tensor | None = None,
        max_depth: int | None = None,
        max_draws: int | None = None,
        width: int | None = None,
        check: bool = True,
        log_values: LogValues | None = None,
    ) -> DraftTree:
        """From tokens and parents [B, N] and the absolute positions [B] of the roots.

        Without `children`, every node is one draw and siblings were drawn in node order. Without `q_rows`,
        row i of q is the law behind the children of node i. `max_depth`, `max_draws` and `width` are bounds that
        a caller on a device knows; left out, they are computed. `check=False` skips the checks that read the device.
        """
        fit = parents.shape == tokens.shape and root_positions.shape == tokens.shape[:1]
        if tokens.dim() != 2 or tokens.shape[1] == 0 or not fit:
            raise ValueError(
                f"tokens {tuple(tokens.shape)}, parents {tuple(parents.shape)} and root positions "
                f"{tuple(root_positions.shape)} do not fit: they must be [B, N], [B, N] and [B], N ≥ 1"
            )
        if check:
            tree_checks.refuse_bad_parents(parents)
        ancestors = ancestors_of(parents)
        depths = ancestors.sum(-1) - 1
        if max_depth is None:
            max_depth = int(depths.max())
        elif check and bool((depths > max_depth).any()):
            raise ValueError(f"max_depth is {max_depth}, but the tree is {int(depths.max())} deep")
        if children is None:
            children = children_of(parents, width)
            max_draws = tokens.shape[1] - 1
            if check and bool(((children >= 0).sum((1, 2)) != (parents >= 0).sum(1)).any()):
                raise ValueError(f"width is {width}, but a node has more children")
        elif check:
            tree_checks.refuse_bad_children(parents, children)
        if max_draws is None:
            max_draws = max_depth * children.shape[2]
        elif check and bool(((children >= 0).sum((1, 2)) > max_draws).any()):
            raise ValueError(f"max_draws is {max_draws}, but a tree has more draws")
        if drawing.sampled:
            if q is None:
                raise ValueError(f"a tree drawn {drawing.value} needs q, the laws its tokens were drawn from")
            if q_rows is None:
                nodes = torch.arange(tokens.shape[1], device=tokens.device)
                q_rows = nodes[None, :, None].expand_as(children)
            if check:
                tree_checks.refuse_bad_draws(tokens, children, q, q_rows, drawing)
            q_rows = tree_checks.or_first(q_rows, children >= 0)
        elif q is not None or q_rows is not None:
            raise ValueError("a fixed tree has no q: its tokens were not sampled")
        drafted = parents >= 0
        drafted[:, 0] = True
        tokens = torch.where(drafted, tokens, 0)  # whatever stood in the padding must not index anything
        positions = root_positions[:, None] + depths
        return cls(
            *(tokens, parents, depths, positions, ancestors, drawing),
            *(children, q, q_rows, max_depth, max_draws, log_values),
        )

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        root_positions: Tensor,
        drawing: Drawing,
        *,
        q: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> DraftTree:
        """A chain: tokens [B, 1 + γ] with the root first, q [B, γ, V], `lengths` [B] drafts where they differ."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens {tuple(tokens.shape)} are no chains: they must be [B, 1 + γ]")
        batch, size = tokens.shape
        parents = torch.arange(-1, size - 1, device=tokens.device).expand(batch, size)
        if lengths is not None:
            if lengths.shape != (batch,) or bool(((lengths < 0) | (lengths >= size)).any()):
                raise ValueError(f"lengths must be [B], between 0 and the {size - 1} drafts there are")
            drafts = torch.arange(size, device=tokens.device)
            parents = torch.where(drafts <= lengths[:, None], parents, -1)
        return cls.build(tokens, parents, root_positions, drawing, q=q, max_depth=size - 1, width=1)

    @classmethod
    def from_shape(
        cls,
        shape: TreeShape,
        tokens: Tensor,
        root_positions: Tensor,
        drawing: Drawing,
        *,
        q: Tensor | None = None,
        present: Tensor | None = None,
    ) -> DraftTree:
        """A shape filled with tokens [B, N]; `present` [B, N] is False where a drafter had no candidate left
        (and then for everything below)."""
        if tokens.dim() != 2 or tokens.shape[1] != shape.size:
            raise ValueError(f"tokens {tuple(tokens.shape)} do not fit a shape of {shape.size} nodes")
        parents = torch.tensor(shape.parents, device=tokens.device).expand(tokens.shape[0], -1)
        if present is not None:
            if present.shape != tokens.shape:
                raise ValueError(f"present {tuple(present.shape)} does not fit tokens {tuple(tokens.shape)}")
            parents = torch.where(present, parents, -1)
        return cls.build(tokens, parents, root_positions, drawing, q=q, max_depth=shape.depth, width=shape.width)

    @classmethod
    def from_paths(
        cls,
        roots: Sequence[int],
        paths: Sequence[Sequence[Sequence[int]]],
        root_positions: Tensor,
        drawing: Drawing,
        *,
        q: Tensor | None = None,
    ) -> DraftTree:
        """Merge drafts that were made as texts: paths[b] lists the token paths drafted for sequence b.

        Equal beginnings share nodes; for sampled paths each keeps its own draw. Row j·D + d of q [B, P·D, V]
        is then the law behind token d of path j, where P is the largest number of paths and D the longest.
        """
        if drawing is Drawing.WITHOUT_REPLACEMENT:
            raise ValueError("separate paths are not drawn without replacement: use iid, independent or fixed")
        if not len(roots) == len(paths) == len(root_positions) > 0:
            raise ValueError(
                f"{len(roots)} roots, paths for {len(paths)} sequences and {len(root_positions)} root positions: "
                f"one of each is needed for every sequence"
            )
        merged = [_merge(sequence, drawing.sampled) for sequence in paths]
        size = 1 + max(len(tree.tokens) for tree in merged)
        width = max((len(draws) for tree in merged for draws in tree.draws), default=0)
        longest = max((len(path) for sequence in paths for path in sequence), default=0)
        batch = len(roots)
        tokens = torch.zeros(batch, size, dtype=torch.int64)
        parents = torch.full((batch, size), -1)
        children = torch.full((batch, size, width), -1)
        q_rows = torch.zeros(batch, size, width, dtype=torch.int64)
        for b, tree in enumerate(merged):
            tokens[b, 0] = roots[b]
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
                tokens[b, node], parents[b, node] = token, parent
            for node, draws in enumerate(tree.draws):
                for rank, (child, path, depth) in enumerate(draws):
                    children[b, node, rank] = child
                    q_rows[b, node, rank] = path * longest + depth
        device = root_positions.device
        return cls.build(
            tokens.to(device),
            parents.to(device),
            root_positions,
            drawing,
            q=q,
            children=children.to(device),
            q_rows=q_rows.to(device) if drawing.sampled else None,
            max_depth=longest,
            max_draws=max((sum(map(len, tree.draws)) for tree in merged), default=0),
        )

    @classmethod
    def of_lists(
        cls,
        trees: Sequence[tuple[list[int], list[int]]],
        root_positions: Sequence[int],
        silent: Sequence[int] | None = None,
        log_values: LogValues | None = None,
    ) -> DraftTree:
        """Fixed trees on the host, each given by its tokens and parents, the root first and parents before children.

        `silent` says for each tree how many nodes at its end are silent: rows of the target's pass that are there for
        what the target says behind them, and that can never be accepted. Their tokens may be no tokens of the
        vocabulary. Only `rows` shows them; everywhere else they are padding.

        `build` finds out who is above whom with some thirty small operations on tensors. Here it is known while
        counting; and a rule that follows the target's own tokens asks for no tensor at all, so they are made when
        somebody does."""
        planted = object.__new__(cls)
        counts = (0,) * len(trees) if silent is None else tuple(silent)
        assert all(0 <= count < len(tokens) for count, (tokens, _) in zip(counts, trees, strict=True)), (
            "a root is heard"
        )
        vars(planted)["planted"] = Planted(tuple(trees), tuple(root_positions), counts)
        vars(planted)["log_values"] = log_values
        return planted

    def __getattr__(self, name: str) -> Any:
        """What a tree of lists does not have yet."""
        if self.planted is None or name not in self.__dataclass_fields__:
            raise AttributeError(f"a draft tree has no {name}")
        vars(self).update(self.planted.columns())
        return vars(self)[name]

    @classmethod
    def full(cls, shape: TreeShape, tokens: Tensor, root_positions: Tensor) -> DraftTree:
        """A shape of which every node is filled, with tokens [B, N] that were not drawn. What depends on the shape
        alone is made once."""
        parents, depths, ancestors, children = structure_of(shape, tokens.device)
        batch = tokens.shape[0]
        return cls(
            tokens=tokens,
            parents=parents.expand(batch, -1),
            depths=depths.expand(batch, -1),
            positions=root_positions[:, None] + depths,
            ancestors=ancestors.expand(batch, -1, -1),
            drawing=Drawing.FIXED,
            children=children.expand(batch, -1, -1),
            q=None,
            q_rows=None,
            max_depth=shape.depth,
            max_draws=shape.size - 1,
        )

    def lists(self) -> list[tuple[list[int], list[int], list[int]]]:
        """For each tree its nodes without padding, their tokens, and their parents as places in the list."""
        if self.planted is not None:
            return [(list(range(len(tokens))), tokens, parents) for tokens, parents in self.planted.drafted()]
        found = []
        for tokens, parents in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            nodes = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
            places = dict(zip(nodes, range(len(nodes)), strict=True)) | {-1: -1}
            found.append((nodes, [tokens[node] for node in nodes], [places[parents[node]] for node in nodes]))
        return found

    def rows(self) -> list[tuple[list[int], list[int], list[int]]]:
        """What the target's pass is made of: like `lists`, and behind it the silent nodes."""
        if self.planted is None or not any(self.planted.silent):
            return self.lists()
        return [(list(range(len(tokens))), list(tokens), list(parents)) for tokens, parents in self.planted.trees]

    def confidences(self) -> list[list[float] | None]:
        """For each tree and each of its nodes, padding included, how likely its drafter found it that its token is
        right where its parent's is; 1 for the root. None for a tree of which the drafter does not know."""
        if self.log_values is None:
            return [None] * self.batch
        listed = self.parents.tolist() if self.planted is None else [own for _, own in self.planted.drafted()]
        return [
            None if values is None else where_parents_are_accepted(values, parents)
            for values, parents in zip(self.log_values(), listed, strict=True)
        ]

    @property
    def silent(self) -> list[int]:
        """For each tree, how many nodes at the end of its `rows` are silent."""
        return [0] * self.batch if self.planted is None else list(self.planted.silent)

    @property
    def tokens_on(self) -> torch.device:
        """Where its tensors are, or would be."""
        return torch.device("cpu") if self.planted is not None else self.tokens.device

    @property
    def batch(self) -> int:
        return len(self.planted.trees) if self.planted is not None else self.tokens.shape[0]

    @property
    def size(self) -> int:
        if self.planted is not None:
            return max(len(tokens) for tokens, _ in self.planted.trees)
        return self.tokens.shape[1]

    @property
    def any_drafts(self) -> bool:
        """Whether anything stands behind a root that can be accepted."""
        if self.planted is not None:
            return any(len(tokens) > 1 for tokens, _ in self.planted.drafted())
        return self.size > 1 and self.max_depth > 0

    @property
    def width(self) -> int:
        """The largest number of draws at one node."""
        return self.children.shape[2]

    @property
    def present(self) -> Tensor:
        """[B, N] False for padding."""
        present = self.parents >= 0
        present[:, 0] = True
        return present

    def paths(self) -> Tensor:
        """[B, N, max_depth] the drafted tokens between the root and each node, in order, padded with -1."""
        paths = self.tokens.new_full((self.batch, self.size, max(self.max_depth, 1)), -1)
        node = torch.arange(self.size, device=self.tokens.device).expand(self.batch, -1)
        for _ in range(self.max_depth):
            depth = self.depths.gather(1, node)
            drafted = (depth > 0)[..., None]
            slot = (depth - 1).clamp_min(0)[..., None]
            token = torch.where(drafted, self.tokens.gather(1, node)[..., None], paths.gather(2, slot))
            paths.scatter_(2, slot, token)
            node = self.parents.gather(1, node).clamp_min(0)
        return paths[..., : self.max_depth]

    def on(self, device: torch.device) -> DraftTree:
        if self.tokens.device == device:
            return self
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def take(self, rows: Tensor) -> DraftTree:
        """The trees of some sequences of the batch, without what only a trace of all asks."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        picked: dict[str, Any] = {name: value[rows] for name, value in columns.items() if isinstance(value, Tensor)}
        return replace(self, **picked, log_values=None)


@dataclass(frozen=True)
class _Merged:
    tokens: list[int]  # of nodes 1, 2, …
    parents: list[int]
    draws: list[list[tuple[int, int, int]]]  # for each node: (child, path, depth) in the order drawn


def _merge(paths: Sequence[Sequence[int]], keep_multiplicity: bool) -> _Merged:
    """A trie of the paths, numbered level by level so that draws at a node come in the order of the paths."""
    tokens: list[int] = []
    parents: list[int] = []
    draws: list[list[tuple[int, int, int]]] = [[]]
    known: dict[tuple[int, int], int] = {}  # (parent, token) → node
    reached = [0] * len(paths)
    for depth in range(max((len(path) for path in paths), default=0)):
        for index, path in enumerate(paths):
            if depth >= len(path):
                continue
            parent, token = reached[index], int(path[depth])
            node = known.get((parent, token))
            if node is None:
                node = known[(parent, token)] = len(tokens) + 1
                tokens.append(token)
                parents.append(parent)
                draws.append([])
                draws[parent].append((node, index, depth))
            elif keep_multiplicity:
                draws[parent].append((node, index, depth))
            reached[index] = node
    return _Merged(tokens, parents, draws)
