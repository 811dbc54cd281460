"""Conformance of connectors. A new one is one more row of `CONNECTORS`, as the one of files, which
Baton does not have."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import pytest

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import DataLossError, NotFoundError, UnavailableError
from baton_kvtransfer import service
from baton_kvtransfer.connector import Connector, Integrity
from baton_kvtransfer.lease.handle import Handle
from baton_kvtransfer.lease.machine import LeaseState
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.stream.block_batch import BlockBatch
from tests.support.failures import failure_of
from tests.support.kvtransfer.clock import HeldClock
from tests.support.kvtransfer.file_connector import FileConnector
from tests.support.kvtransfer.held import num_mapped, open_files
from tests.support.kvtransfer.loopback import (
    BLOCK_SIZE,
    HYBRID,
    LAYOUT,
    PLAIN,
    TOKEN,
    Transfer,
    allocation,
    connectors_of,
    contents,
    nothing,
    transfer,
    untouched,
)
from tests.support.waiting import until

TIMEOUT = 60.0
CONNECTORS = {
    "grpc": ("grpc", Integrity.BY_CONNECTOR),
    "shm": ("shm", Integrity.BY_CONNECTOR),
    "shm, checked": ("shm", Integrity.CHECKSUMS),
    "nixl": ("nixl", Integrity.BY_CONNECTOR),
    "nixl, fenced": ("nixl", Integrity.FENCE),
    "files": ("files", Integrity.BY_CONNECTOR),
}


def rows(names: Iterable[str]) -> list[Any]:
    """NIXL is installed for `make test-full`, which therefore fails where it is missing."""
    slow = {name: pytest.mark.slow if CONNECTORS[name][0] == "nixl" else () for name in names}
    return [pytest.param(CONNECTORS[name], id=name, marks=slow[name]) for name in names]


# Where the fence alone counts nothing tells what was damaged on the way. Files are written before.
CHECKED = [name for name in CONNECTORS if name not in ("shm", "nixl, fenced", "files")]


@pytest.fixture(params=rows(CONNECTORS))
def way(request):
    return request.param


def with_files(pools: Sequence[KvPool]) -> list[Connector]:
    return [FileConnector(pools), *connectors_of(pools)]


def between(way, num_blocks: int = 8, **options: Any) -> AbstractAsyncContextManager[Transfer]:
    return transfer(num_blocks, connector=way[0], **{"connectors": with_files, **options})


def handle_of(ends: Transfer, way, num_blocks: int, **changes: Any) -> Handle:
    return ends.handle(num_blocks, integrity=way[1], **changes)


def fetch(
    ends: Transfer, way, num_blocks: int, into: tuple[int, ...], num_hits: int = 0, **changes: Any
) -> Coroutine[Any, Any, Any]:
    """Returns the fetch of a prompt's blocks into these."""
    handle = handle_of(ends, way, num_blocks, **changes)
    return ends.fetcher.fetch(handle, allocation(into, num_hits=num_hits), TIMEOUT)


