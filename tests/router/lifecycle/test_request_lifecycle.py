"""The saga against workers that say what the test gives, in any order."""

import asyncio
import gc

import pytest

from baton.errors import (
    CancelledError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc.params import params_of, params_to_message
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.lifecycle.attempts.attempt import Attempt
from baton_router.lifecycle.attempts.worker_call import WorkerCall
from baton_router.lifecycle.recovery import MAX_FAILURES
from baton_router.lifecycle.retry_budget import RetryBudget
from tests.support.router.scripted import (
    ADMITTED,
    READY,
    RELEASED,
    Cue,
    Forever,
    Go,
    Worker,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    of,
    prefill,
    run,
    run_on,
    seen_of,
    tokens,
)
from tests.support.waiting import until


async def test_lifecycle_sends_first_token_and_rest_in_order():
    script = [tokens(1, 1, 2), tokens(3, 3, 4), finished()]
    seen = await run_on(prefill(first(), RELEASED), decode(*script))
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")
    assert seen.finished.reason == pb.FINISH_REASON_LENGTH
    assert seen.finished.usage.num_output_tokens == 5


@pytest.mark.parametrize("asked", ["d0", "p0"])
async def test_lifecycle_passes_over_older_worker_that_calls_invalid(asked):
    """Workers of a version that reports no `max_num_seqs` do not name their own limits."""
    refusal = InvalidArgumentError("sampling.n", "asks for 8 sequences; this engine runs 2")
    workers = [
        prefill(first(), RELEASED),
        prefill(first(), RELEASED, name="p1"),
        decode(READY, tokens(1, 1), finished()),
        decode(READY, tokens(1, 1), finished(), name="d1"),
    ]
    (older,) = (worker for worker in workers if worker.name == asked)
    older.script, older.max_num_seqs = [refusal], 0
    seen = await run_on(*workers, max_tokens=2)
    assert seen.token_ids == letter_ids()[:2]
    assert len(older.requests) == 1


async def test_lifecycle_ends_request_all_older_workers_call_invalid():
    refusal = InvalidArgumentError("sampling.grammar", "does not compile")
    workers = prefill(), Worker("d0", "decode", [refusal]), Worker("d1", "decode", [refusal])
    for worker in workers:
        worker.max_num_seqs = 0
    with pytest.raises(InvalidArgumentError, match="does not compile"):
        await run_on(*workers)
    assert [len(worker.requests) for worker in workers] == [0, 1, 1]


async def test_lifecycle_retries_when_first_message_is_not_admitted():
    hasty = Worker("p0", "prefill", [first(), Forever()])
    workers = hasty, prefill(first(), RELEASED, name="p1"), decode(READY, tokens(1, 1), finished())
    seen = await run_on(*workers, max_tokens=2)
    assert seen.text == "ab"
    workers = (
        prefill(first(), RELEASED),
        Worker("d0", "decode", [tokens(0, 0), Forever()]),
        decode(READY, tokens(1, 1), finished(), name="d1"),
    )
    seen = await run_on(*workers, max_tokens=2)
    assert seen.text == "ab"


async def test_lifecycle_holds_tokens_that_overtake_first():
    cue = Cue()
    overtaking = decode(tokens(1, 1, 2), finished(), Go(cue))
    assert (await run_on(prefill(cue, first(), RELEASED), overtaking)).text == "abc"


async def test_lifecycle_ends_sequence_at_worker_after_stop_string():
    cue = Cue()
    script = [READY, of(0, tokens(0, 0, 1)), of(1, tokens(0, 2)), cue, of(1, tokens(1, 3, 4))]
    async with fleet_of(prefill(first(), RELEASED), decode(*script, of(1, finished()))) as fleet:
        worker = fleet.member("d0")
        lifecycle = lifecycle_of(fleet, n=2, temperature=1.0, stop=("b",))
        events = []
        async with asyncio.timeout(5.0):
            async for event in messages_of(lifecycle):
                events.append(event)
                if event.tokens.sequence_index == 1:
                    await until(lambda: worker.ended)
                    cue.event.set()
        (said,) = worker.ended
    assert (said.sequence_index, said.epoch) == (0, worker.epoch)
    assert said.reason == pb.FINISH_REASON_STOP_STRING
    assert said.request_id == worker.requests[0].request_id
    endings = {
        e.finished.sequence_index: e.finished.reason for e in events if e.HasField("finished")
    }
    assert endings == {0: pb.FINISH_REASON_STOP_STRING, 1: pb.FINISH_REASON_LENGTH}


async def test_lifecycle_ends_completed_sequence_at_next_worker():
    failing = decode(READY, of(0, tokens(0, 0, 1)), of(1, tokens(0, 2)), UnavailableError("gone"))
    cue = Cue()
    again = [of(1, tokens(0, 2)), of(0, tokens(0, 0)), cue, of(0, tokens(1, 1)), of(1, finished())]
    second = decode(READY, *again, name="d1")
    async with fleet_of(prefill(first(), RELEASED), failing, second) as fleet:
        lifecycle = lifecycle_of(fleet, n=2, temperature=1.0, stop=("b",))

        async def give_cue() -> None:
            await until(lambda: second.ended)
            cue.event.set()

        async with asyncio.timeout(5.0):
            await asyncio.gather(seen_of(lifecycle), give_cue())
        assert [said.sequence_index for said in second.ended] == [0]


async def test_lifecycle_passes_tenant_salt_priority_to_both_workers():
    source, decoding = prefill(first(), RELEASED), decode(finished())
    await run_on(source, decoding, tenant=Tenant("acme", b"salt"), priority=-4)
    (at_prefill,), (at_decode,) = source.requests, decoding.requests
    assert (at_prefill.tenant, at_decode.handle.tenant) == ("acme", "acme")
    assert (at_prefill.salt, at_decode.salt) == (b"salt", b"salt")
    assert (at_prefill.priority, at_decode.priority) == (-4, -4)
    assert tuple(at_decode.handle.layouts) == Worker.layouts


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_END_OF_SEQUENCE])
async def test_lifecycle_finishes_when_first_token_ends_lease(reason):
    cue = Cue()
    ending = decode(Go(cue), NotFoundError("the lease is over"))
    seen = await run_on(prefill(cue, first(reason)), ending)
    assert (seen.text, seen.finished.reason) == ("a", reason)


