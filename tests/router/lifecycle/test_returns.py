"""Requests that their decode worker gives back are placed again: the client sees only a pause."""

import asyncio

import pytest

from baton.errors import InternalError, OverloadedError
from baton.rpc.backoff import Backoff
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, kv_sharing_pb2
from baton_router.call.request import Request, work_of
from baton_router.lifecycle.attempts.return_cost import return_cost
from baton_router.lifecycle.recovery import MAX_FAILURES, MAX_RETURNS
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import PRIOR, Rates
from baton_router.routing.fleet.worker_model import PoolModel, WorkerModel
from baton_router.routing.placement.exclusions import Exclusions
from baton_router.routing.placement.placer import Placer
from tests.support.router.scripted import (
    DRAINING,
    PREFILL_ADMITTED,
    READY,
    RELEASED,
    Forever,
    Scripts,
    Worker,
    at,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    prefill,
    prefill_behind,
    run,
    run_on,
    suspended,
    tokens,
)
from tests.support.waiting import until

PREEMPTED = decode_pb2.DecodeGenerateResponse(preempted=decode_pb2.DecodePreempted())
NOTHING_LEFT = RetryBudget(largest=0.0, per_second=0.0)


async def test_preempted_request_resumes_on_other_decode_worker():
    giving = decode(READY, tokens(0, 0, 1), tokens(2, 2), PREEMPTED)
    taking = decode(READY, tokens(3, 3, 4), finished(), name="d1")
    async with fleet_of(prefill_behind(0, 3), giving, taking) as fleet:
        seen = await run(fleet, temperature=0.5, seed=9, budget=NOTHING_LEFT)
        (_, asked) = fleet.member("p0").requests
        assert not any(w.num_losses + w.num_failures for w in fleet.workers)
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")
    usage = seen.finished.usage
    assert (usage.num_migrations, usage.num_output_tokens, usage.num_prompt_tokens) == (1, 5, 3)
    assert (len(giving.requests), len(taking.requests)) == (1, 1)
    assert list(asked.token_ids) == list(taking.requests[0].token_ids)
    assert list(asked.token_ids) == [5, 6, 7, *letter_ids()[:3]]


async def test_preempted_request_fetches_prefix_from_worker_it_left():
    long = tuple(range(5, 105))
    computing = prefill_behind(0, 2)
    giving = decode(READY, tokens(0, 0, 1), PREEMPTED)
    shared = kv_sharing_pb2.BlocksShared(num_blocks=6)
    giving.share_script = [kv_sharing_pb2.ShareResponse(shared=shared), Forever()]
    giving.cached = 4096
    taking = decode(READY, tokens(2, 2, 3, 4), finished(), name="d1")
    assert (await run_on(computing, giving, taking, prompt=long)).text == "abcde"
    asked = computing.requests[1]
    assert (asked.source.worker, asked.decode_worker) == ("d0", "d1")


async def test_placement_explains_why_preempting_worker_is_excluded():
    request = Request("r", (5, 6, 7), SamplingParams())
    async with fleet_of(prefill(), decode(), decode(name="d1")) as fleet:
        placer = Placer(fleet)  # type: ignore[arg-type]
        decision = placer.place(work_of(request), Exclusions(preempted_by="d0"))
        assert decision.placement is not None
        assert decision.placement.decode == "d1"
        reasons = {c.worker: c.excluded for c in decision.inputs.candidates}
        assert reasons == {"p0": "", "d0": "gave the request back", "d1": ""}
        lonely = placer.place(work_of(request), Exclusions({"d1"}, preempted_by="d0"))
        assert lonely.placement is not None
        assert lonely.placement.decode == "d0"


async def test_request_offers_return_cost_until_returned_too_often():
    behind = [[READY, tokens(i, i), PREEMPTED] for i in range(MAX_RETURNS)]
    scripts = [decode(*each).script for each in behind]
    scripts += [decode(READY, tokens(4, 4), finished()).script]
    alone = Worker("d0", "decode", Scripts(scripts))
    worker = prefill_behind(*range(MAX_RETURNS + 1))
    seen = await run_on(worker, alone, budget=NOTHING_LEFT)
    assert (seen.text, seen.finished.usage.num_migrations) == ("abcde", MAX_RETURNS)
    offered = [r.HasField("return_cost") for r in alone.requests]
    assert offered == [True] * MAX_RETURNS + [False]
    cost = alone.requests[0].return_cost
    assert cost.fixed.nanos == pytest.approx(1e9 * (PRIOR.handoff_seconds + 3 * 5e-6), rel=1e-3)
    assert cost.per_token.nanos == pytest.approx(1e9 * (1e-4 + 5e-6), rel=1e-3)
    assert cost.recompute_token.nanos == pytest.approx(1e9 * 1e-4, rel=1e-3)


