"""State machine of one attempt at a request, as a table. Pure: no clock, no task, no call.

A row is (state, event) -> (state, actions). An attempt has up to two calls: to the decode worker,
and to the source whose blocks it fetches, which is the prefill worker or, after a live migration,
the former decode worker. An event without a row has no effect. The shell
(`baton_router.lifecycle.attempts.attempt`) delivers every message before the end, with a row or
without.

Invariants:
- Every load that was started is ended: that of the prompt, with its encoder leases, once it is
  computed, that of a decode worker once the request leaves it, both when the attempt completes,
  fails or is closed.
- At most one failure is delivered, and nothing after it. It ends all calls, as closing does.
- The failure of a source is one of the attempt while the source owes something: blocks, or the
  prompt's log-probabilities, which come before its result.
- A decode worker that finds the lease over does not know why: the prompt ended with its first
  token, or the source failed. The source knows, so its events come before this failure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto


class AttemptState(Enum):
    """State of an attempt.

    Attributes:
        CALLING: workers are called and have not all admitted the request.
        COMPUTING: the decode worker, called alone, computes the prompt.
        SCORING: the source owes log-probabilities and blocks.
        UNSCORED: the source owes log-probabilities; the decode worker has the blocks.
        HANDOFF: the source owes blocks.
        HANDED_OVER: the source owes nothing; its call is still open.
        DECODING: only the call to the decode worker is open.
        AWAITING_SOURCE: the call to the decode worker has ended; the source may know the reason.
        COMPLETE: the answer is complete; calls may still be open.
        ENDED: failed or closed; no call is open.
    """

    CALLING = auto()
    COMPUTING = auto()
    SCORING = auto()
    UNSCORED = auto()
    HANDOFF = auto()
    HANDED_OVER = auto()
    DECODING = auto()
    AWAITING_SOURCE = auto()
    COMPLETE = auto()
    ENDED = auto()


class SourceEvent(Enum):
    """Event of the call to the source: kind of a message, or of the call's end."""

    STARTED = "started"
    RESULT = "result"
    FAILED = "failed"
    ENDED = "ended"  # with status OK, or cancelled by the router


class DecodeEvent(Enum):
    """Event of the call to the decode worker: kind of a message, or of the call's end."""

    KV_READY = "kv_ready"
    TOKENS = "tokens"
    FINISHED = "finished"
    LEASE_ENDED = "lease_ended"  # failed, because the source's lease is over
    FAILED = "failed"
    ENDED = "ended"


class RouterEvent(Enum):
    """Event of the router."""

    ADMITTED = auto()  # by both workers
    ADMITTED_TO_SCORE = auto()  # by both; the prompt's log-probabilities are requested
    ADMITTED_ALONE = auto()  # by the only worker
    MIGRATED = auto()  # the decode worker has suspended the request for another one
    COMPLETED = auto()
    CLOSED = auto()


class AttemptAction(Enum):
    """Action of the shell. Ending what has ended, or has never begun, has no effect.

    Attributes:
        END_PREFIX_LEASE, END_ENCODER_LEASES, END_PREFILL_LOAD, END_DECODE_LOAD: end what the name
            says.
        NOTE_HELD: record that the worker which sent the message holds the prompt's blocks.
        CANCEL_SOURCE, CANCEL_CALLS: cancel the call to the source; all calls.
        LIMIT_SOURCE: cancel the call to the source after a while.
        HOLD: hold back the failure that ended the call.
        FAIL, FAIL_AS_HELD: deliver it; deliver the one that was held back.
    """

    END_PREFIX_LEASE = auto()
    END_ENCODER_LEASES = auto()
    END_PREFILL_LOAD = auto()
    END_DECODE_LOAD = auto()
    NOTE_HELD = auto()
    CANCEL_SOURCE = auto()
    CANCEL_CALLS = auto()
    LIMIT_SOURCE = auto()
    HOLD = auto()
    FAIL = auto()
    FAIL_AS_HELD = auto()


AttemptEvent = SourceEvent | DecodeEvent | RouterEvent


@dataclass(frozen=True, slots=True)
class Step:
    """Result of an event: the next state, and actions in order."""

    state: AttemptState
    actions: tuple[AttemptAction, ...] = ()


Table = Mapping[tuple[AttemptState, AttemptEvent], Step]

_S, _A = AttemptState, AttemptAction
_E, _D, _R = SourceEvent, DecodeEvent, RouterEvent

