from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.find import make_drafter
from forerun.drafters.suffix import LEAD, Options, Suffix
from forerun.drafters.suffix_tree import LONGEST, OWN, PLACES, Limits, Store, Trust, grow
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from tests.drafters.models import VOCABULARY, paths_of, sequence, setup
from tests.engine.tiny import drain, tiny_model

Texts = list[list[int]]
SHORT = st.lists(st.integers(0, 2), min_size=1, max_size=PLACES)  # so that no place is left out for their number


def suffix(**options: Any) -> Suffix:
    return Suffix(Options(**options), VOCABULARY)


def finished(prompt: list[int], output: list[int], number: int = 0) -> Sequence:
    return Sequence(prompt, 10_000, output=output, finish_reason="stop", id=number)


def store(texts: Texts, trust: Trust | None = None, *, grows: bool = False) -> Store:
    made = Store(trust or Trust(OWN), grows=grows)
    for number, text in enumerate(texts):
        if number:
            made.begin()
        made.extend(text)
    return made


def naive_places(texts: Texts, end: list[int], longest: int) -> list[tuple[int, int, int]]:
    """(text, place, length of the match), by comparing everything with everything; something must follow."""
    found = []
    for number, text in enumerate(texts):
        for place in range(1, len(text)):
            lengths = [n for n in range(1, min(place, len(end), longest) + 1) if text[place - n : place] == end[-n:]]
            if lengths:
                found.append((number, place, max(lengths)))
    return found


def naive_chances(own: list[int], earlier: Texts, path: list[int], trusts: tuple[Trust, Trust]) -> dict[int, float]:
    """The formula of the module, from the texts: what follows where all of the path does, too."""
    counts: dict[tuple[int, int], dict[int, int]] = {}  # (minus length, source) → token → count
    for source, texts in enumerate(([own], earlier)):
        for number, place, length in naive_places(texts, own, LONGEST):
            text = [*texts[number], *path] if source == 0 else texts[number]
            if text[place : place + len(path)] == path and place + len(path) < len(text):
                followers = counts.setdefault((-length, source), {})
                token = text[place + len(path)]
                followers[token] = followers.get(token, 0) + 1
    chances: dict[int, float] = {}
    left = 1.0
    for (length, source), followers in sorted(counts.items()):
        new = {token: count for token, count in followers.items() if token not in chances}
        if new:
            trust = trusts[source].chances[min(LONGEST, len(path) - length)]
            chances |= {token: left * trust * count / sum(new.values()) for token, count in new.items()}
            left *= 1 - trust
    return chances


@given(own=SHORT, earlier=st.lists(SHORT, max_size=1), nodes=st.integers(1, 9), depth=st.integers(1, 5))
def test_the_tree_is_the_naive_one(own: list[int], earlier: Texts, nodes: int, depth: int) -> None:
    trusts = Trust(OWN), Trust(OWN)
    trusts[1].chances = [0.9 * chance for chance in trusts[0].chances]
    places = store([own], trusts[0], grows=True).places(own, LONGEST)
    places += store(earlier, trusts[1]).places(own, LONGEST)
    guess = grow(own[-1], places, Limits(nodes, depth, 3, 0.01))
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    everything: dict[tuple[int, ...], float] = {}
    for _ in range(depth):
        level = [
            (value * chance, (*path, token))
            for value, path in level
            for token, chance in naive_chances(own, earlier, list(path), trusts).items()
            if value * chance >= 0.01
        ]
        everything |= {path: value for value, path in level}
    drafted = paths_of(DraftTree.of_lists([(guess.tokens, guess.parents)], [Sequence(own, 1).position]), 0)[1:]
    assert len(set(drafted)) == len(drafted) == min(nodes, len(everything))
    for path, value in zip(drafted, guess.values[1:], strict=True):
        assert everything[path] == pytest.approx(value)
    assert guess.values[1:] == pytest.approx(sorted(everything.values(), reverse=True)[:nodes])


