"""What OpenAI's client is told where its requests come to nothing, and what is left of them."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from baton.cli.local_cluster import LocalCluster
from baton.cli.ports import HOST, free_port
from baton.client import AsyncClient
from baton.errors import NotFoundError
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import held, load_of, loads, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

JSON = {"content-type": "application/json"}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def ai(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connected(cluster) as client:
        yield client


def connected(cluster: LocalCluster, token: str = "any", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{cluster.http_address}/v1", api_key=token, **{"max_retries": 0, **options}
    )


async def post(cluster: LocalCluster, path: str, content: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.http_address, timeout=30) as client:
        return await client.post(path, content=content, headers={**JSON, **headers})


# What is refused by its name.

BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "a number as text": ({"temperature": "hot"}, "temperature"),
    "a number out of bounds": ({"top_p": 1.5}, "top_p"),
    "not a whole number": ({"max_tokens": 2.5}, "max_tokens"),
    "no room": ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    "two bounds": ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "too many choices": ({"n": 17}, "n"),
    "too many log-probabilities": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "tops without log-probabilities": ({"top_logprobs": 2}, "top_logprobs"),
    "too many stops": ({"stop": ["a"] * 5}, "stop"),
    "an empty stop": ({"stop": ["a", ""]}, "stop[1]"),
    "a bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "a bias beyond the vocabulary": ({"logit_bias": {"4000": 1}}, "logit_bias[0]"),
    "too great a seed": ({"seed": 2**64}, "seed"),
    "no messages": ({"messages": []}, "messages"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    "half a character": (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "messages[0].content",
    ),
    "a format without a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    "a format that is none": ({"response_format": {"type": "yaml"}}, "response_format"),
    "a schema that is none": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            }
        },
        "response_format",
    ),
    "a tool that must be called": ({"tool_choice": "required"}, "tool_choice"),
    "one call at a time": ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    "to be stored": ({"store": True}, "store"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities[1]"),
    "an effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "what nobody knows": ({"flavour": "sweet"}, "flavour"),
    "usage without a stream": (
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
    ),
    "a template of the client's": (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs.chat_template",
    ),
}


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS.values(), ids=BAD_CHATS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_bad_chat_is_refused_by_the_name_of_the_field(cluster, fields, param, stream):
    asked = {"model": "tiny", "messages": MESSAGES, "stream": stream, **fields}
    response = await post(cluster, "/v1/chat/completions", json.dumps(asked))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")
    assert "sampling." not in error["message"]
    await until_nothing_is_held(cluster)


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "an empty one of several": ({"prompt": ["a", ""]}, "prompt"),
    "mixed": ({"prompt": ["a", 3]}, "prompt[1]"),
    "a negative token": ({"prompt": [3, -1]}, "prompt"),
    "a token beyond the vocabulary": ({"prompt": [3, 4000]}, "prompt[1]"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "too many log-probabilities": ({"logprobs": 21}, "logprobs"),
    "negative log-probabilities": ({"logprobs": -1, "echo": True}, "logprobs"),
    "fewer of which the best": ({"best_of": 1, "n": 2}, "best_of"),
    "a suffix": ({"suffix": "end"}, "suffix"),
}


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
async def test_a_bad_completion_is_refused_by_the_name_of_the_field(cluster, fields, param):
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}
    response = await post(cluster, "/v1/completions", json.dumps(asked))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    await until_nothing_is_held(cluster)


BAD_BODIES = {
    "nothing": b"",
    "half an object": b'{"model": "tiny"',
    "a list": b"[]",
    "no text": b'{"model": "\xff"}',
    "not a number": b'{"temperature": NaN}',
    "too deep": b'{"messages":' + b"[" * 100_000,
    "a number of a million digits": b'{"seed": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_a_body_that_is_no_object_is_refused(cluster, body):
    response = await post(cluster, "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


async def test_a_body_that_is_not_said_to_be_json_is_refused(cluster):
    response = await post(cluster, "/v1/completions", b"{}", **{"content-type": "text/plain"})
    assert response.status_code == 415


async def test_errors_are_those_of_openai_s_client(ai):
    with pytest.raises(openai.NotFoundError) as caught:
        await ai.completions.create(model="gpt-5", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await ai.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await ai.completions.create(model="tiny", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await ai.embeddings.create(model="tiny", input="x")


async def test_what_is_not_there_and_what_is_not_to_be_got_are_said_in_the_same_shape(cluster):
    async with httpx.AsyncClient(base_url=cluster.http_address) as client:
        missing, wrong = await client.get("/v2"), await client.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


# What is too large.


@pytest.mark.parametrize("num_mib", [9, 40])
async def test_a_body_over_the_limit_is_refused_before_it_is_all_there(cluster, num_mib):
    router = psutil.Process(cluster.process("router").pid)
    before = router.memory_info().rss

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(num_mib):
            yield b" " * 2**20

    announced = await post(cluster, "/v1/completions", b" " * (num_mib * 2**20))
    assert announced.status_code == 413
    # One that says nothing of its size.
    async with httpx.AsyncClient(base_url=cluster.http_address, timeout=30) as client:
        response = await client.post("/v1/completions", content=pieces(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert router.memory_info().rss - before < 24 * 2**20


async def test_a_prompt_over_the_limit_is_refused(ai):
    with pytest.raises(openai.BadRequestError, match="at most 1048576 are taken") as caught:
        await ai.completions.create(model="tiny", prompt="x" * 2**21)
    assert caught.value.param == "prompt"


# Who leaves, and what takes too long.


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_ends_its_request_at_once(cluster, ai, stream):
    await until_nothing_is_held(cluster)
    asking = asyncio.create_task(_read_all(ai, stream))
    await until_observed(lambda: loads(cluster)["decode-0"].num_running == 1, what="the decoding")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until_nothing_is_held(cluster)


async def _read_all(ai: openai.AsyncOpenAI, stream: bool) -> None:
    answer: Any = await ai.chat.completions.create(messages=MESSAGES, stream=stream, **LONG)
    if stream:
        async for _ in answer:
            pass


def num_requests(cluster: LocalCluster) -> int:
    """At the router, those among them that wait for room."""
    load = loads(cluster)["router"]
    return load.num_running + load.num_waiting


async def test_a_client_that_leaves_ends_all_its_prompts(cluster, ai):
    await until_nothing_is_held(cluster)
    answer = await ai.completions.create(prompt=[[5, 6], [7, 8]], stream=True, **LONG)
    async for _ in answer:
        break
    await until_observed(lambda: num_requests(cluster) == 2, what="both requests")
    await answer.close()
    await until_nothing_is_held(cluster)


async def test_a_connection_that_is_cut_off_ends_its_request(cluster):
    await until_nothing_is_held(cluster)
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "ignore_eos": True}).encode()
    host, port = cluster.http_address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until_observed(lambda: loads(cluster)["decode-0"].num_running == 1, what="the decoding")
    writer.transport.abort()
    await until_nothing_is_held(cluster)


async def test_a_deadline_is_told_as_such(cluster, ai):
    options = {"ignore_eos": True, "baton": {"timeout_s": 0.4}}
    asked = {**LONG, "messages": MESSAGES, "extra_body": options}
    with pytest.raises(openai.InternalServerError) as caught:
        await ai.chat.completions.create(**asked)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    stream = await ai.chat.completions.create(stream=True, **asked)
    with pytest.raises(openai.APIError, match="deadline") as in_stream:
        async for _ in stream:
            pass
    assert in_stream.value.code == "deadline_exceeded"
    await until_nothing_is_held(cluster)


async def test_an_answer_is_known_to_administrators_by_its_id(cluster, ai, client):
    stream = await ai.chat.completions.create(messages=MESSAGES, stream=True, **LONG)
    chunk = await anext(aiter(stream))
    request_id = chunk.id.removeprefix("chatcmpl-")
    assert stream.response.headers["x-request-id"] == request_id
    await client.abort(request_id)
    with pytest.raises(openai.APIError, match="was aborted"):
        async for _ in stream:
            pass
    await until_nothing_is_held(cluster)


# A router of its own for what would disturb others.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One request at a time, and one that waits; two tenants."""
    path = Path(tmp_path_factory.mktemp("tenants")) / "tokens"
    lines = [f"{hashlib.sha256(t.encode()).hexdigest()} {t}\n" for t in ("acme", "globex")]
    path.write_text("".join(lines))
    with LocalCluster(
        decode_flags={"max_num_seqs": 1, "num_blocks": 128},
        router_flags={"tenants_file": path, "max_waiting": 1, **HANDOFFS},
        http_port=0,
    ) as running:
        yield running


