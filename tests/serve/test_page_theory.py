"""The page's theory: its figures are those of `forerun.theory`, and its coins fall accordingly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.theory import closed_form
from tests.serve.page_browser import (
    Browser,
    call,
    chromium,
    complaints,
    every,
    needs_chromium,
    one,
    put,
    text,
    texts,
    until,
    visit,
)
from tests.serve.page_files import page_files

pytestmark = needs_chromium

ALPHAS = (0.0, 1e-6, 0.1, 0.5, 0.7, 0.9, 0.99, 1 - 1e-9, 1.0)
GAMMAS = (0, 1, 2, 4, 7, 16, 32)
COSTS = (0.0, 0.01, 0.1, 0.4, 0.7, 1.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    visit(browser, address, "theory")
    return browser


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with page_files(info={"model": "m", "drafters": []}) as served:
        yield served


def test_formulas_are_those_of_the_package(page: Browser) -> None:
    grid = [(alpha, gamma) for alpha in ALPHAS for gamma in GAMMAS]
    tokens = call(page, "formulas.js", "a[0].map(([alpha, gamma]) => m.expectedTokens(alpha, gamma))", grid)
    assert tokens == pytest.approx([closed_form.expected_tokens(*point) for point in grid], rel=1e-12)
    full = [(alpha, gamma, cost) for alpha in ALPHAS for gamma in GAMMAS for cost in COSTS]
    gains = call(page, "formulas.js", "a[0].map((point) => m.speedup(...point))", full)
    assert gains == pytest.approx([closed_form.speedup(*point) for point in full], rel=1e-12)
    pairs = [(alpha, cost) for alpha in ALPHAS for cost in COSTS]
    best = call(page, "formulas.js", "a[0].map((pair) => m.bestGamma(...pair))", pairs)
    assert best == [closed_form.best_gamma(*pair) for pair in pairs]
    for alpha, gamma in ((0.3, 5), (0.0, 3), (1.0, 3), (0.8, 0)):
        law = call(page, "formulas.js", "m.distribution(...a)", alpha, gamma)
        reach = closed_form.chain_reach([alpha] * gamma)
        assert law == pytest.approx(closed_form.distribution(reach), abs=1e-12)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.7, 4), (0.95, 12), (0.0, 3), (0.2, 1), (0.99, 0)])
def test_coins_fall_as_the_closed_form_says(page: Browser, alpha: float, gamma: int) -> None:
    rounds = 40_000
    tallies = call(
        page,
        "formulas.js",
        """(() => { const [alpha, gamma, rounds] = a; const uniform = m.uniforms(1);
        const found = Array(gamma + 2).fill(0);
        for (let turn = 0; turn < rounds; turn += 1) found[m.tossedDrafts(alpha, gamma, uniform) + 1] += 1;
        return found; })()""",
        alpha,
        gamma,
        rounds,
    )
    assert sum(tallies) == rounds
    law = closed_form.distribution(closed_form.chain_reach([alpha] * gamma))
    for found, chance in zip(tallies, law, strict=True):
        assert abs(found / rounds - chance) <= 5 * (chance * (1 - chance) / rounds) ** 0.5 + 1e-12


def test_sliders_give_figures_and_curves(page: Browser) -> None:
    for alpha, gamma, cost in ((0.8, 5, 0.05), (0.1, 3, 0.6)):
        put(page, "#theory-alpha", alpha)
        put(page, "#theory-gamma", gamma)
        put(page, "#theory-cost", cost)
        best = closed_form.best_gamma(alpha, cost)
        assert text(page, "#theory-expected") == f"{closed_form.expected_tokens(alpha, gamma):.3f}"
        assert text(page, "#theory-speedup") == f"{closed_form.speedup(alpha, gamma, cost):.3f}×"
        assert text(page, "#theory-best") == (str(best) if best else "0: do not draft")
        assert float(text(page, "#theory-best-speedup")[:-1]) == pytest.approx(
            closed_form.speedup(alpha, best, cost), abs=5e-4
        )
        label = one(page, "#theory-lengths svg").get_attribute("aria-label")
        assert label is not None
        assert label.endswith(f"times at {best}.")
        assert len(every(page, "#theory-lengths .dot")) == 17
        assert len(every(page, "#theory-acceptances .curve")) == 2
    assert complaints(page) == []


def test_the_monte_carlo_can_be_watched(page: Browser) -> None:
    put(page, "#theory-alpha", 0.6)
    put(page, "#theory-gamma", 3)
    for _ in range(3):
        one(page, "#mc-once").click()
    assert text(page, "#mc-rounds") == "3"
    assert len(every(page, "#mc-strips li")) == 3
    assert all(len(strip) > 0 for strip in texts(page, "#mc-strips li"))
    assert len(every(page, "#mc-strips li:first-child .cell")) == 4  # three drafts and the target's own
    put(page, "#mc-speed", 20000)
    one(page, "#mc-run").click()
    until(page, "return Number(document.querySelector('#mc-rounds').textContent) > 5000")
    one(page, "#mc-run").click()
    rounds = int(text(page, "#mc-rounds"))
    mean, error = map(float, text(page, "#mc-mean").split(" ± "))
    assert abs(mean - closed_form.expected_tokens(0.6, 3)) < 5 * error + 0.001
    assert text(page, "#mc-expected") == f"{closed_form.expected_tokens(0.6, 3):.3f}"
    assert text(page, "#mc-said").startswith(f"{rounds} rounds: ")
    one(page, "#mc-reset").click()
    assert text(page, "#mc-rounds") == "0"
    put(page, "#theory-gamma", 0)  # no drafts: every round is the target's own token
    one(page, "#mc-once").click()
    assert texts(page, "#mc-strips li") == ["+1= 1"]
