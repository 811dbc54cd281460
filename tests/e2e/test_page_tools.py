"""Tool calls on the page at `/`, with a real router and workers."""

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from baton.cli.local.local_cluster import LocalCluster
from tests.support.page.browser import answered, choose, chromium, eventually, is_done, opened
from tests.support.router.written import save_calling_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": CITY}}


def test_page_calls_a_tool_and_sends_its_result(tmp_path: Path):
    save_calling_model(tmp_path / "caller")
    flags = {"tool_call_parser": "hermes"}
    with (
        LocalCluster(str(tmp_path / "caller"), http_port=0, router_flags=flags) as cluster,
        chromium() as browser,
        opened(browser, cluster.http_address) as page,
    ):
        tools = json.dumps([TOOL])
        card = answered(page, "Weather?", tools=tools, tool_choice="required", max_tokens="200")
        call = card.find_element(By.CSS_SELECTOR, ".tool-call")
        assert call.find_element(By.TAG_NAME, "code").text == "forecast"
        assert json.loads(call.find_element(By.TAG_NAME, "pre").text)["city"] in ("Oslo", "Rome")
        choose(page, tool_choice="none")
        call.find_element(By.TAG_NAME, "textarea").send_keys("It rains.", Keys.ENTER)
        after = page.find_element(By.CSS_SELECTOR, ".card:last-child")
        eventually(page, lambda: is_done(after))
        assert after.find_element(By.CSS_SELECTOR, ".prompt").text.startswith("forecast: It rains.")
        assert after.find_elements(By.CSS_SELECTOR, ".wrong") == []
        assert after.find_elements(By.CSS_SELECTOR, ".about") != []
