"""Recovery policy of one request: workers to avoid after a failure, backoff, giving up.

Awaits nothing; knows nothing of calls or messages.
"""

from dataclasses import dataclass

from baton.errors import (
    BatonError,
    DataLossError,
    EngineLimitError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc.backoff import Backoff
from baton_router.call.failure import AttemptFailure, FailureKind, Pair
from baton_router.lifecycle.retry_budget import RetryBudget

# Consecutive failures without a new token after which an accepted request is given up.
MAX_FAILURES = 10
# Times that decode workers may give a request back. If it happens again and again, all of them are
# full, and the request waits where it is.
MAX_RETURNS = 4
# If two workers of one role die within so many tokens, the same token may be the cause: a few may
# have been in flight. A larger bound would blame innocent requests.
SAME_PLACE_TOKENS = 8
PAUSES = Backoff(first=0.05, longest=2.0)

_WORTH_ANOTHER_WORKER = (OverloadedError, UnavailableError, InternalError)
_WORTH_ANOTHER_TRY = (
    *_WORTH_ANOTHER_WORKER,
    NotFoundError,
    DataLossError,
    FailedPreconditionError,
    EngineLimitError,  # of all workers that are left; a larger one took it, and may come back
)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Worker that was lost while it computed the request, and the output position then."""

    worker: str
    place: int


class Recovery:
    """Recovery state of one request.

    Until it is accepted, a worker that refuses is passed over, and the client gets the error when
    all have refused. After that it is retried: workers may come back. A preempted request that
    finds no capacity is given up by its deadline alone: it had capacity, which others have now. So
    is one that finds no worker which could take any request (`found_none`).

    Attributes:
        refused: workers to avoid now.
        too_small: workers to avoid now, since they are too small.
        broken: pairs to avoid now.
        preempted_by: the worker that has just preempted the request and given it back, used if no
            other can be; empty for none.
        is_accepted: the client was told that the request is accepted.
        failures: kinds of all failures, in order.
    """

    def __init__(self, request_id: str, budget: RetryBudget, pauses: Backoff = PAUSES) -> None:
        self.refused: set[str] = set()
        self.too_small: set[str] = set()
        self.broken: set[Pair] = set()
        self.preempted_by = ""
        self.is_accepted = False
        self.failures: list[FailureKind] = []
        self._request_id = request_id
        self._budget = budget
        self._pauses = pauses
        self._refusal: BatonError | None = None
        self._limit: BatonError | None = None  # of the last worker that was too small
        self._losses: dict[bool, _Loss] = {}  # the last one of each role
        self._num_failures = 0
        self._num_tokens = 0
        self._returns: list[int] = []  # output tokens at each return
        self._num_waits = 0  # backoffs for capacity since the last return
        self._waits_for_capacity = False

    @property
    def may_return(self) -> bool:
        """True if a decode worker may give the request back (again). False after two returns
        without progress in between: such a request would never end."""
        came_further = len(self._returns) < 2 or self._returns[-1] > self._returns[-2]
        return came_further and len(self._returns) < MAX_RETURNS

    def after(self, failure: AttemptFailure, num_tokens: int, lost_at: int | None = None) -> float:
        """Returns the backoff in seconds before the next attempt, `num_tokens` into the output.
        Raises the error that ends the request.

        Args:
            lost_at: output tokens that the attempt had reached when the worker died that was
                computing it; None if none was, or the number is unknown.
        """
        self.failures.append(failure.kind)
        if failure.kind is FailureKind.TOO_SMALL:  # its worker is not called again for the request
            self._limit = failure.error
            self._avoid(failure)
            return 0.0
        pause = self._pause_for_capacity(failure, num_tokens)
        if pause is None:
            if lost_at is not None:
                self._check_not_poison(failure, _Loss(failure.worker, lost_at))
            pause = self._retry(failure, num_tokens)
        self._avoid(failure)
        return pause

    def found_none(self, failure: AttemptFailure) -> None:
        """Records that no worker could take any request, which is given up by its deadline alone:
        the fault is none of the request's."""
        self.failures.append(failure.kind)
        self._avoid(failure)

    def _retry(self, failure: AttemptFailure, num_tokens: int) -> float:
        """Returns the backoff in seconds after a failure, or where no worker took the request."""
        pause = self._pause(failure, num_tokens) if self.is_accepted else self._fail_over(failure)
        if failure.kind is not FailureKind.NO_WORKER and not self._budget.withdraw():
            raise self._over_budget(failure)
        return pause

    def _fail_over(self, failure: AttemptFailure) -> float:
        """Returns 0: the next worker is called at once. Raises the refusal if that cannot help."""
        if failure.kind is FailureKind.NO_WORKER:
            limit = self._limit if isinstance(failure.error, EngineLimitError) else None
            raise self._refusal or limit or failure.error
        if not isinstance(failure.error, _WORTH_ANOTHER_WORKER):
            raise failure.error
        self._refusal = failure.error
        return 0.0

    def _pause(self, failure: AttemptFailure, num_tokens: int) -> float:
        """Returns the backoff in seconds; 0 for the first retry after progress."""
        if not isinstance(failure.error, _WORTH_ANOTHER_TRY):
            raise failure.error
        if num_tokens > self._num_tokens:
            self._num_failures = 0
        self._num_tokens = num_tokens
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise _as_seen_by_client(failure.error)
        return self._pauses.delay(self._num_failures - 1) if self._num_failures > 1 else 0.0

    def _pause_for_capacity(self, failure: AttemptFailure, num_tokens: int) -> float | None:
        """Returns the backoff in seconds if a preempted request finds no capacity; else None."""
        if failure.kind is FailureKind.PREEMPTED:
            self._returns.append(num_tokens)
            self._num_waits, self._waits_for_capacity = 0, True
            return 0.0
        match failure.kind:
            case FailureKind.REFUSED:
                finds_none = isinstance(failure.error, OverloadedError)
            case FailureKind.NO_WORKER:
                finds_none = bool(self.refused)  # they had no capacity, and are called again
            case _:
                finds_none = False
        if not (self._waits_for_capacity and finds_none and num_tokens == self._returns[-1]):
            self._waits_for_capacity = False
            return None
        self._num_waits += 1
        return self._pauses.delay(self._num_waits)

    def _avoid(self, failure: AttemptFailure) -> None:
        self.preempted_by = ""
        match failure.kind:
            case FailureKind.NO_WORKER:
                self.refused.clear()
                self.too_small.clear()
                self.broken.clear()
            case FailureKind.PREEMPTED:
                # It ran meanwhile; workers that refused it before may have capacity now.
                self.refused.clear()
                self.broken.clear()
                self.preempted_by = failure.worker
            case FailureKind.TOO_SMALL:
                self.too_small.add(failure.worker)
            case FailureKind.BROKEN:
                self.broken.add(failure.pair)
            case _:
                self.refused.add(failure.worker)

    def _check_not_poison(self, failure: AttemptFailure, loss: _Loss) -> None:
        """Raises `InternalError` for a poison request, at which workers of one role die at one
        place. A request that gets well past the place of a loss was not its cause."""
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
    """Maps errors of a failed handoff, and of workers that are left and too small for an accepted
    request, which are no fault of the client, to a retryable one."""
    if isinstance(error, NotFoundError | DataLossError | FailedPreconditionError):
        return UnavailableError(f"the handoff failed: {error}")
    if isinstance(error, EngineLimitError):
        return UnavailableError(f"no worker that is left is large enough: {error}")
    return error
