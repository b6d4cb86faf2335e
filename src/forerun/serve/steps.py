"""What every step did to the texts of a request, as the page shows it: `forerun generate --trace`, with texts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from forerun.core.step_record import SequenceRecord, StepRecord
from forerun.serve.tokens import TokenTexts


@dataclass(frozen=True)
class Step:
    record: StepRecord
    part: SequenceRecord


class StepLog:
    """Written by the engine's thread, read by the server's."""

    def __init__(self, texts: int, drafter: str) -> None:
        self.drafter = drafter
        self._parts: list[deque[Step]] = [deque() for _ in range(texts)]

    def watch(self, record: StepRecord, part: SequenceRecord) -> None:
        self._parts[part.index].append(Step(record, part))

    def take(self, index: int, tokens: list[int]) -> list[Step]:
        """The steps up to the one that committed these tokens; the engine may be further."""
        found = []
        parts = self._parts[index]
        while parts and tokens:
            found.append(parts.popleft())
            if found[-1].part.committed:
                break
        return found

    def told(self, index: int, tokens: list[int], place: int, texts: TokenTexts) -> list[dict[str, Any]]:
        """`place` is the text's among all that the request gets."""
        return [_told(step, place, self.drafter, texts) for step in self.take(index, tokens)]


def _told(step: Step, place: int, drafter: str, texts: TokenTexts) -> dict[str, Any]:
    """Without the root, which every tree has: places and parents are those among the drafts."""
    record, part = step.record, step.part
    drafted = part.tokens[1:]
    sure = part.confidences
    return {
        "step": record.step,
        "index": place,
        "position": part.position,
        "prompt_rows": part.prompt_rows,
        "tokens": drafted,
        "texts": [texts.text(token) for token in drafted],
        "parents": [parent - 1 for parent in part.parents[1:]],
        "confidences": [None] * len(drafted) if sure is None else [round(share, 4) for share in sure[1:]],
        "accepted": [node - 1 for node in part.accepted],
        "committed": part.committed,
        "committed_texts": [texts.text(token) for token in part.committed],
        "kinds": part.kinds,
        "seconds": {name: round(spent, 6) for name, spent in record.seconds.items()},
        "drafter": drafter,
        "rule": part.rule,
        "drawing": part.drawing,
        "finish_reason": part.finish_reason,
        "silent": part.silent,
        "rows": record.rows,
        "cache_used": round(record.cache_used, 4),
    }