async def test_lifecycle_retries_when_lease_is_over_unexpectedly():
    async with fleet_of(prefill(Forever()), decode(NotFoundError("the lease is over"))) as fleet:
        budget = RetryBudget(largest=2.0, per_second=0.0)
        lifecycle = lifecycle_of(fleet, budget=budget, source_timeout=0.1)
        with pytest.raises(UnavailableError, match="this one is not: the lease is over"):
            await seen_of(lifecycle)
        assert len(fleet.member("d0").requests) == 3


async def test_lifecycle_reports_prefill_failure_over_ended_lease():
    cue = Cue()
    failure = InvalidArgumentError("sampling.grammar", "leaves no token")
    async with fleet_of(prefill(cue, failure), decode(Go(cue), NotFoundError("over"))) as fleet:
        with pytest.raises(InvalidArgumentError, match="leaves no token"):
            await run(fleet)


async def test_lifecycle_retries_damaged_handoff():
    async with fleet_of(prefill(Forever()), decode(DataLossError("bad"))) as fleet:
        with pytest.raises(UnavailableError, match="the handoff failed: bad"):
            await run(fleet)
        # Of these tries every second one finds the only pair avoided.
        assert len(fleet.member("d0").requests) == 1 + MAX_FAILURES // 2


REFUSALS = [UnavailableError("draining"), OverloadedError("full")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["draining", "full"])
async def test_lifecycle_replaces_refusing_decode_worker(refusal):
    refusing = Worker("d0", "decode", [refusal])
    source, other = prefill(first(), RELEASED), decode(tokens(1, 1), finished(), name="d1")
    seen = await run_on(source, refusing, other)
    assert seen.text == "ab"
    assert seen.accepted.placement.decode_worker == "d1"
    assert source.requests[0].decode_worker == "d1"


