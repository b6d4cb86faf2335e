"""What theory says a method gains, from what was measured of its parts.

Acceptance: r_d, the share of the steps whose draft at depth d - 1 was accepted that also had one at depth d accepted.
The closed form for tokens per pass is Σ_d Π_{i ≤ d} r_i. Costs: a pass of the target with the drafts in it and what
drafting takes beside it, both in plain passes, from the steps behind the first token. Reading prompts takes as long as
it takes plain decoding. What the prediction leaves out is therefore what the engine adds around model and drafter:
verdicts, bookkeeping, and texts of a batch that wait for each other.
"""

from __future__ import annotations

from itertools import pairwise

from forerun.bench.measures import Sums
from forerun.theory.closed_form import expected_tokens_by_depth, gain


def tokens_per_pass(own: Sums) -> float | None:
    if not own.passes:
        return None
    reached = [own.passes, *own.accepted_by_depth]
    return expected_tokens_by_depth(after / before if before else 0.0 for before, after in pairwise(reached))


def speedup(own: Sums, plain: Sums) -> float | None:
    """None where times or passes are not known, as of a peer."""
    tokens = tokens_per_pass(own)
    base = _later(plain, "target")
    check, draft = _later(own, "target"), _later(own, "draft")
    if tokens is None or not base or not check or draft is None:
        return None
    whole = sum(plain.phases.values())
    prompts = sum(plain.prompt_phases.values()) / whole
    rows = 2 if own.drafted else 1  # how many is in the measured cost; one row is plain decoding
    gained = gain(tokens, rows=rows, draft_steps=1, draft_cost=max(0.0, draft) / base, verify_cost=check / base)
    return 1 / (prompts + (1 - prompts) / gained)


def _later(sums: Sums, phase: str) -> float | None:
    """Seconds of a phase in a pass behind the first token."""
    passes = sums.passes - len(sums.texts)
    return (sums.phases[phase] - sums.prompt_phases[phase]) / passes if passes > 0 else None
