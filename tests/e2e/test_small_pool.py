"""Decode workers whose KV pool has room for 704 tokens, of the 2,048 that their model takes:
requests beyond it are refused with both numbers and the setting, over each API."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from baton.cli.checks.cluster import cluster
from baton.cli.checks.finding import Level
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.errors import ContextLengthError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.second_router import SecondRouter, second_router

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POOL = (
    "The KV pool of the largest worker has room for 704 tokens of a sequence; the model takes 2048."
    " Enlarge the pool by --kv-cache-bytes or --num-blocks of the worker."
)
LONG = {"messages": [{"role": "user", "content": "a b " * 600}], "max_tokens": 9}


@pytest.fixture(scope="module")
def small(tight_shape: LocalCluster) -> Iterator[SecondRouter]:
    with second_router(tight_shape, http=True) as router:
        yield router


def refused(router: SecondRouter, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the error of a request that is refused with status 400."""
    address, headers = f"{router.http_address}/v1/{path}", {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    error: dict[str, Any] = json.load(caught.value)["error"]
    return error


def test_worker_logs_room_of_its_pool_once_ready(small):
    log = small.process("decode-0").log_path.read_text()
    assert "room for 704 tokens; the model takes 2,048 (--kv-cache-bytes or --num-blocks" in log


def test_doctor_notes_workers_of_small_pools(small):
    found = {f.subject: f for f in cluster(small.admin_address, None, "")}
    decoding = [found[f"KV pool of decode-{n}"] for n in (0, 1)]
    assert {f.level for f in decoding} == {Level.NOTE}
    assert {f.text for f in decoding} == {"has room for 704 tokens; the model takes 2,048"}
    assert "raise --kv-cache-bytes or --num-blocks" in decoding[0].advice
    assert "KV pool of prefill-0" not in found


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "asked"),
    [
        (1000, 8, "input.token_ids: has 1000 tokens; "),
        (600, 200, "sampling.max_tokens: is 200, and the prompt has 600 tokens; "),
        (9, 1000, "sampling.max_tokens: is 1000; "),
    ],
    ids=["prompt", "prompt and output", "output"],
)
def test_grpc_error_names_pool_of_workers(small, num_prompt, max_tokens, asked):
    params = SamplingParams(max_tokens=max_tokens)
    with Client(small.address) as client, pytest.raises(ContextLengthError) as caught:
        client.generate(prompt_of(num_prompt), params).text()
    assert str(caught.value).startswith(f"{asked}this model's maximum context length is 704 tokens")
    assert str(caught.value).endswith(POOL)
    assert (caught.value.limit, caught.value.remedy) == (704, POOL)


def test_openai_error_names_pool_of_workers(small):
    prompt = {"prompt": prompt_of(1000), "max_tokens": 8}
    for path, body in ("completions", prompt), ("chat/completions", LONG):
        error = refused(small, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 704 tokens" in error["message"]
        assert error["message"].endswith(POOL)


def test_anthropic_error_names_pool_of_workers(small):
    message = refused(small, "messages", LONG)["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(f" tokens > 704 maximum. {POOL}")
