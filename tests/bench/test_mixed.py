"""Figures of answers that stream while long prompts arrive."""

import random

import httpx
import pytest

from bench.engine.mixed import HEADLINE, ITL_AIM, MAX_GAP, MAX_TTFT, Answered, _answer, _rows

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b'data: {"choices":[{"text":"b"}]}\n\n'
    b'data: {"choices":[],"usage":{}}\n\n'
    b"data: [DONE]\n\n"
)


async def test_mixed_answer_has_a_moment_of_each_event_with_a_choice():
    def respond(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=EVENTS)

    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answered = await _answer(client, random.Random(1), prompt_length=3, max_tokens=2)
    assert len(answered.events) == 2
    assert answered.ttft >= 0
    assert len(answered.gaps) == 1


async def test_mixed_answer_raises_for_refused_request():
    transport = httpx.MockTransport(lambda _: httpx.Response(400))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        with pytest.raises(httpx.HTTPStatusError):
            await _answer(client, random.Random(1), prompt_length=3, max_tokens=2)


@pytest.mark.parametrize(
    ("events", "is_in_time"),
    [
        ((MAX_TTFT, MAX_TTFT + MAX_GAP / 2), True),
        ((MAX_TTFT + 0.1,), False),
        ((0.1, 0.2, 0.3 + MAX_GAP), False),
    ],
)
def test_mixed_goodput_counts_what_keeps_both_objectives(events, is_in_time):
    assert Answered(0.0, events).is_in_time is is_in_time


def test_mixed_ratios_above_one_favour_separate_pools():
    ours = {"ITL p50": 40.0, "ITL p99": 100.0, "TTFT p50": 3000.0, "goodput": 2.0}
    its = {"ITL p50": 20.0, "ITL p99": 300.0, "TTFT p50": 1500.0, "goodput": 1.0}
    rows = {row.case.partition(": ")[2]: row for row in _rows(HEADLINE, "one", [(ours, its)])}
    assert {case: row.ratio for case, row in rows.items()} == {
        "ITL p50": 0.5,
        "ITL p99": 3.0,
        "TTFT p50": 0.5,
        "goodput": 2.0,
    }
    assert rows["ITL p99"].aim == ITL_AIM
    assert rows["ITL p99"].holds
    assert not rows["TTFT p50"].holds
    assert rows["goodput"].holds is None
    assert all(row.aim is None for row in _rows(HEADLINE / 2, "one", [(ours, its)]))
