"""Lease state machine: the transitions of a handoff on each side, as two tables. Pure: no clock, no
task, no transport.

A row is (state, event) -> (state, actions). An event without a row is invalid in that state: the
shells (`baton_kvtransfer.lease`, `baton_kvtransfer.client`) refuse it with a typed error, or ignore
it where it came too late. Every path ends, and every end releases what is held exactly once."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class LeaseState(Enum):
    """State of a handoff. The last three are final; a confirmed one is about to be released.

    Attributes:
        CREATED: nothing is computed, nobody has come.
        COMPUTING: blocks are being filled; on the claimant's side, it has asked for them.
        READY: all blocks are filled and wait for the claimant; on its side, all have arrived.
        STREAMING: the claimant is here, and blocks flow while others are still being filled.
        TRANSFERRING: what is left flows: all blocks are filled.
        CONFIRMED: the claimant has all of them, unharmed.
        RELEASED: confirmed, and the source has its blocks back, the claimant has the content.
        EXPIRED: the time limit passed first.
        FAILED: one of the two, or what lies between them, gave up.
    """

    CREATED = auto()
    COMPUTING = auto()
    READY = auto()
    STREAMING = auto()
    TRANSFERRING = auto()
    CONFIRMED = auto()
    RELEASED = auto()
    EXPIRED = auto()
    FAILED = auto()


OVER = frozenset({LeaseState.CONFIRMED, LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.FAILED})
"""The states in which no block may be read any more."""


class SourceEvent(Enum):
    """Event of a lease on the side that computes."""

    FILLED = auto()  # more blocks may be read
    COMPLETED = auto()  # all of them may
    RETRACTED = auto()  # none of them may, for now
    CLAIMED = auto()  # the claimant is here
    CONFIRMED = auto()  # the claimant has everything
    FREED = auto()  # the blocks were given back
    TIMED_OUT = auto()
    BROKEN = auto()  # the claimant left, or the computation did


class ClaimantEvent(Enum):
    """Event of a handoff on the side that fetches."""

    ASKED = auto()
    MANIFEST = auto()  # the source says what will come
    BLOCKS = auto()
    RESULT = auto()  # the source says that all has come
    ACKNOWLEDGED = auto()  # the source was still holding everything when it was told
    COMMITTED = auto()  # the content is a sequence's
    TIMED_OUT = auto()
    BROKEN = auto()


class LeaseAction(Enum):
    """Action that a transition asks of the shell.

    Attributes:
        WAKE: somebody may be waiting for this.
        FREE: give the blocks back (source).
        STORE: put what arrived into the allocated blocks (claimant).
        CONFIRM: ask the source whether it still held everything (claimant).
        COMMIT: the content may be used (claimant).
        DISCARD: hang up, and let nothing that arrived be used (claimant).
    """

    WAKE = auto()
    FREE = auto()
    STORE = auto()
    CONFIRM = auto()
    COMMIT = auto()
    DISCARD = auto()


Event = SourceEvent | ClaimantEvent


@dataclass(frozen=True, slots=True)
class Step:
    """Result of an event: the next state, and actions in order."""

    state: LeaseState
    actions: tuple[LeaseAction, ...] = ()


Table = Mapping[tuple[LeaseState, Event], Step]

_S, _A = LeaseState, LeaseAction


def _endings(
    states: tuple[LeaseState, ...], timed_out: Event, broken: Event, *actions: LeaseAction
) -> dict[tuple[LeaseState, Event], Step]:
    """The two ways in which each of these states can end without a confirmation."""
    expired, failed = Step(_S.EXPIRED, actions), Step(_S.FAILED, actions)
    return {(s, e): step for s in states for e, step in ((timed_out, expired), (broken, failed))}


_E = SourceEvent
SOURCE: Table = {
    (_S.CREATED, _E.FILLED): Step(_S.COMPUTING),
    (_S.CREATED, _E.COMPLETED): Step(_S.READY),
    (_S.CREATED, _E.RETRACTED): Step(_S.CREATED),
    (_S.CREATED, _E.CLAIMED): Step(_S.STREAMING, (_A.WAKE,)),
    (_S.COMPUTING, _E.FILLED): Step(_S.COMPUTING),
    (_S.COMPUTING, _E.COMPLETED): Step(_S.READY),
    (_S.COMPUTING, _E.RETRACTED): Step(_S.CREATED, (_A.FREE,)),
    (_S.COMPUTING, _E.CLAIMED): Step(_S.STREAMING, (_A.WAKE,)),
    (_S.READY, _E.RETRACTED): Step(_S.CREATED, (_A.FREE,)),
    (_S.READY, _E.CLAIMED): Step(_S.TRANSFERRING, (_A.WAKE,)),
    (_S.STREAMING, _E.FILLED): Step(_S.STREAMING, (_A.WAKE,)),
    (_S.STREAMING, _E.COMPLETED): Step(_S.TRANSFERRING, (_A.WAKE,)),
    (_S.TRANSFERRING, _E.CONFIRMED): Step(_S.CONFIRMED, (_A.FREE,)),
    (_S.CONFIRMED, _E.FREED): Step(_S.RELEASED, (_A.WAKE,)),
    **_endings(
        (_S.CREATED, _S.COMPUTING, _S.READY, _S.STREAMING, _S.TRANSFERRING),
        _E.TIMED_OUT,
        _E.BROKEN,
        _A.FREE,
        _A.WAKE,
    ),
}
"""The side that computes the blocks. There is no way back from a claim: a claimant has perhaps read
what a retraction would take away."""

_C = ClaimantEvent
CLAIMANT: Table = {
    (_S.CREATED, _C.ASKED): Step(_S.COMPUTING),
    (_S.COMPUTING, _C.MANIFEST): Step(_S.TRANSFERRING),
    (_S.TRANSFERRING, _C.BLOCKS): Step(_S.TRANSFERRING, (_A.STORE,)),
    (_S.TRANSFERRING, _C.RESULT): Step(_S.READY, (_A.CONFIRM,)),
    (_S.READY, _C.ACKNOWLEDGED): Step(_S.CONFIRMED, (_A.COMMIT,)),
    (_S.CONFIRMED, _C.COMMITTED): Step(_S.RELEASED),
    **_endings(
        (_S.CREATED, _S.COMPUTING, _S.TRANSFERRING, _S.READY),
        _C.TIMED_OUT,
        _C.BROKEN,
        _A.DISCARD,
    ),
}
"""The side that fetches them. Nothing that arrived is used before the source has acknowledged."""
