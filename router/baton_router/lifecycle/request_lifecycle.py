"""Request lifecycle: attempts in sequence until the answer is complete.

After an attempt failure, the next attempt, on whichever workers are available, resumes after the
tokens that the client has; of several sequences, each after its own. Ranked sequences (beams,
`best_of`) start again: the client gets nothing of them before their end, and the state of the
search (hypotheses and scores) was lost with its engine.
"""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

from baton.errors import BatonError, UnavailableError
from baton.serving.deadline import Deadline
from baton.serving.grpc.coalescer import Coalescer
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.request import Request
from baton_router.call.usage import Account
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.attempts.attempt import SOURCE_TIMEOUT, Attempt
from baton_router.lifecycle.events import Accepted, ClientEvent, coalesced
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.retries import Retries
from baton_router.lifecycle.worker_events import Draining, Received, Suspended
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.placer import Placer
from baton_router.telemetry import request_trace


class RequestLifecycle:
    """Lifecycle of one request. `run` is used once; `abort` may be called meanwhile."""

    def __init__(
        self,
        request: Request,
        fleet: Fleet,
        placer: Placer,
        answer: Answer,
        recovery: Recovery,
        deadline: Deadline,
        coalescer: Coalescer | None = None,
        first_token_due: Deadline | None = None,
        source_timeout: float = SOURCE_TIMEOUT,
    ) -> None:
        """Takes the moment at which the first token is due (None: at any time), and the
        `source_timeout` of attempts."""
        self._source_timeout = source_timeout
        self.request = request
        self._fleet = fleet
        self._answer = answer
        self._recovery = recovery
        self._retries = Retries(request, placer, recovery, deadline)
        self._deadline = deadline
        self._coalescer = coalescer or Coalescer()
        self._first_token_due = first_token_due
        self._attempt: Attempt | None = None

    @property
    def account(self) -> Account:
        """Usage and timings of the request so far."""
        return self._answer.account

    @property
    def placement(self) -> Placement | None:
        """Placement of the present attempt; None while the request waits."""
        return None if self._attempt is None else self._attempt.placement

    def abort(self) -> None:
        """Aborts the request and frees both workers; `run` raises `CancelledError`."""
        self._retries.abort()
        if self._attempt is not None:
            self._attempt.cancel()

    async def run(self, decision: Decision | None = None) -> AsyncGenerator[ClientEvent, None]:
        """Yields the events of the request, from `accepted` to the last `finished`. Raises the
        error that ended it otherwise. `decision` is the placement decision it was admitted by."""
        self._retries.decision = decision
        if self._answer.is_known:
            yield Accepted(self.request, None, self.account)
            for response in self._answer.conclude():
                yield response
        while not self._answer.is_complete:
            try:
                async with self._next_attempt() as attempt:
                    for response in await self._admit(attempt):
                        yield response
                    # Hot path: minimal work per message, no generator of its own.
                    while not self._answer.is_complete:
                        events = await attempt.next_events()
                        responses, error = self._apply_all(attempt, events)
                        for response in responses:
                            yield response
                        if error is not None:
                            raise error
                        for event in events:
                            if isinstance(event, Draining | Suspended):
                                await self._follow_drain(attempt, event)
            except AttemptFailure as failure:
                await self._recover(failure)
                for response in self._answer.conclude() if self._recovery.is_accepted else ():
                    yield response

    async def _admit(self, attempt: Attempt) -> list[ClientEvent]:
        """Waits until all workers have admitted the request; returns the client's events. Raises
        `AttemptFailure`."""
        self._attempt = attempt
        await attempt.admit()
        self._retries.raise_if_aborted()
        self._answer.admitted()
        request_trace.admitted()
        if self._recovery.is_accepted:
            return []
        self._recovery.is_accepted = True
        content = self._retries.content
        accepted = Accepted(self.request, attempt.placement, self.account, content)
        return [accepted, *self._answer.conclude()]

    def _next_attempt(self) -> Attempt:
        """Places the work that is left. Raises `AttemptFailure` if no workers can take it."""
        work = self._answer.work()
        return Attempt(
            work,
            self._fleet,
            self._retries.place(work),
            self._answer.bounds,
            self._deadline,
            self._coalescer,
            may_return=self._recovery.may_return,
            first_token_due=self._first_token_due,
            on_encoded=self._answer.account.encoded,
            source_timeout=self._source_timeout,
        )

    def _apply_all(
        self, attempt: Attempt, events: list[Received]
    ) -> tuple[Iterable[ClientEvent], BatonError | None]:
        """Applies events until the answer is complete or one of them contradicts it; returns the
        client's events up to there, which count as shown, and the error."""
        answer, error = self._answer, None
        responses: list[ClientEvent] = []
        for event in events:
            try:
                responses += answer.on_event(event)
            except BatonError as contradiction:
                error = contradiction
                break
            if answer.is_complete:
                attempt.succeed()  # before the client sees it and sends its next request
                break
        for index in answer.take_surplus():
            attempt.end_sequence(index, answer.finish_reason(index))
        return coalesced(responses) if len(responses) > 1 else responses, error

    async def _follow_drain(self, attempt: Attempt, event: Draining | Suspended) -> None:
        """Migrates the request to another decode worker unless the answer is complete. Raises
        `AttemptFailure`."""
        if self._answer.is_complete:
            return
        if isinstance(event, Draining):
            # Without a successor, the worker may finish the request in time.
            decode = self._retries.successor(self._answer.work(), attempt.decode_worker)
            if decode is not None:
                await attempt.hand_over(decode)
        else:
            await self._move(attempt, event)

    async def _move(self, attempt: Attempt, stopped: Suspended) -> None:
        """Resumes the suspended request on another worker: the KV of `num_tokens` tokens can be
        fetched, and the client has one token more, after which that worker continues."""
        work = self._answer.work()
        if len(work.token_ids) != stopped.num_tokens + 1:
            error = UnavailableError("the request was stopped where its answer has not come to")
            raise AttemptFailure(FailureKind.NO_WORKER, error)
        self._answer.restart()
        await attempt.move(replace(work, output=work.output[:-1]), stopped.lease_id)
        self._retries.raise_if_aborted()
        self._answer.admitted()

    async def _recover(self, failure: AttemptFailure) -> None:
        """Waits until the next attempt is due. Raises the error that ends the request."""
        self._attempt = None
        answer = self._answer
        is_of_prefill = failure.worker == failure.pair[0]
        is_computing = answer.is_prefilling if is_of_prefill else answer.is_handed_over
        lost_at = answer.place if failure.kind is FailureKind.LOST and is_computing else None
        request_trace.failed(
            failure,
            handed_over_at=answer.handed_over_at,
            is_prefilling=answer.is_prefilling,
        )
        await self._retries.wait(failure, answer.num_output_tokens, lost_at)
        if self._recovery.is_accepted:
            answer.restart()
