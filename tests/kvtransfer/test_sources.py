"""Transports of sources: which is chosen, when it is chosen again, and when one is forgotten."""

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from baton.serving.grpc.channels import Channels
from baton.v1.kv_transfer_pb2 import CONNECTOR_PLUGIN, CONNECTOR_SHM, DescribeResponse, KvOffer
from baton.worker.pairing import Pairing
from baton_kvtransfer import sources
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Connector, Integrity, Offer
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.connectors.host import host_id
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from baton_kvtransfer.connectors.shm.source import HandleServer
from baton_kvtransfer.gpu_notice import GpuNotice
from baton_kvtransfer.sources import Sources
from tests.support.descriptors import descriptors_left
from tests.support.kvtransfer.held import num_mapped
from tests.support.kvtransfer.loopback import (
    CLAIMANT,
    EPOCH,
    HYBRID,
    MODEL,
    PLAIN,
    VERSION,
    allocation,
    connectors_elsewhere,
    connectors_of,
    contents,
    filled_pool,
    nothing,
    pool_of,
    transfer,
)
from tests.support.waiting import until

TIMEOUT = 10.0


def two_pools() -> list[KvPool]:
    return [filled_pool(5, layout) for layout in HYBRID]


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)


async def fetched(ends, turn: int = 0, **changes):
    lease_id = bytes([turn]) * 16
    with ends.computed_lease((3,), lease_id=lease_id):
        handle = ends.handle(1, lease_id=lease_id, **changes)
        _, report = await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)
    assert contents(ends.target, (2,)) == contents(ends.source, (3,))
    return report


async def test_fetch_takes_fastest_common_transport_and_logs_it(caplog):
    caplog.set_level("INFO", logger=sources.__name__)
    async with transfer(connector="auto") as ends:
        report = await fetched(ends)
        assert report.connector == "shm"
        assert report.reason.startswith("both are on one host and of one user; not by cuda-ipc: ")
        assert f"fetching from {ends.endpoint} by shm" in caplog.text
        await fetched(ends, 1)
        assert ends.num_readers == 1
        assert caplog.text.count("fetching from") == 1


async def test_fetch_falls_back_to_grpc_and_says_why(without_nixl):
    async with transfer(connector="auto", source_connectors=connectors_elsewhere) as ends:
        report = await fetched(ends)
        assert report.connector == "grpc"
        assert "not by shm: the other worker is on another host; not by nixl: " in report.reason


async def test_fetch_refuses_when_demanded_transport_is_missing():
    async with transfer(connector="shm", source_connectors=connectors_elsewhere) as ends:
        with pytest.raises(FailedPreconditionError, match=r"only come by shm, .* another host"):
            await fetched(ends)


async def test_grpc_transport_requires_checksums():
    async with transfer(connector="grpc") as ends:
        with pytest.raises(FailedPreconditionError, match="grpc needs checksums"):
            await fetched(ends, integrity=Integrity.FENCE)


async def test_sources_ask_restarted_source_again():
    async with transfer(connector="auto") as ends:
        assert (await fetched(ends)).connector == "shm"
        ends.connector(ShmConnector).server.disconnect()
        await until(lambda: not ends.fetcher.sources.num_known, within=2.0)
        assert (await fetched(ends, 1)).connector == "shm"
        assert ends.num_readers == 1


async def test_handle_of_an_earlier_epoch_harms_no_transfer_in_flight():
    async with transfer(8, connector="auto") as ends:
        with ends.lease(8) as lease:
            lease.advance(((1, 2, 3, 4),), 4)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(tuple(range(1, 9))), TIMEOUT)
            in_flight = asyncio.create_task(fetch)
            await lease.claimed()
            late = ends.handle(8, source_epoch=EPOCH - 1)
            with pytest.raises(FailedPreconditionError, match=f"is {EPOCH - 1}: it has restarted"):
                await ends.fetcher.fetch(late, allocation(tuple(range(1, 9))), TIMEOUT)
            lease.advance((tuple(range(1, 9)),), 8)
            lease.complete(None, lambda: None)
            assert (await in_flight)[1].connector == "shm"
            assert ends.fetcher.sources.num_known == 1


async def test_lost_call_of_a_source_harms_no_transfer_in_flight():
    async with transfer(8, connector="shm") as ends:
        table, sources = tuple(range(1, 9)), ends.fetcher.sources
        with ends.lease(8) as lease:
            lease.advance(((1, 2, 3, 4),), 4)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(table), TIMEOUT)
            in_flight = asyncio.create_task(fetch)
            await lease.claimed()
            sources.lost(ends.endpoint, EPOCH)
            await fetched_again(ends)
            assert ends.num_readers == 2
            lease.advance((table,), 8)
            lease.complete(None, lambda: None)
            await in_flight
        await until(lambda: ends.num_readers == 1, within=TIMEOUT)
        assert sources.num_known == 1


async def fetched_again(ends) -> None:
    with ends.computed_lease((3,), lease_id=bytes(16)):
        handle = ends.handle(1, lease_id=bytes(16))
        await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)


