"""Failure of one attempt at a request, and its kind."""

from enum import Enum, auto

from baton.errors import BatonError

Pair = tuple[str, str]
"""The ids of a prefill and a decode worker."""


class FailureKind(Enum):
    """Kind of a failed attempt."""

    REFUSED = auto()
    """A worker did not take the request, and said why."""
    LOST = auto()
    """A worker died, or failed within."""
    SILENT = auto()
    """A worker fell silent, or the way to it is cut. It may be well, and is missed all the same."""
    BROKEN = auto()
    """Two workers that both answer could not go on together."""
    NOBODY = auto()
    """No two workers could be asked."""
    PREEMPTED = auto()
    """A decode worker gave the request back to make room for others. No failure of anybody."""


class AttemptFailure(Exception):  # noqa: N818 - what it becomes, another try or an error, is open yet
    """An attempt that came to nothing.

    Attributes:
        worker: who refused or was lost; empty where that is nobody.
        pair: the two that were asked.
        place: how many tokens the attempt had come to when a worker died that was computing it;
            None: it was not, or nobody knows.
    """

    def __init__(
        self, kind: FailureKind, error: BatonError, worker: str = "", pair: Pair = ("", "")
    ) -> None:
        super().__init__(str(error))
        self.kind = kind
        self.error = error
        self.worker = worker
        self.pair = pair
        self.place: int | None = None
