"""Agents that read each other's pools: when there is one, and what it makes of what it is told."""

import asyncio
import re
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DataLossError, FailedPreconditionError, NotFoundError, UnavailableError
from baton.installation import install_command
from baton.v1.kv_transfer_pb2 import DescribeResponse
from baton_kvtransfer import client, sources
from baton_kvtransfer.block_batch import BlockBatch
from baton_kvtransfer.connector import GRPC, NIXL, SHM, Integrity
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import IpcOffer, IpcRegion
from baton_kvtransfer.connectors.nixl import agent
from baton_kvtransfer.connectors.nixl import claimant as nixl_claimant
from baton_kvtransfer.connectors.nixl.agent import MAX_METADATA_BYTES, NixlOffer, Region
from baton_kvtransfer.connectors.nixl.claimant import NixlReader
from baton_kvtransfer.connectors.nixl.source import NixlSource
from baton_kvtransfer.connectors.shm import claimant as shm_claimant
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint
from baton_kvtransfer.offers import Description, description_of, description_to_message
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import (
    HYBRID,
    LAYOUT,
    allocation,
    contents,
    filled_pool,
    pool_of,
    transfer,
)
from tests.support.waiting import until

TIMEOUT = 10.0
COUNTS = st.integers(0, 2**64 - 1)
REGIONS = st.builds(Region, COUNTS, st.none() | st.integers(0, 2**32 - 1), COUNTS)
IPC_REGIONS = st.builds(IpcRegion, st.binary(), COUNTS, st.binary(), COUNTS)
PROBLEMS = st.text(min_size=1)


async def fetched(ends):
    with ends.computed_lease((3, 1)):
        _, report = await ends.fetcher.fetch(ends.handle(2), allocation((2, 4)), TIMEOUT)
    assert contents(ends.target, (2, 4)) == contents(ends.source, (3, 1))
    return report


@pytest.mark.slow
async def test_nixl_is_chosen_and_started_only_without_shared_memory(monkeypatch):
    async with transfer(connector="auto") as ends:
        assert (await fetched(ends)).connector is SHM
        assert ends.nixl._agent is None
    monkeypatch.setattr(shm_claimant, "host_id", lambda: "elsewhere")
    async with transfer(connector="auto") as ends:
        report = await fetched(ends)
        assert report.connector is NIXL
        assert report.reason.startswith("both have nixl; ")
        assert report.reason.endswith("not by shm: the other worker is on another host")
        assert ends.nixl._agent is not None


async def test_fetch_falls_back_to_grpc_and_says_why_without_nixl(monkeypatch):
    monkeypatch.setattr(shm_claimant, "host_id", lambda: "elsewhere")
    async with transfer(connector="auto", nixl_problem="TLS does not cover it") as ends:
        report = await fetched(ends)
        assert report.connector is GRPC
        assert "not by nixl: TLS does not cover it" in report.reason
        assert ends.nixl._agent is None


async def test_fetch_names_install_command_when_nixl_is_missing(monkeypatch):
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    async with transfer(connector="nixl") as ends:
        with pytest.raises(FailedPreconditionError, match=re.escape(install_command("nixl"))):
            await fetched(ends)
        assert ends.nixl._agent is None


@contextmanager
def both_sides():
    pools = [filled_pool(5, layout) for layout in HYBRID]
    source, reader = NixlSource(pools, "lo"), NixlReader([pool_of(5, x) for x in HYBRID], "lo")
    try:
        yield source, reader
    finally:
        reader.close()
        source.close()


BROKEN = {
    "other pools": lambda offer: replace(offer, regions=offer.regions[:1]),
    "no metadata": lambda offer: replace(offer, metadata=b""),
    "noise": lambda offer: replace(offer, metadata=bytes(range(256))),
    "cut off": lambda offer: replace(offer, metadata=offer.metadata[:-9]),
    "too long": lambda offer: replace(offer, metadata=bytes(MAX_METADATA_BYTES + 1)),
    "more blocks": lambda offer: resized(offer, 6),
    "far more blocks": lambda offer: resized(offer, 2**40),
    "another place": lambda offer: replace(
        offer, regions=tuple(replace(region, address=4096) for region in offer.regions)
    ),
}


