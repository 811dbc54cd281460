"""Exclusions: workers that one request must not be placed on, for what has become of it so far."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from baton_router.call.failure import Pair
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.fit import as_too_small

REFUSED = "refused the request"
RETURNED = "gave the request back"
OTHER_WEIGHTS = "other weights than the answer began with"


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Workers that a request must not be placed on.

    Attributes:
        refused: workers that have refused or lost it.
        broken: pairs of workers that could not continue it together.
        too_small: workers that have refused it by limits of their own; others may fetch the prefix
            that they have cached.
        preempted_by: worker to be chosen only if no other can be; others may fetch from it. Empty:
            none.
        content: hash of the weights that its output so far is of, as in `WorkerRecord`; workers
            with others are excluded. Empty: any, or unknown.
    """

    refused: Collection[str] = ()
    broken: Collection[Pair] = ()
    too_small: Collection[str] = ()
    preempted_by: str = ""
    content: bytes = b""

    @property
    def without_preemption(self) -> "Exclusions":
        """The same, with the worker that preempted the request."""
        return replace(self, preempted_by="")

    def exclude(
        self, candidates: Iterable[Candidate], content_of: Callable[[str], bytes]
    ) -> list[Candidate]:
        """Returns the candidates, with those excluded that must not even lend a prefix.
        `content_of` returns the hash of a worker's weights."""

        def is_of_others(worker: str) -> bool:
            return bool(self.content) and content_of(worker) not in (self.content, b"")

        return [
            _without(c, REFUSED)
            if c.worker in self.refused
            else _without(c, OTHER_WEIGHTS)
            if is_of_others(c.worker)
            else c
            for c in candidates
        ]

    def exclude_lenders(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns the candidates, with those excluded that may lend a prefix and nothing more."""
        return [
            as_too_small(c)
            if c.worker in self.too_small
            else _without(c, RETURNED)
            if c.worker == self.preempted_by
            else c
            for c in candidates
        ]


NO_EXCLUSIONS = Exclusions()


def _without(candidate: Candidate, reason: str) -> Candidate:
    return candidate._replace(excluded=candidate.excluded or reason)
