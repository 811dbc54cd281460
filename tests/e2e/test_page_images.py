"""Images on the page at `/`: chosen, dropped and pasted, with a real router and workers."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from baton import Client
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Clip, Image, Message, SamplingParams
from baton.models import locate
from baton.models.shapes.drawings import Drawing, comparisons, held_out
from tests.support.page.browser import (
    answered,
    axe_violations,
    button,
    choose,
    chromium,
    eventually,
    is_done,
    opened,
    written_on,
)
from tests.support.router.images import animated, encoded

pytestmark = [pytest.mark.e2e, pytest.mark.system]

NUMBERS = ("zero", "one", "two", "three", "four")
# A drop or a paste of one file, as a browser makes it: element, event, its data's field, file.
DELIVER = """
const [place, type, field, base64, name, mediaType] = arguments;
const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type: mediaType }));
const kind = field === "clipboardData" ? ClipboardEvent : DragEvent;
place.dispatchEvent(new kind(type, { [field]: data, bubbles: true, cancelable: true }));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(locate("shapes"), http_port=0) as started:
        yield started


@pytest.fixture
def page(browser: webdriver.Chrome, cluster: LocalCluster) -> Iterator[webdriver.Chrome]:
    with opened(browser, cluster.http_address) as one:
        choose(one, temperature="0")
        yield one


def drawings() -> tuple[Drawing, Drawing]:
    return held_out(3)


def deliver(page: webdriver.Chrome, event: str, file: bytes, media_type: str = "image/png") -> None:
    field = "clipboardData" if event == "paste" else "dataTransfer"
    place = page.find_element(By.ID, "prompt")
    data = base64.b64encode(file).decode()
    page.execute_script(DELIVER, place, event, field, data, "drawing.png", media_type)


def attached(page: webdriver.Chrome) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, "#attached img")


def count_of(card: WebElement) -> str:
    return written_on(card).strip().lower()


def test_page_answers_about_images_dropped_pasted_or_chosen(page, tmp_path: Path):
    drawing = drawings()[0]
    file = tmp_path / "drawing.png"
    file.write_bytes(encoded(drawing.image()))
    for event in ("drop", "paste", "choose"):
        if event == "choose":
            page.find_element(By.ID, "image-files").send_keys(str(file))
        else:
            deliver(page, event, file.read_bytes())
        eventually(page, lambda: attached(page))
        assert axe_violations(page) == []
        card = answered(page, "How many circles?")
        assert count_of(card) == NUMBERS[drawing.count("circle")]
        assert len(card.find_elements(By.CSS_SELECTOR, ".prompt img")) == 1
        assert attached(page) == []
        button(page, "New chat").click()


def test_page_repeats_and_edits_a_message_with_its_images(page):
    first, second = drawings()
    for each in (first, second):
        deliver(page, "drop", encoded(each.image()))
    eventually(page, lambda: len(attached(page)) == 2)
    page.find_element(By.CSS_SELECTOR, "#attached figure:last-child button").click()
    card = answered(page, "How many squares?")
    answer = count_of(card)
    assert answer == NUMBERS[first.count("square")]
    button(card, "Try again").click()
    again = page.find_element(By.CSS_SELECTOR, ".card:last-child")
    eventually(page, lambda: is_done(again))
    assert count_of(again) == answer
    button(again, "Edit").click()
    assert len(attached(page)) == 1
    assert page.find_element(By.ID, "prompt").get_attribute("value") == "How many squares?"


def test_page_sends_an_animation_as_a_clip(page, cluster):
    file = animated([each.image() for each in drawings()])
    question = comparisons(*drawings())[0].text
    deliver(page, "drop", file, "image/gif")
    eventually(page, lambda: attached(page))
    card = answered(page, question)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with Client(cluster.address) as client:
        clip, still = [
            client.generate([Message("user", [part, question])], params).text().strip()
            for part in (Clip(file), Image(file))
        ]
    assert written_on(card).strip() == clip != still


def test_page_says_why_a_file_is_not_attached(page):
    deliver(page, "drop", b"%PDF", "application/pdf")
    alert = eventually(page, lambda: page.find_element(By.CSS_SELECTOR, "#attached .wrong"))
    assert alert.text == "drawing.png is no PNG, JPEG, WebP or GIF."
    choose(page, mode="continue the text")
    assert not page.find_element(By.ID, "image-button").is_displayed()
    deliver(page, "drop", encoded(drawings()[0].image()))
    alert = eventually(page, lambda: page.find_element(By.CSS_SELECTOR, "#attached .wrong"))
    assert alert.text == "Images are for conversations with a model that takes them."
    assert attached(page) == []
