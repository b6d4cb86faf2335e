"""From logits to verdicts: each request's own rule, on the laws of its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.transfer import to_device
from forerun.core.tree import DraftTree
from forerun.engine.laws import StepLaws
from forerun.engine.packing import Packed
from forerun.engine.request import Job, Kind
from forerun.models.target import Output
from forerun.verify import gumbel
from forerun.verify.rule import ANY_DRAWING, Choose, VerificationRule, all_rules, understands


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
    """Each sequence by its own rule; sequences of one rule together. Where rules draw the target's token without a look
    at the drafts, the device is asked once."""
    if all(takes_the_likeliest(job) for job in jobs):
        return _follow_everywhere(packed, _likeliest(output), output)
    device = output.logits.device
    seeds = to_device([[job.sequence.seed, job.sequence.position + 1] for job in jobs], device)
    noise = StepNoise(seeds[:, 0], seeds[:, 1])
    any_drafts = tree.any_drafts
    drawing = Drawing.FIXED if tree.planted is not None else tree.drawing
    groups: dict[str, list[int]] = {}
    rules: dict[str, VerificationRule] = {}
    for b, job in enumerate(jobs):
        fits = any_drafts and understands(job.rule, drawing, chain=tree.width <= 1)
        rule = job.rule if fits else without_drafts(job.rule)
        groups.setdefault(rule.name, []).append(b)
        rules[rule.name] = rule
    if len(groups) == 1:
        rule = next(iter(rules.values()))
        if rule.choose is not None and device.type == "cpu":
            packed.fetch()
            return _follow_choice(rule.choose, packed, laws, noise)
        if rule.choose is not None:
            return _follow_everywhere(packed, _chosen(rule.choose, tree, packed, laws, noise, output), output)
        if rule.looks_along_the_path and device.type == "cpu":
            packed.fetch()
            return _decide(rule, tree, laws, noise)
    if laws.checked and output.likeliest is not None and min(packed.fetch(output.likeliest)[0].tolist()) < 0:
        refuse_broken(output.logits)
    tree = tree.on(device)
    p = laws.dense()
    decisions: dict[int, Decision] = {}
    for name, members in groups.items():
        if len(members) == len(jobs):
            decided = _decide(rules[name], tree, p, noise)
        else:
            rows = torch.tensor(members, device=device)
            decided = _decide(rules[name], tree.take(rows), p[rows], noise.take(rows))
        decisions.update(zip(members, decided, strict=True))
    packed.fetch()
    return [decisions[b] for b in range(len(jobs))]


def takes_the_likeliest(job: Job) -> bool:
    """Whether the token is simply that of the largest logit."""
    params = job.sequence.params
    plain = not params.penalises and not params.logit_bias and params.grammar is None
    return job.rule.name == "greedy" and plain


LIKELIEST = "likeliest"
"""The way in which those draw who take the likeliest token."""


def one_way(ways: Iterable[str | None]) -> str | None:
    """The one way in which all draw their tokens: where some take the likeliest, the others' way is theirs too, since
    their law has no other token. None where there is no such way, or somebody has none."""
    found = set(ways)
    if len(found) > 1:
        found.discard(LIKELIEST)
    return found.pop() if len(found) == 1 else None


def _likeliest(output: Output) -> Tensor:
    """[W]; -1 where the logits are broken."""
    if output.likeliest is not None:
        return output.likeliest
    refuse_broken(output.logits)
    return exact.argmax(output.logits)


def _chosen(
    choose: Choose, tree: DraftTree, packed: Packed, laws: StepLaws, noise: StepNoise, output: Output
) -> Tensor:
    """[W] what the rule draws behind every row, also where the walk will not come: a device does them all at once, and
    asking it which are needed would take longer."""
    owners = [b for b, nodes in enumerate(packed.nodes) for _ in nodes]
    places = [b * tree.size + node for b, nodes in enumerate(packed.nodes) for node in nodes]
    depths = tree.depths.reshape(-1)[to_device(places, tree.depths.device)].to(laws.device, non_blocking=True)
    chosen = choose(laws.every(), noise.take(to_device(owners, laws.device)), depths)
    return chosen if output.likeliest is None else torch.where(output.likeliest < 0, -1, chosen)


def _follow_everywhere(packed: Packed, chosen: Tensor, output: Output) -> list[Decision]:
    """With a choice [W] behind every row."""
    found: list[int] = packed.fetch(chosen)[0].tolist()
    if min(found) < 0:
        refuse_broken(output.logits)
    starts = packed.logit_starts()
    return _follow(packed, lambda walking, places: [found[starts[b] + places[b]] for b in walking])


def _follow_choice(choose: Choose, packed: Packed, laws: StepLaws, noise: StepNoise) -> list[Decision]:
    depth = -1
    races = choose is gumbel.choose and laws.can_race

    def tokens(chosen: list[int], places: list[int]) -> list[int]:
        nonlocal depth
        depth += 1
        nodes = [(b, packed.nodes[b][places[b]]) for b in chosen]
        winners = laws.winners(nodes, noise.token_keys(chosen, depth)) if races else None
        if winners is not None:
            return winners
        sequences = torch.tensor(chosen)
        found: list[int] = choose(laws.at(nodes), noise.take(sequences), torch.full_like(sequences, depth)).tolist()
        return found

    return _follow(packed, tokens)


def _follow(packed: Packed, choose: Callable[[list[int], list[int]], list[int]]) -> list[Decision]:
    """Rules that draw the target's token and follow the draft that equals it, level by level. `choose` gets the
    sequences that are still on their way, and for every sequence the place of its node among its rows.

    What was drafted are a few numbers on the host already, and comparing them there takes less than asking tensors."""
    count = len(packed.nodes)
    drafts: list[dict[tuple[int, int], int]] = []
    inner: list[set[int]] = []  # the places behind which something was drafted
    for b in range(count):
        tokens, parents = packed.drafted(b)
        inner.append(set(parents))
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
    return [Decision(accepted[b], texts[b], at[b] in inner[b]) for b in range(count)]


def refuse_broken(logits: Tensor) -> None:
    best = logits.amax(-1)
    broken = ~torch.isfinite(best)
    if bool(broken.any()):
        row = int(broken.nonzero()[0, 0])
        raise ValueError(f"the logits of row {row} hold NaN or infinity: the model's output is broken")


def without_drafts(rule: VerificationRule) -> VerificationRule:
    """Where nothing was drafted, how it would have been drawn does not matter: rules that rely on it leave the token to
    one that only samples, which they all do in the same way at a leaf. So they do where all that is drafted was not
    drawn: what a grammar forces, behind a root for which the drafter had nothing."""
    return rule if rule.drawings == ANY_DRAWING else all_rules()["sample_match"]


def _decide(rule: VerificationRule, tree: DraftTree, p: Tensor | StepLaws, noise: StepNoise) -> list[Decision]:
    verdict = rule.verify(tree, p, noise)
    committed = verdict.committed(tree.tokens)
    each = torch.arange(tree.batch, device=committed.device)
    children = (tree.children >= 0).any(-1)[each, verdict.stops]
    columns = [verdict.nodes, committed, verdict.lengths[:, None], children[:, None]]
    found = torch.cat([column.to(torch.int64) for column in columns], 1).tolist()  # all in one trip
    depth = verdict.nodes.shape[1]
    decisions = []
    for row in found:
        path, tokens, (length, refused) = row[:depth], row[depth:-2], row[-2:]
        decisions.append(Decision(path[:length], tokens[: length + 1], bool(refused)))
    return decisions
