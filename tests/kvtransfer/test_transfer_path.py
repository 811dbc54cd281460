"""Gathers and scatters of the gRPC connector: order, cancellation, threads, and what is held."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.engine.cache.kv_pool import KvPool
from baton.errors import BatonError, DataLossError, NotFoundError
from baton_kvtransfer import send_ahead
from baton_kvtransfer.arrivals import Arrivals
from baton_kvtransfer.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.cancellation import one_ahead
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.grpc import payload
from baton_kvtransfer.connectors.grpc.payload import PayloadReceiver, PayloadSender
from baton_kvtransfer.transfer_stream import TransferStream
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import (
    LAYOUT,
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


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Held]]:
    """Returns the calls of a pool's method, from then on."""
    made: list[Held] = []

    def hold(name: str) -> Held:
        calls = Held(getattr(KvPool, name))
        made.append(calls)
        monkeypatch.setattr(KvPool, name, lambda *arguments: calls(*arguments))
        return calls

    yield hold
    for calls in made:
        calls.let_go.set()


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is copied as that of a GPU is."""
    monkeypatch.setattr(payload, "waits_for_device", lambda _pool: True)


async def test_host_memory_is_gathered_one_message_at_a_time(monkeypatch):
    monkeypatch.setattr(payload, "MESSAGE_BYTES", 2 * SIZE)
    source, table = filled_pool(12), (3, 4, 5, 9, 1)
    batches = PayloadSender(TransferStream()).send(0, 7, table, source)
    for first, block_ids in ((7, (3, 4)), (9, (5, 9)), (11, (1,))):
        source.content.add_(1)  # nothing was read before
        batch = await anext(batches)
        expected = contents(source, block_ids)
        assert (batch.first_block, b"".join(batch.payload)) == (first, b"".join(expected))
        assert batch.checksums == checksums_of(batch.payload, SIZE)
    assert await anext(batches, None) is None


@pytest.mark.usefixtures("in_threads")
async def test_event_loop_turns_while_blocks_are_read_and_written(held):
    for name in ("read_blocks", "write_blocks"):
        async with transfer() as ends:
            calls = held(name)
            with ends.computed_lease((1, 2)):
                fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
                fetching = asyncio.create_task(fetch)
                await until(lambda calls=calls: calls.is_running, within=TIMEOUT)
                calls.let_go.set()
                await fetching


@pytest.mark.usefixtures("in_threads")
async def test_blocks_reused_while_they_are_gathered_are_not_sent(held):
    """The lease ends, and another sequence writes to its blocks, before the gather is done."""
    async with transfer() as ends:
        gathers = held("read_blocks")
        with ends.computed_lease((1, 2)) as lease:
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            fetching = asyncio.create_task(fetch)
            await until(lambda: gathers.is_running, within=TIMEOUT)
            lease.end(NotFoundError("its time is over"))
            ends.source.content.fill_(9)
            gathers.let_go.set()
            assert "its time is over" in str(await failure_of(fetching))
        assert untouched(ends.target, (3, 4))


@pytest.mark.usefixtures("in_threads")
async def test_lease_of_cancelled_fetch_ends_after_its_gather(held):
    async with transfer() as ends:
        gathers = held("read_blocks")
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


@pytest.mark.usefixtures("in_threads")
async def test_cancelled_fetch_ends_after_its_scatter(held):
    async with transfer() as ends:
        scatters = held("write_blocks")
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


async def test_fetch_fails_at_once_when_a_batch_is_damaged(monkeypatch):
    """Although more blocks are still to be computed."""
    monkeypatch.setattr(payload, "checksums_of", lambda pieces, size: (0,))
    async with transfer() as ends:
        with ends.lease(2) as lease:
            lease.advance(((1,),), 1)
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((3, 4)), TIMEOUT)
            async with asyncio.timeout(TIMEOUT / 2):
                assert isinstance(await failure_of(fetch), DataLossError)


@pytest.mark.usefixtures("in_threads")
async def test_payload_sender_is_one_part_ahead_and_cuts_messages(monkeypatch, held):
    monkeypatch.setattr(payload, "MESSAGE_BYTES", 2 * SIZE)
    monkeypatch.setattr(send_ahead, "_LARGE_PART_BYTES", 4 * SIZE)
    monkeypatch.setattr(send_ahead, "_FIRST_PART_BYTES", SIZE)
    source, target = filled_pool(12), pool_of(12)
    table, into = (3, 4, 5, 9, 1, 2, 12, 7), (1, 3, 5, 7, 2, 4, 6, 8)
    gathers = held("read_blocks")
    gathers.let_go.set()
    batches = PayloadSender(TransferStream()).send(0, 0, table, source)
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


async def test_arrivals_join_batches_that_arrive_during_a_write():
    written, going_on = [], asyncio.Event()

    async def write(batch: BlockBatch, targets: Any) -> None:
        written.append((batch.group, batch.first_block, batch.source_blocks, targets))
        await going_on.wait()

    arrivals = Arrivals(write)
    writing = asyncio.create_task(arrivals.write_all())
    for group, first in ((0, 0), (0, 1), (0, 2), (1, 0)):
        await arrivals.put(BlockBatch(group, first, source_blocks=(9 - first,)), (5 + first,))
        await asyncio.sleep(0.01)
    assert written == [(0, 0, (9,), [5])]
    going_on.set()
    await arrivals.flush()
    assert written[1:] == [(0, 1, (8, 7), [6, 7]), (1, 0, (9,), [5])]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_fetch_holds_nothing_after_any_failure(held):
    """Neither threads nor leases nor transports in use."""
    reads = held("read_blocks")
    reads.let_go.set()
    async with transfer(connector="shm") as ends:
        for turn, failure in enumerate((NotFoundError("a"), DataLossError("b"))):
            lease_id = bytes([turn]) * 16
            with ends.lease_of(8, lease_id) as lease:
                lease.advance(((1,),), 1)
                handle = ends.handle(2, lease_id=lease_id)
                fetch = ends.fetcher.fetch(handle, allocation((3, 4)), TIMEOUT)
                asyncio.get_running_loop().call_later(0.05, lease.end, failure)
                assert isinstance(await failure_of(fetch), BatonError)
        (choice,) = ends.fetcher._sources._transports.values()
        assert not choice.result().is_in_use
        assert not reads.is_running
        assert len(ends.leases) == 0
