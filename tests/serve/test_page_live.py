"""The page before the real server, with a tiny model behind it: what is shown is what the API says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.support.ui import Select

from forerun.engine.loaded import LoadedModel
from forerun.serve.app import Doors
from forerun.serve.keys import Keys
from forerun.serve.server import Settings
from tests.serve.house import House, opened
from tests.serve.page_browser import (
    Browser,
    chromium,
    complaints,
    every,
    needs_chromium,
    one,
    put,
    resize,
    text,
    texts,
    until,
    visit,
)

pytestmark = needs_chromium

PROMPT = "the the the abc abc abc"
TOKEN = "#play-view .tokens .token"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser, house: House) -> Browser:
    resize(browser, 1280)
    visit(browser, f"{house.address}/")
    until(browser, "return document.querySelector('#play-method').options.length > 1")
    return browser


def ask(page: Browser, name: str, *, method: str, tokens: int = 48, temperature: float = 0.0, seed: str = "") -> None:
    settings = {"prompt": PROMPT, "method": method, "max-tokens": tokens, "temperature": temperature, "seed": seed}
    for field, value in settings.items():
        put(page, f"#{name}-{field}", value)
    one(page, f"#{name}-send").click()


def written(page: Browser) -> str:
    until(page, "return document.querySelector('#play-said').textContent.startsWith('Done')")
    return "".join(texts(page, TOKEN))


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_the_text_on_the_page_is_that_of_the_api(page: Browser, house: House, method: str) -> None:
    ask(page, "play", method=method)
    shown = written(page)
    answer = house.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=48, temperature=0
    ).json()
    content = answer["choices"][0]["message"]["content"]
    assert shown.removesuffix("<|end|>") == content  # characters in several tokens included
    usage = answer["usage"]
    assert len(every(page, TOKEN)) == usage["completion_tokens"]
    if method == "ngram":
        # How much is drafted depends on the clock too, so it need not be what another request drafts.
        accepted, _, drafted = text(page, "#play-view [data-figure=accepted]").partition(" of ")
        assert 0 < int(accepted) <= int(drafted)
        assert len(every(page, f"{TOKEN}.accepted")) == int(accepted)
    else:
        assert text(page, "#play-view [data-figure=tokensPerPass]") == "1"
        assert len(every(page, f"{TOKEN}.undrafted")) == usage["completion_tokens"]
    assert complaints(page) == []


def test_hovering_a_token_shows_its_step_and_tree(page: Browser) -> None:
    ask(page, "play", method="ngram")
    written(page)
    span = every(page, f"{TOKEN}.accepted")[3]
    place = int(span.get_attribute("data-step") or -1)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", span)
    ActionChains(page).move_to_element(span).perform()
    until(page, f"return document.querySelector('#play-view h3').textContent.startsWith('Step {place + 1} of ')")
    assert text(page, "#play-view .tip").startswith(f"Step {place + 1} · accepted")
    assert one(page, "#play-view .tip").is_displayed()
    together = every(page, f"{TOKEN}[data-step='{place}']")
    assert every(page, f"{TOKEN}.shown") == together
    path = texts(page, "#play-view .tree .accepted .label, #play-view .tree :is(.corrected, .bonus) .label")
    assert len(path) == len(together)
    assert "were drafted" in text(page, "#play-view .words") or "was drafted" in text(page, "#play-view .words")
    ActionChains(page).move_to_element(one(page, "h1")).perform()
    until(page, "return document.querySelector('#play-view .tip').hidden")


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling"])
def test_a_race_ends_with_the_same_text(page: Browser, method: str) -> None:
    one(page, "#tab-race").click()
    ask(page, "race", method=method, temperature=0.7, seed="7")
    until(page, "return document.querySelector('#race-verdict').textContent")
    lanes = ["".join(texts(page, f"#lane-{lane} .token")) for lane in ("plain", "drafted")]
    assert lanes[0] == lanes[1] != ""
    tokens = len(every(page, "#lane-plain .token"))
    assert text(page, "#race-verdict").startswith(f"✓The texts are identical, all {tokens} tokens.")
    assert text(page, "#lane-plain [data-figure=perPass]") == "1"
    assert float(text(page, "#lane-drafted [data-figure=perPass]")) >= 1
    one(page, "#race-replay").click()
    until(page, "return !document.querySelector('#race-replay').disabled")
    assert "".join(texts(page, "#lane-drafted .token")) == lanes[1]
    assert complaints(page) == []


def test_a_race_at_once(page: Browser) -> None:
    one(page, "#tab-race").click()
    one(page, "#race-together").click()
    ask(page, "race", method="ngram", temperature=1.0, seed="3")
    until(page, "return document.querySelector('#race-verdict').textContent.startsWith('✓')")


STOP_AT_ONCE = """
new MutationObserver((_, observer) => { observer.disconnect(); document.querySelector("#play-stop").click(); })
  .observe(document.querySelector("#play-view .tokens"), {childList: true});
