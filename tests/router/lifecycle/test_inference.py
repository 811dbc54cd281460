"""Every part of the router that a request went through is told of its end, however it ends."""

import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.generate_call import GenerateCall, ReceivedOutput
from baton_router.call.request import Request
from baton_router.lifecycle import inference
from baton_router.lifecycle.answers.answer import Answer
from baton_router.routing.admission.quotas import Quota, Quotas
from tests.support.router.front import TTFT_OBJECTIVE, front_of, inference_of
from tests.support.router.scripted import (
    READY,
    RELEASED,
    FakeFleet,
    at,
    decode,
    finished,
    fleet_of,
    letter_ids,
    prefill,
    prefill_behind,
    tokens,
)
from tests.support.serving.credentials import Call

ASKED = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 5}
LIMITS = Quota(tokens_per_minute=12)


async def test_request_that_admission_rejects_costs_no_tokens():
    async with front_of(decode(), limits=LIMITS, max_waiting=0) as front:
        for _ in range(3):
            response = await front.post("/v1/completions", json=ASKED)
            assert "wait at this router already" in response.json()["error"]["message"]


async def test_request_costs_its_prompt_and_the_tokens_it_got():
    workers = prefill_behind(0, 2), decode(READY, tokens(1, 1), finished())
    async with front_of(*workers, limits=LIMITS) as front:
        response = await front.post("/v1/completions", json={**ASKED, "max_tokens": 2})
        assert response.status_code == 200, response.text
        response = await front.post("/v1/completions", json=ASKED)
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(response.headers["x-ratelimit-remaining-tokens"]) <= 12 - 8


async def test_resumed_request_reserves_only_the_tokens_left():
    received = [ReceivedOutput(letter_ids()[:1] * 98)]
    call = GenerateCall([5, 6], SamplingParams(max_tokens=100), received=received)
    result = at(1)
    result.result.first_tokens[0].position = 98
    workers = prefill(result, RELEASED), decode(READY, tokens(99, 1), finished())
    async with fleet_of(*workers) as fleet:
        inference = inference_of(fleet, Quotas(default=LIMITS))
        inference._services.limits.reserve("", 7)
        async with aclosing(inference.generate(call, Call(), Deadline.after(9.0))) as responses:
            events = [to_message(event).WhichOneof("event") async for event in responses]
    assert events[-1] == "finished"


def test_request_bound_of_tokens_omits_received_ones():
    params = SamplingParams(max_tokens=10, n=2, best_of=4, temperature=1.0)
    assert Request("r", (5, 6), params).most_tokens == 2 + 4 * 10
    assert Request("r", (5, 6), params, received=((1,) * 4, (1,) * 6)).most_tokens == 2 + 4 * 5


async def test_long_received_output_is_decoded_off_the_event_loop(monkeypatch):
    threads = []

    class Recorded(Answer):
        def __init__(self, *args: Any) -> None:
            threads.append(threading.current_thread())
            super().__init__(*args)

    monkeypatch.setattr(inference, "Answer", Recorded)
    tokens_of_letters = letter_ids()[:1]
    for num_received in (2, 2000):
        received = [ReceivedOutput(tokens_of_letters * num_received)]
        call = GenerateCall([5, 6], SamplingParams(max_tokens=num_received), received=received)
        called = inference_of(FakeFleet([]), Quotas())
        async with aclosing(called.generate(call, Call(), Deadline.after(60.0))) as responses:
            events = [to_message(event).WhichOneof("event") async for event in responses]
        assert events.count("finished") == 1
    in_loop, in_thread = threads
    assert in_loop is threading.current_thread() is not in_thread


def test_fingerprint_of_mixed_fleet_lists_those_that_serve():
    inference = inference_of(FakeFleet([]), Quotas())
    assert inference.fingerprint == ""
    serving = [(b"\x0b", True), (b"\x0a", True), (b"\x0b", True), (b"\x0c", False)]
    inference._services.fleet.members = [
        SimpleNamespace(record=SimpleNamespace(fingerprint=fingerprint), is_serving=is_serving)
        for fingerprint, is_serving in serving
    ]
    assert inference.fingerprint == "0a,0b"


async def test_workers_are_told_when_the_first_token_is_due():
    """By the objective, which is earlier than the end of the call."""
    workers = prefill_behind(0, 2), decode(READY, tokens(1, 1), finished())
    async with front_of(*workers) as front:
        response = await front.post("/v1/completions", json={**ASKED, "max_tokens": 2})
        assert response.status_code == 200, response.text
    for worker in workers:
        assert 0 < worker.requests[0].first_token_due.ToMilliseconds() <= TTFT_OBJECTIVE * 1000
