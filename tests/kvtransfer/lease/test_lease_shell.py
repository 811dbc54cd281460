"""The leases of one table in any order of events, on a clock that is held."""

import asyncio
from contextlib import AbstractContextManager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import AlreadyExistsError, BatonError, FailedPreconditionError, NotFoundError
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Claim, Lease
from baton_kvtransfer.lease.machine import LeaseState
from baton_kvtransfer.lease.table import LeaseTable
from tests.support.kvtransfer.clock import HeldClock
from tests.support.waiting import settled

IDS = [b"a" * 16, b"b" * 16]
TOKEN = FirstToken(0, 42)
BLOCK_RANGE = BlockRange(num_tokens=11, block_size=4)
TIME_LIMIT = 10.0
ENDINGS = {LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.FAILED}


class Leases(RuleBasedStateMachine):
    """Any order of open, advance, complete, retract, claim, let go, confirm, wait and close, by
    those who may and those who may not."""

    claims = st.builds(
        Claim, st.sampled_from(IDS), st.sampled_from(["d", "another"]), st.sampled_from(["", "t"])
    )

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = HeldClock()
        self.table = LeaseTable(TIME_LIMIT, lambda: self.clock)
        self.contexts: dict[Claim, AbstractContextManager[Lease]] = {}
        self.open_leases: dict[Claim, Lease] = {}
        self.used: set[bytes] = set()
        self.fetches: list[tuple[Claim, asyncio.Task[str], asyncio.Event]] = []
        self.every: list[Lease] = []
        self.waiters: list[tuple[Lease, asyncio.Task[None]]] = []
        self.held: dict[int, bool] = {}
        self.readers: dict[int, str] = {}
        self.confirmed: list[int] = []

    def run(self) -> None:
        self.loop.run_until_complete(settled())

    def one_of(self, data: st.DataObject) -> Lease:
        claims = sorted(self.open_leases, key=str)
        return self.open_leases[data.draw(st.sampled_from(claims))]

    @rule(lease_id=st.sampled_from(IDS), tenant=st.sampled_from(["", "t"]))
    def open(self, lease_id: bytes, tenant: str) -> None:
        claim = Claim(lease_id, "d", tenant)

        async def enter() -> None:
            context = self.table.open(claim, BLOCK_RANGE)
            lease = context.__enter__()
            self.contexts[claim], self.open_leases[claim] = context, lease
            self.every.append(lease)
            for waiting in (lease.over(), lease.filled_beyond(1), lease.claimed()):
                self.waiters.append((lease, self.loop.create_task(waiting)))

        if lease_id in self.used:
            with pytest.raises(AlreadyExistsError):
                self.loop.run_until_complete(enter())
        else:
            self.loop.run_until_complete(enter())
        self.used.add(lease_id)
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), num_filled=st.integers(0, 3))
    def advance(self, data: st.DataObject, num_filled: int) -> None:
        lease = self.one_of(data)
        before = lease.num_filled
        lease.advance(((4, 5, 6),), num_filled)
        assert lease.num_filled >= before
        self.run()

    @precondition(lambda self: any(x.first_token is None for x in self.open_leases.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lease = self.one_of(data)
        if lease.first_token is None:
            was_over, generation = lease.is_over, lease.generation
            self.held[generation] = True
            lease.complete(TOKEN, lambda: self.free(generation))
            assert lease.is_over == was_over
        self.run()

    def free(self, generation: int) -> None:
        assert self.held[generation], "freed twice"
        self.held[generation] = False

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        lease = self.one_of(data)
        if not lease.is_claimed:
            lease.retract()
            assert lease.is_over or (lease.state, lease.num_filled) == (LeaseState.CREATED, 0)
        self.run()

    @rule(claim=claims)
    def fetch(self, claim: Claim) -> None:
        done = asyncio.Event()

        async def hold() -> str:
            try:
                async with self.table.claim(claim, timeout=60.0) as lease:
                    assert lease.claim == claim, "claimed by another"
                    assert lease.generation not in self.readers, "claimed twice"
                    self.readers[lease.generation] = claim.claimant
                    await done.wait()
                    return "held"
            except NotFoundError:
                return "refused"

        self.fetches.append((claim, self.loop.create_task(hold()), done))
        self.run()

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), cancelled=st.booleans())
    def let_go(self, data: st.DataObject, cancelled: bool) -> None:
        _, task, done = data.draw(st.sampled_from(self.fetches))
        task.cancel() if cancelled else done.set()
        self.run()

    @rule(claim=claims, generation=st.integers(0, 3))
    def confirm(self, claim: Claim, generation: int) -> None:
        lease = self.open_leases.get(claim)
        state = lease.state if lease else None
        in_time = lease is not None and (lease.deadline is None or self.clock.now < lease.deadline)
        allowed = (
            lease is not None
            and in_time
            and state is LeaseState.TRANSFERRING
            and lease.generation == generation
        )
        try:
            self.table.confirm(claim, generation)
        except NotFoundError:
            assert not allowed
        except FailedPreconditionError:
            assert lease is not None
            assert in_time
            assert lease.generation != generation
        else:
            assert allowed
            self.confirmed.append(generation)
        self.run()

    @rule(seconds=st.sampled_from([0.5, TIME_LIMIT - 0.5, TIME_LIMIT]), late=st.booleans())
    def wait(self, seconds: float, late: bool) -> None:
        self.clock.is_late = late
        self.clock.advance(seconds)
        self.run()

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = self.one_of(data)
        del self.open_leases[lease.claim]
        self.contexts.pop(lease.claim).__exit__(None, None, None)
        assert lease.is_over
        self.run()

    @invariant()
    def nothing_is_confirmed_twice(self) -> None:
        assert len(set(self.confirmed)) == len(self.confirmed)
        generations = [lease.generation for lease in self.every]
        assert len(set(generations)) == len(generations)

    @invariant()
    def what_is_over_holds_nothing_and_no_claim_waits_for_it(self) -> None:
        for lease in self.every:
            if lease.is_over:
                assert lease.state in ENDINGS
                assert not self.held.get(lease.generation)
        for lease, waiter in self.waiters:
            assert waiter.done() or not lease.is_over
        assert len(self.table) == len(self.open_leases)

    @invariant()
    def only_whom_it_was_made_for_has_read(self) -> None:
        assert set(self.readers.values()) <= {"d"}
        for _, task, _ in self.fetches:
            if task.done() and not task.cancelled():
                assert task.exception() is None

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.end_everything()
        finally:
            self.loop.close()

    def end_everything(self) -> None:
        for context in self.contexts.values():
            context.__exit__(None, None, None)
        for _, task, _ in self.fetches:
            task.cancel()
        self.run()
        assert all(lease.state in ENDINGS for lease in self.every)
        assert not any(self.held.values())
        assert not self.table.num_awaited
        for _, waiter in self.waiters:
            assert waiter.done(), "a waiter hangs"
            assert waiter.exception() is None or isinstance(waiter.exception(), BatonError)