@pytest.mark.parametrize("refusal", REFUSALS, ids=["draining", "full"])
async def test_lifecycle_replaces_refusing_prefill_worker(refusal):
    refusing = Worker("p0", "prefill", [refusal])
    other, decoding = prefill(first(), RELEASED, name="p1"), decode(tokens(1, 1), finished())
    seen = await run_on(refusing, other, decoding)
    assert seen.text == "ab"
    assert seen.accepted.placement.prefill_worker == "p1"
    # A new attempt is a new lease and a new name, and the first one's decode call has ended.
    attempts = decoding.requests
    assert len({request.handle.lease_id for request in attempts}) == 2
    assert len({request.request_id for request in attempts}) == 2
    assert attempts[1].handle.source_worker == "p1"


async def test_lifecycle_reports_last_refusal_when_all_refuse():
    refusing = [Worker(f"d{i}", "decode", [OverloadedError(f"full {i}", 2.5)]) for i in range(3)]
    async with fleet_of(prefill(), *refusing) as fleet:
        with pytest.raises(OverloadedError, match="full 2") as caught:
            await run(fleet)
    assert caught.value.retry_after == 2.5
    assert all(len(worker.requests) == 1 for worker in refusing)


async def test_lifecycle_says_why_no_worker_can_be_chosen():
    async with fleet_of(decode()) as fleet:
        with pytest.raises(UnavailableError, match="no prefill worker is known"):
            await run(fleet)


async def test_lifecycle_tolerates_worker_leaving_during_admission():
    cue = Cue()
    leaving = prefill(first(), RELEASED)
    slow = Worker("d0", "decode", [cue, ADMITTED, tokens(1, 1), finished()])
    async with fleet_of(leaving, slow) as fleet:
        running = asyncio.create_task(run(fleet))
        await until(lambda: slow.requests, within=5.0)
        fleet.workers.remove(leaving)
        cue.event.set()
        assert (await running).text == "ab"


async def test_lifecycle_frees_workers_when_aborted_client_is_idle():
    chatter = [tokens(i, 1) for i in range(1, 200)]
    workers = prefill(first(), Forever()), decode(*chatter, Forever())
    async with fleet_of(*workers) as fleet:
        lifecycle = lifecycle_of(fleet)
        events = messages_of(lifecycle)
        assert (await anext(events)).HasField("accepted")
        lifecycle.abort()
        await until(lambda: not any(w.num_running for w in workers), within=2.0)
        with pytest.raises(CancelledError, match="r was aborted"):
            async for _ in events:
                pass


async def test_lifecycle_applies_backpressure_when_client_is_slow():
    tops = [pb.TopLogprobs(token_ids=range(1000), logprobs=[-1.0] * 1000)]
    chatter = [tokens(i, 1) for i in range(1, 4000)]
    for message in chatter:
        message.tokens.top_logprobs.extend(tops)
    talking = decode(*chatter, Forever())
    async with fleet_of(prefill(first(), Forever()), talking) as fleet:
        events = messages_of(lifecycle_of(fleet, max_tokens=4000))
        await anext(events)
        said = -1
        while talking.num_sent_messages > said:
            said = talking.num_sent_messages
            await asyncio.sleep(0.3)
        assert 64 < said < 2000
        await events.aclose()


async def test_lifecycle_finishes_at_stop_string_while_workers_run():
    workers = prefill(first(), RELEASED), decode(tokens(1, 1, 2, 3), Forever())
    seen = await run_on(*workers, stop=("bc",))
    assert (seen.text, seen.token_ids) == ("a", letter_ids()[:3])
    assert seen.finished.reason == pb.FINISH_REASON_STOP_STRING
    assert seen.finished.stop_string == "bc"


