"""Lease state machine: the transitions of a handoff on each side, as two tables. Pure: no clock, no
task, no transport.

A row is (state, event) -> (state, actions). An event without a row is invalid in that state: the
shells (`lease.py` and the transfer client) reject it with a typed error, or ignore it if it is
late. Every path reaches a final state, which releases blocks exactly once."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class LeaseState(Enum):
    """State of a handoff. The last three are final; `RELEASED` directly follows `CONFIRMED`.

    Attributes:
        CREATED: no block is computed, and no claimant has connected.
        COMPUTING: the source fills blocks; on the claimant's side, it has requested them.
        READY: all blocks are filled and unclaimed; on the claimant's side, all have arrived.
        STREAMING: the claimant fetches blocks while the source fills others.
        TRANSFERRING: all blocks are filled, and the claimant fetches the rest.
        CONFIRMED: the claimant has all blocks intact.
        RELEASED: confirmed; the source has freed its blocks, the claimant uses the content.
        EXPIRED: the time limit passed before the confirmation.
        FAILED: source, claimant or connection failed.
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
"""States in which the claimant may no longer read any block."""


class SourceEvent(Enum):
    """Event of a lease at the source, which computes the blocks."""

    FILLED = auto()  # more blocks may be read
    COMPLETED = auto()  # all blocks may be read
    RETRACTED = auto()  # no block may be read, until they are computed again
    CLAIMED = auto()  # the claimant has connected
    CONFIRMED = auto()  # the claimant has all blocks
    FREED = auto()  # the blocks are free again
    TIMED_OUT = auto()
    BROKEN = auto()  # the claimant disconnected, or the computation failed


class ClaimantEvent(Enum):
    """Event of a handoff at the claimant, which fetches the blocks."""

    REQUESTED = auto()
    MANIFEST = auto()  # the source announced the number of blocks
    BLOCKS = auto()
    RESULT = auto()  # the source has sent all blocks
    ACKNOWLEDGED = auto()  # the source still held all blocks when it got the confirmation
    COMMITTED = auto()  # the content belongs to a sequence
    TIMED_OUT = auto()
    BROKEN = auto()


class LeaseAction(Enum):
    """Action that the shell takes on a transition.

    Attributes:
        WAKE: wake the tasks that wait for a change.
        FREE: free the blocks (source).
        STORE: write the received blocks into the allocated ones (claimant).
        CONFIRM: ask the source whether it still held all blocks (claimant).
        COMMIT: let the sequence use the content (claimant).
        DISCARD: close the call and discard all that arrived (claimant).
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
    """Returns the rows by which each of these states expires or fails without a confirmation."""
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
"""Transitions of the source, which computes the blocks. A claim is final: the claimant may have
read blocks that a retraction would free."""

_C = ClaimantEvent
CLAIMANT: Table = {
    (_S.CREATED, _C.REQUESTED): Step(_S.COMPUTING),
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
"""Transitions of the claimant. No received block is used before the source has acknowledged."""
