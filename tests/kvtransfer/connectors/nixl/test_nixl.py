"""Agents that read each other's pools: when there is one, and what it makes of what it is told."""

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import DataLossError, FailedPreconditionError, NotFoundError, UnavailableError
from baton.installation import install_command
from baton_kvtransfer import client
from baton_kvtransfer.connector import Integrity, Region
from baton_kvtransfer.connectors.nixl.agent import MAX_METADATA_BYTES, Agent, agent_thread
from baton_kvtransfer.connectors.nixl.claimant import NixlReader, NixlReceiver
from baton_kvtransfer.connectors.nixl.connector import NixlConnector
from baton_kvtransfer.stream.block_batch import BlockBatch
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import (
    HYBRID,
    LAYOUT,
    allocation,
    connectors_elsewhere,
    connectors_of,
    contents,
    filled_pool,
    pool_of,
    transfer,
)
from tests.support.waiting import until

TIMEOUT = 10.0


async def fetched(ends):
    with ends.computed_lease((3, 1)):
        _, report = await ends.fetcher.fetch(ends.handle(2), allocation((2, 4)), TIMEOUT)
    assert contents(ends.target, (2, 4)) == contents(ends.source, (3, 1))
    return report


@pytest.mark.slow
async def test_nixl_is_chosen_and_started_only_without_shared_memory():
    async with transfer(connector="auto") as ends:
        assert (await fetched(ends)).connector == "shm"
        assert not ends.connector(NixlConnector).is_offered
    async with transfer(connector="auto", source_connectors=connectors_elsewhere) as ends:
        report = await fetched(ends)
        assert report.connector == "nixl"
        assert report.reason.startswith("both have nixl; ")
        assert report.reason.endswith("not by shm: the other worker is on another host")
        assert ends.connector(NixlConnector).is_offered


async def test_fetch_falls_back_to_grpc_and_says_why_without_nixl():
    problem = "TLS does not cover it"
    connectors = partial(connectors_of, nixl_problem=problem)
    async with transfer(
        connector="auto", connectors=connectors, source_connectors=connectors_elsewhere
    ) as ends:
        report = await fetched(ends)
        assert report.connector == "grpc"
        assert f"not by nixl: {problem}" in report.reason
        assert not ends.connector(NixlConnector).is_offered


async def test_fetch_names_install_command_when_nixl_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    async with transfer(connector="nixl") as ends:
        with pytest.raises(FailedPreconditionError, match=re.escape(install_command("nixl"))):
            await fetched(ends)
        assert not ends.connector(NixlConnector).is_offered


@dataclass
class Ends:
    """Both sides, and the first pool of the reader."""

    source: NixlConnector
    reader: NixlReader
    target: KvPool


@asynccontextmanager
async def both_sides(**options: Any) -> AsyncIterator[Ends]:
    targets = [pool_of(5, layout) for layout in HYBRID]
    source = NixlConnector([filled_pool(5, layout) for layout in HYBRID], "lo")
    reader = NixlReader(targets, "lo", **options)
    try:
        yield Ends(source, reader, targets[0])
    finally:
        reader.close()
        await source.close()


