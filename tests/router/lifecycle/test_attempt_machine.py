"""The table by itself, then the attempt under any order of what its calls may bring."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.grpc.coalescer import Coalescer
from baton.v1 import decode_pb2, prefill_pb2
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Request, work_of
from baton_router.lifecycle.attempts.attempt import Attempt
from baton_router.lifecycle.attempts.attempt_machine import (
    TABLE,
    AttemptAction,
    AttemptState,
    DecodeEvent,
    RouterEvent,
    SourceEvent,
)
from baton_router.lifecycle.attempts.work_bounds import WorkBounds
from baton_router.routing.placement.placer import Placer
from tests.support.router.scripted import (
    ADMITTED,
    HANDED_OVER,
    HANDOFFS,
    PREFILL_ADMITTED,
    READY,
    RELEASED,
    FakeFleet,
    Worker,
    first,
    suspended,
    tokens,
)
from tests.support.waiting import settled

S, A, D, R, E = AttemptState, AttemptAction, DecodeEvent, RouterEvent, SourceEvent
CLOSE = [
    A.END_PREFIX_LEASE,
    A.END_ENCODER_LEASES,
    A.END_PREFILL_LOAD,
    A.END_DECODE_LOAD,
    A.CANCEL_CALLS,
]
COMPUTED = [A.END_ENCODER_LEASES, A.END_PREFILL_LOAD, A.NOTE_HELD]


def test_attempt_table_leads_out_of_every_state_but_the_end():
    assert {S.CALLING} | {step.state for step in TABLE.values()} == set(S)
    assert {state for state, event in TABLE if event is R.CLOSED} == set(S) - {S.ENDED}
    assert {state for state, _ in TABLE} == set(S) - {S.ENDED}


def test_attempt_table_ends_loads_and_calls_whenever_it_ends():
    for step in TABLE.values():
        is_failure = {A.FAIL, A.FAIL_AS_HELD} & set(step.actions)
        assert step.state is S.ENDED or not is_failure
        assert step.state is not S.ENDED or set(step.actions) >= set(CLOSE)


def test_attempt_table_has_no_row_for_tokens_after_the_handoff():
    assert [state for state, event in TABLE if event is D.TOKENS] == [S.COMPUTING]


@pytest.mark.parametrize(
    ("events", "state", "actions"),
    [
        ([R.ADMITTED, E.STARTED], S.HANDOFF, [A.END_PREFIX_LEASE]),
        ([R.ADMITTED, E.RESULT, D.KV_READY], S.HANDED_OVER, [*COMPUTED, A.NOTE_HELD]),
        ([R.ADMITTED, D.KV_READY, E.FAILED], S.DECODING, [A.NOTE_HELD]),
        ([R.ADMITTED, E.ENDED, D.KV_READY, D.TOKENS], S.DECODING, [A.NOTE_HELD]),
        ([R.ADMITTED, E.RESULT, E.FAILED], S.ENDED, [*COMPUTED, A.FAIL, *CLOSE]),
        ([R.ADMITTED_TO_SCORE, D.KV_READY, E.FAILED], S.ENDED, [A.NOTE_HELD, A.FAIL, *CLOSE]),
        ([R.ADMITTED_TO_SCORE, D.KV_READY, E.RESULT], S.HANDED_OVER, [A.NOTE_HELD, *COMPUTED]),
        ([R.ADMITTED_TO_SCORE, E.RESULT, D.KV_READY], S.HANDED_OVER, [*COMPUTED, A.NOTE_HELD]),
        ([R.ADMITTED_ALONE, D.KV_READY, D.TOKENS, D.TOKENS], S.DECODING, COMPUTED),
        ([R.ADMITTED, D.LEASE_ENDED], S.AWAITING_SOURCE, [A.HOLD, A.LIMIT_SOURCE]),
        ([R.ADMITTED, D.ENDED, E.RESULT], S.AWAITING_SOURCE, [A.HOLD, *COMPUTED]),
        ([R.ADMITTED, D.ENDED, E.ENDED], S.ENDED, [A.HOLD, A.FAIL_AS_HELD, *CLOSE]),
        ([R.ADMITTED, D.ENDED, E.FAILED], S.ENDED, [A.HOLD, A.FAIL, *CLOSE]),
        ([R.ADMITTED, D.FAILED, E.FAILED], S.ENDED, [A.FAIL, *CLOSE]),
        ([R.ADMITTED_ALONE, D.LEASE_ENDED], S.ENDED, [A.FAIL, *CLOSE]),
        ([R.ADMITTED_ALONE, R.MIGRATED, R.ADMITTED], S.HANDOFF, [A.CANCEL_SOURCE, *CLOSE[:-1]]),
        ([R.ADMITTED, R.COMPLETED, D.FAILED], S.COMPLETE, CLOSE[:-1]),
        ([E.FAILED, R.CLOSED], S.ENDED, [A.FAIL, *CLOSE]),
    ],
    ids=lambda value: value.name if isinstance(value, S) else "+".join(v.name for v in value),
)
def test_attempt_table_gives_state_and_actions(events, state, actions):
    at, taken = S.CALLING, []
    for event in events:
        step = TABLE.get((at, event))
        if step is not None:
            at, taken = step.state, [*taken, *step.actions]
    assert (at, taken) == (state, actions)


class Call:
    """Call whose messages and end the test gives, to `worker`, in one role."""

    def __init__(self, worker: Worker, request: Any) -> None:
        self.worker, self.request = worker, request
        self.is_admitted = self.is_over = self.is_cancelled = False
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    def cancel(self) -> None:
        if not self.is_over:
            self.is_over = self.is_cancelled = True
            self.items.put_nowait(asyncio.CancelledError())

    async def read(self) -> Any:
        if self.is_cancelled:
            raise asyncio.CancelledError
        item = await self.items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class Channel:
    """Channel to `worker`, whose calls are collected."""

    def __init__(self, worker: Worker, calls: list[Call]) -> None:
        self.worker, self.calls = worker, calls

    def unary_stream(self, _path: str, **_: Any) -> Any:
        def call(request: Any, **_: Any) -> Call:
            self.calls.append(Call(self.worker, request))
            return self.calls[-1]

        return call

    def unary_unary(self, _path: str, **_: Any) -> Any:
        async def call(request: Any, **_: Any) -> None:
            self.worker.orders.append(request)

        return call


STARTED = prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
BEGUN = decode_pb2.DecodeGenerateResponse(prefill_started=prefill_pb2.PrefillStarted())
PREEMPTED = decode_pb2.DecodeGenerateResponse(preempted=decode_pb2.DecodePreempted())
BY_PREFILL = (STARTED, first(), RELEASED)
BY_DECODE = (BEGUN, READY, tokens(0, 0))
BY_FORMER = (HANDED_OVER, tokens(2, 2))
NUM_DECODES = 4


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed")


ENDINGS = {
    "dies": failed(grpc.StatusCode.UNAVAILABLE),
    "finds the lease over": failed(grpc.StatusCode.NOT_FOUND),
    "ends": grpc.aio.EOF,
    "preempts": PREEMPTED,
}
OPTIONS = {
    "kind": st.sampled_from(["handoff", "scoring", "alone"]),
    "may_return": st.booleans(),
    "window": st.sampled_from([0.0, 1e-9]),
    "is_admitted": st.booleans(),
}


class Attempts(RuleBasedStateMachine):
    """Any order of admissions, messages, migrations, deaths, an abort and the answer's end.

    The consumer takes what it gets at once, and moves a suspended request.
    """

    @initialize(**OPTIONS)
    def start(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.begin(**options)

    @precondition(lambda self: self.is_over)
    @rule(**OPTIONS)
    def start_again(self, **options: Any) -> None:
        self.close()
        self.begin(**options)

    def begin(self, kind: str, may_return: bool, window: float, is_admitted: bool) -> None:
        self.calls: list[Call] = []
        self.workers = [Worker("p0", "prefill", [])]
        self.workers += [Worker(f"d{i}", "decode", []) for i in range(NUM_DECODES)]
        fleet = FakeFleet(self.workers)
        fleet.channel_to = lambda member: nullcontext(Channel(member, self.calls))  # type: ignore
        params = SamplingParams(prompt_logprobs=0 if kind == "scoring" else None)
        self.work = work_of(Request("r", (5, 6, 7), params))
        placement = Placer(fleet, HANDOFFS).place(self.work).placement  # type: ignore[arg-type]
        if kind == "alone":
            placement = replace(placement, prefill="", chosen=placement.chosen[1:])
        self.attempt = Attempt(
            self.work,
            fleet,  # type: ignore[arg-type]
            placement,
            WorkBounds.of(self.work.request, vocab_size=1000),
            Deadline.after(60.0),
            Coalescer(window),
            may_return=may_return,
        )
        self.kind, self.may_return, self.is_closed = kind, may_return, False
        self.got: list[str] = []
        self.failures: list[AttemptFailure] = []
        self.consumer = self.loop.create_task(self.consume())
        self.run()
        if is_admitted:
            self.admit()

    async def consume(self) -> None:
        with pytest.raises(AttemptFailure) as caught:
            await self.consume_all()
        self.failures.append(caught.value)
        with pytest.raises(AttemptFailure) as again:
            await self.attempt.next_events()
        assert again.value is caught.value, "something else after the failure"

    async def consume_all(self) -> None:
        await self.attempt.admit()
        while True:
            for event in await self.attempt.next_events():
                self.got.append("tokens" if isinstance(event, OutputDelta) else event.kind)
                if self.got[-1] == "suspended":
                    self.got.clear()
                    await self.attempt.move(self.work, event.lease_id)

    def run(self) -> None:
        self.loop.run_until_complete(settled())

    @property
    def is_over(self) -> bool:
        return bool(self.failures) or self.is_closed

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.is_over]

    @property
    def is_calling(self) -> bool:
        return any(not call.is_admitted for call in self.open_calls)

    @property
    def prefill(self) -> Call | None:
        return next((call for call in self.calls if call.worker.role == "prefill"), None)

    @property
    def decodes(self) -> list[Call]:
        return [call for call in self.calls if call is not self.prefill]

    @property
    def source(self) -> Call | None:
        return self.decodes[-2] if self.decodes[1:] else self.prefill

    @property
    def source_owes(self) -> bool:
        is_scored = self.kind != "scoring" or self.decodes[1:] or "result" in self.got
        return "kv_ready" not in self.got or not is_scored

    @precondition(lambda self: self.is_calling)
    @rule()
    def admit(self) -> None:
        while self.is_calling:
            call = next(call for call in self.open_calls if not call.is_admitted)
            call.is_admitted = True
            call.items.put_nowait(PREFILL_ADMITTED if call is self.prefill else ADMITTED)
            self.run()

    @precondition(lambda self: any(call.is_admitted for call in self.open_calls))
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        calls = st.sampled_from([call for call in self.open_calls if call.is_admitted])
        for call in data.draw(st.lists(calls, min_size=2, max_size=8)):
            said = {self.prefill: BY_PREFILL, self.decodes[-1]: BY_DECODE}.get(call, BY_FORMER)
            call.items.put_nowait(data.draw(st.sampled_from(said)))
        self.run()

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data(), how=st.sampled_from(sorted(ENDINGS)))
    def end(self, data: st.DataObject, how: str) -> None:
        call, source = data.draw(st.sampled_from(self.open_calls)), self.source
        if self.is_calling:  # others are heard after the admission
            is_failure = not call.is_admitted
        elif call is source:
            is_failure = self.decodes[-1].is_over or (self.source_owes and how != "ends")
        else:
            knows_no_reason = how in ("ends", "finds the lease over")
            is_failure = not (knows_no_reason and source is not None and not source.is_over)
        call.is_over = True
        call.items.put_nowait(ENDINGS[how])
        self.run()
        assert bool(self.failures) == is_failure
        for failure in self.failures:
            assert failure.kind is not FailureKind.PREEMPTED or self.may_return

    @precondition(lambda self: not (self.is_over or self.is_calling or self.decodes[-1].is_over))
    @precondition(lambda self: len(self.decodes) < NUM_DECODES)
    @rule(is_known=st.booleans())
    def migrate(self, is_known: bool) -> None:
        giving, successor = self.decodes[-1], f"d{len(self.decodes)}"
        self.loop.run_until_complete(self.attempt.hand_over(successor))
        event = suspended(2)
        event.suspended.lease_id = giving.worker.orders[-1].lease_id if is_known else b"?"
        giving.items.put_nowait(event)
        self.run()
        assert bool(self.failures) != is_known

    @precondition(lambda self: self.open_calls)
    @rule(is_complete=st.booleans())
    def stop(self, is_complete: bool) -> None:
        if is_complete and not self.is_calling:
            self.attempt.succeed()
            assert not any(worker.load or worker.num_queued for worker in self.workers)
            self.close()
        else:
            self.attempt.cancel()
            self.run()
            assert self.failures

    @invariant()
    def loads_are_those_of_the_present_workers(self) -> None:
        counted = {w.name: (w.load, w.num_queued) for w in self.workers if w.load or w.num_queued}
        expected = {} if self.is_over else {f"d{len(self.decodes) - 1}": (1, 0)}
        shows_computed = "tokens" if self.kind == "alone" else "result"
        if not (self.is_over or self.decodes[1:] or shows_computed in self.got):
            expected |= {"d0": (1, 3)} if self.kind == "alone" else {"p0": (1, 3)}
        assert counted == expected

    @invariant()
    def only_calls_of_present_workers_are_open(self) -> None:
        assert set(self.open_calls) <= {self.decodes[-1], self.source}
        assert bool(self.open_calls) != self.is_over
        assert self.consumer.done() == self.is_over
        assert len(self.failures) <= 1

    def close(self) -> None:
        self.consumer.cancel()
        self.run()
        self.loop.run_until_complete(self.attempt.__aexit__())
        self.is_closed = True

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.close()
            assert not self.open_calls
            assert not any(worker.load or worker.num_queued for worker in self.workers)
            self.loop.close()


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=75)
