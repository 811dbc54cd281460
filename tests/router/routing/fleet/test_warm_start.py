"""A router that starts with nothing but Redis: no worker answers."""

import socket
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from baton.cluster.index import LocalityIndex
from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.registry.registration import Registration
from baton.serving.grpc.channels import Channels
from baton_router.call.prompt import Prompt
from baton_router.routing.fleet.fleet import Fleet
from bench.router.warm import EPOCH, holds_exactly, publish
from tests.support.router.records import RECORD, TOKENIZER
from tests.support.waiting import until

NUM_WORKERS = 8
_TIMEOUT = 60.0  # seconds, for a million blocks


@pytest.mark.parametrize("num_blocks", [40_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
async def test_restarted_router_recovers_cache_state_from_redis(num_blocks, record_property):
    """Every worker RPC is blocked: who connects to a worker's port waits for ever."""
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        server = stack.enter_context(EmbeddedRedis())
        redis, channels = connect(server.url), Channels()
        stack.push_async_callback(redis.aclose)
        stack.push_async_callback(channels.close)
        held = await publish(redis, NUM_WORKERS, num_blocks)
        for worker in held:
            record = replace(
                RECORD,
                id=worker,
                role="prefill",
                epoch=EPOCH,
                endpoint=endpoint,
                kv_endpoint=endpoint,
            )
            registration = Registration(redis, record)
            registration.start()
            stack.push_async_callback(registration.stop)
        await until(lambda: registration._loop.answering_since is not None, _TIMEOUT)

        began, cpu_before = time.perf_counter(), time.thread_time()
        fleet = Fleet(redis, channels, TOKENIZER, LocalityIndex(2 * num_blocks))
        stack.push_async_callback(fleet.stop)
        fleet.start()
        await until(lambda: len(fleet.members) == NUM_WORKERS and fleet.is_warm, _TIMEOUT)
        seconds = time.perf_counter() - began
        cpu = time.thread_time() - cpu_before
        print(
            f"{num_blocks:,} blocks of {NUM_WORKERS} workers from Redis alone: {seconds:.2f} s, "
            f"{cpu:.2f} s of them computing"
        )
        record_property("seconds", seconds)
        assert holds_exactly(fleet.index, held)
        assert {member.excluded(TOKENIZER) for member in fleet.members} == {"not reached yet"}


async def test_fleet_candidates_ask_redis_nothing():
    """Counted at the server: what it has executed between two looks is those looks alone."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        redis, ours, channels = connect(server.url), connect(server.url), Channels()
        for close in (redis.aclose, ours.aclose, channels.close):
            stack.push_async_callback(close)
        await publish(redis, NUM_WORKERS, 4_000)
        fleet = Fleet(redis, channels, TOKENIZER)
        fleet.start()
        for number in range(NUM_WORKERS):
            fleet.on_change(f"worker-{number}", replace(RECORD, id=f"worker-{number}", epoch=EPOCH))
        await until(lambda: fleet.is_warm, _TIMEOUT)
        await fleet.stop()  # what goes on in the background

        async def num_executed() -> int:
            return int((await ours.info("stats"))["total_commands_processed"])

        before = await num_executed()
        for number in range(200):
            assert len(fleet.candidates(Prompt(tuple(range(number, number + 500))))) == NUM_WORKERS
        assert await num_executed() - before == 1