@given(texts=st.lists(SHORT, min_size=2, max_size=4), end=SHORT)
def test_what_is_dropped_leaves_nothing_behind(texts: Texts, end: list[int]) -> None:
    dropped, fresh = store(texts), store(texts[1:])
    dropped.drop_first()
    assert list(dropped.texts()) == texts[1:]
    assert len(dropped) == sum(map(len, texts[1:]))
    assert [place[1:] for place in dropped.places(end, 9)] == [place[1:] for place in fresh.places(end, 9)]
    dropped.begin()
    for _ in texts[1:]:
        dropped.drop_first()
    assert not any(vars(dropped)["_latest"])
    assert not any(vars(dropped)["_before"])
    assert not dropped.tokens


def test_a_longer_match_counts_more_and_a_shorter_one_still_counts() -> None:
    tokens = [1, 2, 3, 30, 9, 2, 3, 20, 8, 2, 3, 20, 7, 1, 2, 3]
    drafter = suffix(tokens=4, min_confidence=0.01)
    one = Sequence(tokens, 100)
    tree = drafter.draft([one], [Budget(2, 1)])
    assert paths_of(tree, 0) == [(), (30,), (20,)]
    trust = Trust(OWN).chances
    assert tree.confidences() == [pytest.approx([1.0, trust[3], (1 - trust[3]) * trust[2]])]


def test_a_repeated_pattern_is_drafted_at_full_length() -> None:
    tree = suffix(tokens=7).draft([Sequence([5, 6, 7] * 9 + [5, 6], 100)], [Budget(8, 8)])
    assert tree.tokens.tolist() == [[6, 7, 5, 6, 7, 5, 6, 7]]


def test_little_is_drafted_where_little_is_known() -> None:
    drafter = suffix(min_confidence=0.5)
    assert drafter.draft([Sequence([1, 2, 3], 9), Sequence([4, 5, 4], 9, id=1)], [Budget(9, 9)] * 2).size == 1
    assert drafter.draft([Sequence([1, 2, 3, 4, 9, 1, 2, 3, 4], 9, id=2)], [Budget(9, 9)]).size > 1


def test_width_one_is_a_chain() -> None:
    chosen = random.Random(1)
    one = Sequence([chosen.randrange(3) for _ in range(300)], 100)
    assert suffix(width=1, min_confidence=0.001).draft([one], [Budget(16, 16)]).width == 1
    assert not suffix(width=1).branches
    assert suffix(width=3, min_confidence=0.001).draft([one], [Budget(16, 16)]).width in {2, 3}


def test_outputs_that_are_over_help_the_next_request() -> None:
    drafter = suffix(min_confidence=0.05)
    fresh = Sequence([9, 8, 1, 2, 3, 4], 100, id=7)
    assert drafter.draft([fresh], [Budget(8, 8)]).size == 1
    drafter.forget(finished([0], [1, 2, 3, 4, 5, 6, 7]))
    assert paths_of(drafter.draft([fresh], [Budget(8, 8)]), 0)[-1] == (5, 6, 7)
    drafter.forget(finished([30, 31, 32, 33], [21, 22]))  # how an answer begins is known by the end of its prompt
    assert (21, 22) in paths_of(drafter.draft([Sequence([30, 31, 32, 33], 100, id=8)], [Budget(8, 8)]), 0)


def test_a_text_that_steps_back_is_not_an_output() -> None:
    drafter = suffix()
    one = Sequence([1, 2], 100, output=[3, 4])
    drafter.draft([one], [Budget(8, 8)])
    drafter.forget(one)
    assert len(drafter.earlier) == 0
    one.finish_reason = "cancelled"
    drafter.forget(one)
    assert list(filter(None, drafter.earlier.texts())) == [[1, 2, 3, 4]]


def test_through_the_engine_every_output_is_remembered_once() -> None:
    target = tiny_model()
    drafter = Suffix(Options(), target.vocab_size)
    engine = Engine(target, drafter, slots=160)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[7, 8, 9, 7, 8, number] for number in range(6)]
    texts = drain(engine, [Request(prompt, params) for prompt in prompts])
    kept = sorted(filter(None, drafter.earlier.texts()))
    assert kept == sorted(prompt[-LEAD:] + text[0] for prompt, text in zip(prompts, texts, strict=True))
    assert not vars(drafter)["_own"]
    assert not vars(drafter)["_guesses"]


