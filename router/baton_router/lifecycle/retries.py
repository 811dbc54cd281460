"""Retries of one request: placement of each attempt, backoff after a failure, abortion."""

import asyncio
import logging

from baton.errors import CancelledError, DeadlineExceededError
from baton.rpc.cancellation import run_until
from baton.serving.deadline import Deadline
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.request import Request, Work
from baton_router.lifecycle.recovery import Recovery
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.exclusions import Exclusions
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.placer import Placer

logger = logging.getLogger(__name__)


class Retries:
    """Retries of one request.

    Attributes:
        recovery: what earlier attempts have left.
        decision: by which the request was admitted, and which the first attempt uses if nothing has
            changed since; None: it was not placed yet.
        content: hash of the weights of the last attempt, or that the client's output is of; empty:
            unknown.
    """

    def __init__(
        self, request: Request, placer: Placer, recovery: Recovery, deadline: Deadline
    ) -> None:
        self.recovery = recovery
        self.decision: Decision | None = None
        self.content = request.content
        self._request = request
        self._placer = placer
        self._deadline = deadline
        self._aborted = asyncio.Event()

    def abort(self) -> None:
        """Aborts the request, also while it waits."""
        self._aborted.set()

    def raise_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise CancelledError(f"request {self._request.request_id} was aborted")

    def place(self, work: Work) -> Placement:
        """Places the work that is left. Raises `AttemptFailure` if no workers can take it."""
        decision = self._placer.place(work, self._exclusions(work), self.decision)
        if decision.placement is None:
            raise AttemptFailure(FailureKind.NO_WORKER, decision.refusal)
        if not (self.content and work.has_begun):
            self.content = self._placer.content_of(decision.placement)
        return decision.placement

    def successor(self, work: Work, worker: str) -> str | None:
        """Returns the decode worker that should resume the work of `worker`, which drains; None:
        there is none."""
        exclusions = self._exclusions(work).without_preemption
        return self._placer.successor(work, worker, exclusions)

    def _exclusions(self, work: Work) -> Exclusions:
        """Returns the workers to avoid now, those with other weights than its output is of among
        them; any may take work that has not begun."""
        recovery = self.recovery
        return Exclusions(
            recovery.refused,
            recovery.broken,
            recovery.too_small,
            recovery.preempted_by,
            self.content if work.has_begun else b"",
        )

    async def _wait_for_workers(self, why: str, *, needs_prefill: bool) -> None:
        """Waits until a request could be placed. Raises `CancelledError` if it is aborted, and
        `DeadlineExceededError` at its deadline, with the reason `why` none could."""
        logger.info("waiting for workers: %s", why)
        try:
            async with asyncio.timeout(self._deadline.remaining()):
                possible = self._placer.until_possible(needs_prefill)
                await run_until(possible, self._aborted.wait())
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request's deadline has passed while it waited for workers: {why}"
            ) from None
        self.raise_if_aborted()

    async def wait(
        self, failure: AttemptFailure, num_tokens: int, lost_at: int | None = None
    ) -> None:
        """Waits until the next attempt is due; arguments as of `Recovery.after`. Raises the error
        that ends the request."""
        self.raise_if_aborted()
        self._deadline.check()
        if failure.kind is FailureKind.NO_WORKER and self.recovery.is_accepted:
            needs_prefill = self._request.params.prompt_logprobs is not None
            if why := self._placer.why_none(needs_prefill):
                self.recovery.found_none(failure)
                await self._wait_for_workers(why, needs_prefill=needs_prefill)
                return
        pause = self.recovery.after(failure, num_tokens, lost_at)
        if self.recovery.is_accepted:
            logger.info("resuming elsewhere: %s", failure)
        try:
            async with asyncio.timeout(min(pause, self._deadline.remaining())):
                await self._aborted.wait()
        except TimeoutError:
            self._deadline.check()
        self.raise_if_aborted()