def resized(offer: NixlOffer, num_blocks: int) -> NixlOffer:
    regions = (replace(region, num_blocks=num_blocks) for region in offer.regions)
    return replace(offer, regions=tuple(regions))


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
async def test_nixl_refuses_broken_offer_and_accepts_next(how):
    with both_sides() as (source, reader):
        offer = await source.offer()
        with pytest.raises(UnavailableError):
            await reader.attach(BROKEN[how](offer))
        with both_sides() as (other, _):
            receiver = await reader.attach(await other.offer())
            await reads(receiver, reader)


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
    with both_sides() as (source, reader):
        offer = await source.offer()
        first, second = await reader.attach(offer), await reader.attach(offer)
        first.close()
        await reads(second, reader)
        second.close()
        await reads(await reader.attach(offer), reader)


async def reads(receiver, reader) -> None:
    target = reader._pools[0]
    run = BlockBatch(0, 0, source_blocks=(3, 5))
    await receiver.receive(run, target, (1, 2), Integrity.FENCE)
    assert contents(target, (1, 2)) == contents(filled_pool(5, LAYOUT), (3, 5))
    target.content.zero_()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(0, 1), (1, 6), (2**31, 1), (1,), (1, 2, 3)])
async def test_nixl_refuses_blocks_outside_pool_as_data_loss(blocks):
    with both_sides() as (source, reader):
        receiver = await reader.attach(await source.offer())
        run = BlockBatch(0, 0, source_blocks=blocks)
        with pytest.raises(DataLossError):
            await receiver.receive(run, reader._pools[0], (1, 2), Integrity.FENCE)
        assert not reader._pools[0].content.any()


@pytest.mark.slow
async def test_nixl_reader_reads_no_more_after_close():
    with both_sides() as (source, reader):
        receiver = await reader.attach(await source.offer())
        run = BlockBatch(0, 0, source_blocks=(1, 2))
        reader.close()
        with pytest.raises(UnavailableError):
            await receiver.receive(run, reader._pools[0], (1, 2), Integrity.FENCE)
        with pytest.raises(UnavailableError):
            await reader.attach(await source.offer())
        assert not receiver.is_open


@pytest.mark.slow
async def test_nixl_bounds_and_ends_abandoned_agents(monkeypatch):
    monkeypatch.setattr(nixl_claimant, "_LINGER_S", 0.3)
    with both_sides() as (source, reader):
        for _ in range(nixl_claimant._MOST_LINGERING + 2):
            receiver = await reader.attach(await source.offer())
            await reads(receiver, reader)
            await reader.abandon(receiver._agent)
            assert not receiver.is_open
            assert len(reader._lingering) <= nixl_claimant._MOST_LINGERING
        await until(lambda: not reader._lingering, within=5.0)
        await reads(await reader.attach(await source.offer()), reader)


def test_nixl_threads_enter_the_context_of_their_pools(monkeypatch):
    entered = []

    def enter(device) -> None:
        entered.append((threading.current_thread().name, device))

    monkeypatch.setattr(agent, "use_device", enter)
    pools = [pool_of(2), pool_of(3)]
    for side in (NixlReader(pools), NixlSource(pools)):
        side._thread.submit(lambda: None).result()
        side.close()
    assert entered == [(f"nixl-{n}_0", pools[0].device) for n in ("reader", "source")]


@given(
    st.integers(0, 2**64 - 1),
    st.builds(HandleEndpoint, st.text(), st.text(), st.lists(COUNTS).map(tuple)) | PROBLEMS,
    st.builds(NixlOffer, st.binary(), st.lists(REGIONS).map(tuple)) | PROBLEMS,
    st.builds(IpcOffer, st.text(), st.lists(IPC_REGIONS).map(tuple)) | PROBLEMS,
)
def test_description_round_trips_through_message(epoch, shm, nixl, ipc):
    description = Description(epoch, shm, nixl, ipc)
    message = description_to_message(description).SerializeToString()
    assert description_of(DescribeResponse.FromString(message)) == description
