"""The lines of a certificate: what was compared, what came of it, and what the broken rule gave."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from forerun.certify.identity import Identity
from forerun.certify.sampled import LawTest, Observed
from forerun.certify.subject import Written
from forerun.core.params import SamplingParams

FALSE_ALARM = 0.01
"""The chance that a certificate denies a right rule, all tests together."""
COUNTED = {"whole texts": "texts", "drafts": "steps"}


@dataclass(frozen=True)
class Finding:
    """A line of the certificate."""

    temperature: float
    test: str
    compared: str
    result: str
    passed: bool
    control: str | None
    """What the broken rule gave."""
    control_failed: bool | None
    """Whether the test saw that rule; None where it need not."""
    figures: dict[str, Any]


def identity_finding(params: SamplingParams, test: str, found: Identity, control: Identity | None) -> Finding:
    return Finding(
        params.temperature,
        test,
        f"{found.texts} texts, {found.tokens:,} tokens",
        _in_words(found),
        found.passed,
        None if control is None else _in_words(control),
        None if control is None else bool(control.failures),
        asdict(found) | {"control": None if control is None else asdict(control)},
    )


def law_finding(params: SamplingParams, kind: str, test: LawTest, control: LawTest | None, passed: bool) -> Finding:
    compared = f"{test.samples:,} {COUNTED.get(kind, 'tokens')}"
    return Finding(
        params.temperature,
        kind,
        compared + (f", {test.tests} tests" if test.tests > 1 else ""),
        _p(test.p_value),
        passed,
        None if control is None else _p(control.p_value),
        None if control is None else control.p_value <= FALSE_ALARM,
        asdict(test) | {"control": None if control is None else asdict(control)},
    )


def allowed_finding(
    test: str, params: SamplingParams, texts: list[list[Written]], observed: Observed, figures: dict[str, Any]
) -> Finding:
    """Every token may occur, and every step ends as it must."""
    irregular = sum(text.irregular for own in texts for text in own)
    strays = [each for each in observed.strays if not each.tie]
    ties = len(observed.strays) - len(strays)
    result = f"{len(strays)} forbidden" if strays else f"all allowed, {ties} by rounding" if ties else "all allowed"
    result += f", {irregular} steps out of order" * bool(irregular)
    return Finding(
        params.temperature,
        test,
        f"{observed.places.samples:,} tokens",
        result,
        not strays and not irregular,
        None,
        None,
        {"forbidden": [asdict(each) for each in strays], "ties": ties, "irregular": irregular, **figures},
    )


def _in_words(found: Identity) -> str:
    parts = [f"{found.identical} identical" if found.partings else "all identical"]
    if ties := len(found.partings) - found.failures:
        parts.append(f"{ties} tie{'s' * (ties > 1)}")
    if found.failures:
        parts.append(f"{found.failures} differ")
    if found.irregular:
        parts.append(f"{found.irregular} steps out of order")
    return ", ".join(parts)


def _p(value: float) -> str:
    if value < 1e-99:
        return "p < 1e-99"
    return f"p = {value:.2g}" if value >= 1e-4 else f"p = {value:.0e}"