@pytest.mark.parametrize("leaves_openly", [True, False])
async def test_fetcher_forgets_sources_that_have_left(leaves_openly, without_nixl):
    connectors, idle_seconds = None, 600.0
    if not leaves_openly:  # such as one of another host
        connectors, idle_seconds = connectors_elsewhere, 0.0
    channels = Channels(idle_seconds=0.0)
    pairing = Pairing(VERSION, MODEL, PLAIN)
    pools = [pool_of(8)]
    fetcher = KvFetcher(
        pools, pairing, CLAIMANT, channels, connectors_of(pools), idle_seconds=idle_seconds
    )
    for _ in range(8):
        async with transfer(8, source_connectors=connectors) as ends:
            with ends.computed_lease((3,)):
                await fetcher.fetch(ends.handle(1), allocation((2,)), TIMEOUT)
        left = 0 if leaves_openly else 1
        await until(lambda left=left: fetcher.sources.num_known == left, within=TIMEOUT)
        assert len(channels.endpoints) == 1
    fetcher.close()
    await channels.close()


class StubConnector(Connector):
    """Connector by which every source can be read."""

    name = "stub"
    is_on_request = True

    async def offer(self):
        raise NotImplementedError

    async def attach(self, _offer):
        return SimpleNamespace(is_open=True, close=nothing)


class EagerShmConnector(ShmConnector):
    """Shared memory that is tried again with the next transfer."""

    retry_seconds = 0.0


def sources_of(describe: Any, *others: Connector, choice: str = "auto", **options: Any) -> Sources:
    """Returns the sources of a claimant that has shared memory, others, and gRPC."""
    pools = two_pools()
    connectors = [EagerShmConnector(pools, **options), *others, GrpcConnector(pools)]
    return Sources(connectors, choice, describe, GpuNotice(pools, "KV"))


def description(*offers: KvOffer) -> DescribeResponse:
    """Returns a description that offers these, of shared memory, and the stub."""
    offered = [*offers, KvOffer(connector=CONNECTOR_PLUGIN, plugin="stub")]
    return DescribeResponse(epoch=7, offers=offered)


def by_shm(offer: Offer) -> KvOffer:
    return KvOffer(
        connector=CONNECTOR_SHM, address=offer.address, host=offer.host, num_blocks=offer.num_blocks
    )


async def names_of(ways: Sources, num_transfers: int) -> list[str]:
    """Returns the connectors of transfers that follow each other."""
    return [(await ways.transport("source", 7)).connector.name for _ in range(num_transfers)]


@pytest.mark.parametrize("others", [(), (StubConnector(()),)], ids=["grpc", "stub"])
async def test_shm_is_tried_again_after_a_source_was_slow(others):
    """It accepts a connection later than it may, once, as it runs on the loop that stands still."""
    async with HandleServer(two_pools()) as server:
        stalls = [0.3]

        async def describe(_endpoint, wanted):
            if stalls and not wanted:
                asyncio.get_running_loop().call_soon(time.sleep, stalls.pop())
            return description(by_shm(server.offer))

        ways = sources_of(describe, *others, connect_timeout=0.1)
        assert await names_of(ways, 2) == ["stub" if others else "grpc", "shm"]
        ways.close()


async def test_shm_is_not_tried_again_in_another_namespace():
    """Pods without a common folder do not try again every ten seconds."""
    described = []

    async def describe(_endpoint, wanted):
        described.append(wanted)
        absent = Offer("baton-kv-absent", host_id(), num_blocks=(8, 8))
        return description(by_shm(absent))

    ways = sources_of(describe, StubConnector(()))
    chosen = [await ways.transport("source", 7) for _ in range(2)]
    ways.close()
    assert described == [(), ("stub",)]  # each transport once
    assert "not in this network namespace or --socket-dir" in chosen[0].reason


@pytest.mark.parametrize(("num_left", "reason"), [(0, "open files"), (2, "no descriptor left")])
async def test_shm_is_tried_again_after_descriptors_ran_out(num_left, reason):
    """Two are those of the connection's ends; the pools need two more."""
    async with HandleServer(two_pools()) as server:

        async def describe(_endpoint, _wanted):
            return description(by_shm(server.offer))

        ways = sources_of(describe)
        with descriptors_left(os.getpid(), num_left):
            way = await ways.transport("source", 7)
        assert way.connector.name == "grpc"
        assert reason in way.reason
        assert await names_of(ways, 1) == ["shm"]
        ways.close()


async def test_sources_ask_again_after_failed_description():
    answers = [UnavailableError("the cat"), None]

    async def describe(_endpoint, _wanted):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return description(KvOffer(connector=CONNECTOR_SHM, problem="nothing to offer"))

    ways = sources_of(describe)
    first = asyncio.create_task(ways.transport("source", 7))
    await asyncio.sleep(0)
    first.cancel()  # the caller is gone before the answer
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.01)
    way = await ways.transport("source", 7)
    assert way.connector.name == "grpc"
    assert "not by shm: nothing to offer" in way.reason
    assert not answers
    ways.close()


async def test_sources_unmap_pools_attached_after_close():
    """The only thread, in which pools are attached, is busy until then."""
    loop, going_on = asyncio.get_running_loop(), threading.Event()
    thread = ThreadPoolExecutor(1)
    async with HandleServer(two_pools()) as server:
        described = asyncio.Event()

        async def describe(_endpoint, _wanted):
            described.set()
            return description(by_shm(server.offer))

        ways = sources_of(describe, choice="shm")
        mapped = num_mapped()
        loop.set_default_executor(thread)
        busy = loop.run_in_executor(None, going_on.wait, TIMEOUT)
        choosing = asyncio.create_task(ways.transport("source", 7))
        await described.wait()
        ways.close()
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await choosing
        await busy
        await loop.run_in_executor(None, time.sleep, 0)  # it has attached by then
        await until(lambda: not server.num_readers, within=TIMEOUT)
        assert num_mapped() == mapped
