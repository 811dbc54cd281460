"""A request whose workers fail goes on with others, and the client sees one answer."""

import asyncio

import pytest

from baton.errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    InternalError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc.backoff import Backoff
from baton.v1 import inference_pb2 as pb
from baton.v1 import prefill_pb2
from baton_router.call.ending import FinishReason
from tests.support.router.scripted import (
    ADMITTED,
    PREFILL_ADMITTED,
    READY,
    RELEASED,
    Cue,
    Forever,
    Go,
    Scripts,
    Vanish,
    Worker,
    at,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    of,
    prefill,
    prefill_behind,
    run,
    run_on,
    seen_of,
    tokens,
)


async def test_lifecycle_resumes_after_sent_tokens_on_other_worker():
    failing = decode(READY, tokens(0, 0, 1, 2), UnavailableError("the worker has stopped"))
    second = decode(READY, tokens(3, 3), tokens(4, 4), finished(), name="d1")
    async with fleet_of(prefill_behind(0, 3), failing, second) as fleet:
        seen = await run(fleet, temperature=0.5, seed=9, logprobs=True)
        (begun,), (continued,) = failing.requests, second.requests
        at_prefill = fleet.member("p0").requests[1]
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")
    usage = seen.finished.usage
    assert (usage.num_migrations, usage.num_output_tokens, usage.num_prompt_tokens) == (1, 5, 3)
    assert usage.num_transferred_blocks == 4
    for request in (continued, at_prefill):
        assert list(request.token_ids) == [5, 6, 7, *letter_ids()[:3]]
        assert request.num_prompt_tokens == 3
        assert request.sampling == begun.sampling
    assert continued.handle.num_tokens == 6
    assert continued.handle.lease_id == at_prefill.lease_id != begun.handle.lease_id


async def test_lifecycle_ignores_late_events_of_earlier_attempt():
    cue = Cue()
    # It says so at a time when another attempt has begun, if the router lets it.
    silent = decode(READY, tokens(1, 1), DataLossError("bad"))
    results = Scripts([[PREFILL_ADMITTED, cue, first()], [PREFILL_ADMITTED, first(), RELEASED]])
    second = decode(Go(cue), READY, tokens(1, 2), finished(), name="d1")
    assert (await run_on(Worker("p0", "prefill", results), silent, second)).text == "ac"


async def test_lifecycle_needs_no_worker_when_only_ending_was_lost():
    only = decode(READY, tokens(0, 0, 1, 2, 3, 4), UnavailableError("the worker has stopped"))
    seen = await run_on(prefill(first(), RELEASED), only)
    assert len(only.requests) == 1
    assert (seen.text, seen.finished.reason) == ("abcde", pb.FINISH_REASON_LENGTH)


async def test_lifecycle_sends_finish_reason_with_last_token():
    """Nothing but a matched grammar's reason tells that its last token was the last."""
    reason = pb.FINISH_REASON_END_OF_SEQUENCE
    script = [READY, tokens(0, 0, 1, reason=reason), UnavailableError("gone before `finished`")]
    async with fleet_of(prefill(first(), RELEASED), decode(*script)) as fleet:
        events = [event async for event in messages_of(lifecycle_of(fleet))]
        assert len(fleet.member("d0").requests) == 1
    chunks = [event.tokens for event in events if event.HasField("tokens")]
    assert [token for chunk in chunks for token in chunk.token_ids] == letter_ids()[:2]
    *others, last = [chunk.finish_reason for chunk in chunks if chunk.token_ids]
    assert last == reason
    assert not any(others)
    assert (events[-1].finished.reason, events[-1].finished.usage.num_migrations) == (reason, 0)


async def test_lifecycle_holds_early_ending_until_tokens_before_it():
    cue = Cue()
    script = [Go(cue), tokens(1, 1, 2, reason=pb.FINISH_REASON_STOP_TOKEN), Forever()]
    seen = await run_on(prefill(cue, first(), RELEASED), decode(*script))
    assert (seen.text, seen.finished.reason) == ("abc", pb.FINISH_REASON_STOP_TOKEN)


async def test_lifecycle_matches_stop_strings_across_attempts():
    failing = decode(READY, tokens(0, 0, 1), UnavailableError("gone"))
    second = decode(READY, tokens(2, 2, 3), Forever(), name="d1")
    seen = await run_on(prefill_behind(0, 2), failing, second, stop=("bcd",))
    assert (seen.text, seen.finished.stop_string) == ("a", "bcd")


