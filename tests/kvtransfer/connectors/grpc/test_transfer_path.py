"""Gathers and scatters of the gRPC connector: order, cancellation, threads, and what is held."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import BatonError, DataLossError, NotFoundError
from baton_kvtransfer.cancellation import one_ahead
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector, PayloadReceiver
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.stream.send_ahead import PartSizes
from baton_kvtransfer.stream.transfer_stream import TransferStream
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import (
    EPOCH,
    LAYOUT,
    Transfer,
    allocation,
    contents,
    filled_pool,
    pool_of,
    transfer,
    untouched,
)
from tests.support.waiting import until

TIMEOUT = 10.0
SIZE = LAYOUT.block_bytes


class Held:
    """Calls of a function that wait in their threads until they are let go."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.num_begun = self.num_ended = 0
        self.let_go = threading.Event()
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        self.num_begun += 1
        assert threading.current_thread() is not threading.main_thread(), "on the event loop"
        assert self.let_go.wait(TIMEOUT)
        result = self._function(*arguments)
        self.num_ended += 1
        return result

    @property
    def is_running(self) -> bool:
        return self.num_begun > self.num_ended


class HeldPool(KvPool):
    """Pool whose blocks are read and written in threads, as those of a GPU's are."""

    waits_for_device = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reads, self.writes = Held(super().read_blocks), Held(super().write_blocks)
        for calls in (self.reads, self.writes):
            calls.let_go.set()

    def read_blocks(self, block_ids: Any) -> Any:
        return self.reads(block_ids)

    def write_blocks(self, *arguments: Any) -> Any:
        return self.writes(*arguments)


@asynccontextmanager
async def held_transfer(name: str) -> AsyncIterator[tuple[Transfer, Held]]:
    """Both ends, and the held calls of the source's "reads" or the target's "writes"."""
    async with transfer(pool_type=HeldPool) as ends:
        pool: Any = ends.source if name == "reads" else ends.target
        calls = getattr(pool, name)
        calls.let_go.clear()
        try:
            yield ends, calls
        finally:
            calls.let_go.set()


async def test_host_memory_is_gathered_one_message_at_a_time():
    source, table = filled_pool(12), (3, 4, 5, 9, 1)
    connector = GrpcConnector(message_bytes=2 * SIZE)
    batches = connector.send(0, 7, table, source, Integrity.CHECKSUMS)
    for first, block_ids in ((7, (3, 4)), (9, (5, 9)), (11, (1,))):
        source.content.add_(1)  # nothing was read before
        batch = await anext(batches)
        expected = contents(source, block_ids)
        assert (batch.first_block, b"".join(batch.payload)) == (first, b"".join(expected))
        assert batch.checksums == checksums_of(batch.payload, SIZE)
    assert await anext(batches, None) is None


async def test_event_loop_turns_while_blocks_are_read_and_written():
    for name in ("reads", "writes"):
        async with held_transfer(name) as (ends, calls):
            with ends.computed_lease((1, 2)):
                fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
                fetching = asyncio.create_task(fetch)
                await until(lambda calls=calls: calls.is_running, within=TIMEOUT)
                calls.let_go.set()
                await fetching


async def test_blocks_reused_while_they_are_gathered_are_not_sent():
    """The lease ends, and another sequence writes to its blocks, before the gather is done."""
    async with held_transfer("reads") as (ends, gathers):
        with ends.computed_lease((1, 2)) as lease:
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            fetching = asyncio.create_task(fetch)
            await until(lambda: gathers.is_running, within=TIMEOUT)
            lease.end(NotFoundError("its time is over"))
            ends.source.content.fill_(9)
            gathers.let_go.set()
            assert "its time is over" in str(await failure_of(fetching))
        assert untouched(ends.target, (3, 4))