async def test_connector_moves_blocks_between_arbitrary_tables(way, rng):
    async with between(way, 600, layouts=HYBRID) as ends:
        for turn in range(12):
            num_tokens = rng.randrange(1, 2000)
            count = -(-num_tokens // BLOCK_SIZE)
            first = max(0, num_tokens - HYBRID[1].window) // BLOCK_SIZE
            tables = [rng.sample(range(1, 601), count) for _ in range(4)]
            for table in (tables[1], tables[3]):
                table[:first] = [NULL_BLOCK] * first
            there, here = (tuple(map(tuple, tables[:2])), tuple(map(tuple, tables[2:])))
            lease_id = bytes([turn]) * 16
            with ends.lease_of(num_tokens, lease_id) as lease:
                lease.advance(there, count)
                lease.complete(TOKEN, nothing)
                handle = handle_of(ends, way, 0, num_tokens=num_tokens, lease_id=lease_id)
                token, report = await ends.fetcher.fetch(handle, allocation(*here), TIMEOUT)
            assert (token, report.connector) == (TOKEN, way[0])
            assert report.num_blocks == 2 * count - first
            for group, start in ((0, 0), (1, first)):
                assert contents(ends.targets[group], here[group][start:]) == contents(
                    ends.sources[group], there[group][start:]
                )
            assert untouched(ends.targets[1], (NULL_BLOCK,))


async def test_connector_streams_blocks_in_order_as_they_fill(way):
    async with between(way) as ends:
        into, out_of = (7, 3, 5, 1, 8, 2), (1, 2, 4, 6, 5, 3)
        fetching = asyncio.create_task(fetch(ends, way, 6, into))
        await until(lambda: ends.leases.num_awaited, within=5.0)  # before there is a lease
        with ends.lease(6) as lease:
            for num_filled in (1, 2, 2, 5):
                lease.advance((out_of[:num_filled],), num_filled)
                expected = contents(ends.source, out_of[:num_filled])
                await until(
                    lambda n=num_filled, x=expected: contents(ends.target, into[:n]) == x,
                    within=5.0,
                )
                assert untouched(ends.target, into[num_filled:])
            lease.advance((out_of,), 5)
            lease.complete(TOKEN, nothing)
            await fetching
        assert contents(ends.target, into) == contents(ends.source, out_of)


@pytest.mark.parametrize("num_held", range(5))
async def test_connector_leaves_held_leading_blocks_untouched(way, num_held):
    async with between(way) as ends:
        with ends.computed_lease((1, 2, 3, 4)):
            token, report = await fetch(ends, way, 4, (5, 6, 7, 8), num_held)
        assert (token, report.num_blocks) == (TOKEN, 4 - num_held)
        assert untouched(ends.target, (5, 6, 7, 8)[:num_held])
        wanted = contents(ends.source, (1, 2, 3, 4)[num_held:])
        assert contents(ends.target, (5, 6, 7, 8)[num_held:]) == wanted


async def test_connector_moves_ten_thousand_blocks(way, rng):
    num_blocks = 10_000 if way[0] != "files" else 1000  # a file for each block
    there = tuple(rng.sample(range(1, num_blocks + 1), num_blocks))
    here = tuple(rng.sample(range(1, num_blocks + 1), num_blocks))
    async with between(way, num_blocks) as ends:
        with ends.computed_lease(there):
            _, report = await fetch(ends, way, num_blocks, here)
        assert report.num_bytes == num_blocks * LAYOUT.block_bytes
        assert contents(ends.target, here) == contents(ends.source, there)


async def test_connector_keeps_concurrent_handoffs_apart(way):
    async with between(way, 64) as ends:

        async def one(i: int) -> None:
            blocks = tuple(range(1 + 4 * i, 5 + 4 * i))
            with ends.lease_of(4 * BLOCK_SIZE, bytes([i]) * 16) as lease:
                fetching = asyncio.create_task(
                    fetch(ends, way, 4, blocks[::-1], lease_id=bytes([i]) * 16)
                )
                for num_filled in range(1, 5):
                    await asyncio.sleep(0.001 * (i % 3))
                    lease.advance((blocks,), num_filled)
                lease.complete(TOKEN, nothing)
                await fetching

        await asyncio.gather(*map(one, range(16)))
        everything = tuple(range(1, 65))
        expected = [b for i in range(0, 64, 4) for b in everything[i : i + 4][::-1]]
        assert contents(ends.target, everything) == contents(ends.source, tuple(expected))


async def test_connector_fetch_can_be_cancelled_at_every_step(way):
    """After so many turns of the event loop, until it is through before it is called off."""
    num_turns = num_finished = 0
    async with between(way, 64) as ends:
        table = tuple(range(1, 65))
        baseline = None
        while num_finished < 3:
            lease_id = num_turns.to_bytes(16, "big")
            with ends.lease_of(64 * BLOCK_SIZE, lease_id) as lease:
                lease.advance((table,), 64)
                lease.complete(TOKEN, nothing)
                handle = handle_of(ends, way, 64, lease_id=lease_id)
                fetching = asyncio.create_task(
                    ends.fetcher.fetch(handle, allocation(table), TIMEOUT)
                )
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                fetching.cancel()
                (outcome,) = await asyncio.gather(fetching, return_exceptions=True)
                # From here on the blocks are another sequence's.
                ends.target.content.fill_(7)
                if isinstance(outcome, asyncio.CancelledError):
                    num_finished = 0
                    await asyncio.sleep(0.002)
                else:
                    assert outcome[0] == TOKEN
                    num_finished += 1
                assert bool((ends.target.content == 7).all()), "written behind the end"
            assert lease.state in (LeaseState.RELEASED, LeaseState.FAILED)
            if isinstance(outcome, tuple):
                assert lease.state is LeaseState.RELEASED
            num_turns += 1 if num_turns < 40 else 10
        baseline = len(open_files())
        await until(lambda: not ends.leases.num_awaited and len(ends.leases) == 0, within=5.0)
        await until(lambda: len(open_files()) <= baseline, within=5.0)
        assert ends.num_readers == (1 if way[0] == "shm" else 0)


STAGES = {
    "before the prefill": lambda lease: None,
    "before the first block": lambda lease: None,
    "amid the blocks": lambda lease: lease.advance(((1, 2),), 2),
    "before the token": lambda lease: lease.advance(((1, 2, 3, 4),), 4),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_lease_ends_when_claimant_cancels(way, stage):
    async with between(way) as ends:
        fetching = asyncio.create_task(fetch(ends, way, 4, (5, 6, 7, 8)))
        if stage == "before the prefill":
            await until(lambda: ends.leases.num_awaited, within=5.0)
            fetching.cancel()
            await until(lambda: not ends.leases.num_awaited, within=5.0)
            return
        with ends.lease(4) as lease:
            await until(lambda: lease.is_claimed, within=5.0)
            STAGES[stage](lease)
            await asyncio.sleep(0.01)
            fetching.cancel()
            with pytest.raises(UnavailableError, match="stopped fetching"):
                async with asyncio.timeout(2.0):
                    await lease.over()
            assert lease.state is LeaseState.FAILED


@pytest.mark.parametrize("stage", STAGES)
async def test_fetch_ends_when_source_cancels(way, stage):
    async with between(way) as ends:
        fetching = asyncio.create_task(fetch(ends, way, 4, (5, 6, 7, 8)))
        await until(lambda: ends.leases.num_awaited, within=5.0)
        if stage == "before the prefill":
            fetching.cancel()
            return
        with ends.lease(4) as lease:
            await until(lambda: lease.is_claimed, within=5.0)
            STAGES[stage](lease)
            await asyncio.sleep(0.01)
        assert isinstance(await failure_of(fetching), NotFoundError)


class LateConfirm(service.KvTransferService):
    """Does something before it hears a confirmation."""

    before = staticmethod(nothing)

    async def Confirm(self, request, context):  # noqa: N802
        self.before()
        return await super().Confirm(request, context)


async def test_fetch_fails_when_lease_breaks_before_confirmation(way):
    async with between(way, service_type=LateConfirm) as ends:
        with ends.computed_lease((1, 2)) as lease:
            ends.service.before = lambda: lease.end(UnavailableError("the cat"))
            failure = await failure_of(fetch(ends, way, 2, (5, 6)))
        assert isinstance(failure, NotFoundError)


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
async def test_fetch_fails_when_lease_expires_before_confirmation(way, is_late):
    clock = HeldClock()
    leases = LeaseTable(5.0, lambda: clock)
    async with between(way, leases=leases, service_type=LateConfirm) as ends:
        with ends.computed_lease((1, 2)) as lease:

            def pass_time() -> None:
                clock.is_late = is_late
                clock.advance(5.0)

            ends.service.before = pass_time
            failure = await failure_of(fetch(ends, way, 2, (5, 6)))
            assert lease.state is LeaseState.EXPIRED
        assert isinstance(failure, NotFoundError)


async def test_fetch_fails_when_lease_expires_during_or_before_blocks(way):
    for num_filled in (0, 1):
        clock = HeldClock()
        async with between(way, leases=LeaseTable(5.0, lambda c=clock: c)) as ends:
            with ends.lease(2) as lease:
                lease.complete(TOKEN, nothing)
                lease.retract()  # it is computed again, and its time runs on
                fetching = asyncio.create_task(fetch(ends, way, 2, (5, 6)))
                await until(lambda lease=lease: lease.is_claimed, within=5.0)
                lease.advance(((1, 2),), num_filled)
                await asyncio.sleep(0.01)
                clock.advance(5.0)
                assert isinstance(await failure_of(fetching), NotFoundError)
                assert lease.state is LeaseState.EXPIRED


async def test_fetch_fails_when_source_reuses_blocks_during_read(way):
    """The source takes its blocks back and writes to them while they are being read."""
    async with between(way, 256) as ends:
        for turn in range(8):
            lease_id, table = bytes([turn]) * 16, tuple(range(1, 257))
            with ends.lease_of(256 * BLOCK_SIZE, lease_id) as lease:
                lease.advance((table,), 255)
                fetching = asyncio.create_task(fetch(ends, way, 256, table, lease_id=lease_id))
                await until(lambda lease=lease: lease.is_claimed, within=5.0)
                for _ in range(turn):
                    await asyncio.sleep(0)
                ends.source.content[1:].random_(0, 255)
                lease.advance((table[::-1],), 255)
                failure = await failure_of(fetching)
            assert isinstance(failure, NotFoundError | DataLossError)


class Damaging:
    """Makes runs as the connector inside it does, and damages them."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    async def send(self, group, first, block_ids, pool, integrity) -> AsyncGenerator[BlockBatch]:
        sending = self._connector.send(group, first, block_ids, pool, integrity)
        async with aclosing(sending) as batches:
            async for batch in batches:
                pool.content[block_ids[-1], -1] ^= 1  # in the memory that is about to be read
                yield batch


@pytest.mark.parametrize("way", rows(CHECKED))
async def test_fetch_is_data_loss_when_bit_flips(way):
    def damaging(pools: Sequence[KvPool]) -> list[Any]:
        return [Damaging(connector) for connector in connectors_of(pools)]

    async with between(way, source_connectors=damaging) as ends:
        with ends.computed_lease((1, 2, 3)) as lease:
            failure = await failure_of(fetch(ends, way, 3, (5, 6, 7)))
            with pytest.raises(UnavailableError):
                await lease.over()
        assert isinstance(failure, DataLossError)
        assert "block 2 of group 0" in str(failure)


async def test_connector_releases_files_and_mappings_when_closed(way):
    before, mapped = len(open_files()), num_mapped()
    for _ in range(3):
        async with between(way, layouts=PLAIN) as ends:
            with ends.lease(1) as lease:
                lease.complete(TOKEN, nothing)
                lease.advance(((1,),), 1)
            assert not ends.leases.num_awaited
            with ends.computed_lease((1,), lease_id=b"x" * 16):
                handle = handle_of(ends, way, 1, lease_id=b"x" * 16)
                await ends.fetcher.fetch(handle, allocation((1,)), TIMEOUT)
        del ends
    await until(lambda: num_mapped() <= mapped, within=5.0)
    await until(
        lambda: len(open_files()) <= before + 2, within=5.0
    )  # what gRPC starts once and keeps
