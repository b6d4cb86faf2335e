"""From cells to rows: medians over rounds with their spread, speedups within rounds, and what theory says beside them.

A row stands for a method under a setting in a category, or `overall`. Its speed is that of whole answers, reading the
prompt included. In a closed batch of one, categories have times of their own; in larger batches and with arrivals all
categories run together, and what a category has is the speed that its requests saw. With arrivals that is also what
the overall speedup compares: a server that keeps up with its requests is no faster in total, but answers sooner.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench import prediction
from forerun.bench.cases import ALL, PLAIN, Case, Setting
from forerun.bench.measures import Cell, Sums, Work

Figures = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """What one method did in one round, for one row."""

    sums: Sums
    work: Work | None
    """None where its time is not apart from that of other categories."""
    peak_bytes: int | None

    @property
    def request_speed(self) -> float:
        return self.sums.tokens / sum(self.sums.request_seconds)

    @property
    def total_speed(self) -> float | None:
        return None if self.work is None else self.sums.tokens / self.work.seconds

    def speed(self, setting: Setting) -> float:
        """What speedups are ratios of."""
        total = self.total_speed
        return self.request_speed if total is None or setting.arrivals is not None else total


def make_rows(
    cells: Sequence[Cell],
    cases: Sequence[Case],
    settings: Sequence[Setting],
    categories: Sequence[str],
    *,
    seeded: bool = False,
) -> list[Figures]:
    """What was not measured yet has no row."""
    found: dict[tuple[Setting, Case], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.place.setting, cell.place.case), []).append(cell)
    rows = []
    for setting in settings:
        plain = found.get((setting, Case(PLAIN)), [])
        comparable = setting.temperature == 0 or seeded
        for case in cases:
            own = found.get((setting, case), [])
            made = [
                _row(case, setting, category, own, plain, categories, comparable) for category in (ALL, *categories)
            ]
            rows += [row for row in made if row is not None]
    return rows


def _row(
    case: Case,
    setting: Setting,
    category: str,
    cells: list[Cell],
    plain: list[Cell],
    categories: Sequence[str],
    comparable: bool,
) -> Figures | None:
    row: Figures = {
        "drafter": case.drafter,
        "method": case.label,
        "rule": case.rule,
        "tree": case.tree,
        "batch": setting.batch,
        "temperature": setting.temperature,
        "arrivals": setting.arrivals,
        "category": category,
    }
    concerned = [cell for cell in cells if category == ALL or cell.place.pool in (ALL, category)]
    errors = list(dict.fromkeys(cell.error for cell in concerned if cell.error is not None))
    rounds = _rounds(concerned, category, categories)
    if not rounds:
        return {**row, **NO_FIGURES, "error": "; ".join(errors)} if errors else None
    row |= _figures(list(rounds.values()))
    row |= _compared(rounds, _rounds(plain, category, categories), setting, comparable)
    return {**row, "error": "; ".join(errors) or None}


def _rounds(cells: list[Cell], category: str, categories: Sequence[str]) -> dict[int, Round]:
    """The rounds in which everything was measured that the row speaks of."""
    rounds = {}
    for number in sorted({cell.place.round for cell in cells}):
        # In one order for all methods, whatever was measured first: their texts are compared one by one.
        found = {cell.place.pool: cell for cell in cells if cell.place.round == number and cell.error is None}
        mixed = ALL in found
        pools = [ALL] if mixed else list(categories) if category == ALL else [category]
        if not all(pool in found for pool in pools):
            continue
        own = [found[pool] for pool in pools]
        if category == ALL:
            sums = Sums.together(each for cell in own for each in cell.sums.values())
        else:
            sums = own[0].sums[category]
        apart = category == ALL or not mixed
        work = sum((cell.work for cell in own[1:]), own[0].work) if apart else None
        peaks = [cell.peak_bytes for cell in own if cell.peak_bytes is not None]
        rounds[number] = Round(sums, work, max(peaks, default=None))
    return rounds


def _figures(rounds: list[Round]) -> Figures:
    last = rounds[-1].sums
    everything = Sums.together(each.sums for each in rounds)
    works = [each.work for each in rounds if each.work is not None]
    offered, accepted = everything.offered_by_depth, everything.accepted_by_depth
    figures: Figures = {"rounds": len(rounds), "tokens": last.tokens, "answers": len(last.texts)}
    figures["seconds"] = _median([work.seconds for work in works])
    figures |= _spread("tokens_per_second", [each.total_speed for each in rounds if each.total_speed is not None])
    figures |= _spread("request_tokens_per_second", [each.request_speed for each in rounds])
    figures["first_token_seconds"] = _median(everything.first_token_seconds)
    figures["first_token_seconds_p95"] = _quantile(everything.first_token_seconds, 0.95)
    figures["request_seconds"] = _median(everything.request_seconds)
    figures["tokens_per_pass"] = everything.tokens / everything.passes if everything.passes else None
    figures["acceptance"] = everything.accepted / everything.drafted if everything.drafted else None
    figures["acceptance_by_depth"] = [a / o for a, o in zip(accepted, offered, strict=True)]
    figures["offered_by_depth"] = offered
    figures["accepted_by_depth"] = accepted
    told = any(everything.phases.values())  # a peer does not say what it drafted, nor where its time went
    figures["rows_verified"] = (everything.drafted + everything.passes) // len(rounds) if told else None
    figures["rows_wasted"] = (everything.drafted - everything.accepted) // len(rounds) if told else None
    figures["shares"] = shares = _shares(works)
    figures["outside_share"] = None if shares is None else 1 - shares["draft"] - shares["target"]
    figures["in_flight"] = _median([sum(each.sums.request_seconds) / each.work.seconds for each in rounds if each.work])
    figures["peak_bytes"] = max((each.peak_bytes for each in rounds if each.peak_bytes is not None), default=None)
    figures["cache_bytes"] = max((work.cache_bytes for work in works if work.cache_bytes is not None), default=None)
    reserved = (work.reserved_bytes for work in works if work.reserved_bytes is not None)
    figures["cache_reserved_bytes"] = max(reserved, default=None)
    return figures


def _shares(works: list[Work]) -> dict[str, float] | None:
    """Of the time of whole answers: what is neither draft, target nor verify is the rest."""
    if not works or not all(work.phases for work in works):
        return None
    whole = sum(work.seconds for work in works)
    shares = {name: sum(work.phases[name] for work in works) / whole for name in ("draft", "target", "verify")}
    return {**shares, "rest": max(0.0, 1 - sum(shares.values()))}


def _compared(own: dict[int, Round], plain: dict[int, Round], setting: Setting, comparable: bool) -> Figures:
    both = sorted(own.keys() & plain.keys())
    figures: Figures = _spread("speedup", [own[n].speed(setting) / plain[n].speed(setting) for n in both])
    figures |= dict.fromkeys(("predicted_speedup", "predicted_tokens_per_pass", "identical_to_plain", "identical"))
    if not both:
        return figures
    predicted = [prediction.speedup(own[n].sums, plain[n].sums) for n in both]
    known = [each for each in predicted if each is not None]
    if known:  # of each round as it is measured: else a pause in one of them would be in the one and not in the other
        figures["predicted_speedup"] = _median(known)
        figures["predicted_tokens_per_pass"] = prediction.tokens_per_pass(Sums.together(own[n].sums for n in both))
    if comparable:  # a text is the same if it is in every round
        rounds = [zip(own[n].sums.texts, plain[n].sums.texts, strict=True) for n in both]
        same = [all(text == other for text, other in pairs) for pairs in zip(*rounds, strict=True)]
        figures |= {"identical_to_plain": all(same), "identical": sum(same)}
    return figures


def _spread(name: str, values: Sequence[float]) -> Figures:
    """The median of the rounds, the smallest and the largest."""
    ends: tuple[Callable[[Sequence[float]], float], ...] = (min, max)
    low, high = (end(values) if values else None for end in ends)
    return {name: _median(values), f"{name}_low": low, f"{name}_high": high}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


_NO_ROUND = Round(Sums(request_seconds=[1.0]), None, None)
_NAMES = (*_figures([_NO_ROUND]), *_compared({}, {}, Setting(), True))
NO_FIGURES: Figures = {**dict.fromkeys(_NAMES), "rounds": 0}
"""What a row has where its method failed."""
