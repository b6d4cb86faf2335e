"""The page's frame, and what it does with answers that a working server seldom gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.serve.page_browser import (
    Browser,
    call,
    chromium,
    complaints,
    every,
    is_one_sentence,
    needs_chromium,
    one,
    put,
    resize,
    text,
    texts,
    until,
    visit,
)
from tests.serve.page_files import PAGE, Answer, page_files

VIEWS = ("playground", "race", "theory", "traces")
INFO = {"model": "small", "version": "1.2.3", "drafters": [{"name": "ngram", "description": "Looks back."}, "none"]}
PROBLEM = "#play-problem"


def told(committed: list[str], kinds: list[str], drafted: list[str] | None = None, accepted: int = 0) -> dict[str, Any]:
    """A chunk with one step, whose drafts are a chain; tokens are numbered by their first letter."""
    chain = drafted or []
    step = {
        "step": 0,
        "position": 3,
        "tokens": [ord(word[0]) for word in chain],
        "texts": chain,
        "parents": list(range(-1, len(chain) - 1)),
        "confidences": [0.5] * len(chain),
        "accepted": list(range(accepted)),
        "committed": [ord(word[0]) for word in committed],
        "committed_texts": committed,
        "kinds": kinds,
        "seconds": {"draft": 0.001, "target": 0.01, "verify": 0.0, "rest": 0.0},
    }
    return {"choices": [{"index": 0, "delta": {"content": "".join(committed)}}], "forerun": {"steps": [step]}}


DRAFTED = [
    told(["a"], ["bonus"]),
    told(["b", "c", "d"], ["accepted", "accepted", "bonus"], ["b", "c"], 2),
    told(["e", "f"], ["accepted", "corrected"], ["e", "x", "y"], 1),
]
PLAIN = [told([letter], ["bonus"]) for letter in "abcdef"]
DONE: dict[str, Any] = {}


# --- the files -----------------------------------------------------------------------------------------------


class Markup(HTMLParser):
    """Attributes and inline text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.inline: list[str] = []
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside in {"script", "style"} and data.strip():
            self.inline.append(data)


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline() -> None:
    markup = Markup()
    markup.feed((PAGE / "index.html").read_text("utf-8"))
    names = {name for name, _ in markup.attributes}
    assert markup.inline == []
    assert "style" not in names
    assert not {name for name in names if name.startswith("on")}
    linked = [value for name, value in markup.attributes if name in {"href", "src"}]
    assert linked
    assert all((PAGE / link.removeprefix("page/")).is_file() for link in linked)
    for file in PAGE.iterdir():
        content = file.read_text("utf-8")
        assert len(content.splitlines()) <= 400, file.name
        assert file.suffix != ".js" or max(map(len, content.splitlines())) <= 120, file.name
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", content))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
        for module in re.findall(r"^import .* from \"(.*)\";", content, flags=re.MULTILINE):
            assert (PAGE / module).is_file(), f"{file.name} imports {module}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", content)


def test_identifiers_are_unique_and_labels_lead_somewhere() -> None:
    markup = Markup()
    markup.feed((PAGE / "index.html").read_text("utf-8"))
    found = [value for name, value in markup.attributes if name == "id"]
    assert len(found) == len(set(found))
    wanted = {value for name, value in markup.attributes if name in {"for", "aria-controls", "aria-labelledby"}}
    assert wanted <= set(found)


# --- the frame -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    def script(body: dict[str, Any], key: str | None) -> Answer:
        return 200, [*(PLAIN if body["speculation"].get("off") else DRAFTED), DONE]

    with page_files(script, INFO) as served:
        yield served


@needs_chromium
def test_tabs_by_keyboard_and_by_address(browser: Browser, address: str) -> None:
    visit(browser, address, "theory")
    assert one(browser, "#tab-theory").get_attribute("aria-selected") == "true"
    one(browser, "#tab-theory").send_keys(Keys.RIGHT)
    for key, view in ((None, "traces"), (Keys.RIGHT, "playground"), (Keys.LEFT, "traces"), (Keys.HOME, "playground")):
        if key is not None:
            browser.switch_to.active_element.send_keys(key)
        shown = [name for name in VIEWS if one(browser, f"#{name}").is_displayed()]
        assert shown == [view]
        assert browser.switch_to.active_element.get_attribute("aria-controls") == view
        assert browser.current_url.endswith(f"#{view}")
    assert complaints(browser) == []