TestLeases = Leases.TestCase


CLAIM = Claim(IDS[0], "d")


def table_of(clock: HeldClock) -> LeaseTable:
    return LeaseTable(TIME_LIMIT, lambda: clock)


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
async def test_expired_lease_cannot_be_claimed(is_late):
    clock, freed = HeldClock(), []
    table = table_of(clock)
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        clock.advance(5 * TIME_LIMIT)  # computing takes as long as it takes
        lease.complete(TOKEN, lambda: freed.append(True))
        clock.is_late = is_late
        clock.advance(TIME_LIMIT)
        with pytest.raises(NotFoundError):
            async with table.claim(CLAIM, timeout=0.01):
                pass
        assert (lease.state, freed) == (LeaseState.EXPIRED, [True])


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
async def test_lease_cannot_be_confirmed_when_it_expires_during_fetch(is_late):
    clock = HeldClock()
    table = table_of(clock)
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.complete(TOKEN, lambda: None)
        clock.advance(TIME_LIMIT - 0.001)
        async with table.claim(CLAIM, timeout=0.01):
            clock.is_late = is_late
            clock.advance(0.001)
            with pytest.raises(NotFoundError):
                table.confirm(CLAIM, lease.generation)
            assert lease.state is LeaseState.EXPIRED
            with pytest.raises(NotFoundError, match="after its 10 s"):
                await lease.over()


async def test_confirmed_lease_does_not_expire():
    clock = HeldClock()
    table = table_of(clock)
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.complete(TOKEN, lambda: None)
        async with table.claim(CLAIM, timeout=0.01):
            clock.advance(TIME_LIMIT - 0.001)
            table.confirm(CLAIM, lease.generation)
            clock.advance(TIME_LIMIT)
            await lease.over()
        assert lease.state is LeaseState.RELEASED


async def test_retracted_lease_keeps_first_deadline():
    clock = HeldClock()
    table = table_of(clock)
    with table.open(CLAIM, BLOCK_RANGE) as lease:
        lease.complete(TOKEN, lambda: None)
        clock.advance(TIME_LIMIT / 2)
        lease.retract()
        lease.complete(TOKEN, lambda: None)
        clock.advance(TIME_LIMIT / 2)
        assert lease.state is LeaseState.EXPIRED