async def test_an_overload_says_when_to_ask_again(small):
    async with connected(small, "acme") as ai:
        running = await ai.chat.completions.create(messages=MESSAGES, stream=True, **LONG)
        await anext(aiter(running))
        waiting = asyncio.create_task(_read_all(ai, True))
        found: list[openai.RateLimitError] = []
        async with asyncio.timeout(20):
            while not found:
                try:
                    again = asyncio.create_task(_read_all(ai, True))
                    await asyncio.wait_for(again, 0.5)
                except TimeoutError:
                    continue
                except openai.RateLimitError as error:
                    found.append(error)
        headers = found[0].response.headers
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) > 0
        assert found[0].code == "rate_limit_exceeded"
        waiting.cancel()
        await running.close()
        await asyncio.gather(waiting, return_exceptions=True)
    await until_nothing_is_held(small)


async def test_a_token_says_whose_a_request_is(small):
    async with connected(small, "guessed") as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.chat.completions.create(messages=MESSAGES, **LONG)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    prompt = prompt_of(100, seed=9)
    counts = []
    for token in ("acme", "acme", "globex"):
        async with connected(small, token) as ai:
            answer = await ai.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            counts.append(details.cached_tokens)
    assert counts == [0, 96, 0]


async def test_a_request_is_ended_by_its_own_tenant_alone(small):
    async with (
        connected(small, "acme") as ai,
        AsyncClient(small.address, admin_address=small.admin_address, token="globex") as other,
        AsyncClient(small.address, admin_address=small.admin_address, token="acme") as owner,
    ):
        stream = await ai.chat.completions.create(messages=MESSAGES, stream=True, **LONG)
        request_id = (await anext(aiter(stream))).id.removeprefix("chatcmpl-")
        with pytest.raises(NotFoundError):
            await other.abort(request_id)
        await owner.abort(request_id)
        await stream.close()
    await until_nothing_is_held(small)


