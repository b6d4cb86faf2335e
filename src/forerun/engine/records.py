"""What a step did, for a trace."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from forerun.core.step_record import SequenceRecord
from forerun.core.tree import DraftTree
from forerun.engine.judge import Decision
from forerun.engine.packing import Packed
from forerun.engine.request import Update
from forerun.engine.scheduler import Turn


def records(
    turns: Many[Turn],
    packed: Packed,
    tree: DraftTree | None,
    decisions: Many[Decision],
    updates: Mapping[int, Update],
) -> list[SequenceRecord]:
    """One for each turn; updates are known by the place of their turn."""
    made = []
    told = [] if tree is None else tree.confidences()
    deciding = 0
    for place, turn in enumerate(turns):
        job = turn.job
        tokens: list[int] = []
        parents: list[int] = []
        accepted: list[int] = []
        silent = 0
        confidences: list[float] | None = None
        if turn.budget is not None and tree is not None:
            places = {node: row for row, node in enumerate(packed.nodes[deciding])}
            tokens, parents = packed.drafted(deciding)
            accepted = [places[node] for node in decisions[deciding].path]
            silent = packed.silent[deciding]
            own = told[deciding]
            confidences = None if own is None else [own[node] for node in packed.nodes[deciding][: len(tokens)]]
            deciding += 1
        update = updates.get(place)
        made.append(
            SequenceRecord(
                request=job.request,
                index=job.index,
                position=job.sequence.position - (len(update.tokens) if update else 0),
                prompt_rows=turn.chain,
                tokens=tokens,
                parents=parents,
                rule=job.rule.name,
                drawing=tree.drawing.value if tree is not None else "",
                accepted=accepted,
                committed=update.tokens if update else [],
                kinds=list(update.kinds) if update else [],
                finish_reason=job.sequence.finish_reason,
                silent=silent,
                confidences=confidences,
            )
        )
    return made
