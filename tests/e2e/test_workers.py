"""Workers asked directly, as a router other than ours might: alone, wrongly, or with half the work
done."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.cluster.keys import record_key
from baton.cluster.redis.client import connect
from baton.cluster.registry.registry import WorkerRecord
from baton.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from baton.models import locate
from baton.v1 import admin_pb2, decode_pb2, kv_transfer_pb2, prefill_pb2, sampling_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import held, until_nothing_is_held
from tests.support.failures import failure_of
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
_names = itertools.count()


@dataclass
class Workers:
    prefill: Any
    decode: Any
    prefill_admin: Any
    decode_admin: Any


@pytest.fixture
async def workers(cluster: LocalCluster) -> AsyncIterator[Workers]:
    async with (
        grpc.aio.insecure_channel(cluster.process("prefill-0").endpoint) as prefill,
        grpc.aio.insecure_channel(cluster.process("decode-0").endpoint) as decode,
        grpc.aio.insecure_channel(cluster.process("prefill-0").admin_endpoint) as prefill_admin,
        grpc.aio.insecure_channel(cluster.process("decode-0").admin_endpoint) as decode_admin,
    ):
        yield Workers(
            PrefillStub(prefill),
            DecodeStub(decode),
            AdminStub(prefill_admin),
            AdminStub(decode_admin),
        )
    await until_nothing_is_held(cluster)


def request(prompt: list[int], output: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "request_id": f"direct-{next(_names)}",
        "token_ids": prompt + output,
        "num_prompt_tokens": len(prompt),
        "sampling": sampling_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    }


def to_decode(
    prompt: list[int], output: list[int] | None = None, max_tokens: int = 12, **fields: Any
) -> decode_pb2.DecodeGenerateRequest:
    return decode_pb2.DecodeGenerateRequest(**request(prompt, output or [], max_tokens), **fields)


def to_prefill(
    prompt: list[int], output: list[int] | None = None, **fields: Any
) -> prefill_pb2.PrefillRequest:
    fields = {"lease_id": next(_names).to_bytes(16, "big"), **fields}
    return prefill_pb2.PrefillRequest(**request(prompt, output or [], 12), **fields)


async def decoded(call: Any) -> tuple[list[int], int, int]:
    """Its tokens, the position of the first, and why it ended."""
    tokens: list[int] = []
    start = reason = -1
    async for response in call:
        if response.HasField("tokens"):
            assert start == -1 or response.tokens.position == start + len(tokens)
            start = response.tokens.position if start == -1 else start
            tokens += response.tokens.token_ids
        if response.HasField("finished"):
            reason = response.finished.reason
    return tokens, start, reason


@pytest.mark.parametrize("known", [0, 3])
async def test_prefill_without_decode_worker_returns_one_token(workers, known):
    prompt = prompt_of(100, seed=23)
    whole, _, _ = await decoded(workers.decode.Generate(to_decode(prompt), timeout=10.0))
    call = workers.prefill.Prefill(to_prefill(prompt, whole[:known]), timeout=10.0)
    events = [response async for response in call]
    assert [e.WhichOneof("event") for e in events] == ["admitted", "started", "result"]
    (first,) = events[-1].result.first_tokens
    assert (first.token_id, first.position) == (whole[known], known)


async def test_prefill_lease_is_released_when_its_caller_cancels(workers, cluster):
    holding = workers.prefill.Prefill(to_prefill(prompt_of(50), decode_worker="d"), timeout=10.0)
    while (await holding.read()).WhichOneof("event") != "result":
        pass
    assert "leases" in held(cluster)["prefill-0"]
    holding.cancel()


async def prefill_record(cluster: LocalCluster) -> WorkerRecord:
    """Returns the record that the prefill worker has written."""
    redis = connect(cluster.redis_url)
    fields = await redis.hgetall(record_key(cluster.process("prefill-0").worker_id))
    await redis.aclose()
    return WorkerRecord.from_fields(fields)


def handle(**changes: Any) -> kv_transfer_pb2.KvHandle:
    fields: dict[str, Any] = {
        "version": 1,
        "source_worker": "p",
        "source_endpoint": "127.0.0.1:1",
        "lease_id": bytes(16),
        "fingerprint": b"another model",
        "layouts": [kv_transfer_pb2.KvLayout(tensor_parallel_size=1)],
        "num_tokens": 20,
        "integrity": kv_transfer_pb2.INTEGRITY_XXH3_64,
    }
    return kv_transfer_pb2.KvHandle(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({}, FailedPreconditionError, b"another model".hex()),
        ({"version": 9}, FailedPreconditionError, "version is 9"),
        ({"integrity": 77}, FailedPreconditionError, "integrity 77"),
        ({"lease_id": b"short"}, InvalidArgumentError, "has 5 bytes"),
        ({"num_tokens": 21}, InvalidArgumentError, "21"),
        ({"layouts": [kv_transfer_pb2.KvLayout()]}, FailedPreconditionError, "ranks"),
    ],
)
async def test_decode_worker_rejects_an_invalid_handle_first(workers, changes, kind, named):
    wanted = to_decode(prompt_of(20), handle=handle(**changes))
    failure = await failure_of(workers.decode.Generate(wanted, timeout=10.0))
    assert isinstance(failure, kind)
    assert named in str(failure)


async def test_decode_fails_as_unavailable_when_the_source_is_gone(workers, cluster):
    record = await prefill_record(cluster)
    gone = handle(
        baton_version=record.version,
        fingerprint=record.fingerprint,
        layouts=kv_transfer_pb2.KvLayouts.FromString(record.layout).layouts,
    )
    wanted = to_decode(prompt_of(20), handle=gone)
    failure = await failure_of(workers.decode.Generate(wanted, timeout=10.0))
    assert isinstance(failure, UnavailableError)


async def test_abort_ends_a_request_that_awaits_its_blocks(workers, cluster):
    record = await prefill_record(cluster)
    # It is early, and its prefill never comes.
    early = handle(
        source_endpoint=record.kv_endpoint,
        source_epoch=record.epoch,
        baton_version=record.version,
        fingerprint=record.fingerprint,
        layouts=kv_transfer_pb2.KvLayouts.FromString(record.layout).layouts,
    )
    wanted = to_decode(prompt_of(20), handle=early)
    call = workers.decode.Generate(wanted, timeout=10.0)
    assert (await call.read()).HasField("admitted")
    await until_observed(lambda: "blocks" in held(cluster).get("decode-0", ""), within=2.0)
    await workers.decode_admin.Abort(admin_pb2.AbortRequest(request_id=wanted.request_id))
    assert isinstance(await failure_of(call), CancelledError)


async def test_abort_ends_a_request_whose_blocks_are_unfetched(workers):
    wanted = to_prefill(prompt_of(50), decode_worker="d")
    call = workers.prefill.Prefill(wanted, timeout=10.0)
    while (await call.read()).WhichOneof("event") != "result":
        pass
    await workers.prefill_admin.Abort(admin_pb2.AbortRequest(request_id=wanted.request_id))
    assert isinstance(await failure_of(call), CancelledError)
