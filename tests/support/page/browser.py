"""Headless Chromium for tests of the page, and steps that they share."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

TIMEOUT = 30.0
AXE = Path(__file__).parent / "axe.min.js"


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.fail("there is no chromium; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    with TemporaryDirectory() as profile:
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--window-size=1100,1000",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        browser = webdriver.Chrome(options=options, service=service)
        browser.set_page_load_timeout(TIMEOUT)
        try:
            yield browser
        finally:
            browser.quit()


@contextmanager
def opened(browser: webdriver.Chrome, address: str) -> Iterator[webdriver.Chrome]:
    """The page, loaded again; at the end it has logged nothing but requests that were refused."""
    browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": address},
    )
    browser.get(address)
    eventually(browser, lambda: browser.find_element(By.ID, "model").text)
    yield browser
    logged = [entry["message"] for entry in browser.get_log("browser")]
    unexpected = [line for line in logged if "status of 4" not in line]
    assert unexpected == [], unexpected


def eventually(browser: webdriver.Chrome, condition: Callable[[], Any]) -> Any:
    """Waits up to `TIMEOUT` seconds until `condition` returns something true, and returns that."""
    return WebDriverWait(browser, TIMEOUT, poll_frequency=0.05).until(lambda _: condition())


def choose(page: webdriver.Chrome, **options: str) -> None:
    """Sets fields of the options, by id; opens the options if they are closed."""
    toggle = page.find_element(By.ID, "options-button")
    if toggle.get_attribute("aria-expanded") == "false":
        toggle.click()
    for name, value in options.items():
        field = page.find_element(By.ID, name.replace("_", "-"))
        if field.tag_name != "select":
            field.clear()
        field.send_keys(value)


def ask(page: webdriver.Chrome, prompt: str, **options: str) -> WebElement:
    """Asks, and returns the card that the answer is written on."""
    if options:
        choose(page, **options)
    page.find_element(By.ID, "prompt").send_keys(prompt, Keys.ENTER)
    return page.find_element(By.CSS_SELECTOR, ".card:last-child")


def is_done(card: WebElement) -> bool:
    return "is-running" not in str(card.get_attribute("class"))


def answered(page: webdriver.Chrome, prompt: str, **options: str) -> WebElement:
    """Asks, and returns the card once the answer is whole."""
    card = ask(page, prompt, **options)
    eventually(page, lambda: is_done(card))
    return card


def written_on(card: WebElement) -> str:
    return str(card.find_element(By.CSS_SELECTOR, ".answer").get_attribute("textContent"))


def button(place: WebElement | webdriver.Chrome, text: str) -> WebElement:
    """Returns the only button with this text."""
    (found,) = [b for b in place.find_elements(By.TAG_NAME, "button") if b.text == text]
    return found


def copied(page: webdriver.Chrome, place: WebElement, label: str) -> str:
    """Clicks a button that copies, and returns the clipboard."""
    page.execute_async_script("navigator.clipboard.writeText('nothing').then(arguments[0])")
    button(place, label).click()
    read = "navigator.clipboard.readText().then((text) => arguments[0](text !== 'nothing' && text))"
    return str(eventually(page, lambda: page.execute_async_script(read)))


def prefer(page: webdriver.Chrome, theme: str) -> None:
    """Sets the theme that the browser's user prefers: light or dark."""
    features = [
        {"name": "prefers-color-scheme", "value": theme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def axe_violations(page: webdriver.Chrome) -> list[str]:
    """Returns the violations of all rules of axe, those of best practices included."""
    page.execute_script(AXE.read_text(encoding="utf-8"))
    found = page.execute_async_script("axe.run().then(arguments[0])")
    return [
        f"{one['id']}: {one['help']}; {[node['html'] for node in one['nodes']]}"
        for one in found["violations"]
    ]
