"""Grammar masks computed beside the steps of an engine, in threads that tenants take turns at."""

import concurrent.futures
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from baton.fairness.fair_threads import FairThreads, Task

Mask = npt.NDArray[np.int32]

_NUM_THREADS: Final = 2
# The steps of other sequences go first.
_NICENESS: Final = 10


class State(Protocol):
    """Position of a sequence in its grammar. Used by one thread at a time.

    Attributes:
        mask_s: CPU seconds of its last masks.
    """

    mask_s: float

    @property
    def failure(self) -> str | None: ...

    @property
    def is_finished(self) -> bool: ...

    def accept(self, token_id: int) -> bool: ...

    def fill_masks(self, drafts: list[int], rows: Mask) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class MaskJob:
    """Computation of the masks of one sequence after its first `length` tokens, and after each of
    its drafts.

    Attributes:
        state: belongs to the job until it is done.
        behind: last of these tokens, which the state has yet to accept.
        masks: `[len(drafts) + 1, num_words]`.
        done: the number of masks that are filled.
    """

    state: State
    behind: list[int]
    length: int
    drafts: list[int]
    masks: Mask
    done: Future[int] = field(default_factory=Future)

    def run(self) -> None:
        try:
            for token_id in self.behind:
                self.state.accept(token_id)
            self.done.set_result(self.state.fill_masks(self.drafts, self.masks))
        except Exception as error:
            self.done.set_exception(error)


class MaskThreads:
    """Threads of mask jobs, started with the first. A tenant has all but one."""

    def __init__(self, max_waiting: int) -> None:
        self._threads = FairThreads(_NUM_THREADS, max_waiting, "grammar-masks", niceness=_NICENESS)

    def submit(self, job: MaskJob, tenant: str) -> None:
        """Queues a job. If too many wait, the newest of the tenant with most is done at once."""
        self._threads.submit(Task(tenant, job.run, job.run))


def wait_for_any(jobs: Iterable[MaskJob]) -> None:
    """Returns once one of these is done."""
    concurrent.futures.wait(
        [job.done for job in jobs], return_when=concurrent.futures.FIRST_COMPLETED
    )
