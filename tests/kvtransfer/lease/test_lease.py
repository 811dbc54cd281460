import asyncio
from dataclasses import replace

import pytest

from baton.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    LeaseNotOpenedError,
    NotFoundError,
    UnavailableError,
)
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Claim, Lease
from baton_kvtransfer.lease.machine import LeaseState
from baton_kvtransfer.lease.table import LeaseTable
from tests.support.waiting import settled

ID, OTHER_ID = b"a" * 16, b"b" * 16
CLAIM = Claim(ID, "d", "acme")
TOKEN = FirstToken(0, 42)
BLOCK_RANGE = BlockRange(num_tokens=11, block_size=4)
TABLES = ((1, 2, 3),)


def nothing() -> None:
    """Stands for the call by which a lease frees its blocks, where that does not matter."""


async def test_lease_refuses_confirmation_of_other_generation():
    table = LeaseTable()
    with table.open(replace(CLAIM, lease_id=OTHER_ID), BLOCK_RANGE):
        pass
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.complete(TOKEN, nothing)
        async with table.claim(CLAIM, timeout=0.01):
            with pytest.raises(FailedPreconditionError, match=r"generation is 2, .* is 1"):
                table.confirm(CLAIM, 1)
            table.confirm(CLAIM, 2)


@pytest.mark.parametrize(
    "forged",
    [
        replace(CLAIM, claimant="another"),
        replace(CLAIM, tenant="globex"),
        replace(CLAIM, tenant=""),
        replace(CLAIM, lease_id=OTHER_ID),
    ],
    ids=["worker", "tenant", "no tenant", "id"],
)
async def test_lease_table_tells_forged_claim_nothing(forged):
    table = LeaseTable()

    async def told(claim: Claim) -> str:
        with pytest.raises(NotFoundError) as refused:
            async with table.claim(claim, timeout=0.01):
                pass
        with pytest.raises(NotFoundError) as denied:
            table.confirm(claim, 1)
        return f"{refused.value} {denied.value}"

    made_up = await told(replace(CLAIM, lease_id=b"x" * 16))
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.complete(TOKEN, nothing)
        assert await told(forged) == made_up
        async with table.claim(CLAIM, timeout=0.01):
            assert await told(forged) == made_up
            table.confirm(CLAIM, lease.generation)
    assert await told(forged) == made_up


async def test_claim_may_precede_its_lease():
    table = LeaseTable()

    async def claim() -> Lease:
        async with table.claim(CLAIM, timeout=5.0) as lease:
            return lease

    claiming = asyncio.create_task(claim())
    await settled()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        assert await claiming is lease


async def test_claim_times_out_when_lease_never_opens():
    table = LeaseTable()
    with pytest.raises(LeaseNotOpenedError, match=r"within 0\.01 s"):
        async with table.claim(CLAIM, timeout=0.01):
            pass
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        assert not lease.is_claimed


async def test_cancelled_claim_leaves_lease_to_next_claimant():
    table = LeaseTable()

    async def claim() -> None:
        async with table.claim(CLAIM, timeout=5.0):
            raise AssertionError("the lease never came")

    claiming = asyncio.create_task(claim())
    await settled()
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    with table.open(CLAIM, BLOCK_RANGE):
        async with table.claim(CLAIM, timeout=0.01) as lease:
            assert lease.is_claimed


@pytest.mark.parametrize("other", [{"claimant": "another"}, {"tenant": "globex"}], ids=str)
async def test_early_claim_of_other_worker_does_not_block_owner(other):
    table = LeaseTable()

    async def claim(by: Claim) -> Lease:
        async with table.claim(by, timeout=5.0) as lease:
            return lease

    thief = asyncio.create_task(claim(replace(CLAIM, **other)))
    await settled()
    owner = asyncio.create_task(claim(CLAIM))
    await settled()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        assert await owner is lease
    thief.cancel()
    with pytest.raises((NotFoundError, asyncio.CancelledError)):
        await thief


async def test_lease_refuses_second_claim():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        async with table.claim(CLAIM, timeout=0.01):
            with pytest.raises(NotFoundError):
                async with table.claim(CLAIM, timeout=0.01):
                    pass
            assert not lease.is_over


