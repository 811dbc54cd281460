"""Endpoint picker behind a real Envoy, before model servers of others."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from baton.cli.local.ports import free_port
from tests.support.gateway.envoy import DESTINATION, envoy, listener
from tests.support.gateway.model_servers import ModelServer, serving
from tests.support.gateway.picker_process import picker_process
from tests.support.waiting import wait_until

# The picker leaves a model server that does not answer its probe within a second.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CLOSED = "127.0.0.1:9"
MAX_BODY = 2**20


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ModelServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(ModelServer())) for _ in range(3)]


@pytest.fixture(scope="module")
def urls(servers, tmp_path_factory) -> Iterator[dict[str, str]]:
    addresses = [server.address for server in servers]
    listeners = {
        "duplex": listener(),
        "buffered": listener("BUFFERED", "NONE"),
        "partial": listener("BUFFERED_PARTIAL", "STREAMED"),
        "streamed": listener("STREAMED", "STREAMED"),
        "header": listener(cluster="by_header"),
        "subset": listener(subset=addresses[:1]),
        "empty": listener(subset=[]),
        "strangers": listener(subset=[CLOSED]),
        "malformed": listener(subset=["localhost"]),
    }
    with (
        picker_process(
            *("--endpoints", ",".join(addresses), "--max-body-bytes", str(MAX_BODY))
        ) as picker,
        envoy(tmp_path_factory.mktemp("envoy"), picker, addresses, listeners) as urls,
    ):
        yield urls


def completion(url: str, prompt: str, **fields) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, **fields}
    # Not over TLS, for which each call would read the certificates of all authorities.
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20, verify=False)


def prompt_of(name: object) -> str:
    return f"{name}: " + "def common(prefix):\n    return prefix\n\n\n" * 40


@pytest.mark.parametrize("mode", ["duplex", "buffered", "partial", "header"])
def test_envoy_sends_equal_prefixes_to_one_model_server(urls, mode):
    served = {}
    for _ in range(3):
        for name in range(16):  # all at one of three servers: one in ten million runs
            answer = completion(urls[mode], prompt_of((mode, name)) + str(len(served))).json()
            assert answer["destination"] == answer["address"]
            served.setdefault(name, set()).add(answer["address"])
    assert all(len(addresses) == 1 for addresses in served.values())
    assert len(set.union(*served.values())) > 1


def test_envoy_passes_bodies_on_unchanged(urls):
    body = b'{"model": "m", "prompt": "' + b"a" * 300_000 + b'"}'
    for mode in ("duplex", "buffered", "streamed"):
        answer = httpx.post(
            f"{urls[mode]}/v1/completions",
            content=body,
            headers={"content-type": "application/json"},
        ).json()
        assert answer["num_bytes"] == len(body)
        assert answer["sha256"] == hashlib.sha256(body).hexdigest()


def test_envoy_streams_answers_event_by_event(urls):
    for mode in ("duplex", "buffered", "streamed"):
        chunks = []
        body = {"model": "m", "prompt": prompt_of(mode), "stream": True}
        with httpx.stream("POST", f"{urls[mode]}/v1/completions", json=body) as response:
            chunks += list(response.iter_text())
        assert "".join(chunks).count("data: ") == 10
        assert len(chunks) > 3


def test_envoy_gets_the_explanation_as_metadata(urls):
    prompt = prompt_of("why")
    completion(urls["duplex"], prompt)
    why = completion(urls["duplex"], prompt).headers["x-why"]
    assert "alone costs" in why
    assert "other choices" in why


def test_picker_places_requests_without_prompt(urls):
    for mode in ("duplex", "streamed"):
        assert httpx.get(f"{urls[mode]}/v1/models").json()["num_bytes"] == 0
        sent = httpx.post(f"{urls[mode]}/v1/audio", content=b"x" * 200_000).json()
        assert sent["num_bytes"] == 200_000


def test_picker_picks_from_the_subset_only(urls, servers):
    for name in range(6):
        answer = completion(urls["subset"], prompt_of(("subset", name)))
        assert answer.json()["address"] == servers[0].address


@pytest.mark.parametrize("subset", ["empty", "strangers"])
def test_picker_answers_503_if_no_endpoint_is_eligible(urls, subset):
    answer = completion(urls[subset], "hello")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"


def test_picker_ends_the_stream_for_a_malformed_subset(urls):
    answer = completion(urls["malformed"], "hello")
    assert answer.status_code == 500
    assert completion(urls["duplex"], "hello").status_code == 200


def test_picker_rejects_large_bodies_with_413(urls):
    for mode in ("duplex", "buffered"):
        headers = {"content-type": "application/json"}
        whole = httpx.post(urls[mode], content=b" " * (MAX_BODY + 1), headers=headers)
        assert whole.status_code == 413
    chunks = (b" " * 2**16 for _ in range(17))
    assert httpx.post(urls["duplex"], content=chunks, headers=headers).status_code == 413


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"[" * 10_000, b'{"prompt": "\xff"}'])
def test_picker_rejects_malformed_bodies_with_400(urls, body):
    answer = httpx.post(urls["duplex"], content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_client_cannot_choose_the_endpoint_itself(urls):
    headers = {DESTINATION: CLOSED}
    answer = httpx.get(f"{urls['header']}/v1/models", headers=headers).json()
    assert answer["destination"] == answer["address"] != CLOSED


@contextmanager
def picked(folder, servers, listeners, *arguments):
    addresses = [server.address for server in servers]
    with (
        picker_process("--endpoints", ",".join(addresses), *arguments) as picker,
        envoy(folder, picker, addresses, listeners) as urls,
    ):
        yield urls


def test_picker_avoids_a_model_server_that_went_down(tmp_path):
    with ExitStack() as stack:
        servers = [ModelServer() for _ in range(2)]
        runs = [stack.enter_context(ExitStack()) for _ in servers]
        for server, run in zip(servers, runs, strict=True):
            run.enter_context(serving(server))
        urls = stack.enter_context(picked(tmp_path, servers, {"duplex": listener()}))
        prompt = prompt_of("down")
        first = completion(urls["duplex"], prompt).json()["address"]
        gone = [server.address for server in servers].index(first)
        runs[gone].close()
        wait_until(lambda: completion(urls["duplex"], prompt).status_code == 200, 10)
        other = servers[1 - gone].address
        for _ in range(5):
            assert completion(urls["duplex"], prompt).json()["address"] == other
        runs[gone].enter_context(serving(servers[gone], int(first.rpartition(":")[2])))
        wait_until(
            lambda: completion(urls["duplex"], prompt_of(object())).json()["address"] == first, 10
        )


def test_envoy_retries_on_the_next_endpoint_of_the_list(tmp_path):
    listeners = {"list": listener(cluster="by_list")}
    slow = "--probe-interval-s=600"
    with ExitStack() as stack:
        run = stack.enter_context(ExitStack())
        servers = [
            run.enter_context(serving(ModelServer())),
            stack.enter_context(serving(ModelServer())),
        ]
        urls = stack.enter_context(picked(tmp_path, servers, listeners, slow, "--max-endpoints=2"))
        prompts = [prompt_of(name) for name in range(8)]
        served = {p: completion(urls["list"], p).json()["address"] for p in prompts}
        assert len(set(served.values())) == 2
        run.close()
        lost = next(p for p, address in served.items() if address == servers[0].address)
        answer = completion(urls["list"], lost).json()
        assert answer["address"] == servers[1].address
        assert answer["destination"] == f"{servers[0].address},{servers[1].address}"
        # The picker learned from the address that served it.
        wait_until(
            lambda: completion(urls["list"], lost).json()["destination"] == servers[1].address, 10
        )


def test_envoy_acts_by_its_failure_mode_without_a_picker(tmp_path):
    # With full-duplex bodies Envoy can fail open until it has sent some of the body.
    buffered = ("BUFFERED", "NONE")
    listeners = {
        "open": listener(*buffered, cluster="by_list", fails_open=True),
        "closed": listener(*buffered, cluster="by_list"),
        "closed duplex": listener(cluster="by_list"),
    }
    with (
        serving(ModelServer()) as server,
        envoy(tmp_path, CLOSED, [server.address], listeners) as urls,
    ):
        assert completion(urls["open"], "hello").json()["address"] == server.address
        assert completion(urls["closed"], "hello").status_code == 500
        assert completion(urls["closed duplex"], "hello").status_code == 500


@pytest.mark.slow
def test_envoy_uses_a_picker_that_comes_back(tmp_path):
    port = free_port(set())
    listeners = {"closed": listener()}
    with serving(ModelServer()) as server:
        names = "--endpoints", server.address
        with envoy(tmp_path, f"127.0.0.1:{port}", [server.address], listeners) as urls:
            with picker_process(*names, port=port):
                wait_until(lambda: completion(urls["closed"], "a").status_code == 200)
            assert completion(urls["closed"], "a").status_code == 500
            with picker_process(*names, port=port):
                wait_until(lambda: completion(urls["closed"], "a").status_code == 200)
