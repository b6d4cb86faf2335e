"""A headless Chromium for tests of the page, and the few things that tests do with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

Browser = webdriver.Chrome

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="install Chromium and its driver (Debian: chromium, chromium-driver)"
)
PATIENCE = 30.0


@contextmanager
def chromium() -> Iterator[Browser]:
    assert CHROMIUM is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


def visit(browser: Browser, address: str, view: str = "playground") -> None:
    """A fresh page: one that only differs in its fragment would not be loaded again."""
    browser.get("about:blank")
    browser.get(f"{address}#{view}")
    until(browser, "return document.documentElement.dataset.ready === 'true'")


def until(browser: Browser, script: str, *arguments: object) -> Any:
    """Waits for a script that returns something true, and returns that."""

    def answer(driver: Browser) -> Any:
        try:
            return driver.execute_script(script, *arguments)
        except JavascriptException:  # a page on its way
            return None

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.05).until(answer, f"never true: {script}")


def one(browser: Browser, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def every(browser: Browser, selector: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def text(browser: Browser, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def texts(browser: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def put(browser: Browser, selector: str, value: object) -> None:
    """Sets a field or a slider as a hand would: its listeners hear of it."""
    browser.execute_script(
        """const field = document.querySelector(arguments[0]);
        field.value = arguments[1];
        for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, {bubbles: true}));""",
        selector,
        str(value),
    )


def call(browser: Browser, module: str, expression: str, *arguments: object) -> Any:
    """The value of an expression over a module `m` of the page and `a`, the arguments."""
    script = f"""const done = arguments[arguments.length - 1]; const a = arguments[1];
        import(arguments[0]).then((m) => done([{expression}])).catch((error) => done(String(error)));"""
    answer = browser.execute_async_script(script, f"/page/{module}", list(arguments))
    assert isinstance(answer, list), answer
    return answer[0]


def resize(browser: Browser, width: int, height: int = 860, scheme: str = "light") -> None:
    """A window of just this width: a real one cannot be as narrow as a telephone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def complaints(browser: Browser) -> list[str]:
    """What the console says since it was last asked; a policy that was broken is among it."""
    entries: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries]


def is_one_sentence(words: str) -> bool:
    return bool(re.fullmatch(r"[A-Z][^\n]{15,300}[.)]", words)) and words.count(". ") == 0
