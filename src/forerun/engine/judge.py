"""From logits to verdicts: each request's own rule, on the laws of its own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree
from forerun.engine.laws import StepLaws
from forerun.engine.packing import Packed
from forerun.engine.request import Job, Kind
from forerun.models.target import Output
from forerun.verify.rule import ANY_DRAWING, Choose, VerificationRule, all_rules


@dataclass(frozen=True)
class Decision:
    """The verdict on one tree, on the host."""

    path: list[int]  # accepted nodes
    tokens: list[int]  # the accepted drafts, then the target's own
    corrected: bool  # drafts stood where the path ended, and all were refused

    @property
    def kinds(self) -> list[Kind]:
        kinds: list[Kind] = ["accepted"] * len(self.path)
        return [*kinds, "corrected" if self.corrected else "bonus"]


def judge(tree: DraftTree, output: Output, jobs: list[Job], packed: Packed, laws: StepLaws) -> list[Decision]:
    """Each sequence by its own rule; sequences of one rule together."""
    if all(_takes_the_likeliest(job) for job in jobs):
        likeliest = _likeliest(output)
        starts = packed.logit_starts()
        return _follow(packed, lambda chosen, places: [likeliest[starts[b] + places[b]] for b in chosen])
    device = output.logits.device
    seeds = torch.tensor([job.sequence.seed for job in jobs], dtype=torch.int64, device=device)
    starts_at = torch.tensor([job.sequence.position + 1 for job in jobs], dtype=torch.int64, device=device)
    noise = StepNoise(seeds, starts_at)
    groups: dict[str, list[int]] = {}
    rules: dict[str, VerificationRule] = {}
    for b, job in enumerate(jobs):
        rule = job.rule if tree.max_depth else _without_drafts(job.rule)
        groups.setdefault(rule.name, []).append(b)
        rules[rule.name] = rule
    if len(groups) == 1 and device.type == "cpu":
        rule = next(iter(rules.values()))
        if rule.choose is not None:
            return _follow_choice(rule.choose, packed, laws, noise)
        if rule.looks_along_the_path:
            return _decide(rule, tree, laws, noise)
    p = laws.dense()
    decisions: dict[int, Decision] = {}
    for name, members in groups.items():
        if len(members) == len(jobs):
            decided = _decide(rules[name], tree, p, noise)
        else:
            rows = torch.tensor(members, device=device)
            decided = _decide(rules[name], tree.take(rows), p[rows], noise.take(rows))
        decisions.update(zip(members, decided, strict=True))
    return [decisions[b] for b in range(len(jobs))]


def _takes_the_likeliest(job: Job) -> bool:
    """Whether the token is simply that of the largest logit."""
    params = job.sequence.params
    return job.rule.name == "greedy" and not params.penalises and not params.logit_bias


def _likeliest(output: Output) -> list[int]:
    best = output.likeliest
    if best is None:
        refuse_broken(output.logits)
        best = exact.argmax(output.logits)
    found: list[int] = best.tolist()
    if min(found) < 0:
        refuse_broken(output.logits)
    return found


def _follow_choice(choose: Choose, packed: Packed, laws: StepLaws, noise: StepNoise) -> list[Decision]:
    depth = -1

    def tokens(chosen: list[int], places: list[int]) -> list[int]:
        nonlocal depth
        depth += 1
        sequences = torch.tensor(chosen)
        p = laws.at([(b, packed.nodes[b][places[b]]) for b in chosen])
        found: list[int] = choose(p, noise.take(sequences), torch.full_like(sequences, depth)).tolist()
        return found

    return _follow(packed, tokens)


def _follow(packed: Packed, choose: Callable[[list[int], list[int]], list[int]]) -> list[Decision]:
    """Rules that draw the target's token and follow the draft that equals it, level by level. `choose` gets the
    sequences that are still on their way, and for every sequence the place of its node among its rows.

    What was drafted are a few numbers on the host already, and comparing them there takes less than asking tensors."""
    count = len(packed.nodes)
    drafts: list[dict[tuple[int, int], int]] = []
    for tokens, parents in zip(packed.tokens, packed.parents, strict=True):
        places: dict[tuple[int, int], int] = {}
        for place in range(1, len(tokens)):
            places.setdefault((parents[place], tokens[place]), place)
        drafts.append(places)
    at = [0] * count
    accepted: list[list[int]] = [[] for _ in range(count)]
    texts: list[list[int]] = [[] for _ in range(count)]
    walking = list(range(count))
    while walking:
        for b, token in zip(walking, choose(walking, at), strict=True):
            texts[b].append(token)
        found = [(b, drafts[b].get((at[b], texts[b][-1]))) for b in walking]
        walking = []
        for b, child in found:
            if child is not None:
                at[b] = child
                accepted[b].append(packed.nodes[b][child])
                walking.append(b)
    return [Decision(accepted[b], texts[b], at[b] in packed.parents[b]) for b in range(count)]


def refuse_broken(logits: Tensor) -> None:
    best = logits.amax(-1)
    broken = ~torch.isfinite(best)
    if bool(broken.any()):
        row = int(broken.nonzero()[0, 0])
        raise ValueError(f"the logits of row {row} hold NaN or infinity: the model's output is broken")


def _without_drafts(rule: VerificationRule) -> VerificationRule:
    """Where nothing was drafted, how it would have been drawn does not matter: rules that rely on it leave the token to
    one that only samples, which they all do in the same way at a leaf."""
    return rule if rule.drawings == ANY_DRAWING else all_rules()["sample_match"]


def _decide(rule: VerificationRule, tree: DraftTree, p: Tensor | StepLaws, noise: StepNoise) -> list[Decision]:
    verdict = rule.verify(tree, p, noise)
    committed = verdict.committed(tree.tokens)
    each = torch.arange(tree.batch, device=committed.device)
    children = (tree.children >= 0).any(-1)[each, verdict.stops]
    columns = (verdict.nodes, committed, verdict.lengths, children)
    paths, tokens, lengths, refused = (column.tolist() for column in columns)
    return [Decision(paths[b][: lengths[b]], tokens[b][: lengths[b] + 1], bool(refused[b])) for b in range(tree.batch)]