def test_memory_is_bounded_and_the_oldest_outputs_go() -> None:
    drafter = suffix(memory=20)
    for number in range(30):
        drafter.forget(finished([number], [number] * (3 + number % 4)))
        assert len(drafter.earlier) <= 20
    assert [text[0] for text in drafter.earlier.texts()] == [27, 28, 29]
    drafter.forget(finished([1], list(range(30))))
    assert list(drafter.earlier.texts()) == [list(range(10, 30))]
    nothing = suffix(memory=0)
    nothing.forget(finished([1], [2, 3]))
    assert len(nothing.earlier) == 0


def test_outputs_that_are_over_wait_until_something_is_drafted() -> None:
    """And what it takes to read them then is told, once."""
    drafter, eager = suffix(memory=2000), suffix(memory=2000)
    for number in range(40):
        output = [(number * place) % 17 for place in range(100)]
        for each in (drafter, eager):
            each.forget(finished([number], output))
        assert len(eager.earlier) <= 2000  # which reads them
    assert len(vars(drafter)["_earlier"]) == 0
    assert 2000 <= sum(map(len, vars(drafter)["_over"])) < 2200
    assert drafter.late() == 0
    fresh = Sequence([3, 6, 9, 12], 100, id=99)
    trees = [each.draft([fresh], [Budget(8, 8)]) for each in (drafter, eager)]
    assert paths_of(trees[0], 0) == paths_of(trees[1], 0)
    assert len(paths_of(trees[0], 0)) > 3
    assert list(drafter.earlier.texts()) == list(eager.earlier.texts())
    assert drafter.late() > eager.late() > 0
    assert drafter.late() == 0


def test_trust_follows_what_comes() -> None:
    trust = Trust(OWN)
    places = store([[1, 2, 3, 9, 1, 2]], trust, grows=True).places([1, 2, 3, 9, 1, 2], 8)
    before = trust.chances[2], trust.chances[3]
    guess = grow(2, places, Limits(4, 4, 2, 0.001))
    guess.learn([3, 5])
    assert trust.chances[2] > before[0]  # 3 came after 1 2, as before
    assert trust.chances[3] < before[1]  # and then 9 did not
    for _ in range(400):
        guess.learn([3, 5])
    assert trust.chances[2] > 0.99
    assert trust.chances[3] < 0.01
    assert len(grow(2, places, Limits(4, 4, 2, 0.1)).tokens) == 2


def test_observing_teaches_and_unknown_sequences_do_not() -> None:
    drafter = suffix()
    one = Sequence([1, 2, 3, 9, 1, 2], 100)
    drafter.draft([one], [Budget(4, 4)])
    before = list(vars(drafter)["_trust"].chances)
    one.commit([3])
    drafter.observe([Observation(Sequence([1], 9, id=5), [1], {}, 0), Observation(one, [3], {}, 5)])
    after = vars(drafter)["_trust"].chances
    assert [place for place in range(LONGEST) if before[place] != after[place]] == [2]


@given(st.lists(st.lists(st.integers(0, 100), max_size=9), min_size=1, max_size=3))
def test_planting_gives_what_building_gives(shapes: Texts) -> None:
    trees = []
    for numbers in shapes:
        parents = [-1, *(number % node for node, number in enumerate(numbers, start=1))]
        trees.append(([0, *numbers], parents))
    texts = [Sequence([4] * (5 + number), 9) for number in range(len(trees))]
    planted = DraftTree.of_lists(trees, [text.position for text in texts])
    built = DraftTree.build(
        planted.tokens, planted.parents, torch.tensor([text.position for text in texts]), Drawing.FIXED
    )
    for name, value in vars(built).items():
        found = vars(planted)[name]
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name
        else:
            assert found == value, name