async def test_lease_of_cancelled_fetch_ends_after_its_gather():
    async with held_transfer("reads") as (ends, gathers):
        with ends.computed_lease((1, 2)) as lease:
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            fetching = asyncio.create_task(fetch)
            await until(lambda: gathers.is_running, within=TIMEOUT)
            fetching.cancel()
            await asyncio.sleep(0.2)
            assert not lease.is_over, "its blocks are free while they are read"
            gathers.let_go.set()
            await until(lambda: lease.is_over, within=TIMEOUT)
            assert not gathers.is_running


async def test_cancelled_fetch_ends_after_its_scatter():
    async with held_transfer("writes") as (ends, scatters):
        with ends.computed_lease((1, 2)):
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            fetching = asyncio.create_task(fetch)
            await until(lambda: scatters.is_running, within=TIMEOUT)
            fetching.cancel()
            assert not (await asyncio.wait({fetching}, timeout=0.1))[0]
            scatters.let_go.set()
            await asyncio.wait({fetching}, timeout=TIMEOUT)
            assert fetching.cancelled()
            assert not scatters.is_running


async def test_fetch_fails_at_once_when_a_batch_is_damaged():
    """Although more blocks are still to be computed."""

    class WrongConnector(GrpcConnector):
        async def send(self, group, first, block_ids, pool, integrity):
            yield BlockBatch(group, first, (0,), tuple(pool.read_blocks(block_ids)))

    async with transfer(connectors=lambda pools: [WrongConnector(pools)]) as ends:
        with ends.lease(2) as lease:
            lease.advance(((1,),), 1)
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            async with asyncio.timeout(TIMEOUT / 2):
                assert isinstance(await failure_of(fetch), DataLossError)


async def test_grpc_gathers_one_part_ahead_and_cuts_messages():
    sizes_of_parts = PartSizes(first_bytes=SIZE, max_bytes=4 * SIZE)
    connector = GrpcConnector(message_bytes=2 * SIZE, sizes=sizes_of_parts)
    source: Any = filled_pool(12, kind=HeldPool)
    target = pool_of(12)
    table, into = (3, 4, 5, 9, 1, 2, 12, 7), (1, 3, 5, 7, 2, 4, 6, 8)
    gathers = source.reads
    batches = connector.send(0, 0, table, source, Integrity.CHECKSUMS)
    sizes = []
    async for batch in batches:
        sizes.append(len(batch.checksums))
        assert batch.checksums == checksums_of(batch.payload, SIZE)
        num_gathered = min(len(sizes) + 1, 4)
        await until(lambda num=num_gathered: gathers.num_ended == num, within=TIMEOUT)
        assert gathers.num_begun == num_gathered
        targets = into[batch.first_block : batch.first_block + sizes[-1]]
        receiver = PayloadReceiver(TransferStream())
        await receiver.receive(batch, target, targets, Integrity.CHECKSUMS)
    assert sizes == [1, 1, 2, 2, 2]
    assert contents(target, into) == contents(source, table)


async def test_one_ahead_waits_for_its_thread_when_closed():
    second = Held(lambda: None)
    results = one_ahead([lambda: 1, second, lambda: 3])
    assert await anext(results) == 1
    closing = asyncio.create_task(results.aclose())
    assert not (await asyncio.wait({closing}, timeout=0.1))[0]
    second.let_go.set()
    await closing
    assert (second.num_begun, second.num_ended) == (1, 1)


async def test_fetch_holds_nothing_after_any_failure():
    """Neither leases nor transports in use."""
    async with transfer(connector="shm") as ends:
        for turn, failure in enumerate((NotFoundError("a"), DataLossError("b"))):
            lease_id = bytes([turn]) * 16
            with ends.lease_of(8, lease_id) as lease:
                lease.advance(((1,),), 1)
                handle = ends.handle(2, lease_id=lease_id)
                fetch = ends.fetcher.fetch(handle, allocation((3, 4)), TIMEOUT)
                asyncio.get_running_loop().call_later(0.05, lease.end, failure)
                assert isinstance(await failure_of(fetch), BatonError)
        transport = await ends.fetcher.sources.transport(ends.endpoint, EPOCH)
        assert not transport.is_in_use
        assert len(ends.leases) == 0
