"""From logits to verdicts: the law of every row, then each request's own rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.history import History
from forerun.core.law import LawSettings, law
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree
from forerun.engine.packing import Packed
from forerun.engine.request import Job, Kind
from forerun.verify.rule import ANY_DRAWING, VerificationRule, all_rules


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


def laws(logits: Tensor, jobs: list[Job], tree: DraftTree, packed: Packed, history: History) -> Tensor:
    """p [B, N, V], zero where a tree has no such node."""
    owner, node = packed.node_rows()
    sequences = [job.sequence for job in jobs]
    settings = LawSettings.of([sequence.params for sequence in sequences], logits.device).take(owner)
    context = None
    if settings.penalises:
        context = history.context(sequences, owner, tree.paths()[owner, node])
    p = law(logits, settings, context)
    if p.shape[0] == tree.batch * tree.size:
        return p.view(tree.batch, tree.size, -1)
    padded = p.new_zeros(tree.batch, tree.size, p.shape[1])
    padded[owner, node] = p
    return padded


def judge(tree: DraftTree, p: Tensor, jobs: list[Job]) -> list[Decision]:
    """Each sequence by its own rule; sequences of one rule together."""
    seeds = torch.tensor([job.sequence.seed for job in jobs], dtype=torch.int64, device=p.device)
    starts = torch.tensor([job.sequence.position + 1 for job in jobs], dtype=torch.int64, device=p.device)
    noise = StepNoise(seeds, starts)
    groups: dict[str, list[int]] = {}
    rules: dict[str, VerificationRule] = {}
    for b, job in enumerate(jobs):
        rule = job.rule if tree.max_depth else _without_drafts(job.rule)
        groups.setdefault(rule.name, []).append(b)
        rules[rule.name] = rule
    decisions: dict[int, Decision] = {}
    for name, members in groups.items():
        if len(members) == len(jobs):
            decided = _decide(rules[name], tree, p, noise)
        else:
            rows = torch.tensor(members, device=p.device)
            decided = _decide(rules[name], tree.take(rows), p[rows], noise.take(rows))
        decisions.update(zip(members, decided, strict=True))
    return [decisions[b] for b in range(len(jobs))]


def _without_drafts(rule: VerificationRule) -> VerificationRule:
    """Where nothing was drafted, how it would have been drawn does not matter: rules that rely on it leave the token to
    one that only samples, which they all do in the same way at a leaf."""
    return rule if rule.drawings == ANY_DRAWING else all_rules()["sample_match"]


def _decide(rule: VerificationRule, tree: DraftTree, p: Tensor, noise: StepNoise) -> list[Decision]:
    verdict = rule.verify(tree, p, noise)
    committed = verdict.committed(tree.tokens)
    each = torch.arange(tree.batch, device=p.device)
    children = (tree.children >= 0).any(-1)[each, verdict.stops]
    columns = (verdict.nodes, committed, verdict.lengths, children)
    paths, tokens, lengths, refused = (column.tolist() for column in columns)
    return [Decision(paths[b][: lengths[b]], tokens[b][: lengths[b] + 1], bool(refused[b])) for b in range(tree.batch)]
