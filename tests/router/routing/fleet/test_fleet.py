"""The fleet over a real Redis and workers that only say whether they serve."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from baton.cli.certs import Authority, write
from baton.cli.local.tls_folder import TlsFolder
from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1.kv_transfer_pb2 import KvLayout, KvLayouts
from baton_router.call.prompt import Prompt
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.worker_model import PoolModel, WorkDone, WorkerModel
from tests.support.router.records import RECORD, TOKENIZER
from tests.support.waiting import until


def record_of(server: Server, **changes: Any) -> WorkerRecord:
    fields = {"endpoint": server.endpoint, "kv_endpoint": server.endpoint, **changes}
    return replace(RECORD, **fields)


@asynccontextmanager
async def worker_and_fleet(
    tls: Path | None = None, poll_interval: float = 0.05
) -> AsyncIterator[tuple[Server, Fleet, EmbeddedRedis]]:
    """`tls`: a folder of certificates."""
    folder = None if tls is None else TlsFolder(tls)
    own = {} if folder is None else folder.own("worker")
    server = Server(ServingSettings.model_validate({name: str(p) for name, p in own.items()}))
    await server.start()
    with EmbeddedRedis() as redis_server:
        shown = None
        if folder is not None:
            shown = replace(folder.to_worker("router"), reload_interval=0.1)
        redis, channels = connect(redis_server.url), Channels(tls=shown, call_start_seconds=0.5)
        fleet = Fleet(redis, channels, TOKENIZER, poll_interval=poll_interval)
        fleet.start()
        try:
            # What is seen in the first look at Redis, and then no more, is given some time.
            await until(lambda: not fleet._registry.stale, within=5.0)
            yield server, fleet, redis_server
        finally:
            await fleet.stop()
            await channels.close()
            await redis.aclose()
            await server.stop(0.0)


@asynccontextmanager
async def registered(redis_server: EmbeddedRedis, record: WorkerRecord) -> AsyncIterator[Any]:
    redis = connect(redis_server.url)
    registration = Registration(redis, record)
    registration.start()
    try:
        yield registration
    finally:
        await registration.stop()
        await redis.aclose()


@asynccontextmanager
async def at_work(
    server: Server, fleet: Fleet, redis_server: EmbeddedRedis, **changes: Any
) -> AsyncIterator[Any]:
    """Registers a worker that is ready, and waits until it takes work."""
    await server.set_ready(True)
    async with registered(redis_server, record_of(server, **changes)) as registration:
        await until(lambda: reason(fleet) == "", within=5.0)
        yield registration


def reason(fleet: Fleet) -> str | None:
    """Returns why the one worker cannot take work; None while it is unknown."""
    candidates = fleet.candidates()
    return candidates[0].excluded if candidates else None


async def test_fleet_pairs_no_mixed_versions_but_shares_their_rates():
    async with worker_and_fleet() as (server, fleet, redis):
        old = record_of(server, version="1.2")
        new = replace(old, id="v", version="1.3", fingerprint=b"g")
        async with AsyncExitStack() as stack:
            for number, record in enumerate((old, new), 1):
                await stack.enter_async_context(registered(redis, record))
                await until(lambda n=number: len(fleet.members) == n, within=5.0)
            one, other = fleet.candidates()
            assert (one.version, other.version) == ("1.3", "1.2")
            assert one.pairing != other.pairing
            newer, older = fleet.members
            assert newer.namespace != older.namespace
            before = newer.model.rates
            done = WorkDone(num_steps=100, num_prompt_tokens=10**5, seconds=1000.0)
            prefill = fleet._pools.of("prefill", old.pairing)
            WorkerModel(prefill).observe_work(done)
            learned = older.model.rates.prefill_seconds_per_token
            assert learned > before.prefill_seconds_per_token
            assert newer.model.rates.prefill_seconds_per_token == learned


async def test_fleet_finds_cached_outputs_of_images_by_content():
    held, other = b"h" * 16, b"o" * 16
    prompt = Prompt((1,) * 40, images=((0, 8, held), (8, 16, other), (16, 24, held)))
    async with (
        worker_and_fleet() as (server, fleet, redis),
        at_work(server, fleet, redis, role="encode", max_model_len=64, num_blocks=1),
    ):
        fleet.index.apply("w", RECORD.epoch, KvEvents(stored=(held,)))
        ((candidate,), (member,)) = fleet.candidates(prompt), fleet.members
        assert (candidate.role, candidate.num_cached_tokens) == ("encode", 0)
        assert (candidate.cached_inputs, candidate.pending_inputs) == ((0, 2), ())
        with fleet.pending.pending("w", (other,)):
            assert fleet.candidates(prompt)[0].pending_inputs == (1,)
        assert fleet.candidates()[0].cached_inputs == ()
        assert fleet.context_length.num_tokens == 64, "no sequence has to fit in its KV pool"
        with member.loaded(num_encoder_tokens=576):
            assert fleet.candidates()[0].num_queued_encoder_tokens == 576
        assert fleet.candidates()[0].num_queued_encoder_tokens == 0


async def test_fleet_uses_worker_only_while_it_reports_ready():
    async with worker_and_fleet() as (server, fleet, redis), registered(redis, record_of(server)):
        await until(lambda: reason(fleet) == "not reached yet", within=5.0)
        await server.set_ready(True)
        await until(lambda: reason(fleet) == "", within=5.0)
        await server.set_ready(False)
        await until(lambda: reason(fleet) == "not answering", within=5.0)


def accepted(port: int) -> set[int]:
    """Returns the ports of the peers that are connected to this one."""
    connections = psutil.Process().net_connections("tcp")
    return {c.raddr.port for c in connections if c.raddr and c.laddr.port == port}


async def test_fleet_keeps_worker_while_certificates_rotate(tmp_path):
    """And the connection that was made with the former ones ends."""
    authority = Authority()
    write(tmp_path, {"ca": authority.own, "worker": authority.issue("worker"),
                     "router": authority.issue("router")})  # fmt: skip
    async with (
        worker_and_fleet(tmp_path) as (server, fleet, redis),
        registered(redis, record_of(server)),
    ):
        await server.set_ready(True)
        await until(lambda: reason(fleet) == "", within=5.0)
        before = accepted(server.port)
        new = authority.issue("router")
        (tmp_path / "router.key").write_bytes(new.key)
        (tmp_path / "router.pem").write_bytes(new.cert)
        await asyncio.sleep(0.3)
        with fleet.channel_to(fleet.member("w")):
            pass
        seen = set()

        def has_moved() -> bool:
            seen.add(reason(fleet))
            return bool(accepted(server.port) - before)

        await until(has_moved, within=5.0)
        await asyncio.sleep(0.2)
        assert seen == {""}
        assert reason(fleet) == ""
        # What it says is heard over the new one, and the former one goes.
        await server.set_ready(False)
        await until(lambda: reason(fleet) == "not answering", within=5.0)
        await until(lambda: not accepted(server.port) & before, within=15.0)


async def test_fleet_first_look_waits_for_redis_and_every_worker():
    server, redis_server = Server(ServingSettings()), EmbeddedRedis()
    await server.start()
    await server.set_ready(True)
    redis_server.start()
    async with registered(redis_server, record_of(server)) as registration:
        await until(lambda: registration._loop.answering_since is not None, within=5.0)
        redis, channels = connect(redis_server.url), Channels()
        os.kill(redis_server.pid, signal.SIGSTOP)
        fleet = Fleet(redis, channels, TOKENIZER)
        fleet.start()
        try:
            await fleet.wait_for_discovery(0.3)
            assert fleet.members == []
            looking = asyncio.create_task(fleet.wait_for_discovery(10.0))
            await asyncio.sleep(0.05)
            assert not looking.done()
            os.kill(redis_server.pid, signal.SIGCONT)
            await looking
            assert reason(fleet) == ""
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
            await fleet.stop()
            await channels.close()
            await redis.aclose()
            await server.stop(0.0)
    redis_server.stop()


async def test_fleet_first_look_skips_unreachable_and_later_workers():
    async with worker_and_fleet() as (server, fleet, redis):
        gone = record_of(server, endpoint="127.0.0.1:1", id="gone")
        async with registered(redis, gone):
            await until(lambda: fleet.members != [], within=5.0)
            async with asyncio.timeout(3.0):
                await fleet.wait_for_discovery(5.0)
            member = Member(record_of(server, id="later"), PoolModel())
            fleet._members["later"] = member
            await fleet.wait_for_discovery(0.0)
            assert not member.was_probed.is_set()
            del fleet._members["later"]


async def test_fleet_excludes_draining_or_other_tokenizer_worker():
    async with worker_and_fleet() as (server, fleet, redis):
        async with at_work(server, fleet, redis) as registration:
            registration.update(replace(registration.record, draining=True))
            await until(lambda: reason(fleet) == "draining", within=5.0)
        await server.set_ready(False)
        await until(lambda: reason(fleet) is None, within=5.0)
        await server.set_ready(True)
        async with registered(redis, record_of(server, epoch=2, tokenizer_hash=b"other")):
            await until(lambda: reason(fleet) == "another tokenizer", within=5.0)


async def test_fleet_keeps_serving_worker_that_redis_lost():
    async with worker_and_fleet() as (server, fleet, redis):
        async with at_work(server, fleet, redis):
            pass
        # Not listed any more, but it answers.
        await until(lambda: not fleet.members[0].is_listed, within=5.0)
        assert reason(fleet) == ""
        await server.stop(0.0)
        await until(lambda: reason(fleet) is None, within=5.0)


async def test_fleet_counts_restarted_worker_as_new_member():
    async with worker_and_fleet() as (server, fleet, redis):
        async with at_work(server, fleet, redis):
            before = fleet.members[0]
        async with registered(redis, record_of(server, epoch=2)):
            await until(lambda: fleet.members[0] is not before, within=5.0)
            await until(lambda: reason(fleet) == "", within=5.0)


async def test_fleet_hashes_prompts_of_isolated_tenants_apart():
    async with worker_and_fleet() as (server, fleet, redis), registered(redis, record_of(server)):
        await until(lambda: reason(fleet) is not None, within=5.0)
        prompts = {salt: Prompt(tuple(range(40)), salt) for salt in (b"", b"a", b"b")}
        stored = tuple(prompts[b"a"].hashes(fleet.members[0].namespace))
        fleet.index.apply("w", 1, KvEvents(stored=stored))
        found = {s: fleet.candidates(p)[0].num_cached_tokens for s, p in prompts.items()}
        assert found == {b"": 0, b"a": 32, b"b": 0}


async def test_fleet_counts_pending_prompt_as_cached():
    async with worker_and_fleet() as (server, fleet, redis), registered(redis, record_of(server)):
        await until(lambda: reason(fleet) is not None, within=5.0)
        prompt = tuple(range(40))
        hashes = Prompt(prompt).hashes(fleet.members[0].namespace)
        with fleet.pending.pending("w", hashes):
            assert fleet.candidates(Prompt((*prompt, 7, 7)))[0].num_cached_tokens == 32
        assert fleet.candidates(Prompt(prompt))[0].num_cached_tokens == 0


async def test_fleet_counts_load_while_it_lasts():
    async with worker_and_fleet() as (server, fleet, redis), registered(redis, record_of(server)):
        await until(lambda: reason(fleet) is not None, within=5.0)
        fresh = fleet.candidates()[0]
        member = fleet.members[0]
        with member.loaded(num_tokens=7), member.loaded(num_held_tokens=5):
            loaded = fleet.candidates()[0]
            assert (loaded.num_sequences, loaded.num_queued_tokens) == (2, 7)
            assert loaded.num_held_tokens == 5
        after = fleet.candidates()[0]
        assert (after.num_sequences, after.num_queued_tokens, after.num_held_tokens) == (0, 0, 0)
        assert after.num_recent_tokens == pytest.approx(7, rel=0.01)
        assert after.last_turn > fresh.last_turn == 0


async def test_fleet_tracks_own_placements_without_redis():
    """With Redis back, the worker's own word counts."""
    async with worker_and_fleet() as (server, fleet, redis_server):
        async with registered(redis_server, record_of(server)):
            await until(lambda: reason(fleet) is not None, within=5.0)
        member, prompt = fleet.members[0], Prompt(tuple(range(100)))
        hashes = prompt.hashes(member.namespace)
        fleet.note_held(member, hashes)
        assert fleet.candidates(prompt)[0].num_cached_tokens == 0
        redis_server.stop()
        await server.set_ready(True)  # who serves stays known
        await until(lambda: fleet._events.stale, within=5.0)
        fleet.note_held(member, hashes)
        assert fleet.candidates(prompt)[0].num_cached_tokens == 96
        with EmbeddedRedis(redis_server._port) as again:
            redis = connect(again.url)
            publisher = EventPublisher(redis, "w", 1)
            publisher.publish(KvEvents(stored=tuple(hashes[:2])))
            publisher.start()
            await until(lambda: fleet.candidates(prompt)[0].num_cached_tokens == 32, within=5.0)
            await publisher.stop()
            await redis.aclose()


