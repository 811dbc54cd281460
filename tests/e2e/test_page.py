"""The page at `/`, in a browser, with a real router and workers."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from baton.cli.local.local_cluster import LocalCluster
from baton.serving.telemetry.placement_terms import TERMS
from tests.support.cluster.checkpoints import description_that_advises
from tests.support.cluster.second_router import second_router
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.page.browser import (
    answered,
    ask,
    button,
    choose,
    chromium,
    copied,
    eventually,
    is_done,
    opened,
    written_on,
)
from tests.support.repository import ROOT
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as one:
        yield one


@pytest.fixture
def page(browser: webdriver.Chrome, cluster: LocalCluster) -> Iterator[webdriver.Chrome]:
    with opened(browser, cluster.http_address) as one:
        yield one


def completion(cluster: LocalCluster, **asked: Any) -> str:
    asked = {"temperature": 0, "max_tokens": 30, **asked}
    response = httpx.post(f"{cluster.http_address}/v1/completions", json=asked, timeout=30)
    return str(response.json()["choices"][0]["text"])


def num_prompt_tokens(card: WebElement) -> int:
    summary = card.find_element(By.CSS_SELECTOR, ".about .quiet").text
    return int(summary.split(" · ")[1].split()[0])


@pytest.mark.system
def test_page_shows_answer_timeline_and_placement(page, cluster, tmp_path):
    assert page.find_element(By.ID, "model").text.startswith("tiny, up to 2,048 tokens")
    card = answered(page, "def main(", mode="continue", temperature="0", max_tokens="30")
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


@pytest.mark.system
def test_page_sends_on_enter_and_empties_the_box(page):
    choose(page, max_tokens="4")
    prompt = page.find_element(By.ID, "prompt")
    prompt.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two", Keys.ENTER)
    card = page.find_element(By.CSS_SELECTOR, ".card")
    assert card.find_element(By.CSS_SELECTOR, ".prompt").text == "one\ntwo"
    assert prompt.get_property("value") == ""
    assert page.switch_to.active_element == prompt
    eventually(page, lambda: is_done(card))
    assert page.switch_to.active_element == prompt
    prompt.send_keys(" ", Keys.ENTER)
    assert len(page.find_elements(By.CSS_SELECTOR, ".card")) == 1
    assert "Shift+Enter" in page.find_element(By.ID, "hint").text


@pytest.mark.system
def test_page_converses_by_default_and_begins_new_chats(page):
    assert page.find_element(By.ID, "mode").get_property("value") == "chat"
    first = answered(page, "A queue.", temperature="0", max_tokens="8")
    second = answered(page, "Go on.")
    assert num_prompt_tokens(second) > num_prompt_tokens(first) + 8
    num_first = num_prompt_tokens(first)
    button(page, "New chat").click()
    assert page.find_elements(By.CSS_SELECTOR, ".card") == []
    assert page.switch_to.active_element == page.find_element(By.ID, "prompt")
    assert num_prompt_tokens(answered(page, "A queue.")) == num_first


@pytest.mark.system
def test_page_shows_what_the_checkpoint_advises(browser, cluster, tmp_path):
    model = description_that_advises(tmp_path / "tiny", temperature=0.25, top_k=7)
    with (
        second_router(cluster, http=True, model=model) as router,
        opened(browser, router.http_address) as page,
    ):
        eventually(page, lambda: "top k 7" in page.find_element(By.ID, "model").text)
        assert page.find_element(By.ID, "temperature").get_property("value") == "0.25"


@pytest.mark.system
def test_page_sends_the_system_prompt(page):
    plain = num_prompt_tokens(answered(page, "A queue.", max_tokens="4"))
    button(page, "New chat").click()
    told = num_prompt_tokens(answered(page, "A queue.", system="Answer in one word."))
    assert told > plain + 4


@pytest.mark.system
def test_page_repeats_or_edits_the_last_message(page):
    first = num_prompt_tokens(answered(page, "A queue.", temperature="0", max_tokens="8"))
    button(page.find_element(By.CSS_SELECTOR, ".card"), "Try again").click()
    card = page.find_element(By.CSS_SELECTOR, ".card")
    eventually(page, lambda: is_done(card))
    assert num_prompt_tokens(card) == first
    button(card, "Edit").click()
    assert page.find_elements(By.CSS_SELECTOR, ".card") == []
    card = answered(page, " And a stack.")
    assert card.find_element(By.CSS_SELECTOR, ".prompt").text == "A queue. And a stack."


@pytest.mark.system
def test_page_copies_curl_that_repeats_the_request(page):
    evil = 'It\'s "$HOME" `id` \\ é'
    card = answered(page, evil, temperature="0", max_tokens="12", api_key="k")
    command = copied(page, card, "Copy as curl")
    assert '-H "authorization: Bearer $BATON_TOKEN"' in command
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    events = [line.removeprefix("data: ") for line in done.stdout.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == copied(page, card, "Copy")


@pytest.mark.system
def test_page_explains_each_term_by_key(page):
    card = answered(page, "def main(", max_tokens="8")
    card.find_element(By.TAG_NAME, "summary").click()
    for term in card.find_elements(By.CSS_SELECTOR, "td .term, .quiet .term"):
        assert term.get_attribute("title") == f"{TERMS[term.text]}."
    amounts = card.find_elements(By.CSS_SELECTOR, "td:last-child")
    assert any(amount.find_elements(By.CSS_SELECTOR, ".term") for amount in amounts)
    explanation = page.find_element(By.ID, "explanation")
    for term in card.find_elements(By.CSS_SELECTOR, ".legend .term"):
        term.send_keys(Keys.ENTER)
        assert explanation.text == f"{term.text}: {term.get_attribute('title')}"
        page.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert not explanation.is_displayed()


@pytest.mark.system
def test_page_lists_terms_and_routes_in_its_help(page, cluster):
    page.find_element(By.ID, "help-button").click()
    shown = page.find_element(By.ID, "help")
    assert all(meaning in shown.text for meaning in TERMS.values())
    links = [link.get_attribute("href") for link in shown.find_elements(By.TAG_NAME, "a")]
    paths = ["/openapi.json", "/v1/models", "/metrics"]
    assert links == [cluster.http_address + path for path in paths]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["button", "escape"])
def test_page_streams_an_answer_and_stops_it(page, cluster, how):
    card = ask(page, "import os", mode="continue", temperature="0", max_tokens="1900")
    eventually(page, lambda: len(written_on(card)) > 20)
    assert not is_done(card)
    if how == "button":
        page.find_element(By.ID, "send").click()
    else:
        page.find_element(By.ID, "prompt").send_keys(Keys.ESCAPE)
    eventually(page, lambda: is_done(card))
    assert card.find_element(By.CSS_SELECTOR, ".note").text == "Stopped."


@pytest.mark.nightly
async def test_page_cancels_its_request_when_left(page, cluster):
    await until_nothing_is_held(cluster)
    ask(page, "class A:", mode="continue", temperature="1", max_tokens="1900")
    await until_observed(lambda: loads(cluster)["decode-0"].num_running == 1, what="the answer")
    page.get("about:blank")
    await until_nothing_is_held(cluster)


@pytest.mark.nightly
def test_page_shows_the_error_of_a_rejected_request(page):
    card = answered(page, "x " * 3000)
    assert "maximum context length is 2048" in card.find_element(By.CSS_SELECTOR, ".wrong").text


@pytest.mark.nightly
def test_page_escapes_prompt_and_answer(page):
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    card = answered(page, evil, mode="continue", temperature="0", max_tokens="4")
    assert card.find_element(By.CSS_SELECTOR, ".prompt").text == evil
    assert card.find_elements(By.TAG_NAME, "img") == []
    assert page.title == "Baton"


@pytest.mark.nightly
def test_page_forbids_foreign_scripts(page, cluster):
    policy = httpx.get(cluster.http_address).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    (scripts,) = re.findall(r"script-src (.*?);", policy)
    assert all(source.startswith("'sha256-") for source in scripts.split())
    for sink in (
        "document.createElement('script').text = 'document.title = 1'",
        "document.createElement('script').src = 'data:,document.title = 1'",
        "document.body.setAttribute('onclick', 'document.title = 1')",
        "document.body.innerHTML = '<b>taken</b>'",
    ):
        with pytest.raises(JavascriptException, match="requires 'Trusted"):
            page.execute_script(sink)
    page.execute_script("new Image().src = 'https://evil.example/'")
    assert page.title == "Baton"
    assert any("Content Security Policy" in e["message"] for e in page.get_log("browser"))


@pytest.mark.nightly
def test_page_loads_nothing_but_the_list_of_models(page, cluster):
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert page.execute_script(script) == [f"{cluster.http_address}/v1/models"]


@pytest.mark.slow
def test_page_makes_html_with_the_sanitizer_alone():
    folder = ROOT / "router/baton_router/apis/page/files"
    vendored = {"marked.umd.js", "purify.min.js"}
    own = [path for path in folder.glob("*.js") if path.name not in vendored]
    assert len(own) == 7
    for path in own:
        assert not re.search("HTML =|insertAdjacent|eval|https?://", path.read_text()), path


@pytest.mark.slow
def test_dependencies_name_the_version_of_each_script():
    table = (ROOT / "docs/dependencies.md").read_text()
    rows = re.findall(r"^\| `(\S+\.js)` \| \S+ (\S+), ", table, re.MULTILINE)
    scripts = [*(ROOT / "router").rglob("*.*.js"), *(ROOT / "tests").rglob("*.js")]
    assert {ROOT / name for name, _ in rows} == set(scripts)
    for name, version in rows:
        assert version in (ROOT / name).read_text()[:200]