# --- files -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_there_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    drafter = make_drafter("suffix", setup(), {"path": str(path)})  # which does not exist yet
    assert isinstance(drafter, Suffix)
    for number in range(3):
        drafter.forget(finished([1, 2], [number, 5, 6]))
    drafter.save(path)
    drafter.save(path)  # over the old one
    assert [item.name for item in tmp_path.iterdir()] == ["outputs.json"]
    again = make_drafter("suffix", setup(), {"path": str(path)})
    assert isinstance(again, Suffix)
    assert [*filter(None, again.earlier.texts())] == [[1, 2, number, 5, 6] for number in range(3)]
    less = make_drafter("suffix", setup(), {"path": str(path), "memory": 6})
    assert isinstance(less, Suffix)
    assert list(less.earlier.texts()) == [[1, 2, 2, 5, 6]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is damaged or was not saved by the suffix drafter: remove it, or name another path"),
        ("\udcff", "is damaged or was not saved"),
        ("[]", "is damaged or was not saved"),
        ('{"format": "forerun suffix 1", "vocabulary": 41, "outputs": []}', "41 tokens and this model has 40: name"),
        ('{"format": "forerun suffix 1", "vocabulary": 40, "outputs": 3}', "holds no lists of tokens: remove it"),
        ('{"format": "forerun suffix 1", "vocabulary": 40, "outputs": [[40]]}', "holds no lists of tokens"),
        ('{"format": "forerun suffix 1", "vocabulary": 40, "outputs": [[1], [true]]}', "holds no lists of tokens"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "outputs.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=reason):
        make_drafter("suffix", setup(), {"path": str(path)})


def test_paths_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: name a file that the suffix drafter saved"):
        make_drafter("suffix", setup(), {"path": str(tmp_path)})
    with pytest.raises(ValueError, match=r"cannot write .*: name a file in a folder"):
        suffix().save(tmp_path / "none" / "outputs.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="cannot write"):
        suffix().save(tmp_path / "folder")
    assert [item.name for item in tmp_path.iterdir()] == ["folder"]


def test_a_file_names_its_vocabulary(tmp_path: Path) -> None:
    suffix().save(tmp_path / "x")
    assert json.loads((tmp_path / "x").read_text("utf-8"))["vocabulary"] == VOCABULARY


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": -1}, "tokens is -1: give a whole number from 0 to 64"),
        ({"tokens": True}, "tokens is True: give a whole number"),
        ({"max_match": 65}, "max_match is 65: give a whole number from 1 to 64"),
        ({"width": 0}, "width is 0: give a whole number from 1 to 32"),
        ({"memory": -1}, "memory is -1: give a whole number from 0 to 10000000"),
        ({"min_confidence": 0}, "min_confidence is 0: give a number above 0"),
        ({"min_confidence": float("nan")}, "min_confidence is nan: give a number above 0"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)


# --- time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 30, 3000])
def test_time_is_printed(vocabulary: int) -> None:
    """Three tokens are a worst case: everything has been said before, many times."""
    chosen = random.Random(0)
    drafter = Suffix(Options(memory=20_000), vocabulary)
    for number in range(20):
        drafter.forget(finished([0], [chosen.randrange(vocabulary) for _ in range(999)], number))
    one = sequence(1, length=6000, vocabulary=vocabulary)
    start = time.process_time()
    drafter.draft([one], [Budget(16, 16)])
    first = time.process_time() - start
    spent, nodes = [], 0
    for _ in range(200):
        copied = one.tokens[-500:-497]
        one.commit([*copied, chosen.randrange(vocabulary)])
        start = time.process_time()
        tree = drafter.draft([one], [Budget(16, 16)])
        drafter.observe([Observation(one, copied, {}, one.position)])
        spent.append(time.process_time() - start)
        nodes += tree.size - 1
    median = sorted(spent)[100]
    print(
        f"suffix, {vocabulary} tokens: index {first * 1e3:.1f} ms, then {median * 1e6:.0f} µs, {nodes / 200:.1f} nodes"
    )