async def test_claim_fails_at_once_when_lease_is_over():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE):
        pass
    with pytest.raises(NotFoundError):
        async with asyncio.timeout(1.0), table.claim(CLAIM, timeout=60.0):
            pass


async def test_lease_table_forgets_oldest_ids():
    table = LeaseTable(num_remembered=2)
    claims = [replace(CLAIM, lease_id=bytes([i]) * 16) for i in range(5)]
    for claim in claims:
        with table.open(claim, BLOCK_RANGE):
            pass
    for claim in claims[3:]:
        with pytest.raises(AlreadyExistsError):
            table.check_new(claim.lease_id)
    for claim in claims[:3]:
        table.check_new(claim.lease_id)


async def test_waits_that_time_out_leave_nothing():
    with LeaseTable().open(CLAIM, BLOCK_RANGE) as lease:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await lease.claimed()
        assert not lease.num_waiting


async def test_lease_never_counts_fewer_filled_blocks():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.advance(TABLES, 2)
        lease.advance(((1, 2),), 1)
        assert (lease.num_filled, lease.block_ids) == (2, TABLES)


async def test_lease_block_tables_grow_and_drop_blocks_before_window():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        assert lease.blocks.num_blocks == 3
        lease.advance(((1,), (4,)), 1)
        assert lease.state is LeaseState.COMPUTING
        lease.advance(((1, 2), (4, 5)), 1)
        lease.advance(((1, 2, 3), (0, 5, 6)), 2)
        assert (lease.num_filled, lease.block_ids) == (2, ((1, 2, 3), (0, 5, 6)))
        lease.complete(TOKEN, nothing)
        assert lease.num_filled == 3


@pytest.mark.parametrize("wait", [lambda x: x.filled_beyond(0), lambda x: x.claimed()])
async def test_waiters_get_reason_for_which_lease_broke(wait):
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        waiting = asyncio.create_task(wait(lease))
        await settled()
        lease.end(UnavailableError("the cat"))
    with pytest.raises(UnavailableError, match="the cat"):
        await waiting


async def test_retracted_lease_is_computed_again_for_claimant():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.advance(TABLES, 2)
        lease.complete(TOKEN, nothing)
        lease.retract()
        assert (lease.state, lease.num_filled) == (LeaseState.CREATED, 0)
        with pytest.raises(NotFoundError):
            table.confirm(CLAIM, lease.generation)
        waiting = asyncio.create_task(lease.claimed())
        await settled()
        assert not waiting.done()
        async with table.claim(CLAIM, timeout=0.01):
            await waiting
            lease.advance(((4, 5, 6),), 3)
            lease.complete(TOKEN, nothing)
            assert lease.block_ids == ((4, 5, 6),)
            table.confirm(CLAIM, lease.generation)


async def test_claimant_counts_as_waiting_until_blocks_are_computed():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        assert not table.has_awaited
        async with table.claim(CLAIM, timeout=0.01):
            assert table.has_awaited
            lease.complete(TOKEN, nothing)
            assert not table.has_awaited


async def test_lease_fails_when_claimed_blocks_are_taken_back():
    table = LeaseTable()
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.advance(((1, 2), (5, 6)), 2)
        async with table.claim(CLAIM, timeout=0.01):
            lease.advance(((1, 2, 3), (0, 6, 7)), 2)  # a window has passed the first
            assert not lease.is_over
            lease.advance(((1, 4, 3), (0, 6, 7)), 2)
            assert lease.state is LeaseState.FAILED
            with pytest.raises(DataLossError):
                await lease.over()
            with pytest.raises(NotFoundError):
                table.confirm(CLAIM, lease.generation)


async def test_lease_frees_blocks_once_when_it_ends():
    table, freed = LeaseTable(), []
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.advance(TABLES, 2)
        lease.complete(TOKEN, lambda: freed.append(lease.state))
        async with table.claim(CLAIM, timeout=0.01):
            assert not freed
            table.confirm(CLAIM, lease.generation)
            assert freed == [LeaseState.CONFIRMED]
            assert lease.state is LeaseState.RELEASED
    assert len(freed) == 1


async def test_lease_frees_blocks_completed_after_its_end_at_once():
    table, freed = LeaseTable(), []
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.end(UnavailableError("the cat"))
        lease.complete(TOKEN, lambda: freed.append(True))
        assert freed == [True]
