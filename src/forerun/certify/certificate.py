"""All tests of a target, a drafter and a rule, and what follows from them: a certificate, a failure, a refusal to say
anything, or a distance for what is lossy anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from forerun.certify import identity, sampled
from forerun.certify.contexts import ANSWER, choose_contexts
from forerun.certify.control import at_zero, broken, decides_by_uniforms
from forerun.certify.drafts import DraftCount
from forerun.certify.findings import FALSE_ALARM, Finding, allowed_finding, identity_finding, law_finding
from forerun.certify.sampled import Distance, LawTest, Observed
from forerun.certify.subject import Change, LostTrackError, Subject, Told, Written, unchanged, write
from forerun.certify.target_laws import TargetLaws
from forerun.core.params import SamplingParams
from forerun.core.shortage import ran_out_of_memory

PLAIN, DRAFTED, CONTROL, ZERO, SEEDED = (arm << 40 for arm in range(1, 6))
"""Where the seeds of each kind of text begin, so that no two texts share noise unless they should."""
AT_ZERO = 8
"""Texts behind each context that meet the uniform 0."""

Verdict = Literal["certified", "failed", "refused", "lossy"]


@dataclass(frozen=True)
class Plan:
    settings: tuple[SamplingParams, ...]
    """A line of tests for each; those at temperature 0 are compared token for token."""
    contexts: int = 4
    samples: int = 80
    """Texts behind each context."""
    length: int = 32
    """Tokens of a sampled text."""
    answer: int = 64
    """Tokens of a text that is compared token for token."""
    seed: int = 0
    """Plans of different seeds share no noise."""

    def __post_init__(self) -> None:
        least = {"contexts": 1, "samples": 20, "length": 4, "answer": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"--{name} is {getattr(self, name)}: it must be at least {value}")
        if not self.settings:
            raise ValueError("--temperature names no temperature: give one or more, as in 0,0.7,1")

    @property
    def first_seed(self) -> int:
        """Of the texts, within a kind: far from those of any other plan."""
        return self.seed * 0x9E3779B97F4A7C15 % (1 << 39)

    @property
    def sampled(self) -> int:
        """How many of the settings sample."""
        return sum(not params.greedy for params in self.settings)


@dataclass(frozen=True)
class Certificate:
    findings: list[Finding]
    lossy: str | None
    """Why no certificate can be had, only a distance."""

    @property
    def failures(self) -> list[Finding]:
        return [each for each in self.findings if not each.passed]

    @property
    def blind(self) -> list[float]:
        """Temperatures at which a kind of test, identity or law, could not even see the broken rule."""
        seen: dict[tuple[float, bool], list[bool]] = {}
        for each in self.findings:
            if each.control_failed is not None:
                seen.setdefault((each.temperature, each.test in {"greedy", "seeded"}), []).append(each.control_failed)
        return [temperature for (temperature, _), failed in seen.items() if not any(failed)]

    @property
    def verdict(self) -> Verdict:
        if self.lossy is not None:
            return "lossy"
        if self.failures:
            return "failed"
        return "refused" if self.blind else "certified"

    @property
    def reason(self) -> str:
        match self.verdict:
            case "certified":
                return f"every test passed, and the broken rule was seen at every temperature{self._not_by}"
            case "lossy":
                return f"no certificate: {self.lossy}; how far the text is from the target's own is measured instead"
            case "failed":
                tests = dict.fromkeys(f"{each.test} at temperature {each.temperature:g}" for each in self.failures)
                return f"no certificate: {', '.join(tests)} failed"
        places = ", ".join(f"{temperature:g}" for temperature in dict.fromkeys(self.blind))
        return (
            f"no certificate: at temperature {places} the tests could not even see a broken rule; raise --samples or "
            "--contexts, or give --prompts on which more is drafted"
        )

    @property
    def _not_by(self) -> str:
        """Tests that passed and say little: they did not see the broken rule either."""
        weak = [f"{each.test} at {each.temperature:g}" for each in self.findings if each.control_failed is False]
        return f", though not by {', '.join(weak)}" if weak else ""

    def as_dict(self) -> dict[str, Any]:
        findings = [asdict(each) for each in self.findings]
        return {"verdict": self.verdict, "reason": self.reason, "findings": findings}


class BrokeDownError(Exception):
    """A drafter, a rule or a kernel failed while it was tested."""


@dataclass
class _Doing:
    """Remembers what was told last: should it break down, that is what it broke down at."""

    told: Told
    where: str = ""
    what: str = "Beginning"

    def __call__(self, what: str, done: int, of: int) -> None:
        self.what = what
        self.told(what, done, of)

    def failed(self, error: Exception) -> str:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        return f"{self.what[0].lower()}{self.what[1:]}{self.where} broke off with {reason}"


def certify(subject: Subject, prompts: Sequence[list[int]], plan: Plan, told: Told) -> Certificate:
    """`prompts` are tokens."""
    for params in plan.settings:
        subject.rule_for(params)  # refuses a wrong pair before any work
    doing = _Doing(told)
    try:
        return _certify(subject, prompts, plan, doing)
    except (ValueError, OSError):
        raise
    except Exception as error:  # of whatever kind: what was being tested is more than what was raised says
        if ran_out_of_memory(error):
            raise
        raise BrokeDownError(doing.failed(error)) from error


def _certify(subject: Subject, prompts: Sequence[list[int]], plan: Plan, told: _Doing) -> Certificate:
    asked = identity.requests(prompts, SamplingParams(temperature=0.0, max_tokens=ANSWER), 0, None)
    answers = [text.tokens for text in identity.plain_texts(subject, asked, told)]
    work = _Work(subject, TargetLaws(subject.original), prompts, answers, plan, told)
    findings: list[Finding] = []
    for params in plan.settings:
        told.where = f" at temperature {params.temperature:g}"
        if subject.why_lossy is not None:
            findings.append(work.distance(params))
            continue
        try:
            findings += work.tests(params)
        except LostTrackError as error:
            findings.append(Finding(params.temperature, "books", "every step", str(error), False, None, None, {}))
            break  # nothing that such an engine writes means anything
    return Certificate(findings, subject.why_lossy)


@dataclass(frozen=True)
class _Work:
    subject: Subject
    laws: TargetLaws
    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]
    """The target's own, at temperature 0."""
    plan: Plan
    told: Told

    def tests(self, params: SamplingParams) -> list[Finding]:
        if params.greedy:
            return [self._identity("greedy", params)]
        contexts = self._contexts(params)
        found = self._law(contexts, params)
        if decides_by_uniforms(self.subject.rule_for(params)):
            found.append(self._zeros(contexts, params))
        if self.subject.rule in {None, "gumbel"}:
            found.append(self._identity("seeded", params))
        return found

    def distance(self, params: SamplingParams) -> Finding:
        found = self._greedy_distance(params) if params.greedy else self._sampled_distance(params)
        result = f"total variation {found.total_variation:.3f}, of which {found.noise:.3f} is noise"
        compared = f"{found.samples:,} tokens"
        return Finding(params.temperature, "distance", compared, result, True, None, None, asdict(found))

    def _greedy_distance(self, params: SamplingParams) -> Distance:
        asked = identity.requests(self.prompts, replace(params, max_tokens=self.plan.answer), 0, self.subject.rule)
        drafted = write(self.subject.engine, asked, lambda done, of: self.told("Writing with drafts", done, of))
        plain = identity.plain_texts(self.subject, asked, self.told)
        own, noise = (identity.foreign_share(self.laws, asked, texts) for texts in (drafted, plain))
        return Distance(own, noise, sum(len(text.tokens) for text in drafted))

    def _sampled_distance(self, params: SamplingParams) -> Distance:
        contexts = self._contexts(params)
        texts = self._texts(contexts, params, DRAFTED, "Writing with drafts")
        plain = self._texts(contexts, params, PLAIN, "Writing plainly")
        return sampled.distance(self._observed(contexts, texts, params), self._observed(contexts, plain, params))

    def _contexts(self, params: SamplingParams) -> list[list[int]]:
        return choose_contexts(self.laws, self.prompts, self.answers, params, self.plan.contexts)

    # --- token for token

    def _identity(self, test: str, params: SamplingParams) -> Finding:
        asked = identity.requests(
            self.prompts, replace(params, max_tokens=self.plan.answer), SEEDED + self.plan.first_seed, self.subject.rule
        )
        plain = identity.plain_texts(self.subject, asked, self.told)
        compare = (self.subject, self.laws, asked, plain)
        # The control first: who remembers texts drafts hardly anything wrong after it has seen the right ones.
        with self.subject.changed(broken):
            control = identity.compare(*compare, "Writing with the broken rule", self.told)
        found = identity.compare(*compare, "Writing with drafts", self.told)
        return identity_finding(params, test, found, control if found.passed else None)

    # --- the law

    def _law(self, contexts: list[list[int]], params: SamplingParams) -> list[Finding]:
        plain = self._texts(contexts, params, PLAIN, "Writing plainly")
        tests, observed, texts = self._tested(contexts, params, DRAFTED, plain, "Writing with drafts")
        irregular = sum(text.irregular for own in texts for text in own)
        strays = [each for each in observed.strays if not each.tie]
        passed = {kind: test.p_value > FALSE_ALARM for kind, test in tests.items()}
        control: dict[str, LawTest] = {}
        if all(passed.values()) and not strays and not irregular:
            control, _, _ = self._tested(contexts, params, CONTROL, plain, "Writing with the broken rule", broken)
        findings = [law_finding(params, kind, test, control.get(kind), passed[kind]) for kind, test in tests.items()]
        drafts = {
            "drafted": sum(text.drafted for own in texts for text in own),
            "refused": sum(text.refused for own in texts for text in own),
        }
        return [*findings, allowed_finding("allowed", params, texts, observed, drafts)]

    def _zeros(self, contexts: list[list[int]], params: SamplingParams) -> Finding:
        """Some texts behind each context by a rule whose uniform numbers are 0: see `control.at_zero`."""
        with self.subject.changed(at_zero):
            texts = self._texts(contexts, params, ZERO, "Writing with the uniform 0", each=AT_ZERO)
        observed = self._observed(contexts, texts, params)
        return allowed_finding("uniform 0", params, texts, observed, {})

    def _tested(
        self,
        contexts: list[list[int]],
        params: SamplingParams,
        arm: int,
        plain: list[list[Written]],
        what: str,
        change: Change = unchanged,
    ) -> tuple[dict[str, LawTest], Observed, list[list[Written]]]:
        drafts = DraftCount()
        with self.subject.changed(lambda rule: drafts.watch(change(rule))):
            texts = self._texts(contexts, params, arm, what)
        observed = self._observed(contexts, texts, params)
        tests = sampled.law_tests(observed, drafts.fit(), texts, plain, FALSE_ALARM, self.plan.sampled, self.plan.seed)
        return tests, observed, texts

    def _texts(
        self, contexts: list[list[int]], params: SamplingParams, arm: int, what: str, each: int | None = None
    ) -> list[list[Written]]:
        plainly = arm == PLAIN
        engine = self.subject.plain if plainly else self.subject.engine
        rule = None if plainly else self.subject.rule_for(params).name
        own = replace(params, max_tokens=self.plan.length)
        count = each or self.plan.samples
        return sampled.sample(engine, contexts, own, count, arm + self.plan.first_seed, rule, what, self.told)

    def _observed(self, contexts: list[list[int]], texts: list[list[Written]], params: SamplingParams) -> Observed:
        return sampled.observe(self.laws, contexts, texts, params, self.plan.seed, self.told)