async def test_lifecycle_resumes_each_sequence_after_its_tokens():
    script = [READY, of(0, tokens(0, 0, 1)), of(1, tokens(0, 2)), of(1, finished())]
    failing = decode(*script, UnavailableError("gone"))
    second = decode(READY, of(0, tokens(2, 3)), of(0, finished()), name="d1")
    seen = await run_on(prefill(first(), RELEASED), failing, second, n=2, temperature=1.0)
    (begun,), (continued,) = failing.requests, second.requests
    assert list(begun.outputs) == []
    assert list(continued.token_ids) == [5, 6, 7]
    assert [list(o.token_ids) for o in continued.outputs] == [letter_ids()[:2], []]
    assert [o.is_complete for o in continued.outputs] == [False, True]
    assert sorted(seen.token_ids) == sorted(letter_ids()[:4])
    assert seen.finished.usage.num_output_tokens == 4
    assert second.load == 0


async def test_lifecycle_resumes_sequences_received_from_other_router():
    script = [READY, of(1, tokens(1, 3)), of(0, tokens(0, 2)), of(1, finished()), of(0, finished())]
    async with fleet_of(prefill(first(), RELEASED), decode(*script)) as fleet:
        received = ((), tuple(letter_ids()[:1]))
        seen = await run(fleet, received=received, n=2, temperature=1.0)
        (asked,) = fleet.member("d0").requests
    assert [list(o.token_ids) for o in asked.outputs] == [[], letter_ids()[:1]]
    assert sorted(seen.token_ids) == sorted(letter_ids()[2:4])


async def test_lifecycle_drops_tokens_that_new_attempt_repeats():
    script = [READY, of(0, tokens(0, 0, 1)), of(1, tokens(0, 2)), of(1, finished())]
    failing = decode(*script, UnavailableError("gone"))
    second = decode(
        *[READY, of(0, tokens(0, 0)), of(1, tokens(0, 2)), of(0, tokens(1, 1, 3))],
        *[of(1, finished()), of(0, finished())],
        name="d1",
    )
    seen = await run_on(prefill(first(), RELEASED), failing, second, n=2, temperature=1.0)
    assert list(second.requests[0].token_ids) == [5, 6, 7]
    assert sorted(seen.token_ids) == sorted(letter_ids()[:4])
    assert seen.finished.usage.num_output_tokens == 4


async def test_lifecycle_fails_when_repeated_output_differs():
    failing = decode(READY, of(0, tokens(0, 0, 1)), UnavailableError("gone"))
    second = decode(READY, of(0, tokens(0, 0, 2)), Forever(), name="d1")
    async with fleet_of(prefill(first(), RELEASED), failing, second) as fleet:
        with pytest.raises(UnavailableError, match="it cannot be continued"):
            await run(fleet, n=2, temperature=1.0)


async def test_lifecycle_sends_prompt_logprobs_once_over_attempts():
    def scored(position: int, *logprobs: float) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(
            prompt_logprobs=pb.PromptLogprobs(position=position, logprobs=logprobs)
        )

    told = [PREFILL_ADMITTED, scored(1, -0.5), UnavailableError("gone")]
    again = [PREFILL_ADMITTED, scored(1, -0.5, -0.25), first(), RELEASED]
    workers = Worker("p0", "prefill", told), Worker("p1", "prefill", again)
    scores: list[tuple[int, float]] = []
    async with fleet_of(*workers, decode(READY, tokens(0, 0), finished())) as fleet:
        async for event in messages_of(lifecycle_of(fleet, prompt_logprobs=0)):
            found = event.prompt_logprobs
            scores += [(found.position + i, p) for i, p in enumerate(found.logprobs)]
    assert scores == [(1, -0.5), (2, -0.25)]


async def test_lifecycle_reports_failed_worker_but_not_refusing_one():
    failing = decode(READY, tokens(0, 0, 1), InternalError("the engine failed"))
    refusing = Worker("d1", "decode", [OverloadedError("full")])
    last = decode(READY, tokens(3, 3), finished(), name="d2")
    assert (await run_on(prefill_behind(0, 2), failing, refusing, last)).text == "abcd"
    assert [w.num_failures for w in (failing, refusing, last)] == [1, 0, 0]


async def test_lifecycle_declares_request_poison_after_two_failures():
    failing = [
        decode(READY, tokens(0, 0, 1), InternalError("the engine failed"), name=f"d{i}")
        for i in range(3)
    ]
    async with fleet_of(prefill_behind(0, 2), *failing) as fleet:
        with pytest.raises(InternalError, match="is poison: d0 and d1 were lost"):
            await run(fleet)
    assert [len(worker.requests) for worker in failing] == [1, 1, 0]


async def test_lifecycle_retries_until_worker_returns():
    failing = Scripts(
        [[ADMITTED, READY, tokens(0, 0), UnavailableError("gone")], [OverloadedError("full")]]
    )
    failing += [[OverloadedError("full")], [ADMITTED, READY, tokens(1, 1), finished()]]
    assert (await run_on(prefill_behind(0, 1), Worker("d0", "decode", failing))).text == "ab"


