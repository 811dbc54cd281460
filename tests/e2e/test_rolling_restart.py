"""Every process of a cluster is replaced, one after the other, and no request notices."""

import asyncio
import signal
import time

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.cluster.keys import record_key
from baton.cluster.redis.client import connect
from baton.cluster.registry.registry import WorkerRecord
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from tests.support.cluster import named_clusters
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.rolling import (
    Question,
    clear_question,
    is_busy,
    mixed_questions,
    questions_of,
    under_load,
)
from tests.support.cluster.slowness import slowed
from tests.support.cluster.watch import held, load_of, until_nothing_is_held
from tests.support.cluster.wide import DECODE_WORKERS
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

# Longer than a router that drains waits for its streams.
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)

NUM_READERS = 8


ONE_OF_EACH = ("prefill-0", "decode-0", "router")
ALL = ("prefill-0", "prefill-1", "decode-0", "decode-1", "router", "router-1")


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """The longer half last beyond the time in which a router hears of a drain."""
    return mixed_questions(400, parts=(1, 8))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_EACH, id="one-of-each"),
        pytest.param(ALL, id="all", marks=pytest.mark.nightly),
    ],
)
async def test_rolling_restart_under_load_loses_no_request(rolling_shape, questions, names):
    processes = {p.name: p for p in [*rolling_shape.workers, *rolling_shape.routers]}
    assert {*processes} == {*ALL}
    async with under_load(rolling_shape, questions, NUM_READERS) as tally:
        for name in names:
            # One that has long answers still to compute when routers hear of its drain.
            with slowed(rolling_shape.cluster, *({name} & {*DECODE_WORKERS})):
                await tally.more(NUM_READERS)
                await until_observed(lambda n=name: is_busy(processes[n]), what=f"work for {name}")
                await rolling_shape.replace(processes[name])
            await tally.more(NUM_READERS)
    print(f"\n{tally}; seconds from SIGTERM to the end: {rolling_shape.drains}")
    assert tally.failures == {}
    assert tally.num_migrations > 0
    await until_nothing_is_held(rolling_shape.cluster)
    assert not is_busy(rolling_shape.routers[1])


@pytest.mark.nightly
async def test_redis_and_worker_restart_under_load_loses_no_request(rolling_shape, questions):
    """The new one is empty: what it has to know, it is told again."""
    redis = rolling_shape.cluster.redis
    assert redis is not None
    async with under_load(rolling_shape, questions, NUM_READERS) as tally:
        await rolling_shape.run(redis.stop)
        await tally.more(NUM_READERS)
        await rolling_shape.run(redis.start)
        for name in ("prefill-0", "decode-0"):
            await rolling_shape.replace(rolling_shape.cluster.process(name))
    assert tally.failures == {}
    await until_nothing_is_held(rolling_shape.cluster)


@pytest.mark.nightly
async def test_stream_resumes_elsewhere_after_router_drain_timeout():
    long = clear_question(LONG)
    with named_clusters.rolling(drain_timeout_s=0.5) as running:
        async with AsyncClient(running.addresses) as client:
            generation = client.generate(list(long.prompt), long.params)
            for _ in range(3):
                await anext(generation)
            first = running.routers[0]
            await until_observed(lambda: is_busy(first), what="the request")
            await running.replace(first)
            assert tuple(await generation.token_ids()) == long.answer[0]
            assert generation.num_resumed == 1
        await until_nothing_is_held(running.cluster)


@pytest.mark.nightly
async def test_prefill_worker_drains_until_its_lease_is_claimed(cluster):
    """As long as the decode worker has not come for it."""
    prompt, params = prompt_of(100), SamplingParams(max_tokens=8, ignore_eos=True)
    (expected,) = questions_of([(prompt, params)])
    giver, taker = cluster.process("prefill-0"), cluster.process("decode-0")
    lease_id = bytes(15) + b"\1"
    handle = await handle_of(cluster, lease_id, len(prompt))
    request = {
        "token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "sampling": params_to_message(params),
    }
    async with (
        grpc.aio.insecure_channel(giver.endpoint) as to_giver,
        grpc.aio.insecure_channel(taker.endpoint) as to_taker,
    ):
        prefill = PrefillStub(to_giver).Prefill(
            prefill_pb2.PrefillRequest(
                request_id="p", lease_id=lease_id, decode_worker=taker.worker_id, **request
            ),
            timeout=60.0,
        )
        while (await prefill.read()).WhichOneof("event") != "result":
            pass
        giver.signal(signal.SIGTERM)
        await until_observed(
            lambda: load_of(giver.admin_endpoint).state == "draining", what="the drain"
        )
        # A second longer than a process takes to end that has nothing left to do.
        assert not await asyncio.to_thread(giver.wait, time.monotonic() + 2.5)
        assert load_of(giver.admin_endpoint).num_leases == 1
        decode = DecodeStub(to_taker).Generate(
            decode_pb2.DecodeGenerateRequest(request_id="d", handle=handle, **request),
            timeout=60.0,
        )
        tokens = [t async for event in decode for t in event.tokens.token_ids]
        assert tuple(tokens) == expected.answer[0]
        assert (await prefill.read()).WhichOneof("event") == "released"
    assert await asyncio.to_thread(giver.wait, time.monotonic() + 10.0)
    assert "ended with code 0;" in giver.failure()
    cluster.restart("prefill-0")
    assert held(cluster) == {}


async def handle_of(
    cluster: LocalCluster, lease_id: bytes, num_tokens: int
) -> kv_transfer_pb2.KvHandle:
    """As a router makes it of what the prefill worker has told of itself."""
    async with connect(cluster.redis_url) as redis:
        fields = await redis.hgetall(record_key("prefill-0"))
    record = WorkerRecord.from_fields(fields)
    return kv_transfer_pb2.KvHandle(
        version=1,
        source_worker=record.id,
        source_endpoint=record.kv_endpoint,
        source_epoch=record.epoch,
        lease_id=lease_id,
        baton_version=record.version,
        fingerprint=record.fingerprint,
        layouts=kv_transfer_pb2.KvLayouts.FromString(record.layout).layouts,
        num_tokens=num_tokens,
        integrity=kv_transfer_pb2.INTEGRITY_BY_CONNECTOR,
    )
