"""The datastore against a search that compares everything, and what is refused."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.drafters import datastore
from forerun.drafters.datastore import DEPTH, Datastore, build, sort_suffixes
from forerun.drafters.drafter import Budget
from forerun.drafters.find import Setup, make_drafter
from forerun.drafters.retrieval import PLACES, Options, Retrieval
from tests.drafters.models import VOCABULARY, paths_of, sequence, setup, tiny

WIDE = 70_000
"""A vocabulary that does not fit in 16 bits."""


def store_of(folder: Path, documents: list[list[int]], vocabulary: int = VOCABULARY) -> Datastore:
    path = folder / f"{random.randrange(2**60)}.store"
    build(path, documents, vocabulary=vocabulary, fingerprint="tiny", model="tiny")
    return Datastore.open(path)


def drafter_of(store: Datastore, options: Options, vocabulary: int | None = None) -> Retrieval:
    return Retrieval(options, store, vocabulary or store.header.vocabulary)


def naive_tree(documents: list[list[int]], text: list[int], options: Options, budget: Budget) -> list[tuple[int, ...]]:
    """Nodes in the order of their places, then of depth and tokens."""
    most = min(options.candidates, budget.nodes)
    depth = min(options.tokens, budget.depth, most)
    for length in range(min(options.max_match, len(text)), options.min_match - 1, -1):
        counts: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for end in range(length, len(document)):
                if document[end - length : end] == text[len(text) - length :]:
                    follows = document[end : end + max(0, depth)]
                    counts.update(tuple(follows[:size]) for size in range(1, len(follows) + 1))
        if counts:
            order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
            return [(), *order[: max(0, most)]]
    return [()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@given(
    documents=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=5),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    matches=st.tuples(st.integers(1, 4), st.integers(0, 12)),
    size=st.tuples(st.integers(1, 6), st.integers(1, 20)),
    budget=st.builds(Budget, st.integers(0, 12), st.integers(0, 6)),
    wide=st.booleans(),
)
def test_equals_a_naive_search(
    folder: Path,
    documents: list[list[int]],
    text: list[int],
    matches: tuple[int, int],
    size: tuple[int, int],
    budget: Budget,
    wide: bool,
) -> None:
    if wide:  # tokens above 16 bits
        documents, text = [[token + 69_000 for token in each] for each in (*documents, [1])], [t + 69_000 for t in text]
    else:
        documents = [*documents, [1]]
    options = Options("x", size[0], matches[0] + matches[1], matches[0], size[1], min_confidence=0.0)
    store = store_of(folder, documents, WIDE if wide else VOCABULARY)
    tree = drafter_of(store, options).draft([Sequence(text, 100)], [budget])
    # Ties are in the order of tokens as well, so the trees are the same node by node.
    assert paths_of(tree, 0) == naive_tree(documents, text, options, budget)
    assert tree.drawing is Drawing.FIXED


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=120),
    repeats=st.integers(1, 3),
    kind=st.sampled_from([np.uint16, np.uint32]),
)
def test_suffixes_are_sorted_by_their_first_tokens(text: list[int], repeats: int, kind: type[np.uint16]) -> None:
    tokens = text * repeats
    order = sort_suffixes(np.array(tokens, kind)).tolist()
    # Beyond the end there is something smaller than every token, but for the first few, where it is token 0.
    assert sorted(order) == list(range(len(tokens)))
    inner = [place for place in order if place + DEPTH <= len(tokens)]
    assert inner == sorted(inner, key=lambda place: (tokens[place : place + DEPTH], place))


def test_no_match_crosses_documents(folder: Path) -> None:
    store = store_of(folder, [[1, 2], [3, 4], [2, 3, 9]])
    drafter = drafter_of(store, Options("x", min_match=1))
    assert store.longest([1, 2, 3], 1, 16) == store.longest([2, 3], 2, 2)
    assert paths_of(drafter.draft([Sequence([1, 2, 3], 9)], [Budget(8, 8)]), 0) == [(), (9,)]
    # 4 ends its document everywhere, and so does 3 4: nothing to draft.
    assert drafter.draft([Sequence([3, 4], 9)], [Budget(8, 8)]).size == 1
    # Tokens that the store cannot have, the separators among them, end a match.
    for stray in (VOCABULARY, 0xFFFF, 0xFFFFF):
        found = store.longest([stray, 2, 3], 1, 16)
        assert found is not None
        assert found.length == 2
        assert store.longest([2, stray], 1, 16) is None


def test_a_match_without_continuation_gives_way_to_a_shorter_one(folder: Path) -> None:
    store = store_of(folder, [[5, 1, 2], [6, 2, 7], [8, 2, 7]])
    tree = drafter_of(store, Options("x", min_match=1)).draft([Sequence([5, 1, 2], 9)], [Budget(8, 8)])
    assert paths_of(tree, 0) == [(), (7,)]


def test_frequent_matches_are_sampled_evenly(folder: Path) -> None:
    chosen = random.Random(1)
    documents = [[1, 2, chosen.choice([3, 3, 3, 4]), 5] for _ in range(20 * PLACES)]
    store = store_of(folder, documents)
    tree = drafter_of(store, Options("x", tokens=2, candidates=4)).draft([Sequence([1, 2], 9)], [Budget(8, 8)])
    assert paths_of(tree, 0) == [(), (3,), (3, 5), (4,), (4, 5)]
    match = store.longest([1, 2], 1, 16)
    assert match is not None
    looked_at = store.continuations(match, 1, PLACES)
    assert len(looked_at) == PLACES
    assert float((looked_at == 3).mean()) == pytest.approx(0.75, abs=0.02)


def test_a_smaller_target_gets_no_token_it_does_not_know(folder: Path) -> None:
    store = store_of(folder, [[1, 2, 39, 3], [1, 2, 5, 39]])
    tree = drafter_of(store, Options("x"), vocabulary=30).draft([Sequence([1, 2], 9)], [Budget(8, 8)])
    assert paths_of(tree, 0) == [(), (5,)]


def test_a_batch_equals_each_alone(folder: Path) -> None:
    chosen = random.Random(2)
    store = store_of(folder, [[chosen.randrange(4) for _ in range(400)]])
    texts = [sequence(number, length=20, vocabulary=4) for number in range(4)]
    budgets = [Budget(9, 5), Budget(0, 5), Budget(4, 2), Budget(9, 9)]
    drafter = drafter_of(store, Options("x", max_match=3))
    together = drafter.draft(texts, budgets)
    assert together.width > 1
    for row, (one, budget) in enumerate(zip(texts, budgets, strict=True)):
        assert paths_of(together, row) == paths_of(drafter.draft([one], [budget]), 0)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs a datastore: make one with `forerun datastore build FOLDER --out FILE`, and name it"),
        ({"store": "x", "tokens": 17}, "tokens is 17: give a whole number from 1 to 16"),
        ({"store": "x", "candidates": True}, "candidates is True: give a whole number from 0 to 256"),
        ({"store": "x", "max_match": 0}, "max_match is 0: give"),
        ({"store": "x", "min_match": 5, "max_match": 4}, "min_match is 5 and max_match 4: give a min_match"),
    ],
)
def test_wrong_options(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)  # type: ignore[arg-type]


def test_a_store_of_another_tokenizer_is_refused(folder: Path) -> None:
    path = folder / "other.store"
    build(path, [[1, 2, 3]], vocabulary=VOCABULARY + 1, fingerprint="mine", model="owner/other")
    with pytest.raises(
        ValueError, match="made with the tokenizer of owner/other, which is not that of this model: build"
    ):
        make_drafter("retrieval", setup(), {"store": str(path)})  # nobody knows the fingerprint, but sizes tell
    target = tiny(vocabulary=VOCABULARY + 1)
    made = make_drafter("retrieval", Setup(target, 64, lambda name: target, lambda: "mine"), {"store": str(path)})
    assert made.branches
    with pytest.raises(ValueError, match="owner/other"):
        make_drafter("retrieval", Setup(target, 64, lambda name: target, lambda: "yours"), {"store": str(path)})


def test_damaged_files_are_refused(folder: Path) -> None:
    path = folder / "whole.store"
    header = build(path, [[1, 2, 3, 4], [5, 6]], vocabulary=VOCABULARY, fingerprint="f")
    assert (header.tokens, header.documents, header.suffixes) == (8, 2, 6)
    whole = path.read_bytes()
    assert Datastore.open(path).intact()
    broken = folder / "broken.store"
    with pytest.raises(ValueError, match=r"there is no datastore .*broken.store: make one with `forerun datastore"):
        Datastore.open(broken)
    for length in range(len(whole)):
        broken.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is no datastore: make|is damaged or cut off: build it again"):
            Datastore.open(broken)
    broken.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="is damaged"):
        Datastore.open(broken)
    body = whole.index(b"}") + 1
    for place in range(body):  # any bit of the header
        broken.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"is no datastore|is damaged|has format"):
            Datastore.open(broken)
    broken.write_bytes(whole[:-1] + b"\xff")
    assert not Datastore.open(broken).intact()


def test_a_damaged_body_drafts_nonsense_at_worst(folder: Path) -> None:
    path = folder / "body.store"
    chosen = random.Random(3)
    build(path, [[chosen.randrange(4) for _ in range(100)]], vocabulary=VOCABULARY, fingerprint="f")
    whole = path.read_bytes()
    start = whole.index(b"}") + 1
    for _ in range(30):
        content = bytearray(whole)
        for _ in range(40):
            content[chosen.randrange(start, len(content))] = chosen.randrange(256)
        path.write_bytes(content)
        drafter = drafter_of(Datastore.open(path), Options("x", min_match=1))
        for _ in range(10):
            text = Sequence([chosen.randrange(4) for _ in range(9)], 9)
            tree = drafter.draft([text], [Budget(12, 8)])
            assert bool((tree.tokens < VOCABULARY).all())


def test_a_build_that_fails_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = folder / "own"
    own.mkdir()
    path = own / "a.store"
    build(path, [[1, 2]], vocabulary=VOCABULARY, fingerprint="f")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no text to put in the datastore: name a folder with text files"):
        build(path, [[], []], vocabulary=VOCABULARY, fingerprint="f")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(datastore, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        build(path, [[3, 4]], vocabulary=VOCABULARY, fingerprint="f")
    assert path.read_bytes() == before
    assert list(own.iterdir()) == [path]


def test_time_is_printed(folder: Path) -> None:
    generator = np.random.default_rng(0)
    documents = (generator.zipf(1.3, (100, 3000)) % VOCABULARY).tolist()
    start = time.perf_counter()
    store = store_of(folder, documents)
    built = time.perf_counter() - start
    drafter, spent = drafter_of(store, Options("x")), []
    for number in range(100):
        one = Sequence(documents[number][50:70], 9)
        start = time.perf_counter()
        drafter.draft([one], [Budget(64, 8)])
        spent.append(time.perf_counter() - start)
    median = sorted(spent)[50]
    print(f"retrieval: {store.header.tokens:,} tokens built in {built:.2f} s, then {median * 1e6:.0f} µs a step")
