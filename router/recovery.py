"""What a request does after a setback: what it avoids, how long it waits, when it gives up.

Awaits nothing, and knows nothing of calls or messages.
"""

from dataclasses import dataclass
from enum import Enum, auto

from baton.errors import (
    BatonError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from router.backoff import Backoff
from router.budget import RetryBudget

# Setbacks in a row, without a new token in between, after which an accepted request gives up.
MAX_SETBACKS = 10
# Of two workers of one role that are lost so few tokens apart, the same token may be to blame.
SAME_PLACE_TOKENS = 16
PAUSES = Backoff(first=0.05, longest=2.0)

_WORTH_ANOTHER_WORKER = (OverloadedError, UnavailableError, InternalError)
_WORTH_ANOTHER_TRY = (
    *_WORTH_ANOTHER_WORKER,
    NotFoundError,
    DataLossError,
    FailedPreconditionError,
)

Pair = tuple[str, str]
"""The ids of a prefill and a decode worker."""


class SetbackKind(Enum):
    """What happened to an attempt."""

    REFUSED = auto()
    """A worker did not take the request, and said why."""
    LOST = auto()
    """A worker fell silent, died, or failed within."""
    BROKEN = auto()
    """Two workers that both answer could not go on together."""
    NOBODY = auto()
    """No two workers could be asked."""


class Setback(Exception):  # noqa: N818 - what it becomes, another try or an error, is open yet
    """An attempt that came to nothing.

    Attributes:
        worker: who refused or was lost; empty where that is nobody.
        pair: the two that were asked.
        place: how many tokens the attempt had come to when a worker was lost that was computing it;
            None: it was not, or nobody knows.
    """

    def __init__(
        self, kind: SetbackKind, error: BatonError, worker: str = "", pair: Pair = ("", "")
    ) -> None:
        super().__init__(str(error))
        self.kind = kind
        self.error = error
        self.worker = worker
        self.pair = pair
        self.place: int | None = None


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker that was lost while it computed the request, and the place it had come to."""

    worker: str
    place: int


class Recovery:
    """The tries of one request.

    Until it is accepted, whoever refuses is passed over, and when all have refused the client is
    told. From then on it is not given up lightly: workers may come back.

    Attributes:
        refused: workers that are not to be asked now.
        broken: pairs that are not to be asked now.
        is_accepted: the client was told that the request is.
    """

    def __init__(self, request_id: str, budget: RetryBudget, pauses: Backoff = PAUSES) -> None:
        self.refused: set[str] = set()
        self.broken: set[Pair] = set()
        self.is_accepted = False
        self._request_id = request_id
        self._budget = budget
        self._pauses = pauses
        self._refusal: BatonError | None = None
        self._losses: dict[bool, _Loss] = {}  # the last one of each role
        self._num_setbacks = 0
        self._num_tokens = 0

    def after(self, setback: Setback, num_tokens: int) -> float:
        """Seconds to wait before the next try, `num_tokens` into the output. Raises what ends the
        request."""
        if setback.place is not None:
            self._check_not_poison(setback, _Loss(setback.worker, setback.place))
        pause = self._pause(setback, num_tokens) if self.is_accepted else self._pass_on(setback)
        if setback.kind is not SetbackKind.NOBODY and not self._budget.withdraw():
            raise self._over_budget(setback)
        self._avoid(setback)
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

    def _avoid(self, setback: Setback) -> None:
        match setback.kind:
            case SetbackKind.NOBODY:
                self.refused.clear()
                self.broken.clear()
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