async def test_a_draining_router_ends_what_it_has_and_takes_no_more(small):
    """The last test of this router."""
    async with connected(small, "acme") as ai:
        stream = await ai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = aiter(stream)
        await anext(chunks)
        small.kill("router", signal.SIGTERM)
        endpoint = small.admin_address
        await until_observed(lambda: load_of(endpoint).state == "draining", what="the drain")
        with pytest.raises(openai.InternalServerError) as caught:
            await ai.chat.completions.create(messages=MESSAGES, **LONG)
        assert caught.value.status_code == 503
        async with httpx.AsyncClient(base_url=small.http_address) as client:
            assert (await client.get("/health")).status_code == 503
        rest = [chunk async for chunk in chunks]
        assert rest[-1].choices[0].finish_reason == "length"
    await until_observed(lambda: not small.process("router").is_running, what="its end")
    assert held(small) == {}


# The process.


def test_a_port_that_is_taken_is_named(cluster):
    port = cluster.http_address.rsplit(":", 1)[1]
    found = router("--http-port", port)
    assert found.splitlines()[-1] == (
        f"router: port {port} on {HOST} is taken; choose another with --http-port"
    )


def test_what_is_not_installed_is_named(tmp_path):
    """Where `fastapi` is not found, which is what an absent package looks like."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fastapi' else find(name, *a)\n"
    )
    found = router("--http-port", "0", PYTHONPATH=str(tmp_path))
    assert found == "router: --http-port needs fastapi; pip install 'baton-serve[http]'\n"


def router(*flags: str, **variables: str) -> str:
    """What a router that cannot start says."""
    paths = [variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "router", "--port", "0"),
            *("--redis-url", f"redis://{HOST}:{free_port(set())}/0", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 1
    return done.stderr