BROKEN = {
    "other pools": lambda offer: {"regions": offer.regions[:1]},
    "no metadata": lambda offer: {"metadata": b""},
    "noise": lambda offer: {"metadata": bytes(range(256))},
    "cut off": lambda offer: {"metadata": offer.metadata[:-9]},
    "too long": lambda offer: {"metadata": bytes(MAX_METADATA_BYTES + 1)},
    "more blocks": lambda offer: {"num_blocks": (6, 6)},
    "far more blocks": lambda offer: {"num_blocks": (2**40, 2**40)},
    "another place": lambda offer: {"regions": (Region(4096),) * 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
async def test_nixl_refuses_broken_offer_and_accepts_next(how):
    async with both_sides() as ends:
        offer = await ends.source.offer()
        with pytest.raises(UnavailableError):
            await ends.reader.attach(replace(offer, **BROKEN[how](offer)))
        async with both_sides() as other:
            receiver = await ends.reader.attach(await other.source.offer())
            await reads(receiver, ends.target)


@pytest.mark.slow
async def test_nixl_refuses_source_that_connects_late():
    """As behind closed ports, for which NIXL keeps the agent's thread waiting."""
    may_end = threading.Event()

    class LateAgent(Agent):
        def connect(self, offer):
            assert may_end.wait(TIMEOUT)
            return super().connect(offer)

    async with both_sides(make_agent=LateAgent) as ends:
        offer = await ends.source.offer()
        with pytest.raises(UnavailableError, match="ports may be closed"):
            await ends.reader.attach(offer, 0.1)
        may_end.set()
        await until(lambda: not ends.reader.num_connecting)
        await reads(await ends.reader.attach(offer, TIMEOUT), ends.target)


@pytest.mark.slow
async def test_fetch_fails_as_its_lease_if_a_read_ends_last(monkeypatch):
    """The read ends while the end of the call is being noticed."""
    calls = []

    async def run_until(work, stop):
        stopping = asyncio.create_task(stop)
        await work
        await calls[0].code()
        stopping.cancel()
        await asyncio.wait({stopping})

    def fetch_of(fetcher, channel, real=client.KvFetcher._fetch_of):
        fetch = real(fetcher, channel)
        return lambda *args, **options: calls.append(fetch(*args, **options)) or calls[0]

    monkeypatch.setattr(client.KvFetcher, "_fetch_of", fetch_of)
    monkeypatch.setattr(client, "run_until", run_until)
    async with transfer(connector="nixl") as ends:
        fetch = ends.fetcher.fetch(ends.handle(1), allocation((5,)), TIMEOUT)
        fetching = asyncio.create_task(fetch)
        with ends.lease(1) as lease:
            await until(lambda: lease.is_claimed, within=5.0)
            lease.advance(((1,),), 1)
            await until(lambda: contents(ends.target, (5,)) == contents(ends.source, (1,)))
        assert isinstance(await failure_of(fetching), NotFoundError)


@pytest.mark.slow
async def test_nixl_forgets_source_with_its_last_receiver():
    async with both_sides() as ends:
        offer = await ends.source.offer()
        first, second = await ends.reader.attach(offer), await ends.reader.attach(offer)
        first.close()
        await reads(second, ends.target)
        second.close()
        await reads(await ends.reader.attach(offer), ends.target)


async def reads(receiver: NixlReceiver, target: KvPool) -> None:
    run = BlockBatch(0, 0, source_blocks=(3, 5))
    await receiver.receive(run, target, (1, 2), Integrity.FENCE)
    assert contents(target, (1, 2)) == contents(filled_pool(5, LAYOUT), (3, 5))
    target.content.zero_()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(0, 1), (1, 6), (2**31, 1), (1,), (1, 2, 3)])
async def test_nixl_refuses_blocks_outside_pool_as_data_loss(blocks):
    async with both_sides() as ends:
        receiver = await ends.reader.attach(await ends.source.offer())
        run = BlockBatch(0, 0, source_blocks=blocks)
        with pytest.raises(DataLossError):
            await receiver.receive(run, ends.target, (1, 2), Integrity.FENCE)
        assert not ends.target.content.any()


@pytest.mark.slow
async def test_nixl_reader_reads_no_more_after_close():
    async with both_sides() as ends:
        receiver = await ends.reader.attach(await ends.source.offer())
        run = BlockBatch(0, 0, source_blocks=(1, 2))
        ends.reader.close()
        with pytest.raises(UnavailableError):
            await receiver.receive(run, ends.target, (1, 2), Integrity.FENCE)
        with pytest.raises(UnavailableError):
            await ends.reader.attach(await ends.source.offer())
        assert not receiver.is_open


@pytest.mark.slow
async def test_nixl_bounds_and_ends_abandoned_agents():
    async with both_sides(linger_seconds=0.3, max_lingering=2) as ends:
        for _ in range(4):
            receiver = await ends.reader.attach(await ends.source.offer())
            await reads(receiver, ends.target)
            await ends.reader.abandon(receiver.agent)
            assert not receiver.is_open
            assert ends.reader.num_lingering <= 2
        await until(lambda: not ends.reader.num_lingering, within=5.0)
        await reads(await ends.reader.attach(await ends.source.offer()), ends.target)


def test_nixl_thread_enters_the_context_of_its_pools():
    used = []
    pools = [pool_of(2), pool_of(3)]
    thread_of = threading.current_thread
    with agent_thread("nixl", pools, lambda device: used.append((thread_of().name, device))) as own:
        own.submit(lambda: None).result()
    assert used == [("nixl_0", pools[0].device)]
