"""Failure of one attempt at a request, and its kind."""

from enum import Enum, auto
from typing import Final

from baton.errors import BatonError

Pair = tuple[str, str]
"""Ids of a prefill and a decode worker."""


class FailureKind(Enum):
    """Kind of a failed attempt."""

    REFUSED = auto()
    """A worker refused the request, with a reason."""
    LOST = auto()
    """A worker died, or had an internal error."""
    SILENT = auto()
    """A worker fell silent, or the network to it is cut. It may be healthy, but is unreachable."""
    BROKEN = auto()
    """Two workers that both respond could not continue the request together."""
    NO_WORKER = auto()
    """No workers were available for the attempt."""
    PREEMPTED = auto()
    """A decode worker preempted the request and gave it back. No fault of the worker."""
    TOO_SMALL = auto()
    """A worker refused the request by a limit of its own. A larger one may serve it."""
    VIOLATION = auto()
    """A worker sent what no worker may send for the request."""


class AttemptFailure(Exception):  # noqa: N818 - it may become a retry, not an error
    """Failure of one attempt at a request.

    Attributes:
        worker: the worker that refused or was lost; empty if there is none.
        pair: the two workers that were called.
    """

    def __init__(
        self, kind: FailureKind, error: BatonError, worker: str = "", pair: Pair = ("", "")
    ) -> None:
        super().__init__(str(error))
        self.kind: Final = kind
        self.error: Final = error
        self.worker: Final = worker
        self.pair: Final = pair

    def of_pair(self, prefill: str, decode: str) -> "AttemptFailure":
        """Returns the failure as that of an attempt on these two workers."""
        return AttemptFailure(self.kind, self.error, self.worker, (prefill, decode))