async def test_lifecycle_ends_calls_when_all_sequences_met_stop_string():
    decoding = decode(of(0, tokens(0, 0, 1)), of(1, tokens(0, 2, 1)), Forever())
    seen = await run_on(prefill(first(), RELEASED), decoding, n=2, temperature=1.0, stop=("b",))
    assert seen.text == "ac"


async def test_lifecycle_counts_each_sequence_as_load():
    cue = Cue()
    slow = decode(cue, of(0, tokens(0, 0)), *(of(i, finished()) for i in range(3)))
    async with fleet_of(prefill(first(), RELEASED), slow) as fleet:
        running = asyncio.create_task(run(fleet, n=3, temperature=1.0))
        await until(lambda: slow.requests, within=5.0)
        assert slow.load == 3
        cue.event.set()
        await running


async def test_lifecycle_prefills_plain_token_for_several_sequences():
    grammar = Grammar(GrammarKind.REGEX, "a+")
    asked = {"n": 2, "best_of": 3, "temperature": 0.5, "logprobs": True, "grammar": grammar}
    script = [of(0, finished()), of(1, finished())]
    async with fleet_of(prefill(first(), RELEASED), decode(*script)) as fleet:
        await run(fleet, **asked, prompt_logprobs=2)
        (at_prefill,), (at_decode,) = (fleet.member(name).requests for name in ("p0", "d0"))
    assert at_prefill.has_several_sequences
    assert params_of(at_prefill.sampling, default_seed=1) == SamplingParams(
        max_tokens=5, seed=1, prompt_logprobs=2
    )
    assert params_of(at_decode.sampling, default_seed=1) == SamplingParams(
        max_tokens=5, seed=1, **asked
    )


async def test_lifecycle_sends_both_workers_same_sampling_params():
    asked = {"temperature": 0.7, "seed": 3, "min_p": 0.1, "logprobs": True, "top_logprobs": 2}
    async with fleet_of(prefill(first(), RELEASED), decode(finished())) as fleet:
        await run(fleet, **asked, prompt_logprobs=2)
        (at_prefill,), (at_decode,) = (fleet.member(name).requests for name in ("p0", "d0"))
    assert not at_prefill.has_several_sequences
    assert at_prefill.sampling.prompt_logprobs == 2
    assert not at_decode.sampling.HasField("prompt_logprobs")
    at_prefill.sampling.ClearField("prompt_logprobs")
    assert (
        at_prefill.sampling
        == at_decode.sampling
        == params_to_message(SamplingParams(max_tokens=5, **asked))
    )


async def test_lifecycle_reports_uncompilable_grammar_without_retry():
    refusal = InvalidArgumentError("sampling.grammar.regex", "does not compile: (")
    refusing = Worker("d0", "decode", [refusal])
    async with fleet_of(prefill(), refusing, decode(name="d1")) as fleet:
        with pytest.raises(InvalidArgumentError, match="does not compile") as caught:
            await run(fleet, grammar=Grammar(GrammarKind.REGEX, "("))
        assert fleet.member("d1").requests == []
    assert caught.value.field == "sampling.grammar.regex"


async def test_failed_attempts_are_freed_without_garbage_collection():
    """An object that holds an ended call holds its connection, to a worker that may be gone."""
    failing = decode(READY, tokens(1, 1), UnavailableError("gone"))
    second = decode(READY, tokens(2, 2), finished(), name="d1")
    async with fleet_of(prefill(first(), RELEASED), failing, second) as fleet:
        lifecycle = lifecycle_of(fleet, max_tokens=3)
        gc.collect()
        before = attempts_alive()
        gc.disable()
        try:
            assert (await seen_of(lifecycle)).text == "abc"
            del lifecycle
            await until(lambda: attempts_alive() <= before)
        finally:
            gc.enable()


def attempts_alive() -> set[int]:
    """Ids of the objects; those of other tests may be among them."""
    return {id(each) for each in gc.get_objects() if isinstance(each, Attempt | WorkerCall)}
