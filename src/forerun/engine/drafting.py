"""What is checked in a step: the drafter's trees, as the grammars of their texts leave them."""

from __future__ import annotations

from collections.abc import Sequence as Many

from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Drafter
from forerun.drafters.none import roots_only
from forerun.engine.grammar_trees import Room, constrain
from forerun.engine.scheduler import Turn
from forerun.models.target import TargetModel, WritesAhead


def draft(turns: Many[Turn], drafter: Drafter) -> tuple[DraftTree | None, list[frozenset[int]]]:
    """A tree for each turn that reaches its root, roots alone where nothing may be drafted; and for each tree the nodes
    that break a grammar and need no row in the pass."""
    deciding = [(turn, turn.budget) for turn in turns if turn.budget is not None]
    if not deciding:
        return None, []
    sequences = [turn.job.sequence for turn, _ in deciding]
    budgets = [budget for _, budget in deciding]
    drafts = any(budget.nodes for budget in budgets)
    tree = drafter.draft(sequences, budgets) if drafts else roots_only(sequences)
    rooms = [Room(max(own.nodes, turn.forced), max(own.depth, turn.forced)) for turn, own in deciding]
    return constrain(tree, [turn.job.walk for turn, _ in deciding], rooms)


MAX_DRAFTING = 12
"""Texts of a step on an accelerator up to which drafts that the host makes are checked. What it does for each text
takes longer than the pass from about there on, while plain decoding writes in runs (docs/log.md)."""


def most_drafting(target: TargetModel, drafter: Drafter) -> int | None:
    on_host = not drafter.layers  # what reads the target's states drafts where they are
    return MAX_DRAFTING if on_host and isinstance(target, WritesAhead) and target.device.type == "cuda" else None


MAX_BESIDE = 512
"""Rows of prompts, times texts, up to which an accelerator drafts while it reads. With more its pass takes as long as
there are rows."""


def most_beside(target: TargetModel, *, in_runs: bool) -> int | None:
    """Where it drafts in runs, a step in which the host grows trees, of a shape that may not come again, takes longer
    than it gains."""
    if target.device.type != "cuda":
        return None
    return 0 if in_runs else MAX_BESIDE