"""


def test_stop_ends_the_text_on_the_server_too(page: Browser, house: House) -> None:
    page.execute_script(STOP_AT_ONCE)  # a hand would be too slow for so small a model
    ask(page, "play", method="none", tokens=400)
    until(page, "return document.querySelector('#play-said').textContent.startsWith('Stopped')")
    assert 0 < len(every(page, TOKEN)) < 400
    assert house.eventually(lambda: house.idle)


def test_a_wish_that_the_server_refuses_is_said(page: Browser) -> None:
    put(page, "#play-shape", "999999")
    ask(page, "play", method="ngram")
    words = until(page, "return document.querySelector('#play-problem').textContent")
    assert "length" in words
    complaints(page)


def test_a_saved_trace_can_be_dropped_in_again(page: Browser, house: House, tmp_path: Path) -> None:
    place = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.execute_cdp_cmd("Browser.setDownloadBehavior", place)
    ask(page, "play", method="ngram")
    shown = written(page)
    tables = (
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.getAttribute('class').split(' ')[1])"
    )
    kinds = page.execute_script(tables, TOKEN)
    one(page, "#play-save").click()
    saved = tmp_path / "trace.jsonl"
    assert house.eventually(saved.exists)
    one(page, "#tab-traces").click()
    one(page, "#trace-file").send_keys(str(saved))
    until(page, "return document.querySelectorAll('#trace-view .tokens .token').length > 0")
    assert "".join(texts(page, "#trace-view .tokens .token")) == shown
    assert page.execute_script(tables, "#trace-view .tokens .token") == kinds
    assert not one(page, "#trace-problem").is_displayed()


def test_what_was_measured_stands_on_the_curves(page: Browser) -> None:
    ask(page, "play", method="ngram")
    written(page)
    one(page, "#tab-theory").click()
    assert text(page, "#theory-measured").startswith("ngram in the playground: α = ")
    assert len(every(page, "#theory-lengths .mark.measured")) == 1
    assert len(every(page, "#theory-acceptances .mark.measured")) == 1
    one(page, "#theory-use").click()
    told = float(text(page, "#theory-measured").partition("α = ")[2].partition(" ")[0])
    assert float(text(page, "#theory-alpha-value")) == pytest.approx(told, abs=0.006)


def test_prompts_may_be_texts_to_go_on_with(page: Browser, house: House) -> None:
    Select(one(page, "#play-format")).select_by_value("text")
    ask(page, "play", method="suffix", tokens=20)
    shown = written(page)
    answer = house.post("/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0).json()
    assert shown == answer["choices"][0]["text"]


def test_a_server_with_keys(browser: Browser, model: LoadedModel) -> None:
    key = "sk-0123456789"
    with opened(model, Settings("tiny", "ngram", cache_tokens=1024, doors=Doors(keys=Keys([key])))) as house:
        visit(browser, f"{house.address}/")
        until(browser, "return document.querySelector('#play-method').value === 'ngram'")
        ask(browser, "play", method="ngram", tokens=8)
        until(browser, "return document.querySelector('#key-dialog').open")
        one(browser, "#key-field").send_keys(key)
        one(browser, "#key-dialog .primary").click()
        assert written(browser) != ""
    complaints(browser)  # a refused request is written there by the browser itself


def test_a_narrow_window(page: Browser) -> None:
    resize(page, 360)
    ask(page, "play", method="ngram")
    written(page)
    for view in ("playground", "race", "theory", "traces"):
        one(page, f"#tab-{view}").click()
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