ALONE = (_S.COMPUTING, _S.DECODING)
"""States in which the call to the decode worker is the only one."""
_OWED = (_S.SCORING, _S.UNSCORED, _S.HANDOFF)
_BOTH = (*_OWED, _S.HANDED_OVER)
_OPEN = (_S.CALLING, *ALONE, *_BOTH, _S.AWAITING_SOURCE)

END_ACTIONS = (
    _A.END_PREFIX_LEASE,
    _A.END_ENCODER_LEASES,
    _A.END_PREFILL_LOAD,
    _A.END_DECODE_LOAD,
)
"""Actions that end something."""
_COMPUTED = (_A.END_ENCODER_LEASES, _A.END_PREFILL_LOAD, _A.NOTE_HELD)
_CLOSE = (*END_ACTIONS, _A.CANCEL_CALLS)


def _rows(
    states: Iterable[AttemptState],
    events: Iterable[AttemptEvent],
    state: AttemptState | None,
    *actions: AttemptAction,
) -> Table:
    """Returns a row for each of these states and events; with `state` None, the state stays."""
    return {(at, event): Step(state or at, actions) for at in states for event in events}


TABLE: Table = {
    (_S.CALLING, _R.ADMITTED): Step(_S.HANDOFF),
    (_S.CALLING, _R.ADMITTED_TO_SCORE): Step(_S.SCORING),
    (_S.CALLING, _R.ADMITTED_ALONE): Step(_S.COMPUTING),
    # The prompt is computed, by the source or by the decode worker.
    **_rows((*_BOTH, _S.AWAITING_SOURCE), (_E.STARTED,), None, _A.END_PREFIX_LEASE),
    (_S.SCORING, _E.RESULT): Step(_S.HANDOFF, _COMPUTED),
    (_S.UNSCORED, _E.RESULT): Step(_S.HANDED_OVER, _COMPUTED),
    **_rows((_S.HANDOFF, _S.HANDED_OVER, _S.AWAITING_SOURCE), (_E.RESULT,), None, *_COMPUTED),
    **_rows((_S.COMPUTING,), (_D.TOKENS, _D.FINISHED), _S.DECODING, *_COMPUTED),
    # Its blocks are handed over, and those of a running sequence from one decode worker to another.
    (_S.SCORING, _D.KV_READY): Step(_S.UNSCORED, (_A.NOTE_HELD,)),
    (_S.HANDOFF, _D.KV_READY): Step(_S.HANDED_OVER, (_A.NOTE_HELD,)),
    (_S.DECODING, _D.KV_READY): Step(_S.DECODING, (_A.NOTE_HELD,)),
    **_rows((*_BOTH, *ALONE), (_R.MIGRATED,), _S.CALLING, _A.CANCEL_SOURCE, *END_ACTIONS),
    # A call ends before the answer.
    **_rows((_S.CALLING, *_OWED, _S.AWAITING_SOURCE), (_E.FAILED,), _S.ENDED, _A.FAIL, *_CLOSE),
    (_S.HANDED_OVER, _E.FAILED): Step(_S.DECODING),
    **_rows(_BOTH, (_E.ENDED,), _S.DECODING),
    (_S.CALLING, _E.ENDED): Step(_S.ENDED, (_A.FAIL, *_CLOSE)),
    (_S.AWAITING_SOURCE, _E.ENDED): Step(_S.ENDED, (_A.FAIL_AS_HELD, *_CLOSE)),
    **_rows((_S.CALLING, *ALONE), (_D.LEASE_ENDED, _D.ENDED), _S.ENDED, _A.FAIL, *_CLOSE),
    **_rows(_OPEN, (_D.FAILED,), _S.ENDED, _A.FAIL, *_CLOSE),
    **_rows(_BOTH, (_D.LEASE_ENDED,), _S.AWAITING_SOURCE, _A.HOLD, _A.LIMIT_SOURCE),
    **_rows(_BOTH, (_D.ENDED,), _S.AWAITING_SOURCE, _A.HOLD),
    # The answer is complete, or no longer wanted.
    **_rows(_OPEN, (_R.COMPLETED,), _S.COMPLETE, *END_ACTIONS),
    **_rows((*_OPEN, _S.COMPLETE), (_R.CLOSED,), _S.ENDED, *_CLOSE),
}
"""Transitions of an attempt. After the handoff, `tokens` have no row."""