async def test_lifecycle_ends_when_aborted_between_attempts():
    cue = Cue()
    scripts = Scripts(
        [[ADMITTED, READY, tokens(0, 0), UnavailableError("gone")], [Go(cue), Forever()]]
    )
    async with fleet_of(prefill(first(), RELEASED), Worker("d0", "decode", scripts)) as fleet:
        lifecycle = lifecycle_of(fleet)
        events = messages_of(lifecycle)
        assert (await anext(events)).HasField("accepted")
        assert (await anext(events)).HasField("tokens")
        reading = asyncio.create_task(anext(events))
        await cue.event.wait()
        lifecycle.abort()
        with pytest.raises(CancelledError, match="r was aborted"):
            await reading


async def test_lifecycle_stops_retrying_at_deadline():
    full = Scripts([[ADMITTED, UnavailableError("gone")], [OverloadedError("full")]])
    async with fleet_of(prefill(first(), RELEASED), Worker("d0", "decode", full)) as fleet:
        lifecycle = lifecycle_of(fleet, seconds=0.3, pauses=Backoff(0.1, 0.1))
        with pytest.raises(DeadlineExceededError):
            await seen_of(lifecycle)


@pytest.mark.parametrize(("seconds", "num_losses"), [(10.0, 1), (0.4, 0)])
async def test_lifecycle_counts_no_loss_when_deadline_ended_call(seconds, num_losses):
    """On the worker's side it runs out a little earlier, which looks here as if it had gone."""
    scripts = Scripts(
        [[ADMITTED, READY, Vanish(0.32)], [ADMITTED, READY, tokens(0, 0), finished()]]
    )
    async with fleet_of(prefill(first(), RELEASED), Worker("d0", "decode", scripts)) as fleet:
        lifecycle = lifecycle_of(fleet, seconds=seconds)
        if num_losses:
            await seen_of(lifecycle)
        else:
            with pytest.raises(DeadlineExceededError):
                await seen_of(lifecycle)
        assert fleet.member("d0").num_losses == num_losses


async def test_lifecycle_sends_no_token_that_client_received():
    async with fleet_of(prefill(at(3), RELEASED), decode(tokens(4, 4), finished())) as fleet:
        seen = await run(fleet, received=(tuple(letter_ids()[:3]),))
        (at_decode,) = fleet.member("d0").requests
    assert (seen.token_ids, seen.text) == (letter_ids()[3:], "de")
    assert seen.finished.usage.num_output_tokens == 5
    assert seen.finished.usage.num_migrations == 0
    assert list(at_decode.token_ids) == [5, 6, 7, *letter_ids()[:3]]


async def test_lifecycle_shows_text_held_back_of_received_tokens():
    resuming = prefill(at(2), RELEASED), decode(tokens(2, 2), finished())
    seen = await run_on(*resuming, received=(tuple(letter_ids()[:2]),), stop=("abd",))
    assert (seen.text, seen.token_ids) == ("abc", letter_ids()[2:3])


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_tokens": 2}, pb.FINISH_REASON_LENGTH),
        ({"stop": ("b",)}, pb.FINISH_REASON_STOP_STRING),
        ({"stop_token_ids": (-1,)}, pb.FINISH_REASON_STOP_TOKEN),
        ({"endings": (FinishReason.END_OF_SEQUENCE,)}, pb.FINISH_REASON_END_OF_SEQUENCE),
    ],
    ids=["length", "stop string", "stop token", "received ending"],
)
async def test_lifecycle_reports_ending_when_client_has_every_token(params, reason):
    if "stop_token_ids" in params:
        params = {"stop_token_ids": (letter_ids()[1],)}
    seen = await run_on(received=(tuple(letter_ids()[:2]),), **params)
    assert (seen.finished.reason, seen.token_ids) == (reason, [])
    assert seen.accepted.request_id == "r"
    assert not seen.accepted.HasField("placement")
    assert seen.finished.usage.num_output_tokens == 2


async def test_lifecycle_finishes_complete_sequence_before_others():
    script = [of(1, tokens(0, 2, 3)), of(0, tokens(0, 0, 1)), of(1, finished()), of(0, finished())]
    async with fleet_of(prefill(first(), RELEASED), decode(*script)) as fleet:
        received = (tuple(letter_ids()[:2]), tuple(letter_ids()[2:3]))
        lifecycle = lifecycle_of(fleet, received=received, n=2, temperature=1.0, max_tokens=2)
        events = [event async for event in messages_of(lifecycle)]
    assert [event.WhichOneof("event") for event in events] == [
        *["accepted", "finished", "tokens", "finished"]
    ]
    assert list(events[2].tokens.token_ids) == letter_ids()[3:4]


async def test_lifecycle_reports_seed_in_use():
    async with fleet_of(prefill(first(), RELEASED), decode(finished())) as fleet:
        assert (await run(fleet, seed=2**64 - 1, temperature=1.0)).accepted.seed == 2**64 - 1
