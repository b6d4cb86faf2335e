"""What every drafter has to hold to, whatever its method. `test_all.py` asks it of each file in the folder."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.datastore import build
from forerun.drafters.drafter import Budget, Checked, Drafter, Observation, SharesCache
from forerun.drafters.find import make_drafter
from forerun.models.cache import KVCache
from forerun.models.heads.feature_head import new_head
from forerun.models.heads.files import HeadFolder, write_head
from forerun.models.heads.side_heads import METHODS as SIDE_HEADS
from forerun.models.heads.side_heads import new_side_heads
from tests.drafters.models import VOCABULARY, accept_some, read_to_roots, sequence, setup, tiny, twin
from tests.engine.tiny import tiny_model

REQUESTS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(temperature=0.8, top_p=0.7, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.3),
    SamplingParams(seed=8, top_k=3, min_p=0.01),
)


def needed(name: str, hidden: int = 16) -> dict[str, Any]:
    """Options that a drafter cannot do without: whoever needs a model gets a tiny one, and so for a datastore and for
    what is trained for a target of that hidden size."""
    known = {field.name for field in fields(import_module(f"forerun.drafters.{name}").Options)}
    named = {"model": "tiny", "models": "tiny,other"}
    stores = {"store": str(tiny_store())} if "store" in known else {}
    trained = {}
    if "path" in known and name != "suffix":
        trained = {"path": str(look_ahead(hidden) if name == "parallel" else untrained(name, hidden))}
    return {option: value for option, value in named.items() if option in known} | stores | trained


@cache
def tiny_store() -> Path:
    """Documents of few different tokens, so that texts are found there."""
    chosen = random.Random(0)
    path = Path(mkdtemp()) / "tiny.store"
    atexit.register(rmtree, path.parent)
    documents = [[chosen.randrange(VOCABULARY) for _ in range(600)] for _ in range(8)]
    build(path, documents, vocabulary=VOCABULARY, fingerprint="tiny")
    return path


@cache
def look_ahead(hidden: int, count: int = 3) -> Path:
    """Look-ahead embeddings that nobody trained."""
    path = Path(mkdtemp()) / "look-ahead"
    atexit.register(rmtree, path.parent)
    weight = torch.randn(count, hidden, generator=torch.Generator().manual_seed(1))
    write_head(path, HeadFolder("parallel", {"hidden_size": hidden}, {"look_ahead.weight": weight}))
    return path


@cache
def untrained(name: str, hidden: int) -> Path:
    """A head that nobody trained, over a part of the vocabulary."""
    path = Path(mkdtemp()) / name
    atexit.register(rmtree, path.parent)
    target = tiny() if hidden == 16 else tiny_model()
    ids = torch.arange(0, target.vocab_size, 2)
    made = new_side_heads(name, target, 3, ids=ids) if name in SIDE_HEADS else new_head(name, target, ids=ids)
    generator = torch.Generator().manual_seed(4)
    trained = {
        weight: tensor if weight == "d2t" else tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        for weight, tensor in made.trained().items()
    }
    write_head(path, HeadFolder(name, {"num_heads": 3}, trained))
    return path


def fresh(name: str) -> Drafter:
    """A new drafter with its own defaults, but for what it needs."""
    return make_drafter(name, setup(), needed(name))


def check_tree(drafter: Drafter, tree: DraftTree, sequences: list[Sequence], budgets: list[Budget]) -> None:
    """The tree is well formed, starts at the last committed token, keeps to its budget and is what it says it is."""
    DraftTree.build(
        tree.tokens,
        tree.parents,
        tree.positions[:, 0],
        tree.drawing,
        q=tree.q,
        children=tree.children,
        q_rows=tree.q_rows,
        max_depth=tree.max_depth,
        max_draws=tree.max_draws,
    )
    assert tree.batch == len(sequences)
    assert tree.tokens[:, 0].tolist() == [item.tokens[-1] for item in sequences]
    assert tree.positions[:, 0].tolist() == [item.position for item in sequences]
    rows = [len(nodes) - 1 for nodes, _, _ in tree.rows()]
    drafted = (tree.parents >= 0).sum(1).tolist()
    assert drafted == [count - silent for count, silent in zip(rows, tree.silent, strict=True)]
    deepest = tree.depths.amax(1).tolist()
    for count, depth, budget in zip(rows, deepest, budgets, strict=True):
        assert count <= max(0, budget.nodes)
        assert depth <= max(0, budget.depth)
    assert bool(((tree.tokens >= 0) & (tree.tokens < VOCABULARY)).all())
    if not drafter.branches:
        assert tree.width <= 1, "it says that it does not branch"
    assert tree.drawing in {drafter.drawing, Drawing.FIXED}
    relied_on = [not item.params.greedy and not item.coupled for item in sequences]
    if tree.drawing is not drafter.drawing:
        some = (tree.parents >= 0).any(1)
        assert not bool((some & torch.tensor(relied_on)).any()), "drawn otherwise than it says"
    if tree.q is not None:
        assert tree.q.shape[2] == VOCABULARY


def check_nodes(tree: DraftTree, row: int, top: int, chosen: random.Random) -> Checked:
    """What a target might say about the nodes of a tree: any candidates, those of a node all different."""
    _, tokens, parents = tree.rows()[row]
    candidates = [chosen.sample(range(VOCABULARY), min(top, VOCABULARY)) for _ in tokens]
    return Checked(tokens, parents, torch.tensor(candidates))


def live(drafter: Drafter, steps: int, seed: int, check: Callable[[DraftTree], None] | None = None) -> list[Any]:
    """Some requests through some steps, with luck and bad luck, pauses, ends and new ones; returns what was drafted."""
    chosen = random.Random(seed)
    target = tiny()
    cache = KVCache(target.new_storage(2048))
    if isinstance(drafter, SharesCache):
        drafter.share(cache)
    running = [sequence(number, REQUESTS[number % len(REQUESTS)]) for number in range(3)]
    born = len(running)
    told: list[Any] = []
    read: set[int] = set()  # the first step of a text reads its prompt
    states = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        turn = [item for item in running if chosen.random() < 0.8] or running[:1]
        budgets = [Budget(chosen.choice([0, 1, 2, 3, 5, 8, 40]), chosen.choice([0, 1, 2, 4, 8])) for _ in turn]
        if isinstance(drafter, SharesCache):
            read_to_roots(target, cache, turn)
        tree = drafter.draft(turn, budgets)
        cache.check_integrity()
        assert all(cache.slots(number)[1].numel() == 0 for number in cache.holders), "it gives back what it reserves"
        check_tree(drafter, tree, turn, budgets)
        if check is not None:
            check(tree)
        told.append((tree.tokens.tolist(), tree.parents.tolist(), tree.drawing))
        observations = []
        for row, item in enumerate(turn):
            start = item.position if item.id in read else 0
            read.add(item.id)
            tokens = accept_some(tree, row, chosen)
            item.commit(tokens)
            rows = item.position - start
            features = {layer: torch.randn(rows, 16, generator=states) for layer in drafter.layers}
            checked = check_nodes(tree, row, drafter.top, chosen) if drafter.top else None
            observations.append(Observation(item, tokens, features, start, checked))
        drafter.observe(observations)
        if chosen.random() < 0.3:
            gone = running.pop(chosen.randrange(len(running)))
            drafter.forget(gone)
            cache.free(gone.id)
            read.discard(gone.id)
            # Out of the cache for a while, or over and another in its place.
            running.append(twin(gone) if chosen.random() < 0.5 else sequence(born, REQUESTS[born % len(REQUESTS)]))
            born += 1
    return told
