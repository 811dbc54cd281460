"""What a request does after a setback: what it avoids, how long it waits, when it gives up.

Awaits nothing, and knows nothing of calls or messages.
"""

from dataclasses import dataclass

from baton.errors import (
    BatonError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from router.failure import Pair, Setback, SetbackKind
from router.fleet.backoff import Backoff
from router.lifecycle.retry_budget import RetryBudget

# Setbacks in a row, without a new token in between, after which an accepted request gives up.
MAX_SETBACKS = 10
# How often decode workers that have no room any more may give a request back. One that comes to it
# again and again is among too many everywhere, and waits for its turn where it is.
MAX_RETURNS = 4
# Of two workers of one role that die so few tokens apart, the same token may be to blame: a few may
# have been on their way. With more than a few, bystanders would be blamed.
SAME_PLACE_TOKENS = 8
PAUSES = Backoff(first=0.05, longest=2.0)

_WORTH_ANOTHER_WORKER = (OverloadedError, UnavailableError, InternalError)
_WORTH_ANOTHER_TRY = (
    *_WORTH_ANOTHER_WORKER,
    NotFoundError,
    DataLossError,
    FailedPreconditionError,
)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker that was lost while it computed the request, and the place it had come to."""

    worker: str
    place: int


class Recovery:
    """The tries of one request.

    Until it is accepted, whoever refuses is passed over, and when all have refused the client is
    told. From then on it is not given up lightly: workers may come back. One that was given back is
    given up for want of room by its deadline alone: it had some, and others have it now.

    Attributes:
        refused: workers that are not to be asked now.
        broken: pairs that are not to be asked now.
        crowded: the worker that has just given the request back, to be asked if no other one can
            be; empty for none.
        is_accepted: the client was told that the request is.
        setbacks: all that have come.
    """

    def __init__(self, request_id: str, budget: RetryBudget, pauses: Backoff = PAUSES) -> None:
        self.refused: set[str] = set()
        self.broken: set[Pair] = set()
        self.crowded = ""
        self.is_accepted = False
        self.setbacks: list[SetbackKind] = []
        self._request_id = request_id
        self._budget = budget
        self._pauses = pauses
        self._refusal: BatonError | None = None
        self._losses: dict[bool, _Loss] = {}  # the last one of each role
        self._num_setbacks = 0
        self._num_tokens = 0
        self._returns: list[int] = []  # with how many tokens it was given back
        self._num_waits = 0  # for room, since then
        self._waits_for_room = False

    @property
    def may_return(self) -> bool:
        """Whether a decode worker may give the request back (once more). One that has come no
        further between two times may not: it would never come to its end."""
        came_further = len(self._returns) < 2 or self._returns[-1] > self._returns[-2]
        return came_further and len(self._returns) < MAX_RETURNS

    def after(self, setback: Setback, num_tokens: int) -> float:
        """Seconds to wait before the next try, `num_tokens` into the output. Raises what ends the
        request."""
        self.setbacks.append(setback.kind)
        pause = self._wait_for_room(setback, num_tokens)
        if pause is None:
            pause = self._try_again(setback, num_tokens)
        self._avoid(setback)
        return pause

    def _try_again(self, setback: Setback, num_tokens: int) -> float:
        """Something has failed, or nobody took it: seconds to wait."""
        if setback.place is not None:
            self._check_not_poison(setback, _Loss(setback.worker, setback.place))
        pause = self._pause(setback, num_tokens) if self.is_accepted else self._pass_on(setback)
        if setback.kind is not SetbackKind.NOBODY and not self._budget.withdraw():
            raise self._over_budget(setback)
        return pause

    def _pass_on(self, setback: Setback) -> float:
        """Not yet accepted: the next worker is asked at once."""
        if setback.kind is SetbackKind.NOBODY:
            raise self._refusal or setback.error
        if not isinstance(setback.error, _WORTH_ANOTHER_WORKER):
            raise setback.error
        self._refusal = setback.error
        return 0.0

    def _pause(self, setback: Setback, num_tokens: int) -> float:
        """The first try after some progress is made at once."""
        if not isinstance(setback.error, _WORTH_ANOTHER_TRY):
            raise setback.error
        if num_tokens > self._num_tokens:
            self._num_setbacks = 0
        self._num_tokens = num_tokens
        self._num_setbacks += 1
        if self._num_setbacks > MAX_SETBACKS:
            raise _as_seen_by_client(setback.error)
        return self._pauses.delay(self._num_setbacks - 1) if self._num_setbacks > 1 else 0.0

    def _wait_for_room(self, setback: Setback, num_tokens: int) -> float | None:
        """Seconds to wait, where a request was given back and finds no room since; else None."""
        if setback.kind is SetbackKind.PREEMPTED:
            self._returns.append(num_tokens)
            self._num_waits, self._waits_for_room = 0, True
            return 0.0
        match setback.kind:
            case SetbackKind.REFUSED:
                finds_none = isinstance(setback.error, OverloadedError)
            case SetbackKind.NOBODY:
                finds_none = bool(self.refused)  # those who had none, and are asked again
            case _:
                finds_none = False
        if not (self._waits_for_room and finds_none and num_tokens == self._returns[-1]):
            self._waits_for_room = False
            return None
        self._num_waits += 1
        return self._pauses.delay(self._num_waits)

    def _avoid(self, setback: Setback) -> None:
        self.crowded = ""
        match setback.kind:
            case SetbackKind.NOBODY:
                self.refused.clear()
                self.broken.clear()
            case SetbackKind.PREEMPTED:
                # It ran meanwhile; who refused it before may have room now.
                self.refused.clear()
                self.broken.clear()
                self.crowded = setback.worker
            case SetbackKind.BROKEN:
                self.broken.add(setback.pair)
            case _:
                self.refused.add(setback.worker)

    def _check_not_poison(self, setback: Setback, loss: _Loss) -> None:
        """A request that comes well past the place where a worker was lost was not to blame; one
        that is to blame ends workers of one role at one place."""
        is_prefill = setback.worker == setback.pair[0]
        last = self._losses.get(is_prefill)
        self._losses[is_prefill] = loss
        if last is not None and abs(loss.place - last.place) < SAME_PLACE_TOKENS:
            raise InternalError(
                f"request {self._request_id} is poison: {last.worker} and {loss.worker} were lost "
                "while they computed it, and it is given to no third worker "
                f"({setback.error})"
            )

    def _over_budget(self, setback: Setback) -> BatonError:
        if not self.is_accepted:
            return setback.error
        return UnavailableError(
            f"too many requests are tried again at this router, so this one is not: {setback.error}"
        )


def _as_seen_by_client(error: BatonError) -> BatonError:
    """A handoff that failed is no fault of the client's: another try may go well."""
    if isinstance(error, NotFoundError | DataLossError | FailedPreconditionError):
        return UnavailableError(f"the handoff failed: {error}")
    return error
