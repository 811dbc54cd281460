"""Both tables by themselves, then against each other over a network that may do anything."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kvtransfer.lease.machine import (
    CLAIMANT,
    OVER,
    SOURCE,
    ClaimantEvent,
    LeaseAction,
    LeaseState,
    SourceEvent,
)

FINAL = {LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.FAILED}
TABLES = {"source": (SOURCE, SourceEvent), "claimant": (CLAIMANT, ClaimantEvent)}


def reachable(table, start=LeaseState.CREATED):
    seen, left = set(), [start]
    while left:
        state = left.pop()
        if state not in seen:
            seen.add(state)
            left += [step.state for (at, _), step in table.items() if at is state]
    return seen


@pytest.mark.parametrize(("table", "events"), TABLES.values(), ids=TABLES)
def test_lease_machine_reaches_an_ending_from_every_state(table, events):
    states = reachable(table)
    assert {at for at, _ in table} == states - FINAL
    assert states > FINAL
    for state in states:
        assert FINAL & reachable(table, state)


@pytest.mark.parametrize(("table", "events"), TABLES.values(), ids=TABLES)
def test_lease_machine_can_expire_and_break_in_every_open_state(table, events):
    for state in reachable(table) - OVER:
        assert table[state, events.TIMED_OUT].state is LeaseState.EXPIRED
        assert table[state, events.BROKEN].state is LeaseState.FAILED


@pytest.mark.parametrize(("table", "events"), TABLES.values(), ids=TABLES)
def test_lease_machine_table_has_only_events_of_its_side(table, events):
    assert {type(event) for _, event in table} == {events}
    assert {event for _, event in table} == set(events)


def test_lease_machine_frees_once_when_ended_or_retracted():
    for (at, _), step in SOURCE.items():
        ends = step.state in OVER and at not in OVER
        goes_back = step.state is LeaseState.CREATED and at is not LeaseState.CREATED
        assert step.actions.count(LeaseAction.FREE) == int(ends or goes_back)


def test_lease_machine_commits_only_after_acknowledgement():
    uses = [step for step in CLAIMANT.values() if LeaseAction.COMMIT in step.actions]
    assert uses == [CLAIMANT[LeaseState.READY, ClaimantEvent.ACKNOWLEDGED]]
    for (at, _), step in CLAIMANT.items():
        gave_up = step.state in (LeaseState.EXPIRED, LeaseState.FAILED)
        assert (LeaseAction.DISCARD in step.actions) == (gave_up and at not in OVER)


def test_lease_machine_allows_no_retraction_under_claimant():
    for state in (LeaseState.STREAMING, LeaseState.TRANSFERRING):
        assert (state, SourceEvent.RETRACTED) not in SOURCE


class Side:
    """One side's table and what it holds."""

    def __init__(self, table) -> None:
        self._table = table
        self.state = LeaseState.CREATED
        self.actions: list[LeaseAction] = []

    def apply(self, event) -> bool:
        step = self._table.get((self.state, event))
        if step is None:
            return False
        assert self.state not in FINAL, "something happened behind the end"
        self.state = step.state
        self.actions += step.actions
        return True


class Handoff(RuleBasedStateMachine):
    """A source, a claimant, and a network that delays, repeats, reorders and loses what they say.

    The content of the source's blocks is the generation it was computed in, or rubbish once they
    were freed; what the claimant stores is what the blocks hold when it reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source, self.claimant = Side(SOURCE), Side(CLAIMANT)
        self.blocks = "empty"
        self.stored: list[str] = []
        self.messages: list[object] = []
        self.num_confirmed = 0
        self.num_freed = 0

    # The source.

    def at_source(self, event) -> bool:
        done = self.source.apply(event)
        frees = self.source.actions.count(LeaseAction.FREE)
        if frees > self.num_freed:
            self.num_freed, self.blocks = frees, "rubbish"
        return done

    @rule()
    def fill(self) -> None:
        if self.at_source(SourceEvent.FILLED) and self.blocks != "content":
            self.blocks = "part"

    @rule()
    def complete(self) -> None:
        if self.at_source(SourceEvent.COMPLETED):
            self.blocks = "content"
            if self.source.state is LeaseState.TRANSFERRING:
                self.messages += [ClaimantEvent.BLOCKS, ClaimantEvent.RESULT]

    @rule()
    def retract(self) -> None:
        self.at_source(SourceEvent.RETRACTED)

    @rule(event=st.sampled_from([SourceEvent.TIMED_OUT, SourceEvent.BROKEN]))
    def source_ends(self, event) -> None:
        self.at_source(event)

    @precondition(lambda self: self.source.state is LeaseState.CONFIRMED)
    @rule()
    def give_back(self) -> None:
        self.at_source(SourceEvent.FREED)

    # The claimant.

    @rule()
    def ask(self) -> None:
        if self.claimant.apply(ClaimantEvent.REQUESTED):
            self.messages.append(SourceEvent.CLAIMED)

    @rule(event=st.sampled_from([ClaimantEvent.TIMED_OUT, ClaimantEvent.BROKEN]))
    def claimant_ends(self, event) -> None:
        self.claimant.apply(event)

    @precondition(lambda self: self.claimant.state is LeaseState.CONFIRMED)
    @rule()
    def commit(self) -> None:
        self.claimant.apply(ClaimantEvent.COMMITTED)

    # What lies between them.

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), repeated=st.booleans())
    def deliver(self, data, repeated) -> None:
        message = data.draw(st.sampled_from(self.messages))
        if not repeated:
            self.messages.remove(message)
        if isinstance(message, SourceEvent):
            self.hear(message)
        elif self.claimant.apply(message):
            if message is ClaimantEvent.BLOCKS:
                self.stored.append(self.blocks)
            if message is ClaimantEvent.RESULT:
                self.messages.append(SourceEvent.CONFIRMED)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def lose(self, data) -> None:
        self.messages.remove(data.draw(st.sampled_from(self.messages)))

    def hear(self, message: SourceEvent) -> None:
        if not self.at_source(message):
            return
        if message is SourceEvent.CLAIMED:
            self.messages.append(ClaimantEvent.MANIFEST)
            if self.source.state is LeaseState.TRANSFERRING:
                self.messages += [ClaimantEvent.BLOCKS, ClaimantEvent.RESULT]
        if message is SourceEvent.CONFIRMED:
            self.num_confirmed += 1
            self.messages.append(ClaimantEvent.ACKNOWLEDGED)

    # What must hold.

    @invariant()
    def it_is_confirmed_and_used_at_most_once(self) -> None:
        assert self.num_confirmed <= 1
        assert self.claimant.actions.count(LeaseAction.COMMIT) <= self.num_confirmed

    @invariant()
    def what_is_used_was_read_while_it_was_held(self) -> None:
        if LeaseAction.COMMIT in self.claimant.actions:
            assert "rubbish" not in self.stored

    @invariant()
    def an_ending_holds_nothing(self) -> None:
        if self.source.state in FINAL:
            assert self.blocks in ("rubbish", "empty")
        if self.claimant.state in FINAL:
            kept = LeaseAction.COMMIT in self.claimant.actions
            assert kept != (LeaseAction.DISCARD in self.claimant.actions)


TestHandoff = Handoff.TestCase
