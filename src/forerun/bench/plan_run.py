"""What to run on this machine: profiles the target, watches drafters on prompts, recommends, and checks what it said.

For every concurrency the drafter and the size of its drafts with the largest expected gain, and whether that is a clear
gain, as surely as its interval says (`plan_model`). If not: do not speculate. The check, a short run of `bench`, has
the last word: what it does not confirm is not advised.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.bench.cases import shown
from forerun.bench.contest import in_words
from forerun.bench.contestants import prompt_tokens
from forerun.bench.memory import Ledger
from forerun.bench.plan_check import Check, Checked
from forerun.bench.plan_drafters import Measured, Tell, Watch, default_drafters
from forerun.bench.plan_model import SURE, Expected, expect, gain_of
from forerun.bench.plan_profile import Profile, profile
from forerun.bench.questions import Question
from forerun.core.params import SamplingParams
from forerun.engine.loaded import LoadedModel

ALONE, TOGETHER = 6, 24
"""Texts of the check: one at a time, and in larger batches, which are filled at least once."""
ROUNDS = 2
"""Of the check."""
TARGET = "target"
MOST_CHECKED = 4
"""Methods that are checked for one concurrency, while none that was foreseen to pay does."""
SMALL = "which is too small a gain to count on"


@dataclass(frozen=True)
class Recommendation:
    batch: int
    ranked: list[Expected]
    """The best size of every drafter, the best first."""
    checked: list[Checked] = field(default_factory=list)

    @property
    def best(self) -> Expected | None:
        return self.ranked[0] if self.ranked else None

    @property
    def chosen(self) -> Expected | None:
        """What to use; None for plain decoding. What was measured decides, where something was: of what held, the
        fastest; and what was not foreseen to pay has to be beyond doubt."""
        if not self.checked:
            return self.best if self.best is not None and self.best.pays else None
        foreseen = {each.candidate.label: each for each in reversed(self.ranked)}
        speeds = {
            each.candidate.label: each.measured or 0.0
            for each in self.checked
            if each.beyond_doubt or (each.holds and foreseen[each.candidate.label].pays)
        }
        return foreseen[max(speeds, key=lambda label: speeds[label])] if speeds else None

    @property
    def speculate(self) -> bool:
        return self.chosen is not None

    @property
    def advice(self) -> str:
        chosen, best = self.chosen, self.best
        if chosen is not None:
            gained = self._measured(chosen) or _told(chosen)
            return f"Use {chosen.candidate.label}: {gained}, {chosen.tokens_per_pass:.2f} tokens per pass."
        if best is None:
            return "Do not speculate: no drafter drafts anything here."
        if best.pays:
            return (
                f"Do not speculate: {best.candidate.label} was expected at {best.gain:.2f}×, and "
                f"{self._measured(best) or 'the check failed'}."
            )
        why = "which is a loss" if best.high <= 1 else "which is not surely a gain" if best.low <= 1 else SMALL
        return f"Do not speculate: the best, {best.candidate.label}, is expected at {_told(best)}, {why}."

    def _measured(self, one: Expected) -> str | None:
        """What the check gave; None where there was none, or it failed."""
        for each in self.checked:
            if each.candidate.label == one.candidate.label and each.measured is not None:
                return f"measured at {each.measured:.2f}× plain decoding, {each.low:.2f} to {each.high:.2f}"
        return None

    @property
    def use(self) -> str | None:
        """Options of `forerun generate` and the other commands with a model; None for plain decoding."""
        chosen = self.chosen
        if chosen is None:
            return None
        options = dict(chosen.candidate.options)
        tree = ["--tree", options.pop("tree")] if "tree" in options else []
        more = [part for key, value in options.items() for part in ("--drafter-option", f"{key}={value}")]
        return shlex.join(["--drafter", chosen.candidate.given, *tree, *more])

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "speculate": self.speculate,
            "advice": self.advice,
            "use": self.use,
            "ranked": [_expected(each) for each in self.ranked],
            "check": [each.as_dict() for each in self.checked],
        }


@dataclass
class Plan:
    profiles: dict[int, Profile] = field(default_factory=dict)
    drafters: list[Measured] = field(default_factory=list)
    recommendations: list[Recommendation] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    """Numbers of texts at once that could not be timed, and why."""
    peak_bytes: int | None = None
    """Of plain decoding."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "how": HOW,
            "target": {
                "peak_bytes": self.peak_bytes,
                "passes": [each.as_dict() for each in self.profiles.values()],
                "errors": {str(batch): error for batch, error in self.errors.items()},
            },
            "drafters": [each.as_dict() for each in self.drafters],
            "recommendations": [each.as_dict() for each in self.recommendations],
        }


HOW = (
    f"Intervals hold the middle {SURE:.0%} of what a bootstrap gives, which draws texts and rounds of timing with "
    "replacement. They speak of texts like the prompts, not of other kinds of text, and that the best of several was "
    "picked is not in them. Gains are those of whole answers "
    "while as many texts are on their way as the concurrency says. The check is a short run of `forerun bench`, whose "
    "last texts have less company; what is predicted beside it is for that very run. It has the last word."
)


