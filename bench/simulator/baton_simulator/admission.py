"""Admission control in simulated time.

The router's own decisions and forecasts (`baton_router.routing.admission`), on a simulated clock in
place of the event loop."""

from collections.abc import Callable

from baton.errors import BatonError
from baton.fairness.fair_queue import Waiting
from baton_router.routing.admission.admission_queue import (
    POLL_SECONDS,
    AdmissionQueue,
    QueuedRequest,
    expired,
)
from baton_router.routing.admission.forecast import Forecasts
from baton_router.routing.admission.policy import admission_named
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.placement.decision import Decision
from baton_simulator.clock import Clock
from baton_simulator.job import Job
from baton_simulator.setup import Setup

_TENANT = ""  # all jobs are one tenant's


class AdmissionController:
    """All jobs go through it.

    Args:
        decide: where a job would be placed at this moment.
        on_admitted: places an admitted job.
        on_refused: told of a job that has waited in vain.
    """

    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        decide: Callable[[Job], Decision],
        on_admitted: Callable[[Job], None],
        on_refused: Callable[[Job, BatonError], None],
    ) -> None:
        admission = admission_named(setup.admission)
        self._clock = clock
        self._on_admitted = on_admitted
        self._on_refused = on_refused
        self._seconds = float("inf") if setup.ttft_deadline is None else setup.ttft_deadline
        self._forecasts: Forecasts[Job] = Forecasts(
            lambda job, _: decide(job), lambda job: job.demand, admission, lambda: clock.now
        )
        self._queue: AdmissionQueue[Job] = AdmissionQueue(
            Quotas(clock=lambda: clock.now),
            self._forecasts,
            self._refuse,
            clock=lambda: clock.now,
        )
        self._waiting: set[int] = set()
        self._is_polling = False
        self._will_poll = False

    def arrive(self, job: Job) -> None:
        """A job asks to be served. Raises `OverloadedError` if that cannot be in time."""
        waiting = self._queue.join(
            job,
            tenant=_TENANT,
            priority=0,
            num_tokens=job.num_prompt_tokens,
            seconds_left=self._seconds,
        )
        self._waiting.add(job.number)
        self.poll()
        if job.number in self._waiting and self._seconds < float("inf"):
            self._clock.at(self._clock.now + self._seconds, lambda: self._expire(waiting))

    def end(self, job: Job) -> None:
        """An admitted job has ended, or was not taken after all."""
        num_output_tokens = 0 if job.prefilled_at is None else 1 + job.num_gaps
        self._forecasts.end(job, num_output_tokens, job.prefilled_at)
        self._queue.leave(_TENANT, num_output_tokens)
        self.poll()

    def poll(self) -> None:
        """Admits the requests that may go now, one after the other."""
        if self._is_polling:
            return
        self._is_polling = True
        while (result := self._queue.next()) is not None:
            job = result.request
            if result.refusal is not None:
                self._refuse(job, result.refusal)
                continue
            self._waiting.remove(job.number)
            self._forecasts.begin(job, result.forecast)
            self._on_admitted(job)
        self._is_polling = False
        if len(self._queue) and not self._will_poll:
            self._will_poll = True
            self._clock.at(self._clock.now + POLL_SECONDS, self._poll_again)

    def _poll_again(self) -> None:
        self._will_poll = False
        self.poll()

    def _expire(self, waiting: Waiting[QueuedRequest[Job]]) -> None:
        job = waiting.item.request
        if job.number in self._waiting:
            self._queue.remove(waiting)
            self._refuse(job, expired())
            self.poll()

    def _refuse(self, job: Job, error: BatonError) -> None:
        self._waiting.remove(job.number)
        self._on_refused(job, error)