@needs_chromium
def test_everything_that_can_be_set_has_a_name(browser: Browser, address: str) -> None:
    visit(browser, address)
    until(browser, "return document.querySelector('#play-method').value === 'ngram'")
    nameless = browser.execute_script(
        """return [...document.querySelectorAll("input, select, textarea, button")].filter((control) =>
        !control.labels?.length && !control.getAttribute("aria-label") && !control.textContent.trim())
        .map((control) => control.outerHTML)"""
    )
    assert nameless == []
    landmarks = "return ['header', 'nav', 'main', 'footer'].every((name) => document.querySelector(`body > ${name}`))"
    assert browser.execute_script(landmarks)


@needs_chromium
def test_colours_follow_the_system_or_the_choice(browser: Browser, address: str) -> None:
    def background() -> int:
        shade = str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        return sum(map(int, re.findall(r"\d+", shade)[:3]))

    resize(browser, 1280, scheme="dark")
    visit(browser, address)
    assert background() < 150
    put(browser, "#scheme", "light")
    assert background() > 600
    visit(browser, address)  # the choice is kept
    assert background() > 600
    put(browser, "#scheme", "system")
    resize(browser, 1280, scheme="light")
    assert background() > 600


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(browser: Browser, address: str, scheme: str) -> None:
    """Contrast of 4.5 and more, as WCAG asks, for text on what is behind it."""
    resize(browser, 1280, scheme=scheme)
    visit(browser, address)
    one(browser, "#play-send").click()
    until(browser, "return document.querySelectorAll('#play-view .tree .node').length > 1")
    colours = browser.execute_script(
        """const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const over = (colours) => {
          for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
          return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const words = "h1, h3, p, dt, dd, label, button:enabled, .token, option, td, th";
        return [...document.querySelectorAll(words)]
          .filter((element) => element.checkVisibility() && element.textContent.trim())
          .map((element) => {
            const behind = [];
            for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
            const ink = over([...behind, getComputedStyle(element).color]);
            return [element.outerHTML.slice(0, 90), ink, over(behind)];
          })"""
    )
    assert len(colours) > 40

    def light(colour: list[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for element, ink, paper in colours:
        low, high = sorted((light(ink), light(paper)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (element, ink, paper)
    resize(browser, 1280)


@needs_chromium
def test_a_narrow_window_needs_no_sideways_scrolling(browser: Browser, address: str) -> None:
    resize(browser, 360)
    visit(browser, address)
    one(browser, "#play-send").click()
    until(browser, "return document.querySelectorAll('#play-view .tree .node').length > 1")
    for view in VIEWS:
        one(browser, f"#tab-{view}").click()
        if view == "race":
            one(browser, "#race-send").click()
            until(browser, "return document.querySelector('#race-verdict').textContent !== ''")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360, view
        tabs = browser.execute_script(
            "const t = document.querySelector('.tabs'); return [t.scrollHeight, t.clientHeight]"
        )
        assert tabs[0] == tabs[1]  # else they have a scrollbar of their own
        reach = """return [...document.querySelectorAll("main button, main input, main select, main textarea")]
            .filter((each) => each.checkVisibility() && each.type !== "file")
            .filter((each) => each.getBoundingClientRect().right > 360).length"""
        assert browser.execute_script(reach) == 0, view
    resize(browser, 1280)


# --- answers -------------------------------------------------------------------------------------------------


def generate(browser: Browser) -> None:
    until(browser, "return document.querySelector('#play-method').value === 'ngram'")
    one(browser, "#play-send").click()


@needs_chromium
def test_tokens_are_marked_by_how_they_came_about(browser: Browser, address: str) -> None:
    visit(browser, address)
    generate(browser)
    until(browser, "return !document.querySelector('#play-save').disabled")
    assert "".join(texts(browser, "#play-view .tokens .token")) == "abcdef"
    marks = [span.get_attribute("class") for span in every(browser, "#play-view .tokens .token")]
    kinds = ["undrafted", "accepted", "accepted", "bonus", "accepted", "corrected"]
    assert [(mark or "").split()[1] for mark in marks] == kinds
    look = "return getComputedStyle(document.querySelector(`#play-view .tokens .${arguments[0]}`)).textDecorationStyle"
    styles = [browser.execute_script(look, kind) for kind in ("accepted", "corrected", "bonus")]
    assert len(set(styles)) == 3  # told without colours too
    assert text(browser, "#play-said") == "Done: 6 tokens in 3 passes, 2 per pass."
    assert text(browser, "#play-view [data-figure=accepted]") == "3 of 5"
    one(browser, "#tab-theory").click()  # 3 held, 1 was refused
    assert text(browser, "#theory-measured").startswith(
        "ngram in the playground: α = 0.75 (3 of 4 checked drafts held)"
    )
    assert len(every(browser, "#theory-acceptances .mark.measured")) == 1
    assert len(every(browser, "#theory-lengths .curve.measured")) == 1
    one(browser, "#theory-use").click()
    assert one(browser, "#theory-alpha").get_attribute("value") == "0.75"
    assert one(browser, "#theory-gamma").get_attribute("value") == "3"  # drafts of 2 and 3
    assert complaints(browser) == []


@needs_chromium
def test_a_race_that_parts_says_where(browser: Browser) -> None:
    def script(body: dict[str, Any], key: str | None) -> Answer:
        other = [*DRAFTED[:2], told(["e", "z"], ["accepted", "corrected"], ["e", "x"], 1)]
        return 200, [*(PLAIN if body["speculation"].get("off") else other), DONE]

    with page_files(script, INFO) as address:
        visit(browser, address, "race")
        until(browser, "return document.querySelector('#race-method').value === 'ngram'")
        one(browser, "#race-send").click()
        words = until(browser, "return document.querySelector('#race-verdict').textContent")
    assert words.startswith("✗The texts differ from token 6 on: plain has “f”, ngram has “z”.")
    assert "different" in (one(browser, "#race-verdict").get_attribute("class") or "")


@needs_chromium
def test_a_key_is_asked_for_and_sent(browser: Browser) -> None:
    seen: list[str | None] = []

    def script(body: dict[str, Any], key: str | None) -> Answer:
        seen.append(key)
        wrong = {"error": {"message": "the key is not known: send another", "type": "authentication_error"}}
        return (200, [*DRAFTED, DONE]) if key == "right" else (401, [wrong])

    with page_files(script, INFO) as address:
        visit(browser, address)
        generate(browser)
        for attempt, key in enumerate(("wrong", "right")):
            until(browser, "return document.querySelector('#key-dialog').open")
            assert one(browser, "#key-wrong").is_displayed() == (attempt == 1)
            one(browser, "#key-field").send_keys(key)
            one(browser, "#key-dialog .primary").click()
            until(browser, f"return document.querySelector('#key-dialog').open === {str(attempt == 0).lower()}")
        until(browser, "return document.querySelectorAll('#play-view .tokens .token').length === 6")
        assert seen == [None, "wrong", "right"]
        generate(browser)  # not asked for again
        until(browser, "return !document.querySelector('#play-save').disabled")
        visit(browser, address)  # and kept nowhere
        generate(browser)
        until(browser, "return document.querySelector('#key-dialog').open")
        one(browser, "#key-dialog button:not(.primary)").click()
        until(browser, f"return !document.querySelector('{PROBLEM}').hidden")
        assert text(browser, PROBLEM) == "The key is not known: send another."
    complaints(browser)  # a refused request is written there by the browser itself


ERRORS: dict[str, tuple[Answer, str]] = {
    "refused": ((400, [{"error": {"message": "max_tokens is 0: it must be at least 1"}}]), "Max_tokens is 0"),
    "busy": ((429, [{"error": {"message": "the queue is full: try again later"}}]), "The queue is full"),
    "no shape": ((500, [{"detail": "?"}]), "The server answered with status 500."),
    "cut off": ((200, DRAFTED), "The server ended its answer early"),
    "error in the stream": (
        (200, [*DRAFTED, {"error": {"message": "the engine broke down: start it again"}}]),
        "The engine",
    ),
    "no steps": ((200, [{"choices": [{"delta": {"content": "hello"}}]}, DONE]), "This server sent no steps"),
    "nothing": ((200, [{"choices": []}, DONE]), "The model ended the text at once"),
}


@needs_chromium
@pytest.mark.parametrize("what", ERRORS)
def test_what_goes_wrong_is_said_in_a_sentence(browser: Browser, what: str) -> None:
    answer, expected = ERRORS[what]
    with page_files(lambda body, key: answer, INFO) as address:
        visit(browser, address)
        generate(browser)
        until(browser, f"return !document.querySelector('{PROBLEM}').hidden")
        words = text(browser, PROBLEM)
        assert words.startswith(expected)
        assert is_one_sentence(words) or what == "no steps"
        until(browser, "return !document.querySelector('#play-send').disabled")
    complaints(browser)


@needs_chromium
def test_without_a_server_theory_and_traces_still_work(browser: Browser) -> None:
    with page_files() as address:
        visit(browser, address)
        until(browser, "return document.querySelector('#about').textContent.includes('Theory and traces work')")
        assert text(browser, "#theory-expected") == "2.773"
    generate_alone = "return document.querySelector('#play-method').value"
    assert browser.execute_script(generate_alone) == "none"
    one(browser, "#play-send").click()
    until(browser, f"return !document.querySelector('{PROBLEM}').hidden")
    assert text(browser, PROBLEM) == "The server does not answer: check that forerun serve is running."
    complaints(browser)


@needs_chromium
def test_what_a_model_writes_is_never_markup(browser: Browser) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    chunk = told([evil, "b"], ["accepted", "corrected"], [evil, "x"], 1)
    with page_files(lambda body, key: (200, [chunk, DONE]), INFO) as address:
        visit(browser, address)
        generate(browser)
        until(browser, "return !document.querySelector('#play-save').disabled")
        assert texts(browser, "#play-view .tokens .token") == [evil, "b"]
        assert every(browser, "#play-view img, #play-view script") == []
        assert browser.title == "Forerun"
    assert complaints(browser) == []


SPELLINGS = {
    "as they are": (["Hello", " world"], "Hello world", ["Hello", " world"]),
    "a character in three tokens": (["Hi", " \ufffd", "\ufffd", "\ufffd", "!"], "Hi 🦊!", ["Hi", " 🦊", "", "", "!"]),
    "one at the end": (["Hi", "\ufffd", "\ufffd"], "Hié", ["Hi", "é", ""]),
    "spaces that only show between tokens": (["The", "sky", "."], "The sky.", ["The", " sky", "."]),
    "a mark that is no text": (["a", "<|im_end|>"], "a", ["a", "<|im_end|>"]),
    "a replacement that is really there": (["a", "\ufffd", "b"], "a\ufffdb", ["a", "\ufffd", "b"]),
    "a text that does not fit": (["a", "x", "\ufffd"], "abc", ["a", "x", "\ufffd"]),
    "a text that was cut before its end": (["ab", "\ufffd", "cd"], "ab", ["ab", "\ufffd", "cd"]),
}


@needs_chromium
def test_tokens_are_spelled_as_the_whole_text_has_them(browser: Browser, address: str) -> None:
    visit(browser, address)
    spell = """a.map(([pieces, text]) => { const tokens = pieces.map((piece) => ({text: piece, named: true}));
        m.respell(tokens, text); return tokens.map((token) => token.text); })"""
    cases = list(SPELLINGS.values())
    found = call(browser, "spelling.js", spell, *[[pieces, whole] for pieces, whole, _ in cases])
    assert dict(zip(SPELLINGS, found, strict=True)) == {what: case[2] for what, case in SPELLINGS.items()}
