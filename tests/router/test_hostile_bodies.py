"""Hostile bodies and messages against a router process: each is refused by its field, cheaply."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest

from baton.errors import InvalidArgumentError
from baton.rpc_errors import error_of
from tests.support.router.hostile_bodies import BODIES, MESSAGES, assert_legal
from tests.support.router.lone_router import LoneRouter, lone_router

JSON = {"content-type": "application/json"}
# Before bodies were bounded, each of them held the event loop for 1 to 5 s.
MAX_STALL_SECONDS = 0.5


@pytest.fixture(scope="module")
def router() -> Iterator[LoneRouter]:
    with lone_router() as running:
        yield running


@contextmanager
def answers_others(router: LoneRouter) -> Iterator[None]:
    """Fails if another client waits for an answer longer than `MAX_STALL_SECONDS`."""
    begun, ended, waits = threading.Event(), threading.Event(), []

    def ask() -> None:
        with httpx.Client(base_url=router.http_address, timeout=60) as client:
            while not ended.is_set():
                began = time.monotonic()
                client.get("/health")
                waits.append(time.monotonic() - began)
                begun.set()
                time.sleep(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert max(waits) < MAX_STALL_SECONDS


@pytest.mark.parametrize("name", BODIES)
def test_router_refuses_hostile_body_and_answers_others(router, name):
    path, field, make = BODIES[name]
    body = make()
    assert len(body) < 8 * 2**20
    before = router.rss()
    with httpx.Client(base_url=f"{router.http_address}/v1/", timeout=60) as client:
        with answers_others(router):
            response = client.post(path, content=body, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert client.get("models").status_code == 200
    assert router.rss() - before < 20 * 10**6


@pytest.mark.parametrize("name", [name for name in BODIES if name != "deep lists"])
def test_hostile_body_is_legal_json(name):
    assert_legal(BODIES[name][2]())


@pytest.mark.parametrize("name", MESSAGES)
def test_router_refuses_hostile_message_and_answers_others(router, name):
    field, make = MESSAGES[name]
    message = make()
    before = router.rss()
    with router.channel() as channel, answers_others(router):
        error = refusal_of(channel, message)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert router.rss() - before < 20 * 10**6


def refusal_of(channel: grpc.Channel, message: bytes) -> Exception:
    generate = channel.unary_stream("/baton.v1.Inference/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(message, timeout=60))
    return error_of(caught.value)


@pytest.mark.slow
def test_router_memory_returns_after_hostile_bodies():
    requests = [(path, make()) for path, _, make in BODIES.values()]
    with lone_router() as router, httpx.Client(timeout=60) as client:
        client.get(f"{router.http_address}/v1/models")
        before = router.rss()
        for at in range(100):
            path, body = requests[at % len(requests)]
            url = f"{router.http_address}/v1/{path}"
            assert client.post(url, content=body, headers=JSON).status_code == 400
        with router.channel() as channel:
            for _, make in MESSAGES.values():
                refusal_of(channel, make())
        assert router.rss() - before < 20 * 10**6
