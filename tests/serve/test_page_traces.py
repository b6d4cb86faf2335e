"""Traces on the page: dropped or chosen, looked at step by step; what is damaged gets one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from tests.serve.page_browser import (
    Browser,
    chromium,
    complaints,
    every,
    is_one_sentence,
    needs_chromium,
    one,
    put,
    text,
    texts,
    until,
    visit,
)
from tests.serve.page_files import page_files
from tests.serve.page_traces import real_trace, records, step_line

pytestmark = needs_chromium

DROP = """
const transfer = new DataTransfer();
transfer.items.add(new File([arguments[1]], arguments[0]));
for (const kind of ["dragenter", "dragover", "drop"]) {
  document.body.dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: transfer}));
}
"""
TOKEN = "#trace-view .token[data-order]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with page_files(info={"model": "m", "drafters": []}) as served:
        yield served


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_trace(tmp_path_factory.mktemp("trace"))


def drop(browser: Browser, name: str, content: str) -> None:
    browser.execute_script(DROP, name, content)


def test_a_dropped_trace_comes_to_the_front_with_all_its_tokens(browser: Browser, address: str, trace: Path) -> None:
    visit(browser, address)
    drop(browser, "run.jsonl", trace.read_text("utf-8"))
    until(browser, f"return document.querySelectorAll('{TOKEN}').length > 0")
    assert one(browser, "#tab-traces").get_attribute("aria-selected") == "true"
    steps = records(trace, 0)
    committed = [token for step in steps for token in step["committed"]]
    assert texts(browser, TOKEN) == [f"#{token}" for token in committed]
    accepted = sum(kind == "accepted" for step in steps for kind in step["kinds"])
    assert accepted > 0
    assert len(every(browser, f"{TOKEN}.accepted")) == accepted
    assert text(browser, "#trace-view [data-figure=tokens]") == str(len(committed))
    assert text(browser, "#trace-view [data-figure=passes]") == str(len(steps))
    assert text(
        browser, "#trace-view [data-figure=tokensPerPass]"
    ) == f"{len(committed) / len(steps):.2f}".removesuffix(".00")
    assert "no texts" in text(browser, "#trace-said")
    assert complaints(browser) == []


def test_the_tree_of_a_step_is_that_of_the_record(browser: Browser, address: str, trace: Path) -> None:
    visit(browser, address, "traces")
    one(browser, "#trace-file").send_keys(str(trace))
    until(browser, f"return document.querySelectorAll('{TOKEN}').length > 0")
    Select(one(browser, "#trace-text")).select_by_index(1)
    steps = records(trace, 1)
    place = max(range(len(steps)), key=lambda at: len(steps[at]["tokens"]) if steps[at]["accepted"] else 0)
    step = steps[place]
    browser.execute_script(f"document.querySelector('{TOKEN}[data-step=\"{place}\"]').focus()")
    assert text(browser, "#trace-view .inspector h3") == f"Step {place + 1} of {len(steps)}"
    drafted = len(step["tokens"]) - 1
    own = sum(kind != "accepted" for kind in step["kinds"])
    assert len(every(browser, "#trace-view .tree .node")) == 1 + drafted + own
    assert len(every(browser, "#trace-view .tree .node.accepted")) == len(step["accepted"])
    assert texts(browser, "#trace-view .nodes tbody td:nth-child(2)") == [f"#{token}" for token in step["tokens"]]
    parents = ["", *(str(parent) for parent in step["parents"][1:])]
    assert texts(browser, "#trace-view .nodes tbody td:nth-child(3)") == parents


def test_outcomes_of_nodes(browser: Browser, address: str) -> None:
    visit(browser, address, "traces")
    drop(browser, "one.jsonl", step_line(confidences=[None, 0.5, 0.25, 0.125, 1.0]))
    outcomes = until(
        browser,
        """const rows = document.querySelectorAll("#trace-view .nodes tbody tr");
        return rows.length && [...rows].map((row) => row.cells[4].textContent.split(":")[0])""",
    )
    assert outcomes == ["the token before", "accepted", "refused", "refused", "never reached"]
    assert texts(browser, "#trace-view .nodes tbody td:nth-child(4)") == ["", "0.50", "0.25", "0.13", "1"]
    assert texts(browser, "#trace-view .tree .node.corrected .label") == ["#20"]
    words = text(browser, "#trace-view .words")
    assert words == "4 tokens were drafted in a tree 2 deep. The target accepted #11 and corrected the draft with #20."
    assert one(browser, "#trace-view .tree").get_attribute("aria-label") == words


def test_a_text_that_ended_inside_a_draft(browser: Browser, address: str) -> None:
    line = step_line(accepted=[1, 3], committed=[11], kinds=["accepted"], finish_reason="stop")
    visit(browser, address, "traces")
    drop(browser, "cut.jsonl", line)
    until(browser, f"return document.querySelectorAll('{TOKEN}').length === 1")
    assert "but the text had ended" in texts(browser, "#trace-view .nodes tbody td:nth-child(5)")[3]
    assert text(browser, "#trace-view .words").endswith("and the text ended.")
    assert every(browser, "#trace-view .tree .node.corrected, #trace-view .tree .node.bonus") == []


def test_arrow_keys_go_from_token_to_token_and_step_to_step(browser: Browser, address: str, trace: Path) -> None:
    visit(browser, address, "traces")
    one(browser, "#trace-file").send_keys(str(trace))
    until(browser, f"return document.querySelectorAll('{TOKEN}').length > 0")
    steps = records(trace, 0)
    assert len(every(browser, f"{TOKEN}[tabindex='0']")) == 1  # one stop for the tabulator
    at = "return Number(document.activeElement.dataset.order)"
    one(browser, f"{TOKEN}[data-order='0']").send_keys(Keys.END)
    assert browser.execute_script(at) == sum(len(step["committed"]) for step in steps) - 1
    browser.switch_to.active_element.send_keys(Keys.HOME)
    for key, order in ((Keys.RIGHT, 1), (Keys.RIGHT, 2), (Keys.LEFT, 1), (Keys.HOME, 0)):
        browser.switch_to.active_element.send_keys(key)
        assert browser.execute_script(at) == order
    browser.switch_to.active_element.send_keys(Keys.DOWN)
    assert browser.execute_script(at) == len(steps[0]["committed"])
    described = browser.switch_to.active_element.get_attribute("aria-describedby")
    assert described is not None
    assert text(browser, f"#{described}").startswith("Step 2 · ")
    assert one(browser, f"#{described}").is_displayed()
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert text(browser, "#trace-view .where") == f"2 / {len(steps)}"
    browser.switch_to.active_element.send_keys(Keys.UP)
    assert browser.execute_script(at) == 0


def test_step_through_and_replay(browser: Browser, address: str) -> None:
    visit(browser, address, "traces")
    drop(browser, "four.jsonl", "\n".join(step_line(position=7 + at) for at in range(0, 8, 2)))
    until(browser, f"return document.querySelectorAll('{TOKEN}').length === 8")
    buttons = {name: one(browser, f"#trace-view [aria-label='{name} step']") for name in ("First", "Next", "Last")}
    buttons["First"].click()
    assert len(every(browser, f"{TOKEN}.later")) == 6
    buttons["Next"].click()
    assert text(browser, "#trace-view .inspector h3") == "Step 2 of 4"
    assert len(every(browser, f"{TOKEN}.later")) == 4
    buttons["Last"].click()
    assert every(browser, f"{TOKEN}.later") == []
    put(browser, "#trace-view .player input", 3)
    assert text(browser, "#trace-view .inspector h3") == "Step 3 of 4"
    put(browser, "#trace-view .player select", "8")
    buttons["Last"].click()
    began = browser.execute_script(
        """const view = document.querySelector("#trace-view"), play = view.querySelector(".play");
        play.click();
        return [play.textContent, view.querySelector(".where").textContent];"""
    )
    assert began == ["Pause", "1 / 4"]
    until(browser, "return document.querySelector('#trace-view .play').textContent === 'Replay'")
    assert text(browser, "#trace-view .where") == "4 / 4"


NAME = "bad <b>name</b>.jsonl"
DAMAGED = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "prose": ("Dear diary,\nnothing happened.\n", "Line 1 of"),
    "binary": ("PK\x00\x03\x04", "is not text"),
    "other JSON": ('{"model": "m", "text": "hello"}', "has no list of sequences"),
    "a number": ("7", "has no list of sequences"),
    "null": ("null", "has no list of sequences"),
    "a line in the middle": (f"{step_line()}\n{{oops\n{step_line()}", "Line 2 of"),
    "sequences of nothing": ('{"step": 0, "sequences": [null]}', "a step is not an object"),
    "tokens without parents": (step_line(parents=[-1, 0]), "differ in number"),
    "a child before its parent": (step_line(parents=[-1, 0, 4, 1, 2]), "does not come before it"),
    "no root": (step_line(parents=[0, 0, 0, 1, 2]), "the first node is not the root"),
    "an accepted node that is not there": (step_line(accepted=[9]), "not in the tree"),
    "an accepted node off the path": (step_line(accepted=[1, 4]), "does not follow"),
    "unknown kinds": (step_line(kinds=["accepted", "guessed"]), "a kind is unknown"),
    "kinds missing": (step_line(kinds=["accepted"]), "differ in number"),
    "tokens that are words": (step_line(tokens=[5, "a", "b", "c", "d"]), "no whole number"),
    "a prompt only": (step_line(tokens=[], parents=[], accepted=[], committed=[], kinds=[]), "no step that wrote"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_gets_one_sentence(browser: Browser, address: str, what: str) -> None:
    content, expected = DAMAGED[what]
    if "traces" not in browser.current_url or not browser.current_url.startswith(address):
        visit(browser, address, "traces")
    drop(browser, NAME, content)
    until(browser, "return !document.querySelector('#trace-problem').hidden")
    words = until(browser, "return document.querySelector('#trace-problem').textContent")
    assert expected in words
    assert NAME in words  # as it is, not as markup
    assert is_one_sentence(words.replace(NAME, "File")), words
    assert not one(browser, "#trace-view").is_displayed()
    browser.execute_script("document.querySelector('#trace-problem').hidden = true")
    assert complaints(browser) == []


def test_a_trace_that_was_cut_off_is_shown_up_to_there(browser: Browser, address: str) -> None:
    visit(browser, address, "traces")
    drop(browser, "cut.jsonl", f"{step_line()}\n{step_line()}\n{step_line()[:50]}")
    until(browser, f"return document.querySelectorAll('{TOKEN}').length === 4")
    assert (
        text(browser, "#trace-problem") == "Line 3, the last of cut.jsonl, is cut off: the 2 lines before it are shown."
    )
