"""The batched form of every rule against its plain reference: the identical verdict for identical noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree
from forerun.verify import batched
from forerun.verify.plain import SequenceNoise
from forerun.verify.rule import VerificationRule, all_rules, why_not

from .drafting import CHAIN_FORMS, TREE_FORMS, Drafted, TableNoise, random_drafts, reference_verdicts, verdicts

VOCABULARIES = {7: 0.7, 300: 0.22, 1000: 0.08}
"""With the share of the verdicts that each has: the plain form takes its time on large ones."""
DTYPES = (torch.float32, torch.float64)
VERDICTS = 2500
"""At least so many for each rule."""


def supported(rule: VerificationRule) -> list[Drawing]:
    """The drawings that some tree or chain may have under this rule."""
    return [d for d in Drawing if why_not(rule, d, chain=True, greedy=True) is None]


def forms(rule: VerificationRule, drawing: Drawing) -> tuple[str, ...]:
    return TREE_FORMS if why_not(rule, drawing, chain=False, greedy=True) is None else CHAIN_FORMS


@cache
def drafts(form: str, drawing: Drawing, vocabulary: int, dtype: torch.dtype) -> Drafted:
    """The same for all rules."""
    batch = max(batch_size(rule, vocabulary) for rule in all_rules().values())
    seed = TREE_FORMS.index(form) * 1009 + list(Drawing).index(drawing) * 101 + vocabulary + DTYPES.index(dtype)
    return random_drafts(seed, form, drawing, batch, vocabulary, dtype)


def wanted(rule: VerificationRule) -> list[tuple[str, Drawing, torch.dtype]]:
    return [(form, d, dtype) for d in supported(rule) for form in forms(rule, d) for dtype in DTYPES]


def batch_size(rule: VerificationRule, vocabulary: int) -> int:
    """So that the rule meets VERDICTS sequences in all."""
    return math.ceil(VERDICTS * VOCABULARIES[vocabulary] / len(wanted(rule)))


def batches(rule: VerificationRule, vocabulary: int, *dtypes: torch.dtype) -> Iterator[Drafted]:
    """Batches of every form, drawing and precision."""
    for form, drawing, dtype in wanted(rule):
        if dtype not in (dtypes or DTYPES):
            continue
        drafted = drafts(form, drawing, vocabulary, dtype)
        yield drafted.take(torch.arange(batch_size(rule, vocabulary)))


RULES = [pytest.param(rule, id=name) for name, rule in all_rules().items()]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rule", RULES)
def test_batched_equals_reference(rule: VerificationRule, vocabulary: int) -> None:
    accepted = 0
    for drafted in batches(rule, vocabulary):
        found = verdicts(rule.verify(drafted.tree, drafted.p, drafted.noise))
        assert found == reference_verdicts(rule, drafted)
        assert len(found) == batch_size(rule, vocabulary)
        accepted += sum(len(path) for path, _ in found)
    assert accepted > 20  # or else agreeing would mean little


def test_one_sequence_meets_the_numbers_of_the_batch() -> None:
    """`SequenceNoise` and the table that stands for it above."""
    drafted = drafts("random", Drawing.IID, 7, torch.float32)
    table = TableNoise.of(drafted.noise, drafted.tree, 7)
    for b in range(5):
        one, listed = SequenceNoise(drafted.noise, b, 7), table.of_sequence(b)
        for node in range(drafted.tree.size):
            assert [one.accept(node, k) for k in range(drafted.tree.width)] == listed.accepts[node]
        assert [one.final(depth) for depth in range(drafted.tree.max_depth + 1)] == listed.finals
        assert one.race(2).tolist() == listed.race(2).tolist()


def test_the_drafts_are_what_they_should_be() -> None:
    """Padding, absent nodes, repeated draws and rejected first candidates all occur, or nothing is tested."""
    padded = absent = repeated = several_laws = 0
    for form in TREE_FORMS:
        for drawing in Drawing:
            tree = drafts(form, drawing, 7, torch.float32).tree
            present = tree.present
            padded += int((present.sum(1) < tree.size).sum())
            absent += int((~present[:, :-1] & present[:, 1:]).any(1).sum())
            drawn = (tree.children >= 0).sum((1, 2))
            repeated += int((drawn > present.sum(1) - 1).sum())
            if tree.q is not None and tree.q_rows is not None:
                several_laws += int(bool((tree.q_rows != tree.q_rows[:, :, :1]).any()))
                token = tree.tokens.gather(1, tree.children.clamp_min(0).flatten(1)).view_as(tree.children)
                b, node, rank = (tree.children >= 0).nonzero(as_tuple=True)
                q = tree.q[b, tree.q_rows[b, node, rank], token[b, node, rank]]
                assert bool((q > 0).all()), f"{form} {drawing}: a child was drawn that q does not hold"
    assert min(padded, absent, repeated, several_laws) > 0


# --- whatever the batch ----------------------------------------------------------------------------------------


def alone(drafted: Drafted, b: int) -> Drafted:
    """Sequence b without its neighbours: its tree without any of the padding they caused."""
    tree = drafted.tree
    size = int(tree.present[b].nonzero().max()) + 1
    width = int((tree.children[b] >= 0).sum(-1).max()) if tree.width else 0
    row = slice(b, b + 1)
    small = DraftTree.build(
        tree.tokens[row, :size],
        tree.parents[row, :size],
        tree.positions[row, 0],
        tree.drawing,
        q=None if tree.q is None else tree.q[row],
        children=tree.children[row, :size, :width],
        q_rows=None if tree.q_rows is None else tree.q_rows[row, :size, :width],
    )
    noise = StepNoise(drafted.noise.seeds[row], drafted.noise.starts[row])
    return Drafted(small, drafted.p[row, :size], noise)


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_has_the_same_verdict_alone(rule: VerificationRule) -> None:
    smaller = 0
    for drafted in batches(rule, 300, torch.float32):
        found = verdicts(rule.verify(drafted.tree, drafted.p, drafted.noise))
        for b in range(0, drafted.tree.batch, 6):
            one = alone(drafted, b)
            smaller += one.tree.size < drafted.tree.size and one.tree.max_depth < drafted.tree.max_depth
            assert verdicts(rule.verify(one.tree, one.p, one.noise)) == [found[b]]
    assert smaller > 10


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_batch_does_not_matter(rule: VerificationRule) -> None:
    for drafted in batches(rule, 300, torch.float32):
        order = torch.randperm(drafted.tree.batch, generator=torch.Generator().manual_seed(5))
        other = drafted.take(order)
        found = verdicts(rule.verify(drafted.tree, drafted.p, drafted.noise))
        assert verdicts(rule.verify(other.tree, other.p, other.noise)) == [found[b] for b in order.tolist()]


# --- other devices ---------------------------------------------------------------------------------------------


def test_rules_do_not_ask_which_device_they_are_on() -> None:
    """Then what holds on a CPU holds elsewhere: no line is left to other devices alone."""
    folder = Path(batched.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if "device.type" in path.read_text()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rule", RULES)
def test_cuda_gives_the_same_verdicts(rule: VerificationRule, vocabulary: int) -> None:
    """Bit for bit those of the plain form on the CPU."""
    for drafted in batches(rule, vocabulary):
        there = drafted.to("cuda")
        verdict = rule.verify(there.tree, there.p, there.noise)
        assert verdict.tokens.device.type == "cuda"
        assert verdicts(verdict) == reference_verdicts(rule, drafted)