@pytest.mark.parametrize(
    ("role", "num_blocks", "expected"),
    [("decode", 1000, 2048), ("decode", 10, 160), ("prefill", 10, 2048)],
)
async def test_fleet_bounds_sequence_length_by_decode_pool(role, num_blocks, expected):
    async with worker_and_fleet() as (server, fleet, redis):
        assert fleet.context_length.num_tokens > 2**30
        async with at_work(server, fleet, redis, role=role, num_blocks=num_blocks):
            assert fleet.context_length.num_tokens == expected


async def test_fleet_length_is_that_of_largest_decode_worker():
    """A smaller worker that joins shrinks nothing, also while the larger one is away."""
    async with worker_and_fleet() as (server, fleet, redis):
        large = record_of(server, num_blocks=100, max_num_seqs=16)
        small = record_of(server, id="v", num_blocks=60, max_num_seqs=2)
        scoring = record_of(server, id="u", role="prefill", num_blocks=10)
        await server.set_ready(True)
        async with AsyncExitStack() as stack:
            for record in (large, small, scoring):
                await stack.enter_async_context(registered(redis, record))
            await until(lambda: _num_ready(fleet) == 3, within=5.0)
            assert fleet.context_length.num_tokens == 1600
            limits = [c.limits for c in fleet.candidates()]
            assert [each.max_num_seqs for each in limits] == [None, 2, 16]
            assert [each.num_blocks for each in limits] == [10, 60, 100]
            await server.set_ready(False)
            await until(lambda: _num_ready(fleet) == 0, within=5.0)
            assert fleet.context_length.num_tokens == 1600