@dataclass(frozen=True)
class Planner:
    model: LoadedModel
    given: Mapping[str, str]
    """Drafters by the names they have in results, as they were given."""
    options: Mapping[str, Mapping[str, str]]
    questions: Sequence[Question]
    """Every turn is a prompt of its own."""
    params: SamplingParams
    batches: Sequence[int]
    checks: bool = True

    @classmethod
    def drafters(cls, model: LoadedModel) -> list[str]:
        return default_drafters(model)

    @property
    def parts(self) -> int:
        """So often `begin` is called, for a bar."""
        return len(self.batches) * (1 + self.checks) + len(self.given)

    def run(self, begin: Tell, tell: Tell) -> Plan:
        """`begin` hears of each part, `tell` of what is done in it."""
        prompts = [self._prompt(question) for question in self.questions]
        ledger = Ledger(self.model.target.device)
        plan = Plan()
        watch = Watch(self.model, prompts, self.params, self.batches)
        for name, given in self.given.items():
            begin(f"Watching {name}")
            plan.drafters += watch.measure(given, self.options.get(name, {}), ledger, tell)
        most = max((each.size for own in plan.drafters for each in own.candidates), default=0)
        with ledger.at_work(TARGET):
            for batch in self.batches:
                begin(f"Timing the target, {batch} at once")
                try:
                    own = profile(self.model.target, prompts, batch, 1 + most, self.params, tell=lambda: tell(""))
                except Exception as error:  # of whatever kind: the others are planned, and what is known is kept
                    plan.errors[batch] = in_words(error)
                else:
                    plan.profiles[batch] = own
        plan.peak_bytes = ledger.peak(TARGET)
        plan.recommendations = [
            Recommendation(batch, self._ranked(plan, profile)) for batch, profile in plan.profiles.items()
        ]
        if self.checks:
            plan.recommendations = [self._check(each, plan.profiles, begin, tell) for each in plan.recommendations]
        return plan

    def _prompt(self, question: Question) -> list[int]:
        tokens = prompt_tokens(self.model.tokenizer, [{"role": "user", "content": question.turns[0]}])
        most = self.model.target.context_length - self.params.max_tokens
        if most < 1:
            raise ValueError(
                f"--max-tokens is {self.params.max_tokens}, and the context holds {self.model.target.context_length}: "
                "give less"
            )
        if len(tokens) > most:
            raise ValueError(
                f"the prompt {question.id} has {len(tokens)} tokens, and {most} fit beside an answer: leave it out, or "
                "lower --max-tokens"
            )
        return tokens

    def _ranked(self, plan: Plan, profile: Profile) -> list[Expected]:
        found = []
        for drafter in plan.drafters:
            fitting = [
                each
                for each in drafter.candidates
                if each.size <= profile.most_drafts and each.drafting.get(profile.batch)
            ]
            if fitting:
                found.append(expect(max(fitting, key=lambda each: gain_of(each, profile)), profile))
        return sorted(found, key=lambda each: -each.gain)

    def _check(self, made: Recommendation, profiles: Mapping[int, Profile], begin: Tell, tell: Tell) -> Recommendation:
        """The best one, and the best that drafts chains: theory knows them best. Where the best does not hold what was
        foreseen, those behind it that shall pay too."""
        begin(f"Checking, {made.batch} at once")
        chains = [each for each in made.ranked if each.candidate.kind == "chain"]
        waiting = list({each.candidate.label: each for each in made.ranked[:1] + chains[:1]}.values())
        check = Check(self.model, self.given, self.questions, self.params, profiles)
        most = ALONE if made.batch == 1 else TOGETHER
        texts = max(made.batch, min(most, len(self.questions)))  # no prompt twice, which a drafter would remember
        while waiting:
            found = check.run([each.candidate for each in waiting], made.batch, texts, ROUNDS, tell)
            made = replace(made, checked=[*made.checked, *found])
            done = {each.candidate.label for each in made.checked}
            left = [each for each in made.ranked if each.pays and each.candidate.label not in done]
            waiting = left[:1] if made.chosen is None and len(made.checked) < MOST_CHECKED else []
        return made


def _told(one: Expected) -> str:
    return f"{one.gain:.2f}× plain decoding, {one.low:.2f} to {one.high:.2f}"


def _expected(one: Expected) -> dict[str, Any]:
    return {
        "method": one.candidate.label,
        "drafter": one.candidate.drafter,
        "kind": one.candidate.kind,
        "size": one.candidate.size,
        "options": {key: shown(value) for key, value in one.candidate.options.items()},
        "gain": one.gain,
        "low": one.low,
        "high": one.high,
        "tokens_per_pass": one.tokens_per_pass,
        "rows": one.rows,
        "step_ms": 1000 * one.step_seconds,
        "draft_ms": 1000 * one.draft_seconds,
    }