async def test_preempted_request_without_progress_offers_no_return():
    scripts = [decode(READY, tokens(0, 0), PREEMPTED).script]
    scripts += [decode(PREEMPTED).script, decode(READY, tokens(1, 1, 2, 3, 4), finished()).script]
    alone = Worker("d0", "decode", Scripts(scripts))
    silent = [PREFILL_ADMITTED]
    prefills = [[PREFILL_ADMITTED, first(), RELEASED], silent, [PREFILL_ADMITTED, at(1), RELEASED]]
    seen = await run_on(Worker("p0", "prefill", Scripts(prefills)), alone)
    assert seen.text == "abcde"
    assert [r.HasField("return_cost") for r in alone.requests] == [True, True, False]


async def test_return_cost_is_that_of_the_successor_after_a_migration():
    class SlowModel(WorkerModel):
        rates = Rates(handoff_seconds=9.0)  # type: ignore[assignment]

    giving, successor = decode(READY, tokens(0, 0, 1), DRAINING), decode(Forever(), name="d1")
    giving.script += [giving.was_ordered, tokens(2, 2), suspended(5), Forever()]
    successor.model = SlowModel(PoolModel())
    async with fleet_of(prefill(first(), RELEASED), giving, successor) as fleet:
        running = asyncio.create_task(run(fleet))
        await until(lambda: successor.requests)
        running.cancel()
        await asyncio.wait([running])
    assert giving.requests[0].return_cost.fixed.seconds == 0
    assert successor.requests[0].return_cost.fixed.seconds == 9


@pytest.mark.parametrize(
    "several", [{"n": 2, "temperature": 1.0}, {"beam_width": 2}], ids=["samples", "beams"]
)
async def test_several_sequences_offer_no_return_cost(several):
    ending = [finished()]
    if several.get("n"):
        second = decode_pb2.DecodeFinished(sequence_index=1, reason=finished().finished.reason)
        ending += [decode_pb2.DecodeGenerateResponse(finished=second)]
    worker = decode(READY, *ending)
    await run_on(prefill(RELEASED), worker, **several)
    assert not worker.requests[0].HasField("return_cost")


async def test_lifecycle_fails_when_worker_returns_unoffered_request():
    alone = decode(PREEMPTED)
    async with fleet_of(prefill(), alone) as fleet:
        with pytest.raises(InternalError, match="d0 gave up the request"):
            await run(fleet)
    # Without a token it may give it back twice; then each time no worker is left for a moment.
    assert len(alone.requests) == 2 + MAX_FAILURES // 2 + 1


async def test_preempted_request_waits_until_worker_has_room():
    """More refusals than another request would bear."""
    scripts = [decode(READY, tokens(0, 0, 1), PREEMPTED).script]
    scripts += [[OverloadedError("full")]] * (MAX_FAILURES + 5)
    scripts += [decode(READY, tokens(2, 2, 3, 4), finished()).script]
    alone = Worker("d0", "decode", Scripts(scripts))
    seen = await run_on(prefill_behind(0, 2), alone, pauses=Backoff(1e-3, 1e-3))
    assert seen.text == "abcde"


def test_return_cost_counts_queue_handoff_and_later_tokens():
    rates = Rates(
        prefill_seconds_per_step=0.5,
        prefill_seconds_per_token=0.01,
        attention_seconds_per_pair=1e-4,
        max_step_tokens=100,
        handoff_seconds=0.25,
        transfer_seconds_per_token=1e-3,
    )
    busy = Candidate("p", "prefill", b"", num_queued_tokens=200, rates=rates)
    cost = return_cost(busy, Candidate("d", "decode", b"", rates=rates), 1000)
    assert cost.fixed == pytest.approx(2 * 0.5 + 200 * 0.01 + 0.5 + 0.25 + 1.0)
    assert cost.per_token == pytest.approx(0.01 + 1000.5 * 1e-4 + 1e-3)
    assert cost.recompute_token == pytest.approx((10 * 0.5 + 1000 * 0.01 + 500_000 * 1e-4) / 1000)


def test_return_cost_is_below_recompute_unless_mostly_decoded():
    prefill_worker, decode_worker = Candidate("p", "prefill", b""), Candidate("d", "decode", b"")
    cost = return_cost(prefill_worker, decode_worker, 1000)
    assert cost.fixed + 100 * cost.per_token < 1100 * cost.recompute_token
    assert cost.fixed + 100_000 * cost.per_token > 101_000 * cost.recompute_token
