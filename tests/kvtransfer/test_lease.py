import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from kvtransfer.extent import Extent
from kvtransfer.handle import FirstToken
from kvtransfer.lease import Lease, LeaseState, LeaseTable

ID, OTHER_ID = b"a" * 16, b"b" * 16
TOKEN = FirstToken(0, 42)
EXTENT = Extent(num_tokens=11, block_size=4)
TABLES = ((1, 2, 3),)


async def settled() -> None:
    """Lets every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_confirmed_lease_cannot_be_confirmed_again():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        lease.advance(((1, 2),), 1)
        lease.complete(TOKEN)
        table.confirm(ID, lease.generation)
        with pytest.raises(NotFoundError):
            table.confirm(ID, lease.generation)
    with pytest.raises(NotFoundError):
        table.confirm(ID, lease.generation)


async def test_a_lease_that_is_still_computed_cannot_be_confirmed():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        lease.advance(((1, 2),), 1)
        with pytest.raises(NotFoundError):
            table.confirm(ID, lease.generation)
        assert not lease.is_over


async def test_a_confirmation_of_another_generation_is_refused_and_the_lease_goes_on():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT):
        pass
    with table.open(ID, "d", EXTENT) as lease:
        lease.complete(TOKEN)
        with pytest.raises(FailedPreconditionError, match=r"generation is 2, .* is 1"):
            table.confirm(ID, 1)
        table.confirm(ID, 2)


async def test_a_claim_may_come_before_its_lease():
    table = LeaseTable()

    async def claim() -> Lease:
        async with table.claim(ID, "d", timeout=5.0) as lease:
            return lease

    claiming = asyncio.create_task(claim())
    await settled()
    with table.open(ID, "d", EXTENT) as lease:
        assert await claiming is lease


async def test_a_claim_whose_lease_never_comes_gives_up():
    table = LeaseTable()
    with pytest.raises(NotFoundError, match=r"within 0\.01 s"):
        async with table.claim(ID, "d", timeout=0.01):
            pass
    with table.open(ID, "d", EXTENT) as lease:
        assert not lease.is_claimed


async def test_a_claim_that_is_called_off_while_it_waits_leaves_the_lease_to_the_next_one():
    table = LeaseTable()

    async def claim() -> None:
        async with table.claim(ID, "d", timeout=5.0):
            raise AssertionError("the lease never came")

    claiming = asyncio.create_task(claim())
    await settled()
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    with table.open(ID, "d", EXTENT):
        async with table.claim(ID, "d", timeout=0.01) as lease:
            assert lease.is_claimed


async def test_another_worker_s_claim_is_refused_and_changes_nothing():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        with pytest.raises(NotFoundError):
            async with table.claim(ID, "another", timeout=0.01):
                pass
        assert not lease.is_over
        async with table.claim(ID, "d", timeout=0.01) as claimed:
            assert claimed is lease


async def test_another_worker_s_early_claim_does_not_stand_in_the_way():
    table = LeaseTable()

    async def claim(claimant: str) -> Lease:
        async with table.claim(ID, claimant, timeout=5.0) as lease:
            return lease

    thief = asyncio.create_task(claim("another"))
    await settled()
    owner = asyncio.create_task(claim("d"))
    await settled()
    with table.open(ID, "d", EXTENT) as lease:
        assert await owner is lease
    thief.cancel()
    with pytest.raises((NotFoundError, asyncio.CancelledError)):
        await thief


async def test_a_second_claim_is_refused():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        async with table.claim(ID, "d", timeout=0.01):
            with pytest.raises(NotFoundError):
                async with table.claim(ID, "d", timeout=0.01):
                    pass
            assert not lease.is_over


async def test_a_claim_that_ends_early_breaks_the_lease():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        async with table.claim(ID, "d", timeout=0.01):
            pass
        with pytest.raises(UnavailableError, match="stopped fetching"):
            await lease.over()


async def test_an_id_can_be_open_once_and_again_afterwards():
    table = LeaseTable()
    with (
        table.open(ID, "d", EXTENT),
        pytest.raises(AlreadyExistsError),
        table.open(ID, "d", EXTENT),
    ):
        pass
    with table.open(ID, "d", EXTENT):
        assert len(table) == 1
    assert len(table) == 0


async def test_blocks_that_were_filled_stay_filled():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        lease.advance(TABLES, 2)
        lease.advance(((1, 2),), 1)
        assert (lease.num_filled, lease.block_ids) == (2, TABLES)


async def test_tables_grow_with_what_is_computed_and_lose_what_a_window_has_passed():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        assert lease.extent.num_blocks == 3
        lease.advance(((1,), (4,)), 1)
        lease.advance(((1, 2), (4, 5)), 1)
        lease.advance(((1, 2, 3), (0, 5, 6)), 2)
        assert (lease.num_filled, lease.block_ids) == (2, ((1, 2, 3), (0, 5, 6)))
        lease.complete(TOKEN)
        assert lease.num_filled == 3


async def test_a_waiter_gets_the_reason_for_which_a_lease_broke():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        waiting = asyncio.create_task(lease.filled_beyond(0))
        await settled()
        lease.end(UnavailableError("the cat"))
    with pytest.raises(UnavailableError, match="the cat"):
        await waiting


async def test_a_lease_that_is_retracted_is_computed_again_for_whoever_comes():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        lease.advance(TABLES, 2)
        lease.complete(TOKEN)
        lease.retract()
        assert (lease.state, lease.num_filled) == (LeaseState.COMPUTING, 0)
        with pytest.raises(NotFoundError):
            table.confirm(ID, lease.generation)
        waiting = asyncio.create_task(lease.claimed())
        await settled()
        assert not waiting.done()
        async with table.claim(ID, "d", timeout=0.01):
            await waiting
            lease.advance(((4, 5, 6),), 3)
            lease.complete(TOKEN)
            assert lease.block_ids == ((4, 5, 6),)
            table.confirm(ID, lease.generation)


async def test_a_claimant_is_awaited_until_its_blocks_are_computed():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        assert not table.has_awaited
        async with table.claim(ID, "d", timeout=0.01):
            assert table.has_awaited
            lease.complete(TOKEN)
            assert not table.has_awaited


async def test_a_lease_that_breaks_is_never_claimed():
    table = LeaseTable()
    with table.open(ID, "d", EXTENT) as lease:
        waiting = asyncio.create_task(lease.claimed())
        await settled()
        lease.end(UnavailableError("the cat"))
    with pytest.raises(UnavailableError, match="the cat"):
        await waiting


class LeaseMachine(RuleBasedStateMachine):
    """Any order of open, advance, complete, claim, confirm, break and close over two ids."""

    leases = st.sampled_from([ID, OTHER_ID])
    claimants = st.sampled_from(["d", "another"])

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.table = LeaseTable()
        self.open_leases: dict[bytes, tuple[object, Lease]] = {}
        self.claims: list[tuple[bytes, str, asyncio.Task[str], asyncio.Event]] = []
        self.every: list[Lease] = []
        self.waiters: list[tuple[Lease, asyncio.Task[None]]] = []
        self.num_confirmed: dict[int, int] = {}

    def run(self) -> None:
        self.loop.run_until_complete(settled())

    @rule(lease_id=leases)
    def open(self, lease_id: bytes) -> None:
        async def enter() -> None:
            context = self.table.open(lease_id, "d", EXTENT)
            lease = context.__enter__()
            self.open_leases[lease_id] = (context, lease)
            self.every.append(lease)
            for waiting in (lease.over(), lease.filled_beyond(1), lease.claimed()):
                self.waiters.append((lease, self.loop.create_task(waiting)))

        if lease_id in self.open_leases:
            with pytest.raises(AlreadyExistsError):
                self.loop.run_until_complete(enter())
        else:
            self.loop.run_until_complete(enter())
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), num_filled=st.integers(0, 3))
    def advance(self, data: st.DataObject, num_filled: int) -> None:
        _, lease = self.open_leases[data.draw(st.sampled_from(sorted(self.open_leases)))]
        before = lease.num_filled
        lease.advance(((4, 5, 6),), num_filled)
        assert lease.num_filled >= before
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        _, lease = self.open_leases[data.draw(st.sampled_from(sorted(self.open_leases)))]
        if not lease.is_claimed:
            lease.retract()
            assert lease.is_over or (lease.state, lease.num_filled) == (LeaseState.COMPUTING, 0)
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        _, lease = self.open_leases[data.draw(st.sampled_from(sorted(self.open_leases)))]
        was_over = lease.is_over
        lease.complete(TOKEN)
        assert lease.is_over == was_over
        self.run()

    @rule(lease_id=leases, claimant=claimants)
    def claim(self, lease_id: bytes, claimant: str) -> None:
        done = asyncio.Event()

        async def hold() -> str:
            try:
                async with self.table.claim(lease_id, claimant, timeout=60.0) as lease:
                    assert lease.claimant == claimant, "claimed by another"
                    await done.wait()
                    return "held"
            except NotFoundError:
                return "refused"

        self.claims.append((lease_id, claimant, self.loop.create_task(hold()), done))
        self.run()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), cancelled=st.booleans())
    def let_go(self, data: st.DataObject, cancelled: bool) -> None:
        *_, task, done = data.draw(st.sampled_from(self.claims))
        task.cancel() if cancelled else done.set()
        self.run()

    @rule(lease_id=leases, generation=st.integers(0, 6))
    def confirm(self, lease_id: bytes, generation: int) -> None:
        _, lease = self.open_leases.get(lease_id, (None, None))
        allowed = lease and lease.state is LeaseState.READY and lease.generation == generation
        try:
            self.table.confirm(lease_id, generation)
        except (NotFoundError, FailedPreconditionError):
            assert not allowed
        else:
            assert allowed
            self.num_confirmed[generation] = self.num_confirmed.get(generation, 0) + 1
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        context, lease = self.open_leases.pop(data.draw(st.sampled_from(sorted(self.open_leases))))
        context.__exit__(None, None, None)
        assert lease.is_over
        self.run()

    @invariant()
    def nothing_is_confirmed_twice(self) -> None:
        assert all(times == 1 for times in self.num_confirmed.values())
        generations = [lease.generation for lease in self.every]
        assert len(set(generations)) == len(generations)

    @invariant()
    def nobody_waits_for_a_lease_that_is_over(self) -> None:
        for lease, waiter in self.waiters:
            assert waiter.done() or not lease.is_over
        assert len(self.table) == len(self.open_leases)

    @invariant()
    def a_claim_that_was_let_go_ends_its_lease(self) -> None:
        for *_, task, _done in self.claims:
            if task.done() and not task.cancelled():
                assert task.exception() is None

    def teardown(self) -> None:
        try:
            self.end_everything()
        finally:
            self.loop.close()

    def end_everything(self) -> None:
        for context, _ in self.open_leases.values():
            context.__exit__(None, None, None)
        for *_, task, _done in self.claims:
            task.cancel()
        self.run()
        assert all(lease.is_over for lease in self.every)
        for _, waiter in self.waiters:
            assert waiter.done(), "a waiter hangs"
            assert waiter.exception() is None or isinstance(waiter.exception(), BatonError)


TestLeaseMachine = LeaseMachine.TestCase
