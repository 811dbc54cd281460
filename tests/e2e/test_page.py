"""The page at `/`, in a browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from baton.cli.local_cluster import LocalCluster
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.repository import ROOT
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

TIMEOUT = 30.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("there is no chromium; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("browser")
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
    open_browser = webdriver.Chrome(options=options, service=service)
    open_browser.set_page_load_timeout(TIMEOUT)
    yield open_browser
    open_browser.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, cluster: LocalCluster) -> Iterator[webdriver.Chrome]:
    """The page anew; at the end it has complained of nothing but what was refused."""
    browser.get(cluster.http_address)
    eventually(browser, lambda: browser.find_element(By.ID, "model").text)
    yield browser
    said = [entry["message"] for entry in browser.get_log("browser")]
    assert [line for line in said if "status of 4" not in line] == []


def eventually(browser: webdriver.Chrome, condition: Any) -> Any:
    return WebDriverWait(browser, TIMEOUT, poll_frequency=0.05).until(lambda _: condition())


def ask(page: webdriver.Chrome, prompt: str, **options: str) -> WebElement:
    """Asks, and returns the card that the answer is written on."""
    for name, value in options.items():
        field = page.find_element(By.ID, name.replace("_", "-"))
        if field.tag_name == "input":
            field.clear()
        field.send_keys(value)
    field = page.find_element(By.ID, "prompt")
    field.clear()
    field.send_keys(prompt)
    field.send_keys(Keys.CONTROL, Keys.ENTER)
    return page.find_elements(By.CSS_SELECTOR, ".card")[-1]


def is_done(card: WebElement) -> bool:
    return "is-running" not in str(card.get_attribute("class"))


def written_on(card: WebElement) -> str:
    return str(card.find_element(By.CSS_SELECTOR, ".answer").get_attribute("textContent"))


def completion(cluster: LocalCluster, **asked: Any) -> str:
    asked = {"temperature": 0, "max_tokens": 30, **asked}
    response = httpx.post(f"{cluster.http_address}/v1/completions", json=asked, timeout=30)
    return str(response.json()["choices"][0]["text"])


@pytest.mark.system
def test_page_shows_answer_timeline_and_placement(page, cluster, tmp_path):
    assert page.find_element(By.ID, "model").text.startswith("tiny, up to 2,048 tokens")
    card = ask(page, "def main(", temperature="0", max_tokens="30")
    eventually(page, lambda: is_done(card))
    assert written_on(card) == completion(cluster, prompt="def main(")
    parts = card.find_elements(By.CSS_SELECTOR, ".legend li")
    kinds = [part.get_attribute("data-part") for part in parts]
    # It need not wait at the prefill worker, and its blocks may be there before its first token.
    assert [k for k in kinds if k not in ("wait", "transfer")] == ["queue", "prefill", "decode"]
    bars = card.find_elements(By.CSS_SELECTOR, ".bar span")
    assert len(bars) == len(parts)
    assert all(bar.size["width"] >= 2 for bar in bars)
    whole = card.find_element(By.CSS_SELECTOR, ".bar").size["width"]
    assert sum(bar.size["width"] for bar in bars) == pytest.approx(whole, abs=2 * len(bars) + 2)
    assert "written by decode-0" in card.find_element(By.CSS_SELECTOR, ".where").text
    reason = card.find_element(By.CSS_SELECTOR, ".placement .quiet").text
    assert reason.startswith("prefill-0 with decode-0 cost ")
    card.find_element(By.TAG_NAME, "summary").click()
    rows = card.find_elements(By.CSS_SELECTOR, "tr.is-chosen td:first-child")
    assert sorted(row.text for row in rows) == ["decode-0 ✓", "prefill-0 ✓"]
    page.save_screenshot(str(tmp_path / "page.png"))


@pytest.mark.nightly
def test_page_streams_an_answer_and_stops_it(page, cluster):
    card = ask(page, "import os", temperature="0", max_tokens="1900")
    eventually(page, lambda: len(written_on(card)) > 20)
    assert not is_done(card)
    page.find_element(By.ID, "send").click()
    eventually(page, lambda: is_done(card))
    assert card.find_element(By.CSS_SELECTOR, ".wrong").text == "stopped"


@pytest.mark.nightly
async def test_page_cancels_its_request_when_left(page, cluster):
    await until_nothing_is_held(cluster)
    ask(page, "class A:", temperature="1", max_tokens="1900")
    await until_observed(lambda: loads(cluster)["decode-0"].num_running == 1, what="the answer")
    page.get("about:blank")
    await until_nothing_is_held(cluster)


@pytest.mark.nightly
def test_page_continues_a_conversation(page):
    first = ask(page, "A queue.", mode="conversation", temperature="0", max_tokens="8")
    eventually(page, lambda: is_done(first))
    second = ask(page, "Go on.")
    eventually(page, lambda: is_done(second))
    counts = [
        int(card.find_element(By.CSS_SELECTOR, ".about .quiet").text.split(" for ")[1].split()[0])
        for card in (first, second)
    ]
    assert counts[1] > counts[0] + 8


@pytest.mark.nightly
def test_page_shows_the_error_of_a_rejected_request(page):
    card = ask(page, "x", max_tokens="100000")
    eventually(page, lambda: is_done(card))
    assert "the model's length is 2048" in card.find_element(By.CSS_SELECTOR, ".wrong").text


@pytest.mark.nightly
def test_page_escapes_prompt_and_answer(page):
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    card = ask(page, evil, temperature="0", max_tokens="4")
    eventually(page, lambda: is_done(card))
    assert card.find_element(By.CSS_SELECTOR, ".prompt").text == evil
    assert card.find_elements(By.TAG_NAME, "img") == []
    assert page.title == "Baton"


@pytest.mark.nightly
def test_page_forbids_foreign_scripts(page, cluster):
    policy = httpx.get(cluster.http_address).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1';"
        "document.body.append(s);"
    )
    assert page.title == "Baton"
    assert any("Content Security Policy" in e["message"] for e in page.get_log("browser"))


@pytest.mark.slow
def test_page_loads_nothing_from_other_hosts():
    text = (ROOT / "router/baton_router/http/page.html").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "innerHTML" not in text
