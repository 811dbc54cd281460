"""Hostile bodies and messages against a router process: each is refused by its field, cheaply."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from baton.errors import InvalidArgumentError
from baton.rpc.errors import error_of
from baton.serving.tokens import new_token
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.hostile_bodies import BODIES, MESSAGES, NEEDED, SHAPES, assert_legal
from tests.support.router.lone_router import LoneRouter, lone_router
from tests.support.waiting import wait_until

JSON = {"content-type": "application/json"}
# The event loop is held for less. Without bounds, most of these take 1 to 5 s and keep 100 MB.
MAX_CPU_SECONDS = 0.5
MAX_KEPT_BYTES = 20 * 10**6


@pytest.fixture(scope="module")
def router() -> Iterator[LoneRouter]:
    with lone_router() as running:
        yield running


@contextmanager
def costing_little(router: LoneRouter) -> Iterator[None]:
    """Fails if the router computes for longer in the block, or keeps memory after it."""
    memory, cpu = router.rss(), router.cpu_seconds()
    yield
    assert router.cpu_seconds() - cpu < MAX_CPU_SECONDS
    wait_until_returned(router, memory)


def wait_until_returned(router: LoneRouter, before: int) -> None:
    """Waits until the router keeps little more memory than `before`: gRPC frees a message of 8 MB
    some milliseconds after the refusal has arrived."""
    wait_until(lambda: router.rss() - before < MAX_KEPT_BYTES, 5.0, "the return of its memory")


@pytest.mark.parametrize("name", BODIES)
def test_router_refuses_hostile_body_at_little_cost(router, name):
    path, field, make = BODIES[name]
    body = make()
    assert len(body) < 8 * 2**20
    with httpx.Client(base_url=f"{router.http_address}/v1/", timeout=60) as client:
        with costing_little(router):
            response = client.post(path, content=body, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert client.get("models").status_code == 200


@pytest.mark.parametrize("name", SHAPES)
def test_every_route_refuses_body_of_hostile_shape(router, name):
    with httpx.Client(base_url=router.http_address, timeout=60) as client, costing_little(router):
        for path, needed in NEEDED.items():
            body = SHAPES[name](json.dumps(needed).encode())
            response = client.post(path, content=body, headers=JSON)
            assert response.status_code == 400, (path, response.text)
            error = response.json()["error"]
            # Anthropic's errors name the field in their message alone.
            assert error.get("param", error["message"].partition(":")[0]) in ("body", "x")


def test_every_route_with_a_body_is_tried_with_hostile_ones(router):
    paths = httpx.get(f"{router.http_address}/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == {*NEEDED}


def test_router_refuses_too_large_body_at_once_by_its_length(router):
    head = b"content-type: application/json\r\ncontent-length: 99999999\r\n\r\n"
    address = urlsplit(router.http_address)
    for path in NEEDED:
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + head)
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("key", ["model", "mo\\u0064el"])
def test_body_with_key_twice_is_refused_by_name(router, key):
    body = b'{"prompt":"x","model":"tiny","%b":"tiny"}' % key.encode()
    response = httpx.post(f"{router.http_address}/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "body: has the key 'model' twice; expected it once"


@pytest.mark.parametrize("name", [name for name in BODIES if name != "deep lists"])
def test_hostile_body_is_legal_json(name):
    assert_legal(BODIES[name][2]())


@pytest.mark.parametrize("name", MESSAGES)
def test_router_refuses_hostile_message_at_little_cost(router, name):
    field, make = MESSAGES[name]
    message = make()
    with router.channel() as channel, costing_little(router):
        error = refusal_of(channel, message)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field


def refusal_of(channel: grpc.Channel, message: bytes) -> Exception:
    generate = channel.unary_stream("/baton.v1.Inference/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(message, timeout=60))
    return error_of(caught.value)


def test_router_reads_large_legal_message(router):
    text = "word " * 20_000
    with router.channel() as channel:
        answer = InferenceStub(channel).Tokenize(pb.TokenizeRequest(text=text), timeout=60)
    assert answer.text == text


def test_router_names_field_of_large_malformed_message(router):
    latin = pb.GenerateRequest(request_id="?" * 10, text="x" * 100_000).SerializeToString()
    with router.channel() as channel:
        error = refusal_of(channel, latin.replace(b"?", b"\xe9"))
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.problem) == ("request_id", "is not valid UTF-8; text must be")


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
        wait_until_returned(router, before)


@pytest.mark.slow
def test_large_bodies_share_a_budget():
    with (
        lone_router(large_request_budget_bytes=2**20) as router,
        upload(router, 3 * 2**20) as first,
        upload(router, 900 * 2**10) as second,
    ):
        first.send(700 * 2**10)
        wait_until(lambda: first.num_unread() == 0)
        assert first.answer(within=0.2) is None, "it is not complete"
        second.send(600 * 2**10)
        wait_until(lambda: second.num_unread() < 200 * 2**10)  # of 276 beyond the budget
        assert second.answer(within=0.5) is None, "it waits for what the first one holds"
        assert second.num_unread() > 0
        first.send(2**20)
        refused = first.answer(within=30)
        assert refused is not None
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in refused.lower()
        second.send(300 * 2**10)
        served = second.answer(within=30)
        assert served is not None
        assert b'"param": "prompt"' in served
        with upload(router, 2**22) as alone:
            alone.send(2**22)
            served = alone.answer(within=30)
            assert served is not None
            assert b'"param": "prompt"' in served


@pytest.mark.slow
def test_bodies_of_largest_tenant_give_way(tmp_path):
    tokens, path = {tenant: new_token(tenant) for tenant in ("many", "few")}, tmp_path / "tenants"
    path.write_text("".join(f"{line}\n" for _, line in tokens.values()))
    with (
        lone_router(large_request_budget_bytes=2**20, tenants_file=path) as router,
        upload(router, 900 * 2**10, tokens["many"][0]) as first,
        upload(router, 900 * 2**10, tokens["many"][0]) as second,
        upload(router, 450 * 2**10, tokens["few"][0]) as other,
    ):
        for one in (first, second):
            one.send(500 * 2**10)
            wait_until(lambda one=one: one.num_unread() == 0)
        other.send(450 * 2**10)
        served = other.answer(within=30)
        assert served is not None
        assert b'"param": "prompt"' in served
        refused = second.answer(within=30)
        assert refused is not None
        assert refused.startswith(b"HTTP/1.1 429")
        assert first.answer(within=0.2) is None, "it is not complete"
        first.send(400 * 2**10)
        served = first.answer(within=30)
        assert served is not None
        assert b'"param": "prompt"' in served


class Upload:
    """A body without a prompt, of which parts are sent by hand."""

    def __init__(self, connection: socket.socket, num_bytes: int, token: str) -> None:
        self._connection = connection
        self._left = b'{"user":"' + b"a" * (num_bytes - 11) + b'"}'
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {num_bytes}\r\nauthorization: Bearer {token}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n")

    def send(self, num_bytes: int) -> None:
        """Sends the next bytes; does not wait until the router has read them."""
        part, self._left = self._left[:num_bytes], self._left[num_bytes:]
        sending = threading.Thread(target=self._send, args=(part,))
        sending.start()
        sending.join(0.3)

    def answer(self, within: float) -> bytes | None:
        """Returns what the router answers; None if that is nothing in `within` seconds."""
        self._connection.settimeout(within)
        received = b""
        try:
            while b"}}" not in received:
                received += self._connection.recv(65536)
        except TimeoutError:
            return None
        return received

    def num_unread(self) -> int:
        """Returns the bytes sent that the router has not read: they wait at one of both ends."""
        ends = {self._connection.getsockname()[1], self._connection.getpeername()[1]}
        num_bytes = 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, queues, *_ = line.split()
            if {int(address.partition(":")[2], 16) for address in (local, remote)} == ends:
                num_bytes += sum(int(queue, 16) for queue in queues.split(":"))
        return num_bytes

    def _send(self, part: bytes) -> None:
        with suppress(OSError):
            self._connection.sendall(part)


@contextmanager
def upload(router: LoneRouter, num_bytes: int, token: str = "") -> Iterator[Upload]:
    address = urlsplit(router.http_address)
    with socket.create_connection((address.hostname, address.port)) as connection:
        yield Upload(connection, num_bytes, token)