def _num_ready(fleet: Fleet) -> int:
    return [c.excluded for c in fleet.candidates()].count("")


def layout(window: int | None) -> bytes:
    return KvLayouts(layouts=[KvLayout(block_size=16, window=window)]).SerializeToString()


@pytest.mark.parametrize(("window", "expected"), [(None, 160), (64, 2048)])
async def test_fleet_lets_windowed_sequence_outgrow_pool(window, expected):
    async with worker_and_fleet() as (server, fleet, redis):
        await server.set_ready(True)
        record = record_of(server, num_blocks=10, layout=layout(window))
        async with registered(redis, record):
            await until(lambda: reason(fleet) == "", within=5.0)
            assert fleet.context_length.num_tokens == expected


async def test_fleet_uses_lost_worker_again_once_it_is_healthy():
    async with worker_and_fleet() as (server, fleet, redis), at_work(server, fleet, redis):
        fleet.report_loss(fleet.members[0])
        assert reason(fleet) == "failed a moment ago"
        await until(lambda: reason(fleet) == "", within=2.0)
        fleet.report_loss(fleet.members[0])
        await server.set_ready(False)
        await asyncio.sleep(0.5)
        assert not fleet.members[0].circuit.is_closed
        await server.set_ready(True)
        await until(lambda: reason(fleet) == "", within=2.0)


def channel_to(fleet: Fleet, member: Member) -> grpc.aio.Channel:
    """Returns the channel to a worker; a new one if its channel has closed."""
    with fleet.channel_to(member) as channel:
        return channel


async def test_fleet_closes_idle_channel_of_worker_that_left():
    async with worker_and_fleet() as (server, fleet, redis):
        async with at_work(server, fleet, redis):
            member = fleet.members[0]
        with fleet.channel_to(member) as channel:
            await server.stop(0.0)
            await until(lambda: reason(fleet) is None, within=5.0)
            await asyncio.sleep(0.05)
            assert channel_to(fleet, member) is channel
        await until(lambda: channel_to(fleet, member) is not channel, within=5.0)


async def test_fleet_keeps_channel_of_worker_restarted_in_place():
    async with worker_and_fleet() as (server, fleet, redis):
        async with at_work(server, fleet, redis):
            before = fleet.members[0]
            channel = channel_to(fleet, before)
        async with registered(redis, record_of(server, epoch=2)):
            await until(lambda: reason(fleet) == "" and fleet.members[0] is not before, within=5.0)
            await asyncio.sleep(0.05)
            assert channel_to(fleet, fleet.members[0]) is channel
