"""Recovery policy of one request: which workers it avoids after a failure, how long it backs off,
when it gives up.

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
from baton_router.failure import AttemptFailure, FailureKind, Pair
from baton_router.fleet.backoff import Backoff
from baton_router.lifecycle.retry_budget import RetryBudget

# Setbacks in a row, without a new token in between, after which an accepted request gives up.
MAX_FAILURES = 10
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
        self.failures: list[FailureKind] = []
        self._request_id = request_id
        self._budget = budget
        self._pauses = pauses
        self._refusal: BatonError | None = None
        self._losses: dict[bool, _Loss] = {}  # the last one of each role
        self._num_failures = 0
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

    def after(self, failure: AttemptFailure, num_tokens: int) -> float:
        """Seconds to wait before the next try, `num_tokens` into the output. Raises what ends the
        request."""
        self.failures.append(failure.kind)
        pause = self._wait_for_room(failure, num_tokens)
        if pause is None:
            pause = self._try_again(failure, num_tokens)
        self._avoid(failure)
        return pause

    def _try_again(self, failure: AttemptFailure, num_tokens: int) -> float:
        """Something has failed, or nobody took it: seconds to wait."""
        if failure.place is not None:
            self._check_not_poison(failure, _Loss(failure.worker, failure.place))
        pause = self._pause(failure, num_tokens) if self.is_accepted else self._pass_on(failure)
        if failure.kind is not FailureKind.NOBODY and not self._budget.withdraw():
            raise self._over_budget(failure)
        return pause

    def _pass_on(self, failure: AttemptFailure) -> float:
        """Not yet accepted: the next worker is asked at once."""
        if failure.kind is FailureKind.NOBODY:
            raise self._refusal or failure.error
        if not isinstance(failure.error, _WORTH_ANOTHER_WORKER):
            raise failure.error
        self._refusal = failure.error
        return 0.0

    def _pause(self, failure: AttemptFailure, num_tokens: int) -> float:
        """The first try after some progress is made at once."""
        if not isinstance(failure.error, _WORTH_ANOTHER_TRY):
            raise failure.error
        if num_tokens > self._num_tokens:
            self._num_failures = 0
        self._num_tokens = num_tokens
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise _as_seen_by_client(failure.error)
        return self._pauses.delay(self._num_failures - 1) if self._num_failures > 1 else 0.0

    def _wait_for_room(self, failure: AttemptFailure, num_tokens: int) -> float | None:
        """Seconds to wait, where a request was given back and finds no room since; else None."""
        if failure.kind is FailureKind.PREEMPTED:
            self._returns.append(num_tokens)
            self._num_waits, self._waits_for_room = 0, True
            return 0.0
        match failure.kind:
            case FailureKind.REFUSED:
                finds_none = isinstance(failure.error, OverloadedError)
            case FailureKind.NOBODY:
                finds_none = bool(self.refused)  # those who had none, and are asked again
            case _:
                finds_none = False
        if not (self._waits_for_room and finds_none and num_tokens == self._returns[-1]):
            self._waits_for_room = False
            return None
        self._num_waits += 1
        return self._pauses.delay(self._num_waits)

    def _avoid(self, failure: AttemptFailure) -> None:
        self.crowded = ""
        match failure.kind:
            case FailureKind.NOBODY:
                self.refused.clear()
                self.broken.clear()
            case FailureKind.PREEMPTED:
                # It ran meanwhile; who refused it before may have room now.
                self.refused.clear()
                self.broken.clear()
                self.crowded = failure.worker
            case FailureKind.BROKEN:
                self.broken.add(failure.pair)
            case _:
                self.refused.add(failure.worker)

    def _check_not_poison(self, failure: AttemptFailure, loss: _Loss) -> None:
        """A request that comes well past the place where a worker was lost was not to blame; one
        that is to blame ends workers of one role at one place."""
        is_prefill = failure.worker == failure.pair[0]
        last = self._losses.get(is_prefill)
        self._losses[is_prefill] = loss
        if last is not None and abs(loss.place - last.place) < SAME_PLACE_TOKENS:
            raise InternalError(
                f"request {self._request_id} is poison: {last.worker} and {loss.worker} were lost "
                "while they computed it, and it is given to no third worker "
                f"({failure.error})"
            )

    def _over_budget(self, failure: AttemptFailure) -> BatonError:
        if not self.is_accepted:
            return failure.error
        return UnavailableError(
            f"too many requests are tried again at this router, so this one is not: {failure.error}"
        )


def _as_seen_by_client(error: BatonError) -> BatonError:
    """A handoff that failed is no fault of the client's: another try may go well."""
    if isinstance(error, NotFoundError | DataLossError | FailedPreconditionError):
        return UnavailableError(f"the handoff failed: {error}")
    return error
